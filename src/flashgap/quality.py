"""How far a build's predictions are from Standard's, on text that neither was tuned on.

The one idea: perplexity alone can hide damage (errors that cancel), so the whole next-token distribution
is compared: mean KL(Standard || build), how often both name the same best token, and the perplexity ratio.
Text is cut into windows that each start with an empty context, as the memory of one forward pass allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flashgap.generation_check import check_generation

CHUNK_ROWS = 128  # rows turned into float32 log-probabilities at a time; bounds memory at any vocabulary


class QualityError(RuntimeError):
    """Text that cannot be scored, or outputs that are not numbers."""


@dataclass(frozen=True)
class Quality:
    """Means over `tokens` predicted tokens; KL in nats."""

    tokens: int
    kl_nats: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the build over that of Standard; 1 is no drift."""
        return self.perplexity / self.reference_perplexity

    def as_dict(self) -> dict[str, float]:
        """All numbers by name, the ratio included."""
        return {**asdict(self), "perplexity_ratio": self.perplexity_ratio}


def window_logits(model: Any, ids: Sequence[int], window: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each window of `ids`: logits [w-1, V] that predict, and the ids [w-1] that came."""
    device = next(model.parameters()).device
    tensor = torch.tensor(ids, dtype=torch.long, device=device)
    with torch.inference_mode():
        for part in tensor.split(window):
            if len(part) >= 2:
                yield model(input_ids=part[None], use_cache=False).logits[0, :-1], part[1:]


def reference_logits(model: Any, ids: Sequence[int], window: int = 256) -> list[Tensor]:
    """Standard's logits per window, in its own dtype on the host, so that Standard can be freed."""
    return [logits.cpu() for logits, _ in window_logits(model, ids, window)]


def compare(reference: Sequence[Tensor], model: Any, ids: Sequence[int], window: int = 256) -> Quality:
    """Score `model` against `reference` (from `reference_logits` with the same `ids` and `window`).

    Raises `QualityError` for fewer than two ids or logits that are NaN or infinite.
    """
    if len(ids) < 2:
        raise QualityError(f"{len(ids)} tokens of text predict nothing; give at least 2")
    sums = torch.zeros(4, dtype=torch.float64)
    tokens = 0
    for ours, (theirs, targets) in zip(reference, window_logits(model, ids, window), strict=True):
        for rows in range(0, len(targets), CHUNK_ROWS):
            cut = slice(rows, rows + CHUNK_ROWS)
            sums += _sums(ours[cut].to(theirs.device), theirs[cut], targets[cut])
        tokens += len(targets)
    kl, agree, loss, reference_loss = (sums / tokens).tolist()
    if not math.isfinite(kl + loss + reference_loss):
        raise QualityError("logits are NaN or infinite")
    return Quality(tokens, max(kl, 0.0), agree, math.exp(loss), math.exp(reference_loss))


def measure_quality(trial: Any, w: Any) -> None:
    """`kl_nats`, `loss_nats`, `standard_loss_nats` and `top1_agreement`: means of each window, one row a window; then
    what both write on their own (`generation_check`).

    Standard and the build are in memory together, so that no logits need be kept.
    """
    from flashgap import models
    from flashgap.builds.calibration import other_english_text

    text, digest = other_english_text()
    ids = held_out_ids(models.tokenizer(trial.spec.model).encode, text, w.tokens)
    trial.first_token()
    standard = models.load(trial.spec.model, trial.spec.device)
    trial.facts |= {"text_sha256": digest, "tokens": len(ids)}
    pairs = zip(
        window_logits(standard, ids, w.window_tokens),
        window_logits(trial.engine.model, ids, w.window_tokens),
        strict=True,
    )
    for window, ((ours, targets), (theirs, _)) in enumerate(pairs):
        kl, agree, loss, reference_loss = (_sums(ours, theirs, targets) / len(targets)).tolist()
        if not math.isfinite(kl + loss + reference_loss):
            raise QualityError("logits are NaN or infinite")
        rows = {
            "kl_nats": kl,
            "loss_nats": loss,
            "standard_loss_nats": reference_loss,
            "top1_agreement": agree,
        }
        for metric, value in rows.items():
            trial.observations.add(metric, value, context_tokens=w.window_tokens, iteration=window)
    check_generation(trial, standard)


def _sums(ours: Tensor, theirs: Tensor, targets: Tensor) -> Tensor:
    """Sums over rows: KL(ours || theirs), equal best tokens, -log p(target) of theirs and of ours."""
    p, q = ours.float().log_softmax(-1), theirs.float().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    agree = (p.argmax(-1) == q.argmax(-1)).double()
    pick = targets[:, None]
    losses = -q.gather(-1, pick)[:, 0], -p.gather(-1, pick)[:, 0]
    return torch.stack([v.double().sum() for v in (kl, agree, *losses)]).cpu()


def held_out_ids(encode: Callable[[str], Sequence[int]], text: str, tokens: int) -> list[int]:
    """The first `tokens` ids of `text`; only as much text as needed is encoded (16 characters a token)."""
    ids = list(encode(text[: tokens * 16]))[:tokens]
    if len(ids) < tokens:
        raise QualityError(
            f"the held-out text gives {len(ids)} tokens, {tokens} are asked for; lower correctness.tokens"
        )
    return ids
