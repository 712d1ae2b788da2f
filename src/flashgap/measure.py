"""One function a workload: run it on a ready engine and keep every raw sample.

The one idea: nothing is averaged here. A pass gives a time to first token, one time per decode step and
their sum; each becomes a row with its batch, context, request and iteration. Warm-up passes (a whole
prefill and a few steps) are discarded, and prompts are random ids drawn anew in each trial, so no cache
that compares prompts can help.
"""

from __future__ import annotations

import resource
from itertools import pairwise
from typing import Any

from flashgap import hardware, metrics, workload
from flashgap.trial import WARMUP_STEPS, Trial, check_finite, discarded_pass, measured_pass, peaks, tensor


def run(trial: Trial) -> None:
    """Measure the workload of `trial` into its observations, facts and memory phases."""
    kind = trial.spec.workload.kind
    if kind == "capacity":
        from flashgap.capacity import capacity as function
    elif kind == "reference":
        from flashgap.reference import reference as function
    elif kind == "quality":
        from flashgap.quality import measure_quality as function
    elif kind == "crossover":
        from flashgap.crossover import crossover as function
    else:
        function = {
            "latency": latency,
            "prefill": prefill,
            "context": context,
            "generation": generation,
            "task": task,
        }[kind]
    before = _minor_faults()
    function(trial, trial.spec.workload)
    trial.facts["minor_page_faults"] = _minor_faults() - before
    trial.phase("steady")
    trial.memory["peak"] = peaks(hardware.memory_counters(trial.spec.device))


def _minor_faults() -> int:
    """Pages this process was given so far; many of them in a decode step mean an allocator that hands memory back."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


# ---------------------------------------------------------------------- workloads


def latency(trial: Trial, w: Any) -> None:
    """`ttft_s`, `itl_s` per step, `tpot_s`, `e2e_s` and `throughput_tokens_per_s` at each batch size."""
    for batch in w.batch_sizes:
        trial.engine.warmup(batch, w.prompt_tokens + w.generated_tokens)
        for _ in range(w.warmup):
            steps = min(w.generated_tokens, WARMUP_STEPS + 1)
            discarded_pass(trial, trial.prompts([w.prompt_tokens] * batch), steps, w.generated_tokens)
        for repeat in range(w.repeats):
            last = batch == w.batch_sizes[-1] and repeat == w.repeats - 1
            result = measured_pass(
                trial, trial.prompts([w.prompt_tokens] * batch), w.generated_tokens, steady=last
            )
            _rows(trial, result, batch, w.prompt_tokens, w.generated_tokens, repeat)


def _rows(
    trial: Trial, result: Any, batch: int, prompt_tokens: int, generated_tokens: int, repeat: int
) -> None:
    add, at = trial.observations.add, {"batch": batch, "context_tokens": prompt_tokens}
    add("ttft_s", result.ttft_s, iteration=repeat, **at)
    for step, step_s in enumerate(result.step_s):
        add("itl_s", step_s, iteration=repeat * len(result.step_s) + step, **at)
    add("e2e_s", result.e2e_s, iteration=repeat, **at)
    rate = metrics.throughput_tokens_per_s(batch * generated_tokens, result.e2e_s)
    add("throughput_tokens_per_s", rate, iteration=repeat, **at)
    if generated_tokens > 1:
        add("tpot_s", metrics.tpot_s(result.e2e_s, result.ttft_s, generated_tokens), iteration=repeat, **at)


def prefill(trial: Trial, w: Any) -> None:
    """`ttft_s` of one prompt at each length."""
    engine = trial.engine
    for length in w.prompt_tokens:
        for repeat in range(-w.warmup, w.repeats):
            ids = tensor(trial, trial.prompts([length]))
            start_s = engine.clock()
            _, state = engine.prefill(ids, None, length)
            ttft_s = engine.clock() - start_s
            trial.first_token()
            check_finite(state.logits)
            if repeat >= 0:
                trial.observations.add("ttft_s", ttft_s, batch=1, context_tokens=length, iteration=repeat)


def context(trial: Trial, w: Any) -> None:
    """`itl_s` of `steps` tokens at each context length, one cache prefilled further each time.

    Step i of length L attends to L + i + 1 tokens. The step after a prefill is discarded as warm-up.
    """
    engine, lengths = trial.engine, sorted(w.context_tokens)
    gaps = [b - a for a, b in pairwise(lengths)]
    if lengths[0] < 2 or any(gap < w.steps + 2 for gap in gaps):
        raise ValueError(f"context_tokens {lengths} must start at 2 or more and lie at least steps + 2 apart")
    capacity_tokens = lengths[-1] + w.steps
    engine.warmup(1, capacity_tokens)
    tokens = tensor(trial, trial.prompts([lengths[-1]]))
    _, state = engine.prefill(tokens[:, : lengths[0] - 1], None, capacity_tokens)
    trial.first_token()
    for length in lengths:
        missing = length - 1 - state.length
        if missing > 0:
            engine.extend(state, tokens[:, state.length : length - 1])
        engine.decode_step(state)
        for step in range(w.steps):
            step_s = engine.timed_step(state, trial.on_step)
            trial.observations.add("itl_s", step_s, batch=1, context_tokens=length, iteration=step)
    trial.phase("steady")
    check_finite(state.logits)


def generation(trial: Trial, w: Any) -> None:
    """One generation: `ttft_s`, `e2e_s`, and `itl_s` with the context each step attends to."""
    trial.engine.warmup(1, w.prompt_tokens + w.generated_tokens)
    discarded_pass(trial, trial.prompts([w.prompt_tokens]), WARMUP_STEPS + 1, w.generated_tokens)
    result = measured_pass(trial, trial.prompts([w.prompt_tokens]), w.generated_tokens, steady=True)
    add = trial.observations.add
    add("ttft_s", result.ttft_s, batch=1, context_tokens=w.prompt_tokens)
    for step, step_s in enumerate(result.step_s):
        add("itl_s", step_s, batch=1, context_tokens=w.prompt_tokens + step + 1, iteration=step)
    add("e2e_s", result.e2e_s, batch=1, context_tokens=w.prompt_tokens)


def task(trial: Trial, w: Any) -> None:
    """The study's task. Time runs from handing over the whole list, so waiting for a batch counts.

    Static batches, padded: a batch computes a slot for every row until its longest request is done;
    `useful_slots` of the `computed_slots` carried a token someone asked for.
    """
    requests = workload.replica_share(workload.draw_task(w), trial.replica, trial.replicas)
    groups = list(workload.batches(requests, w.max_batch))
    prompts = trial.prompts([r.prompt_tokens for r in requests])
    _warm_task(trial, groups, prompts)
    if trial.barrier is not None:
        trial.barrier.wait()
    start_s, done, useful, computed = trial.engine.clock(), 0, 0, 0
    for group in groups:
        batch = prompts[done : done + len(group)]
        began_s = trial.engine.clock() - start_s
        result = measured_pass(trial, batch, [r.generated_tokens for r in group], steady=group is groups[-1])
        useful += sum(r.prompt_tokens + r.generated_tokens - 1 for r in group)
        computed += len(group) * (result.padded_tokens + len(result.step_s))
        _request_rows(trial, group, result, began_s, done)
        done += len(group)
        task_s = began_s + result.e2e_s
    trial.observations.add("task_s", task_s)
    trial.observations.add("useful_slots", useful)
    trial.observations.add("computed_slots", computed)
    tokens = sum(r.generated_tokens for r in requests)
    trial.observations.add("throughput_tokens_per_s", metrics.throughput_tokens_per_s(tokens, task_s))


def _warm_task(trial: Trial, groups: list, prompts: list[list[int]]) -> None:
    """A short request, and for a compiled engine every shape of the task; fixed graphs have no others to be warmed by."""
    from flashgap.compiled import ArtefactEngine

    fixed = isinstance(trial.engine, ArtefactEngine)
    if not fixed:
        discarded_pass(trial, [prompts[0][:32]], WARMUP_STEPS + 1)
    done = 0
    for group in groups:
        batch = prompts[done : done + len(group)]
        if fixed:
            discarded_pass(trial, batch, min(WARMUP_STEPS + 1, *(r.generated_tokens for r in group)))
        longest = max(len(p) for p in batch)
        padded = any(len(p) != longest for p in batch)
        trial.engine.warmup(len(group), longest + max(r.generated_tokens for r in group), padded)
        done += len(group)


def _request_rows(trial: Trial, group: list, result: Any, began_s: float, first: int) -> None:
    """Per request: when its first and last token came, counted from the start of the task."""
    add, ends_s = trial.observations.add, [began_s + result.ttft_s]
    for step_s in result.step_s:
        ends_s.append(ends_s[-1] + step_s)
    for index, request in enumerate(group):
        at = {"batch": len(group), "context_tokens": request.prompt_tokens}
        at["request"] = trial.replica + (first + index) * trial.replicas
        add("ttft_s", ends_s[0], **at)
        add("e2e_s", ends_s[request.generated_tokens - 1], **at)
        add("generated_tokens", request.generated_tokens, **at)
