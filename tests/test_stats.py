"""Intervals: are they as right as they say, and do they fail in words."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgap import stats
from flashgap.stats import StatsError, paired_ratio

positive = st.floats(1e-3, 1e3)
sample = st.lists(positive, min_size=1, max_size=12).map(np.array)
some_pairs = st.lists(st.tuples(sample, sample), min_size=2, max_size=6)


# --- calibration: simulated machines on which nothing differs -----------------------------------------


def quiet(rng: np.random.Generator, m: int) -> np.ndarray:
    return rng.normal(0, 0.02) + rng.normal(0, 0.05, m)


def one_number(rng: np.random.Generator, m: int) -> np.ndarray:
    """A task's wall time: one observation a process, so no inner noise to widen the interval."""
    return rng.normal(0, 0.02, 1)


def heavy_iterations(rng: np.random.Generator, m: int) -> np.ndarray:
    """Interruptions: one-sided iteration noise without a variance."""
    return rng.normal(0, 0.005) + 0.05 * np.minimum(np.abs(rng.standard_t(1.5, m)), 100)


def heavy_processes(rng: np.random.Generator, m: int) -> np.ndarray:
    """Placement luck: some whole processes are much slower."""
    return 0.03 * rng.exponential() + 0.02 * rng.exponential(1, m)


def two_modes(rng: np.random.Generator, m: int) -> np.ndarray:
    return rng.normal(0, 0.01) + rng.normal(0, 0.02, m) + 0.1 * (rng.random(m) < 0.5)


MACHINES = [quiet, one_number, heavy_iterations, heavy_processes, two_modes]


def simulated_block(machine, rng: np.random.Generator, drift: float, ratio: float = 1.0):
    """One block of the same treatment twice; `drift` is the log speed of the machine at that time."""
    a, b = (np.exp(drift + machine(rng, 48)) for _ in range(2))
    return ratio * a, b


def rate_of_exclusion(machine, blocks: int, ratio: float, repeats: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    excluded = 0
    for repeat in range(repeats):
        drift = np.cumsum(rng.normal(0, 0.03, blocks))  # the machine wanders by 3 % from block to block
        pairs = [simulated_block(machine, rng, d, ratio) for d in drift]
        excluded += paired_ratio(pairs, seed=repeat, draws=400).excludes(1.0)
    return excluded / repeats


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("blocks", "repeats"), [(5, 600), (8, 400), (24, 300)])
def test_false_alarms_stay_under_seven_percent(machine, blocks, repeats):
    """If this fails, the lab calls noise a difference more often than it says."""
    seed = blocks * 1009 + MACHINES.index(machine)
    assert rate_of_exclusion(machine, blocks, 1.0, repeats, seed) <= 0.07


def test_five_blocks_find_a_ten_percent_slowdown_on_a_quiet_machine():
    """If this fails, the interval is safe only because it is useless."""
    assert rate_of_exclusion(quiet, 5, 1.10, 200, 1) >= 0.9


def test_drift_between_blocks_cancels():
    """If this fails, a machine that slows down over an hour is taken for a treatment's effect."""
    rng = np.random.default_rng(5)
    pairs = [simulated_block(quiet, rng, drift=0.0) for _ in range(8)]
    drifted = [(a * f, b * f) for (a, b), f in zip(pairs, np.geomspace(1, 3, 8), strict=True)]
    before, after = paired_ratio(pairs), paired_ratio(drifted)
    assert (after.value, after.low, after.high) == pytest.approx((before.value, before.low, before.high))


def test_interval_agrees_with_student_where_it_should():
    """One normal number a block: the stretched bootstrap must be the t interval, give or take resampling."""
    rng = np.random.default_rng(3)
    logs = rng.normal(0.1, 0.03, 40)
    found = paired_ratio([(np.exp([x]), np.ones(1)) for x in logs], draws=20000)
    half = 2.0227 * logs.std(ddof=1) / math.sqrt(40)
    assert found.value == pytest.approx(math.exp(logs.mean()))
    assert math.log(found.high / found.low) / 2 == pytest.approx(half, rel=0.05)


def test_inner_resampling_is_the_ordinary_bootstrap_of_a_quantile(monkeypatch):
    """The short cut by order statistics must give the distribution of resampled quantiles."""
    monkeypatch.setattr(stats, "POOL", 40000)
    rng = np.random.default_rng(0)
    for m, q in ((1, 0.5), (2, 0.5), (7, 0.5), (48, 0.5), (48, 0.9), (5, 1.0)):
        x = rng.exponential(1, m)
        quick = stats._resampled_quantiles(x, q, rng)
        plain = np.quantile(x[rng.integers(0, m, (40000, m))], q, axis=1)
        spread = max(plain.std(), 1e-12)
        assert abs(quick.mean() - plain.mean()) < 0.03 * spread + 1e-9
        assert quick.std() == pytest.approx(plain.std(), rel=0.03, abs=1e-9)


# --- properties ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(some_pairs)
def test_value_lies_in_its_interval(pairs):
    found = paired_ratio(pairs, draws=200)
    assert found.low <= found.value * (1 + 1e-12)
    assert found.value <= found.high * (1 + 1e-12)


@settings(deadline=None, max_examples=60)
@given(some_pairs, st.floats(0.01, 100))
def test_a_change_of_unit_scales_the_ratio_and_nothing_else(pairs, factor):
    plain = paired_ratio(pairs, draws=200)
    scaled = paired_ratio([(a * factor, b) for a, b in pairs], draws=200)
    expected = plain.scaled(factor)
    assert (scaled.value, scaled.low, scaled.high) == pytest.approx(
        (expected.value, expected.low, expected.high)
    )


@settings(deadline=None, max_examples=40)
@given(some_pairs)
def test_swapping_sides_inverts_the_value(pairs):
    forward, back = paired_ratio(pairs, draws=200), paired_ratio([(b, a) for a, b in pairs], draws=200)
    assert forward.value * back.value == pytest.approx(1.0)


@settings(deadline=None, max_examples=40)
@given(some_pairs)
def test_ratio_is_the_quotient_of_the_two_typical_medians(pairs):
    """If this fails, a table's two columns do not divide to its third."""
    a, b = (stats.median_ci([pair[side] for pair in pairs], draws=100).value for side in (0, 1))
    assert paired_ratio(pairs, draws=100).value == pytest.approx(a / b)


@settings(deadline=None, max_examples=30)
@given(st.lists(sample, min_size=2, max_size=6), st.integers(0, 5))
def test_the_same_seed_gives_the_same_interval(groups, seed):
    assert stats.median_ci(groups, seed=seed, draws=100) == stats.median_ci(groups, seed=seed, draws=100)


@settings(deadline=None, max_examples=30)
@given(some_pairs)
def test_more_confidence_is_a_wider_interval(pairs):
    narrow, wide = (paired_ratio(pairs, confidence=c, draws=300) for c in (0.8, 0.99))
    assert wide.low <= narrow.low * (1 + 1e-12)
    assert narrow.high <= wide.high * (1 + 1e-12)


# --- examples -----------------------------------------------------------------------------------------


def test_one_block_has_no_interval_and_excludes_nothing():
    found = paired_ratio([(np.full(9, 2.0), np.full(9, 1.0))])
    assert found.value == pytest.approx(2.0)
    assert not found.known
    assert not found.excludes(1.0)
    assert found.half_width_relative == math.inf
    assert str(found) == "2 [no interval: 1 block]"
    alone = stats.median_ci([np.array([1.0, 2.0, 3.0])])
    assert (alone.low, alone.value, alone.high) == pytest.approx((0, 2, math.inf))


def test_identical_blocks_have_a_point_interval():
    found = paired_ratio([(np.full(5, 3.0), np.full(5, 2.0))] * 5)
    assert (found.low, found.value, found.high) == pytest.approx((1.5, 1.5, 1.5))
    assert found.half_width_relative == pytest.approx(0)


def test_medians_that_are_not_positive_take_the_plain_mean():
    found = stats.median_ci([np.array([-1.0, 0.0, 1.0]), np.array([1.0, 2.0, 3.0])])
    assert found.value == pytest.approx(1.0)
    assert found.method.startswith("mean of process medians")


@pytest.mark.parametrize(
    ("value", "low", "high", "spec", "text"),
    [
        (2.912, 2.837, 2.991, "", "2.91 [2.84, 2.99]"),
        (2.912, 2.837, 2.991, ".1f", "2.9 [2.8, 3.0]"),
        (151.2, 140.0, 163.0, "", "151 [140, 163]"),
        (46e9, 45e9, 47e9, "", "4.6e+10 [4.5e+10, 4.7e+10]"),
        (0.0, 0.0, 0.0, "", "0 [0, 0]"),
    ],
)
def test_estimates_print_as_people_write_them(value, low, high, spec, text):
    assert format(stats.Estimate(value, low, high, 0.95, 5, 240, ""), spec) == text


def test_excludes_and_scaled():
    found = stats.Estimate(2.0, 1.5, 2.5, 0.95, 5, 10, "")
    assert found.excludes(1.0)
    assert not found.excludes(1.5)
    assert found.half_width_relative == pytest.approx(0.25)
    milli = found.scaled(1e3)
    assert (milli.value, milli.low, milli.high) == (2000, 1500, 2500)


def test_equivalence_needs_evidence():
    rng = np.random.default_rng(0)
    alike = [simulated_block(quiet, rng, 0.0) for _ in range(24)]
    assert stats.equivalence(alike, margin=0.05).equivalent
    assert "within 5.0% of 1" in str(stats.equivalence(alike, margin=0.05))
    assert not stats.equivalence(alike[:2], margin=0.05).equivalent  # too few to know
    assert not stats.equivalence([(a * 1.2, b) for a, b in alike], margin=0.05).equivalent


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([], "no samples"),
        ([(np.array([]), np.ones(3))], "group 0 holds no observations"),
        ([(np.ones(3), np.array([1.0, np.nan]))], "group 1 .* not finite"),
        ([(np.ones(3), np.ones(3)), (np.ones(3), np.array([0.0, 1.0]))], "block 1 .* positive"),
    ],
)
def test_unusable_samples_are_refused_in_words(pairs, words):
    with pytest.raises(StatsError, match=words):
        paired_ratio(pairs)


# --- A/A and power ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured():
    """24 blocks of: a treatment, itself again, and itself with 5 % planted."""
    rng = np.random.default_rng(11)
    drift = np.cumsum(rng.normal(0, 0.03, 24))
    a, b = zip(*(simulated_block(quiet, rng, d) for d in drift), strict=True)
    slowed = [1.05 * np.exp(d + quiet(rng, 48)) for d in drift]
    return a, b, slowed


def test_false_alarm_rate_of_a_quiet_machine(measured):
    a, b, _ = measured
    found = stats.false_alarm_rate(a, b, 5, repeats=400)
    assert found.value <= 0.07
    assert found.low <= found.value <= found.high
    assert 0 < found.high - found.low < 0.08


def test_false_alarm_rate_ignores_a_label_bias(measured):
    """Labels are swapped at random, so even a real difference between them leaves a symmetric null."""
    a, _, slowed = measured
    assert stats.false_alarm_rate(a, slowed, 8, repeats=200).value < 0.2


def test_power_grows_with_blocks_and_with_the_effect(measured):
    a, b, slowed = measured
    few, many = (stats.power(a, slowed, n, repeats=200).value for n in (5, 16))
    assert few < many
    assert many > 0.95
    assert stats.power(a, b, 5, repeats=200).value < 0.1
    assert stats.power(slowed, a, 5, repeats=200).value < 0.02  # faster is not slower


def test_detectable_slowdown_shrinks_with_blocks_and_predicts_power(measured):
    a, b, _ = measured
    few, many = (stats.detectable_slowdown(a, b, n, repeats=400) for n in (5, 16))
    assert 0 < many < few
    low, _ = stats._subset_intervals(a, b, 16, 0.95, 400, 0, 1000, swap=True)
    assert np.mean(low + np.log1p(many) >= 0) == pytest.approx(0.8, abs=0.01)


def test_blocks_needed_is_the_first_count_that_suffices(measured):
    a, b, slowed = measured
    needed = stats.blocks_needed(a, slowed, repeats=200)
    assert needed is not None
    assert stats.power(a, slowed, needed, repeats=200).value >= 0.8
    assert needed == 5 or stats.power(a, slowed, needed - 1, repeats=200).value < 0.8
    assert stats.blocks_needed(a, [x / 1.02 for x in b], repeats=50) is None


def test_impossible_subsets_are_refused(measured):
    a, b, _ = measured
    with pytest.raises(StatsError, match="cannot take 25 blocks from 24"):
        stats.false_alarm_rate(a, b, 25)
    with pytest.raises(StatsError, match="pair them first"):
        stats.power(a, b[:3], 2)


# --- warnings -----------------------------------------------------------------------------------------


def steady(n: int = 8, m: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [1 + rng.normal(0, 0.01, m) for _ in range(n)]


def test_a_steady_machine_draws_no_warning():
    assert stats.noise_warnings(steady()) == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda g: g[:3], "only 3 process"),
        (lambda g: [np.concatenate([x[:-2], [9.0, 9.0]]) for x in g], "far from their median"),
        (lambda g: [np.concatenate([[1.5], x]) for x in g], "raise warmup"),
        (lambda g: [x * (1 + 0.2 * (i % 2)) for i, x in enumerate(g)], "process medians differ"),
        (lambda g: [x * (1 + 0.02 * i) for i, x in enumerate(g)], "drifts by"),
    ],
)
def test_each_kind_of_noise_is_named(spoil, words):
    assert any(words in text for text in stats.noise_warnings(spoil(steady()), "itl_s"))
    assert all(text.startswith("itl_s: ") for text in stats.noise_warnings(spoil(steady()), "itl_s"))
