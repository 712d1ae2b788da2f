"""What a build is asked to do: requests, their lengths, their token ids.

The one idea: lengths come from real traffic, token ids do not matter for speed but must not repeat,
or a cache could answer for the model. So lengths are drawn once with the study's seed (every
treatment gets the same list) and ids are drawn anew for every trial. Nothing here imports torch.

The quantile table below was read off one hour of conversation requests to a production service
(Azure Public Dataset, "AzureLLMInferenceTrace_conv", November 2023, CC-BY; Patel et al., "Splitwise",
ISCA 2024). Prompt and generated lengths are drawn independently: their rank correlation there is 0.07.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flashgap.treatment import AnyWorkload, LatencyWorkload, PrefillWorkload, TaskWorkload

QUANTILES = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1)
CONV_PROMPT_TOKENS = (2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 6179, 14050)
CONV_GENERATED_TOKENS = (7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 954, 1000)


@dataclass(frozen=True)
class Request:
    """One request: how many tokens come in and how many must come out (exact; no early stop)."""

    prompt_tokens: int
    generated_tokens: int


def draw_lengths(table: Sequence[int], count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` lengths in tokens, [count] int: the inverse of the distribution function, linear between quantiles."""
    return np.interp(rng.random(count), QUANTILES, table).round().astype(int)


def draw_task(task: TaskWorkload) -> list[Request]:
    """The study's task: the same list for every treatment and machine, decided by `task.draw_seed`.

    Generated tokens are capped first to half the context, then prompts to what is left of it, so that
    every request fits `task.max_context_tokens`.
    """
    rng = np.random.default_rng(task.draw_seed)
    prompts = draw_lengths(CONV_PROMPT_TOKENS, task.requests, rng) * task.prompt_scale
    generated = draw_lengths(CONV_GENERATED_TOKENS, task.requests, rng) * task.generated_scale
    requests = []
    for prompt, output in zip(prompts, generated, strict=True):
        output_tokens = min(max(1, round(output)), task.max_context_tokens // 2)
        prompt_tokens = min(max(1, round(prompt)), task.max_context_tokens - output_tokens)
        requests.append(Request(prompt_tokens, output_tokens))
    return requests


def replica_share(requests: Sequence[Request], replica: int, replicas: int) -> list[Request]:
    """The requests of one of `replicas` independent replicas: dealt out in turn."""
    return list(requests[replica::replicas])


def batches(requests: Sequence[Request], max_batch: int) -> list[list[Request]]:
    """Arrival order, at most `max_batch` a batch (padded to the longest when run)."""
    return [list(requests[i : i + max_batch]) for i in range(0, len(requests), max_batch)]


def prompt_ids(lengths_tokens: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids, one list per length. Seed it per trial: equal prompts let a prefix cache cheat."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths_tokens]


PROMPT_GRAPHS = (128, 512, 1024, 2048, 4096, 8192)  # lengths that unequal prompts are padded to, on the right


def fixed_shapes(w: AnyWorkload) -> list[tuple[str, int, int]]:
    """The fixed graphs that `w` needs as (phase, batch, tokens): `decode` over a cache of `tokens`, `prefill` of
    one prompt of `tokens`. `ValueError` for a workload that is no list of known shapes."""
    if isinstance(w, PrefillWorkload):
        return [("prefill", 1, tokens) for tokens in w.prompt_tokens]
    if isinstance(w, LatencyWorkload):
        room = w.prompt_tokens + w.generated_tokens
        return [("prefill", 1, w.prompt_tokens), *(("decode", batch, room) for batch in w.batch_sizes)]
    if isinstance(w, TaskWorkload):
        shares = [replica_share(draw_task(w), replica, w.replicas) for replica in range(w.replicas)]
        groups = [group for share in shares for group in batches(share, w.max_batch)]
        prompts = {next(n for n in PROMPT_GRAPHS if n >= r.prompt_tokens) for group in groups for r in group}
        decodes = {
            (len(g), max(r.prompt_tokens for r in g) + max(r.generated_tokens for r in g)) for g in groups
        }
        return [("prefill", 1, n) for n in sorted(prompts)] + [("decode", *d) for d in sorted(decodes)]
    raise ValueError(f"a workload of kind '{w.kind}' has no fixed graphs; use ahead_of_time: false for it")
