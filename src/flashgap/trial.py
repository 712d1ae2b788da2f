"""What a workload function is given, and the passes it is built from.

The one idea: a trial owns its observations and memory phases; a pass through the engine is either
*discarded* (warm-up, probes) or *measured*, and both notice the first token of the process, which ends the
initialisation phase, and logits that are no numbers.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashgap import hardware, workload
from flashgap.treatment import TrialSpec

COLUMNS = ("metric", "value", "batch", "context_tokens", "request", "iteration", "replica")
WARMUP_STEPS = 4
ALLOCATION_WORDS = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "could not create a memory",
    "mkldnn_matmul failed",  # a warning: torch goes on with its own, far slower matmul
    "could not create a primitive",  # oneDNN: no room for its code or scratchpad
    "could not execute a primitive",
)


class NotFinite(RuntimeError):
    """Logits are NaN or infinite, so a time would be the time of nothing."""


@dataclass
class Observations:
    """Column lists, one entry a sample; -1 where a column does not apply."""

    replica: int = -1
    columns: dict[str, list] = field(default_factory=lambda: {name: [] for name in COLUMNS})

    def add(
        self,
        metric: str,
        value: float,
        batch: int = -1,
        context_tokens: int = -1,
        request: int = -1,
        iteration: int = -1,
    ) -> None:
        """Append one sample."""
        row = (metric, float(value), batch, context_tokens, request, iteration, self.replica)
        for name, item in zip(COLUMNS, row, strict=True):
            self.columns[name].append(item)


@dataclass
class Trial:
    """What a workload function is given: the specification, the engine, and where results go."""

    spec: TrialSpec
    engine: Any
    observations: Observations
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    replica: int = 0
    replicas: int = 1
    barrier: Any = None

    @property
    def on_step(self) -> Callable[[float], None] | None:
        """The planted slowdown, or None."""
        return spin(self.spec.treatment.planted_slowdown)

    def phase(self, name: str) -> None:
        """Keep every memory counter under `name`, the first time only."""
        if name not in self.memory:
            self.memory[name] = hardware.memory_counters(self.spec.device)

    def first_token(self) -> None:
        """The first token of the process: ends the initialisation phase."""
        self.phase("first_token")
        self.memory.setdefault("initialisation_peak", peaks(self.memory["first_token"]))

    def prompts(self, lengths_tokens: Sequence[int]) -> list[list[int]]:
        """Random prompts of these lengths, different at every call."""
        vocabulary = self.engine.model.config.get_text_config().vocab_size
        return workload.prompt_ids(lengths_tokens, vocabulary, secrets.randbits(31))


def peaks(counters: dict[str, int]) -> dict[str, int]:
    """Only the counters that are maxima since the process began."""
    return {name: value for name, value in counters.items() if "peak" in name}


def spin(share: float) -> Callable[[float], None] | None:
    """A callback that burns `share` of the step's own time; None for no slowdown."""
    if share == 0:
        return None

    def burn(elapsed_s: float) -> None:
        until_s = time.perf_counter() + share * elapsed_s
        while time.perf_counter() < until_s:
            pass

    return burn


def tensor(trial: Trial, rows: list[list[int]]) -> Any:
    import torch

    return torch.tensor(rows, dtype=torch.long, device=trial.engine.device)


def discarded_pass(trial: Trial, prompts: list[list[int]], tokens: int, planned: int | None = None) -> None:
    """A discarded pass of `tokens` tokens, with the cache as large as for `planned` ones."""
    if planned is None or not trial.engine.static:
        check_result(trial.engine.generate(prompts, tokens, on_first_token=trial.first_token))
        return
    ids = tensor(trial, prompts)
    _, state = trial.engine.prefill(ids, None, ids.shape[1] + planned)
    trial.first_token()
    for _ in range(tokens - 1):
        trial.engine.decode_step(state)


def measured_pass(trial: Trial, prompts: list[list[int]], tokens: Any, steady: bool) -> Any:
    """A measured pass; keeps the steady memory phase at its end if `steady`."""
    result = trial.engine.generate(
        prompts,
        tokens,
        on_step=trial.on_step,
        on_first_token=trial.first_token,
        on_last_token=(lambda: trial.phase("steady")) if steady else None,
    )
    check_result(result)
    return result


def check_result(result: Any) -> None:
    if not result.finite:
        raise NotFinite("logits are NaN or infinite")


def check_finite(logits: Any) -> None:
    import torch

    if not bool(torch.isfinite(logits).all()):
        raise NotFinite("logits are NaN or infinite")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is an allocation that failed, in Python, torch, oneDNN or the system."""
    text = f"{type(error).__name__} {error}".lower()
    return (
        isinstance(error, MemoryError)
        or "outofmemory" in text
        or any(word in text for word in ALLOCATION_WORDS)
    )
