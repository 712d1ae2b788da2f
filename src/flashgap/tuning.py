"""Choosing matrix kernels by timing them, more than once: what inductor believes after one timing, asked again.

The one idea: autotuning times each candidate once, in a row, and keeps what it saw on disk for good; so one burst of
other work makes a kernel look dozens of times slower than it is, in this graph and in all later ones. Here candidates
take turns in several rounds, the least time of each counts (other work only adds), rounds go on until the two least of
every candidate agree, and nothing outlives the graph that it was timed for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ROUNDS, MOST_ROUNDS = 3, 9
AGREE = 1.2  # the second least time of a candidate over the least
# Of one candidate in one round; inductor's 20 and 100 would pay for a few long looks, which a burst of other work spoils whole.
WARMUP_MS, TIMED_MS = 5, 25


@contextmanager
def patient(tell: Callable[[str], None]) -> Iterator[list[dict[str, Any]]]:
    """While open, inductor's autotuning on the CPU works in rounds; gives the list of choices that it fills.

    A choice is {operator, sizes of the two inputs, chosen, ms: candidate -> time}. `tell` hears of candidates whose
    times never agreed, which is what a busy machine looks like.
    """
    from torch._inductor.codecache import PersistentCache
    from torch._inductor.runtime.benchmarking import Benchmarker
    from torch._inductor.select_algorithm import (
        AlgorithmSelectorCache,
        add_feedback_saver,
        clear_feedback_savers,
    )

    choices: list[dict[str, Any]] = []
    remembered: dict[str, Any] = {}
    original = {
        (owner, name): owner.__dict__.get(name)
        for owner, name in (
            (AlgorithmSelectorCache, "benchmark_choices"),
            (PersistentCache, "get_local_cache"),
            (PersistentCache, "update_local_cache"),
            (Benchmarker, "benchmark_cpu"),
        )
    }
    once, timer = AlgorithmSelectorCache.benchmark_choices, Benchmarker.benchmark_cpu

    def benchmark(candidates: Any, *args: Any, **kwargs: Any) -> dict[Any, float]:
        return least(lambda: once(candidates, *args, **kwargs), lambda c: plain(c.name), tell)

    def keep(timings: dict[Any, float], name: str, inputs: Any, *_: Any) -> None:
        sizes = [[int(n) for n in node.get_size()] for node in inputs[:2]]
        timed = {plain(choice.name): ms for choice, ms in timings.items()}
        choices.append(
            {"operator": name, "sizes": sizes, "chosen": min(timed, key=timed.__getitem__), "ms": timed}
        )

    def brief(self: Benchmarker, call: Callable[[], Any], **_: Any) -> float:
        return timer(self, call, warmup=WARMUP_MS, rep=TIMED_MS)

    Benchmarker.benchmark_cpu = brief  # type: ignore[method-assign]
    AlgorithmSelectorCache.benchmark_choices = staticmethod(benchmark)  # type: ignore[method-assign, assignment]
    PersistentCache.get_local_cache = lambda self: remembered  # type: ignore[method-assign]
    PersistentCache.update_local_cache = lambda self, cache: None  # type: ignore[method-assign]
    add_feedback_saver(keep)
    try:
        yield choices
    finally:
        clear_feedback_savers()
        for (owner, name), value in original.items():
            if value is None:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, value)


def least(
    measure: Callable[[], dict[Any, float]], name_of: Callable[[Any], str], tell: Callable[[str], None]
) -> dict[Any, float]:
    """The least time of each candidate over rounds of `measure`: at least `ROUNDS`, until all agree, at most `MOST_ROUNDS`."""
    rounds = [measure() for _ in range(ROUNDS)]
    while (apart := disagreement(rounds)) and len(rounds) < MOST_ROUNDS:
        rounds.append(measure())
    for candidate, ratio in apart.items():
        tell(
            f"{name_of(candidate)}: its two best times of {len(rounds)} are {ratio:.1f} times apart; is something else running? "
            "Kernels are chosen by these times"
        )
    return {candidate: min(times[candidate] for times in rounds) for candidate in rounds[0]}


def disagreement(rounds: list[dict[Any, float]]) -> dict[Any, float]:
    """Candidates whose second least time is more than `AGREE` times the least, and by how much; one that fails is infinite."""
    found = {}
    for candidate in rounds[0]:
        first, second = sorted(times[candidate] for times in rounds)[:2]
        if 0 < first < float("inf") and second / first > AGREE:
            found[candidate] = second / first
    return found


def plain(name: str) -> str:
    """A candidate's name without the number that inductor gives each kernel it generates."""
    return re.sub(r"_\d+$", "", name)
