"""Largest batch that fits a memory budget, found by running out of it for real.

The one idea: arithmetic predicts a largest batch, only an allocation that fails proves one. The limit is
the operating system's (private writable data of the process, `RLIMIT_DATA`) or the device allocator's, and
it is lifted between probes so that what failed can be cleaned up.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import warnings
from collections.abc import Callable
from typing import Any

from flashgap.trial import Trial, discarded_pass, is_out_of_memory


def capacity(trial: Trial, w: Any) -> None:
    """`largest_batch` whose prefill and decode fit the budget: doubling, then bisection; 0 if none does."""
    discarded_pass(trial, trial.prompts([2]), 2)  # thread pools start outside the limit
    good, bad, batch = 0, w.max_batch + 1, 1
    while good + 1 < bad:
        fits = _fits(trial, w, batch)
        trial.observations.add("probe_ok", fits, batch=batch, context_tokens=w.prompt_tokens)
        good, bad = (batch, bad) if fits else (good, batch)
        doubling = bad == w.max_batch + 1
        batch = min(good * 2, w.max_batch) if doubling else (good + bad) // 2
    trial.facts |= {"largest_batch": good, "capped": good == w.max_batch, "budget_bytes": w.budget_bytes}
    trial.observations.add("largest_batch", good, context_tokens=w.prompt_tokens)


def _fits(trial: Trial, w: Any, batch: int) -> bool:
    prompts = trial.prompts([w.prompt_tokens] * batch)
    restore = _enforce(trial.spec.device, w.budget_bytes)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="mkldnn_matmul failed")
            discarded_pass(trial, prompts, w.generated_tokens)
        return True
    except (MemoryError, RuntimeError, OSError, UserWarning) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        restore()
        release(trial)


def _enforce(device: str, budget_bytes: int) -> Callable[[], None]:
    """Make allocations beyond `budget_bytes` fail for real; returns what lifts the limit again."""
    if device == "cuda":
        import torch

        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total_bytes))
        return lambda: torch.cuda.set_per_process_memory_fraction(1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (budget_bytes, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def release(trial: Trial) -> None:
    """Give freed memory back, so that one probe does not count against the next."""
    trial.engine.release()
    gc.collect()
    if trial.spec.device == "cuda":
        import torch

        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)
