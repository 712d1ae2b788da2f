"""Intervals for numbers that come from few processes with many iterations each.

The one idea: iterations inside one process share its luck (memory placement, neighbours, clock), so
the *process* is the unit that counts. Every interval resamples processes first and iterations second.
With five processes a plain bootstrap interval is much too narrow; it is stretched as a Student t
interval would be. A comparison takes the ratio inside each block first, which cancels whatever drifts
between blocks. Pure numpy and scipy.

Sources: Kalibera & Jones, "Rigorous benchmarking in reasonable time", ISMM 2013 (levels of repetition);
Hesterberg, "What teachers should know about the bootstrap", The American Statistician 69(4), 2015,
section 5.3 (few samples: correct by t/z and sqrt(n/(n-1))); Brown, Cai & DasGupta, "Interval estimation
for a binomial proportion", Statistical Science 16(2), 2001 (Jeffreys interval).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats as distributions

Array = np.ndarray
Pair = tuple[Array, Array]

POOL = 256  # inner resamples kept per process; outer draws pick among them


class StatsError(RuntimeError):
    """Samples no statistic can be made of; the message says which and why."""


@dataclass(frozen=True)
class Estimate:
    """A statistic with its confidence interval.

    `n_blocks` independent processes or blocks; `n_observations` raw samples. An interval that cannot be
    known (one block) is infinite, so it excludes nothing.
    """

    value: float
    low: float
    high: float
    confidence: float
    n_blocks: int
    n_observations: int
    method: str

    @property
    def half_width_relative(self) -> float:
        """Half the interval's width over the value; infinite if either is unusable."""
        if not self.known or self.value == 0:
            return math.inf
        return (self.high - self.low) / 2 / abs(self.value)

    @property
    def known(self) -> bool:
        """Whether there is an interval at all."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def excludes(self, x: float) -> bool:
        """Whether `x` lies outside the interval."""
        return x < self.low or x > self.high

    def scaled(self, factor: float) -> Estimate:
        """The same estimate in another unit, such as `scaled(1e3)` for seconds to milliseconds."""
        low, high = sorted((self.low * factor, self.high * factor))
        return replace(self, value=self.value * factor, low=low, high=high)

    def __format__(self, spec: str) -> str:
        """`2.91 [2.84, 2.99]`; without a format each number is cut where its uncertainty begins."""
        spec = spec or self._digits()
        if not self.known:
            return f"{self.value:{spec}} [no interval: {self.n_blocks} block{'s' * (self.n_blocks != 1)}]"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    def __str__(self) -> str:
        return format(self, "")

    def _digits(self) -> str:
        """A format that shows as many decimals as the half-width warrants."""
        half = (self.high - self.low) / 2
        largest = max(abs(x) for x in (self.value, self.low, self.high) if math.isfinite(x))
        if not 0 < half < math.inf or not 1e-3 <= largest < 1e6:
            return ".4g"
        return f".{max(0, -math.floor(math.log10(half)))}f"


@dataclass(frozen=True)
class Equivalence:
    """Whether a ratio is shown to lie within `margin` of 1 (two one-sided tests, 5 % each)."""

    estimate: Estimate
    margin: float
    equivalent: bool

    def __str__(self) -> str:
        word = "within" if self.equivalent else "not shown to be within"
        return f"{self.estimate}: {word} {self.margin:.1%} of 1"


def median_ci(
    groups: Sequence[Array],
    confidence: float = 0.95,
    seed: int = 0,
    draws: int = 2000,
    quantile: float = 0.5,
) -> Estimate:
    """The typical process's median: geometric mean over `groups` of each group's median.

    `groups`: one array of observations for each process, in any unit. The geometric mean makes the
    ratio of two such values equal to `paired_ratio` of the same blocks; where a median is not positive
    the plain mean is taken and `method` says so. `quantile` replaces the median (0.99 for a p99).
    Raises `StatsError` on no groups, an empty group or a value that is not finite.
    """
    groups = _checked(groups)
    rng = np.random.default_rng(seed)
    centres = np.array([np.quantile(group, quantile) for group in groups])
    pools = np.stack([_resampled_quantiles(group, quantile, rng) for group in groups])
    positive = bool((centres > 0).all() and (pools > 0).all())
    if positive:
        centres, pools = np.log(centres), np.log(pools)
    interval = _interval(centres, pools, confidence, rng, draws)
    value, low, high = np.exp(interval) if positive else interval
    mean = "geometric mean" if positive else "mean"
    what = "median" if quantile == 0.5 else f"p{100 * quantile:g}"
    method = f"{mean} of process {what}s, {_METHOD if len(groups) > 1 else 'one process: no interval'}"
    observations = sum(group.size for group in groups)
    return Estimate(float(value), float(low), float(high), confidence, len(groups), observations, method)


def paired_ratio(
    pairs: Sequence[Pair],
    confidence: float = 0.95,
    seed: int = 0,
    draws: int = 2000,
    quantile: float = 0.5,
) -> Estimate:
    """Numerator over denominator: geometric mean over blocks of the ratio of the two medians.

    `pairs`: for each block the observations of the two processes, both positive. The interval is the
    hierarchical bootstrap's on the log scale (blocks, then iterations), stretched about the estimate for
    few blocks. It counts iteration noise a second time (the spread of the blocks already holds it), so
    it errs towards caution: false alarms at 95 % stay under 7 % from 2 blocks on (see the tests).
    Raises `StatsError` on no pairs, empty or non-positive samples.
    """
    ratios, pools = _log_ratios(pairs, seed, quantile)
    rng = np.random.default_rng([seed, 1])
    value, low, high = np.exp(_interval(ratios, pools, confidence, rng, draws))
    method = f"geometric mean of block ratios, {_METHOD if len(pairs) > 1 else 'one block: no interval'}"
    observations = sum(np.size(a) + np.size(b) for a, b in pairs)
    return Estimate(float(value), float(low), float(high), confidence, len(pairs), observations, method)


def equivalence(pairs: Sequence[Pair], margin: float = 0.05, seed: int = 0, draws: int = 2000) -> Equivalence:
    """Two one-sided tests at 5 %: is the ratio within `margin` (0.05 = 5 %) of 1, up and down?

    Equivalent if the 90 % interval lies inside [1 / (1 + margin), 1 + margin]: Schuirmann, J.
    Pharmacokinetics and Biopharmaceutics 15, 1987. Failing to see a difference is not equivalence.
    """
    estimate = paired_ratio(pairs, confidence=0.90, seed=seed, draws=draws)
    inside = estimate.low >= 1 / (1 + margin) and estimate.high <= 1 + margin
    return Equivalence(estimate, margin, inside)


def false_alarm_rate(
    a: Sequence[Array],
    b: Sequence[Array],
    blocks: int,
    confidence: float = 0.95,
    repeats: int = 1000,
    seed: int = 0,
    draws: int = 1000,
) -> Estimate:
    """How often `paired_ratio` of `blocks` blocks sees a difference between identical treatments.

    `a`, `b`: the same treatment twice in each of k real blocks (k >= 20 to mean much). Random subsets of
    the blocks with random swaps of the two labels; the share of intervals that exclude 1. The interval
    of that share is Jeffreys' over the repeats: it holds resampling error only, since all repeats share
    the same k blocks.
    """
    low, high = _subset_intervals(a, b, blocks, confidence, repeats, seed, draws, swap=True)
    alarms = (low > 0) | (high < 0)
    return _share(alarms, f"false alarms in {len(alarms)} relabelled subsets of {blocks} of {len(a)} blocks")


def power(
    a: Sequence[Array],
    slowed: Sequence[Array],
    blocks: int,
    confidence: float = 0.95,
    repeats: int = 1000,
    seed: int = 0,
    draws: int = 1000,
) -> Estimate:
    """How often `blocks` blocks find that `slowed` is slower than `a` (times, paired by block).

    Share of random subsets of the k real blocks whose interval lies above 1. Jeffreys interval over the
    repeats, resampling error only; with `blocks` near k the subsets are nearly the same one.
    """
    low, _ = _subset_intervals(slowed, a, blocks, confidence, repeats, seed, draws, swap=False)
    return _share(low > 0, f"found in {len(low)} subsets of {blocks} of {len(a)} blocks")


def detectable_slowdown(
    a: Sequence[Array],
    b: Sequence[Array],
    blocks: int,
    share: float = 0.8,
    confidence: float = 0.95,
    repeats: int = 1000,
    seed: int = 0,
    draws: int = 1000,
) -> float:
    """The smallest slowdown (0.05 = 5 %) that `blocks` blocks find in `share` of cases.

    `a`, `b`: the same treatment twice. Making `b` slower by a factor moves every log ratio, and so the
    interval, by its log; a shift is found when it lifts the lower end above 0. The answer is therefore
    the `share` quantile of the lower ends' distances below 0, over relabelled subsets.
    """
    low, _ = _subset_intervals(a, b, blocks, confidence, repeats, seed, draws, swap=True)
    return float(np.expm1(max(0.0, np.quantile(-low, share))))


def blocks_needed(
    a: Sequence[Array],
    slowed: Sequence[Array],
    share: float = 0.8,
    min_blocks: int = 5,
    confidence: float = 0.95,
    repeats: int = 400,
    seed: int = 0,
    draws: int = 1000,
) -> int | None:
    """The fewest blocks, from `min_blocks` on, that find `slowed` slower than `a` in `share` of cases.

    None if not even all the real blocks given do. Nothing is extrapolated.
    """
    for blocks in range(min(min_blocks, len(a)), len(a) + 1):
        if power(a, slowed, blocks, confidence, repeats, seed, draws).value >= share:
            return blocks
    return None


def noise_warnings(groups: Sequence[Array], name: str = "the measurement", min_groups: int = 5) -> list[str]:
    """What is wrong with these samples, in plain words and with what to do; empty if nothing is.

    `groups`: observations by process, in the order measured. After hyperfine's warnings.
    """
    groups = _checked(groups)
    found = [
        _few(groups, min_groups),
        _outliers(groups),
        _slow_start(groups),
        _unlike_processes(groups),
        _drift(groups),
    ]
    return [f"{name}: {text}" for text in found if text]


# --- the bootstrap -------------------------------------------------------------------------------------

_METHOD = "hierarchical bootstrap stretched by t/z sqrt(n/(n-1))"


def _checked(groups: Sequence[Array]) -> list[Array]:
    """`groups` as float arrays; StatsError names the first unusable one."""
    arrays = [np.asarray(group, dtype=float).ravel() for group in groups]
    if not arrays:
        raise StatsError("no samples: every block failed or none was measured; see the failures table")
    for index, array in enumerate(arrays):
        if array.size == 0:
            raise StatsError(f"group {index} holds no observations; check the metric's name and filters")
        if not np.isfinite(array).all():
            raise StatsError(f"group {index} holds a value that is not finite; its trial should have failed")
    return arrays


def _resampled_quantiles(sample: Array, quantile: float, rng: np.random.Generator) -> Array:
    """`POOL` quantiles of bootstrap resamples of `sample` -> [POOL], without drawing the resamples.

    The k-th smallest of m resampled values is the order statistic of `sample` at floor(m U), U the k-th
    smallest of m uniforms, which is Beta(k, m - k + 1); the next uniform above it is
    U + (1 - U) Beta(1, m - k). Exact, and as quick for 5,000 iterations as for 5.
    """
    ordered, m = np.sort(sample), sample.size
    position = (m - 1) * quantile
    k = int(position)
    u = rng.beta(k + 1, m - k, POOL)
    lower = ordered[np.minimum((u * m).astype(int), m - 1)]
    weight = position - k
    if weight == 0:
        return lower
    v = u + (1 - u) * rng.beta(1, m - k - 1, POOL)
    upper = ordered[np.minimum((v * m).astype(int), m - 1)]
    return lower + weight * (upper - lower)


def _log_ratios(pairs: Sequence[Pair], seed: int, quantile: float = 0.5) -> tuple[Array, Array]:
    """Log ratio of each block -> [n], and of its inner resamples -> [n, POOL]."""
    rng = np.random.default_rng(seed)
    sides = _checked([side for pair in pairs for side in pair])
    for index, side in enumerate(sides):
        if side.min() <= 0:
            raise StatsError(
                f"block {index // 2} holds a value of {side.min():g}: a ratio needs positive values"
            )
    centres = np.array([np.log(np.quantile(side, quantile)) for side in sides])
    pools = np.log(np.stack([_resampled_quantiles(side, quantile, rng) for side in sides]))
    return centres[0::2] - centres[1::2], pools[0::2] - pools[1::2]


def _stretch(n: int, confidence: float) -> float:
    """How much wider than the plain bootstrap's an interval from `n` blocks must be (Hesterberg 2015)."""
    tail = (1 + confidence) / 2
    return float(distributions.t.ppf(tail, n - 1) / distributions.norm.ppf(tail) * math.sqrt(n / (n - 1)))


def _interval(centres: Array, pools: Array, confidence: float, rng: np.random.Generator, draws: int) -> Array:
    """(mean, low, high) of `centres` [n], with inner resamples `pools` [n, POOL].

    The percentile interval's two arms are stretched. Taking more extreme percentiles instead cannot
    work for few blocks: no resample mean lies outside the range of the blocks, so that with five equal
    treatments at least 2 in 32 intervals would exclude the truth.
    """
    n, mean = len(centres), centres.mean()
    if n < 2:
        return np.array([mean, -math.inf, math.inf])
    picked = pools[rng.integers(0, n, (draws, n)), rng.integers(0, pools.shape[1], (draws, n))]
    low, high = np.quantile(picked.mean(axis=1), [(1 - confidence) / 2, (1 + confidence) / 2])
    # A discrete sample's inner medians can all lie to one side of its own: no arm is negative.
    factor = _stretch(n, confidence)
    return np.array([mean, mean - factor * max(0.0, mean - low), mean + factor * max(0.0, high - mean)])


def _subset_intervals(
    a: Sequence[Array],
    b: Sequence[Array],
    blocks: int,
    confidence: float,
    repeats: int,
    seed: int,
    draws: int,
    swap: bool,
) -> tuple[Array, Array]:
    """Log-scale interval ends -> ([repeats], [repeats]) of a / b in random subsets of the real blocks."""
    if len(a) != len(b):
        raise StatsError(f"{len(a)} blocks on one side and {len(b)} on the other: pair them first")
    if not 2 <= blocks <= len(a):
        raise StatsError(f"cannot take {blocks} blocks from {len(a)}: ask for 2 to {len(a)}, or measure more")
    centres, pools = _log_ratios(list(zip(a, b, strict=True)), seed)
    rng = np.random.default_rng([seed, 2])
    ends = np.empty((repeats, 3))
    for index in range(repeats):
        chosen = rng.choice(len(a), blocks, replace=False)
        sign = rng.choice([-1.0, 1.0], blocks) if swap else np.ones(blocks)
        ends[index] = _interval(centres[chosen] * sign, pools[chosen] * sign[:, None], confidence, rng, draws)
    return ends[:, 1], ends[:, 2]


def _share(hits: Array, what: str) -> Estimate:
    """The share of `hits` with its 95 % Jeffreys interval."""
    n, k = len(hits), int(np.count_nonzero(hits))
    low = float(distributions.beta.ppf(0.025, k + 0.5, n - k + 0.5)) if k else 0.0
    high = float(distributions.beta.ppf(0.975, k + 0.5, n - k + 0.5)) if k < n else 1.0
    return Estimate(k / n, low, high, 0.95, n, n, f"{what}, Jeffreys interval")


# --- warnings ------------------------------------------------------------------------------------------


def _few(groups: list[Array], least: int) -> str:
    if len(groups) >= least:
        return ""
    return f"only {len(groups)} process(es): measure at least {least} before comparing"


def _outliers(groups: list[Array]) -> str:
    """Boris Iglewicz and David Hoaglin's modified z-score, at hyperfine's threshold."""
    extreme = total = 0
    for group in groups:
        deviation = np.abs(group - np.median(group))
        spread = max(1.4826 * np.median(deviation), 0.002 * abs(float(np.median(group))))
        extreme += int(np.count_nonzero(deviation > 10 * spread)) if spread > 0 else 0
        total += group.size
    if extreme / total < 0.01 or extreme < 2:
        return ""
    return f"{extreme} of {total} iterations lie far from their median: something else ran; close it and remeasure"


def _slow_start(groups: list[Array]) -> str:
    long_enough = [group for group in groups if group.size >= 8]
    slow = [group for group in long_enough if group[0] > 1.1 * np.median(group[1:])]
    if len(long_enough) < 3 or len(slow) <= 0.75 * len(long_enough):
        return ""
    return "the first iteration is over 10 % slower in most processes: raise warmup"


def _unlike_processes(groups: list[Array]) -> str:
    medians = np.array([np.median(group) for group in groups])
    if len(medians) < 3 or medians.mean() == 0:
        return ""
    spread = medians.std(ddof=1) / abs(medians.mean())
    if spread < 0.05:
        return ""
    return f"process medians differ by {spread:.0%} (standard deviation): use more blocks, and only paired ratios"


def _drift(groups: list[Array]) -> str:
    medians = np.array([np.median(group) for group in groups])
    if len(medians) < 8 or np.ptp(medians) == 0:
        return ""
    rank = distributions.spearmanr(np.arange(len(medians)), medians)
    third = len(medians) // 3
    change = (
        np.median(medians[-third:]) / np.median(medians[:third]) - 1 if np.median(medians[:third]) else 0.0
    )
    if rank.pvalue > 0.01 or abs(change) < 0.02:
        return ""
    return f"drifts by {change:+.0%} from first to last block (heat, or a changing load): compare only within blocks"
