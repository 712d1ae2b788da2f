"""Choosing kernels by time: one bad minute must not choose, and what never settles must be said."""

from __future__ import annotations

import contextlib

import torch
from torch._inductor.codecache import CacheBase, PersistentCache
from torch._inductor.runtime.benchmarking import Benchmarker
from torch._inductor.select_algorithm import AlgorithmSelectorCache

from flashgap import tuning


def rounds_of(*rounds: dict[str, float]):
    given = iter(rounds)
    return lambda: next(given)


def test_a_burst_of_other_work_does_not_choose():
    """If this fails, a kernel that was timed beside something else loses for good."""
    told: list[str] = []
    slow_once = {"amx": 7.6, "operator": 0.5}
    usual = {"amx": 0.09, "operator": 0.5}
    assert tuning.least(rounds_of(slow_once, usual, usual), str, told.append) == usual
    assert told == []


def test_rounds_go_on_until_two_agree():
    told: list[str] = []
    times = [{"a": t} for t in (3.0, 2.0, 1.0, 1.05)]
    assert tuning.least(rounds_of(*times), str, told.append) == {"a": 1.0}
    assert told == []


def test_what_never_settles_is_said():
    told: list[str] = []
    times = [{"a": 2.0**-n, "b": 1.0} for n in range(tuning.MOST_ROUNDS)]
    found = tuning.least(rounds_of(*times), str, told.append)
    assert found["a"] == min(t["a"] for t in times)
    assert [line.split(";")[0] for line in told] == [
        f"a: its two best times of {tuning.MOST_ROUNDS} are 2.0 times apart"
    ]


def test_a_candidate_that_fails_is_not_waited_for():
    inf = float("inf")
    assert tuning.disagreement([{"a": inf}, {"a": inf}, {"a": inf}]) == {}


def test_inductor_is_left_as_it_was_and_its_store_untouched():
    """If this fails, timings of one graph decide the next one, or every later compilation in the process is ours."""
    before, timer = AlgorithmSelectorCache.__dict__["benchmark_choices"], Benchmarker.benchmark_cpu
    with contextlib.suppress(ZeroDivisionError), tuning.patient(print):
        cache = PersistentCache()
        cache.get_local_cache()["x"] = {}
        assert cache.get_local_cache() == {"x": {}}
        raise ZeroDivisionError
    assert AlgorithmSelectorCache.__dict__["benchmark_choices"] is before
    assert Benchmarker.benchmark_cpu is timer
    assert "get_local_cache" not in PersistentCache.__dict__
    assert PersistentCache.get_local_cache is CacheBase.get_local_cache


def test_autotuning_really_works_in_rounds(monkeypatch):
    """The hook is inductor's own, private place: a version that moves it must fail here and not go unnoticed."""
    calls: list[int] = []
    real = tuning.least

    def counted(measure, name_of, tell):
        def one():
            calls.append(1)
            return measure()

        return real(one, name_of, tell)

    monkeypatch.setattr(tuning, "least", counted)
    settings = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN", "freezing": True}
    model = torch.nn.Linear(64, 96, bias=False).to(torch.bfloat16).requires_grad_(False)
    with torch.no_grad(), torch._inductor.config.patch(settings), tuning.patient(lambda _: None) as choices:
        torch.compile(model)(torch.randn(4, 64, dtype=torch.bfloat16))
    assert len(choices[0]["ms"]) > 1
    assert len(calls) >= tuning.ROUNDS
