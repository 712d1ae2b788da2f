"""Recovery after pruning: a short distillation from the model that was pruned, by adapters that are merged afterwards.

The one idea: what pruning broke is mostly the fit between the parts that stayed, which a low-rank correction can mend in
minutes where training could not. The adapters are PEFT's, the loss is the whole next-token distribution's divergence
from the teacher's (Hinton et al. 2015, arXiv:1503.02531; Hu et al. 2021, arXiv:2106.09685), and the result is a plain model again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flashgap.builds.calibration import calibration_chunks
from flashgap.builds.weights import BuildError
from flashgap.treatment import Recovery

ALPHA = 2  # scale of the adapters, in ranks
CLIP = 1.0  # norm of the gradient


def recovered(
    student: Any, teacher: Any, tokenizer: Any, spec: Recovery, tell: Callable[[str], None]
) -> tuple[Any, dict[str, Any]]:
    """`student` with merged adapters, and facts: `steps` done, `first_loss` and `last_loss` in nats, `seconds`.

    It stops at `spec.steps`, or before a step that would pass `spec.budget_s`. Raises `BuildError` if the loss is no number.
    """
    from peft import LoraConfig, get_peft_model

    chunks = calibration_chunks(tokenizer, spec.text)
    torch.manual_seed(spec.text.seed)
    settings = LoraConfig(r=spec.rank, lora_alpha=ALPHA * spec.rank, target_modules="all-linear")
    wrapped = get_peft_model(student, settings)
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=spec.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, spec.steps)
    losses: list[float] = []
    start_s = time.perf_counter()
    order = torch.randperm(len(chunks)).repeat(1 + spec.steps * spec.batch // len(chunks))
    for step in range(spec.steps):
        elapsed_s = time.perf_counter() - start_s
        if step and elapsed_s * (step + 1) / step > spec.budget_s:
            break
        ids = chunks[order[step * spec.batch : (step + 1) * spec.batch]].to(student.device)
        with torch.no_grad():
            truth = teacher(input_ids=ids, use_cache=False).logits
        with torch.enable_grad():
            loss = divergence(truth, wrapped(input_ids=ids, use_cache=False).logits)
            loss.backward()
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            raise BuildError(
                f"pruning.recovery: the loss is {losses[-1]} at step {step}; lower learning_rate"
            )
        nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 0:
            tell(f"recovery: step {step + 1} of {spec.steps}, KL {losses[-1]:.3f} nats")
    merged = wrapped.merge_and_unload()
    facts = {
        "steps": len(losses),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "seconds": time.perf_counter() - start_s,
    }
    return merged.eval().requires_grad_(False), facts


def divergence(truth: Tensor, other: Tensor) -> Tensor:
    """Mean KL(truth || other) in nats over logits [B, S, V]."""
    p, q = (logits.flatten(0, 1).float().log_softmax(-1) for logits in (truth, other))
    return nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
