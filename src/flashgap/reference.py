"""Our clock against an independent one: `torch.utils.benchmark` on plain calls of the same model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.benchmark import Timer
from transformers import DynamicCache

from flashgap.gate import compare_tokens, reference_tokens
from flashgap.trial import Trial, tensor


def reference(trial: Trial, w: Any) -> None:
    """Ours and `torch.utils.benchmark` on plain model calls, in turn; the order changes every time.

    `Timer.timeit(1)` runs its statement twice before the timed run; our decode does the same, so both
    caches are equally long at each sample.
    """
    engine, model = trial.engine, trial.engine.model
    ids = tensor(trial, trial.prompts([w.prompt_tokens]))
    room = w.context_tokens + 3 * w.repeats + 1
    _, state = engine.prefill(tensor(trial, trial.prompts([w.context_tokens])), None, room)
    trial.first_token()
    plain = _PlainDecode(model, state.tokens, DynamicCache(config=model.config))
    plain.call(tensor(trial, trial.prompts([w.context_tokens])))

    def ours_prefill() -> float:
        start_s = engine.clock()
        engine.prefill(ids, None, w.prompt_tokens)
        return engine.clock() - start_s

    def ours_decode() -> float:
        for _ in range(2):
            engine.decode_step(state)
        return engine.timed_step(state, trial.on_step)

    pairs = {
        "prefill": (
            ours_prefill,
            lambda: _timer(lambda: _PlainDecode(model, ids, DynamicCache(config=model.config)).step()),
        ),
        "decode_step": (ours_decode, lambda: _timer(plain.step)),
    }
    for repeat in range(w.repeats):
        for name, (ours, theirs) in pairs.items():
            both = [(f"{name}_s", ours), (f"{name}_reference_s", theirs)]
            for metric, function in both if repeat % 2 else both[::-1]:
                tokens = w.prompt_tokens if name == "prefill" else w.context_tokens
                trial.observations.add(metric, function(), batch=1, context_tokens=tokens, iteration=repeat)
    prompts = trial.prompts([w.prompt_tokens])
    result = engine.generate(prompts, w.generated_tokens, gaps=True)
    with torch.inference_mode():
        compared = compare_tokens(
            result.tokens, reference_tokens(model, prompts, w.generated_tokens), result.logits_gap
        )
    trial.facts["tokens_equal_generate"] = compared["first_difference"] is None
    trial.facts["tie_margin"] = compared["tie_margin"]


@dataclass
class _PlainDecode:
    """The model called as its documentation says, nothing of ours in between."""

    model: Any
    tokens: Any
    cache: Any

    def step(self) -> None:
        self.tokens = self.call(self.tokens)

    def call(self, ids: Any) -> Any:
        with torch.inference_mode():
            out = self.model(input_ids=ids, past_key_values=self.cache, logits_to_keep=1)
            return out.logits[:, -1].argmax(-1, keepdim=True)


def _timer(function: Callable[[], None]) -> float:
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return timer.timeit(1).median
