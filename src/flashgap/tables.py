"""From a measured result to the small tables that notebooks and figures share.

The one idea: a number is computed once, here, and both the table and the picture show that one. Every
row keeps its interval and its counts. Times leave in the unit their column names. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from flashgap import stats
from flashgap.hardware import KIB, WORKING_SET_COLUMN
from flashgap.results import samples
from flashgap.stats import Estimate

if TYPE_CHECKING:
    from flashgap.results import Result

Array = np.ndarray
FALSE_ALARM_LIMIT = 0.07  # what the lab promises at 95 % confidence
POWER_WANTED = 0.80
OVERHEAD_LIMIT_S = 1.5
REFERENCE_MARGIN = 0.05


def treatments(result: Result) -> list[str]:
    """Names of the treatments that were measured: Standard first, then by name."""
    names = {name for block in result.blocks for name in block.trials}
    return sorted(names, key=lambda name: (not name.startswith("standard"), name))


def aligned(result: Result, names: Sequence[str], metric: str, **filters: float) -> list[list[Array]]:
    """For each of `names` its groups, of the complete blocks in which every one of them has any."""
    rows = [
        [samples(block, name, metric, filters) for name in names] for block in result.blocks if block.complete
    ]
    rows = [row for row in rows if all(array.size for array in row)]
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in names]


def row(estimate: Estimate) -> dict[str, Any]:
    """An estimate as columns; ends that are not known (one block) are NaN."""
    return {
        "value": estimate.value,
        "low": estimate.low if estimate.known else np.nan,
        "high": estimate.high if estimate.known else np.nan,
        "blocks": estimate.n_blocks,
        "observations": estimate.n_observations,
    }


def levels(result: Result, metric: str, by: str) -> list[int]:
    """The batch sizes or context lengths (`by`) at which `metric` was observed, ascending."""
    frame = result.frame(metric)
    return sorted(int(x) for x in frame[by].unique()) if len(frame) else []


def medians(result: Result, metric: str, by: str, scale: float = 1.0) -> pd.DataFrame:
    """Median of `metric` times `scale` for each treatment at each level of `by`, with 95 % intervals."""
    rows = []
    for name in treatments(result):
        for level in levels(result, metric, by):
            groups = result.groups(name, metric, **{by: level})
            if groups:
                rows.append({"treatment": name, by: level, **row(stats.median_ci(groups).scaled(scale))})
    return pd.DataFrame(rows, columns=["treatment", by, *_ESTIMATE])


_ESTIMATE = ["value", "low", "high", "blocks", "observations"]


def ratios(
    result: Result, metric: str, by: str, over: str = "standard", under: str = "flash"
) -> pd.DataFrame:
    """Paired ratio `under` / `over` of `metric` at each level of `by`, with 95 % intervals."""
    rows = []
    for level in levels(result, metric, by):
        pairs = result.pairs(under, over, metric, **{by: level})
        if pairs:
            rows.append({by: level, **row(stats.paired_ratio(pairs))})
    return pd.DataFrame(rows, columns=[by, *_ESTIMATE])


# --- 00_environment ------------------------------------------------------------------------------------


def byte_ceilings(result: Result) -> pd.DataFrame:
    """Measured GB/s by kind of access and working set, from a `ceilings` result.

    Columns: access (read, copy, gemv), working_set_bytes, value, low, high, blocks, observations.
    """
    rows = []
    for access in ("read", "copy", "gemv"):
        metric = f"{access}_bytes_per_s"
        for kib in levels(result, metric, WORKING_SET_COLUMN):
            groups = _all_groups(result, metric, **{WORKING_SET_COLUMN: kib})
            estimate = stats.median_ci(groups).scaled(1e-9)
            rows.append({"access": access, "working_set_bytes": kib * KIB, **row(estimate)})
    return pd.DataFrame(rows, columns=["access", "working_set_bytes", *_ESTIMATE])


def flop_ceilings(result: Result) -> pd.DataFrame:
    """Measured FLOP/s of a square matrix product by number type: dtype, value, low, high, blocks, observations."""
    metrics = sorted(m for m in result.frame()["metric"].unique() if m.startswith("matmul_"))
    rows = [
        {
            "dtype": m.removeprefix("matmul_").removesuffix("_flops_per_s"),
            **row(stats.median_ci(_all_groups(result, m))),
        }
        for m in metrics
    ]
    return pd.DataFrame(rows, columns=["dtype", *_ESTIMATE])


def _all_groups(result: Result, metric: str, **filters: Any) -> list[Array]:
    """Groups of the first treatment that has the metric (ceilings need no model, so there is one)."""
    return next((g for name in treatments(result) if (g := result.groups(name, metric, **filters))), [])


AA = ("standard", "standard_again", "standard_slowed")


def noise(result: Result) -> list[list[Array]]:
    """Seconds per token by block, of the same blocks: Standard, the same again, with a planted slowdown."""
    return aligned(result, AA, "itl_s")


def block_counts(available: int) -> list[int]:
    """How many blocks to ask the power curve about, given `available` real ones."""
    least = 5 if available >= 10 else 2
    return [n for n in (2, 3, 4, 5, 6, 8, 10, 12, 16) if least <= n <= max(least, available * 0.7)]


def power_curve(result: Result, repeats: int = 400) -> pd.DataFrame:
    """What `n` blocks can see, for several n: false alarms, power, smallest slowdown found (80 %).

    One row a count of blocks: `blocks`, `false_alarms` and `power` with `_low`/`_high`, `detectable`.
    Empty with fewer than 2 blocks.
    """
    a, b, slowed = noise(result)
    rows = []
    for n in block_counts(len(a)) if len(a) >= 2 else []:
        alarms = stats.false_alarm_rate(a, b, n, repeats=repeats)
        power = stats.power(a, slowed, n, repeats=repeats)
        rows.append(
            {
                "blocks": n,
                "false_alarms": alarms.value,
                "false_alarms_low": alarms.low,
                "false_alarms_high": alarms.high,
                "power": power.value,
                "power_low": power.low,
                "power_high": power.high,
                "detectable": stats.detectable_slowdown(a, b, n, repeats=repeats),
            }
        )
    return pd.DataFrame(rows)


def reference_check(result: Result) -> pd.DataFrame:
    """Our prefill and decode time over `torch.utils.benchmark`'s of the same call, and the verdict.

    Columns: call, value, low, high, blocks, observations, equivalent (within 5 %, two one-sided tests),
    verdict in words.
    """
    rows = []
    for call, ours in (("prefill", "prefill_s"), ("decode step", "decode_step_s")):
        theirs = ours.removesuffix("_s") + "_reference_s"
        pairs = list(zip(_all_groups(result, ours), _all_groups(result, theirs), strict=True))
        if not pairs:
            continue
        estimate = stats.paired_ratio(pairs)
        test = stats.equivalence(pairs, REFERENCE_MARGIN)
        near = abs(estimate.value - 1) <= REFERENCE_MARGIN
        verdict = (
            "shown equal"
            if test.equivalent
            else "agrees, interval too wide to show it"
            if near
            else "differs"
        )
        rows.append({"call": call, **row(estimate), "equivalent": test.equivalent, "verdict": verdict})
    return pd.DataFrame(rows, columns=["call", *_ESTIMATE, "equivalent", "verdict"])


def facts(result: Result, name: str) -> list[Any]:
    """The extra scalar `name` of every trial that recorded it."""
    return [trial.facts[name] for trial in _trials(result) if name in (trial.facts or {})]


def overheads_s(results: Iterable[Result]) -> Array:
    """Seconds each trial spent beyond loading its model, its checks and its measurement."""
    values = [trial.timings_s.get("overhead") for result in results for trial in _trials(result)]
    return np.array([v for v in values if v is not None], dtype=float)


def _trials(result: Result) -> list[Any]:
    return [block.trials[name] for block in result.blocks for name in sorted(block.trials)]


# --- 01_baseline ---------------------------------------------------------------------------------------


def slowest(result: Result, name: str, metric: str = "task_s") -> list[Array]:
    """By block, the slowest replica's value of `metric`: a task is over when its last replica is."""
    return [np.array([group.max()]) for group in result.groups(name, metric)]


def task(result: Result) -> pd.DataFrame:
    """Task time by treatment [s], with useful over computed token slots."""
    rows = []
    for name in treatments(result):
        groups = slowest(result, name)
        if not groups:
            continue
        useful = sum(g.sum() for g in result.groups(name, "useful_slots"))
        computed = sum(g.sum() for g in result.groups(name, "computed_slots"))
        share = useful / computed if computed else np.nan
        rows.append({"treatment": name, **row(stats.median_ci(groups)), "slots_used": share})
    return pd.DataFrame(rows, columns=["treatment", *_ESTIMATE, "slots_used"])


PHASES = ("start", "weights_loaded", "first_token", "steady", "initialisation_peak", "peak")


def memory_medians(result: Result) -> pd.DataFrame:
    """Median MiB over blocks: rows phase x counter in the order of a trial, one column a treatment."""
    frame = result.memory_frame()
    if frame.empty:
        return pd.DataFrame(columns=treatments(result))
    wide = (
        frame.pivot_table(index=["phase", "counter"], columns="trial", values="bytes", aggfunc="median")
        / 2**20
    )
    known = [phase for phase in PHASES if phase in wide.index.get_level_values(0)]
    return wide.reindex(known, level=0)[[name for name in treatments(result) if name in wide]]


def main_counter(result: Result) -> str | None:
    """The counter of which the system also keeps the peak: the allocator's on a GPU, else resident memory."""
    there = set(result.memory_frame()["counter"])
    preferred = ("cuda_allocated_bytes", "rss_bytes")
    return next((counter for counter in preferred if counter in there), None)


def peak_counter(counter: str) -> str:
    """The counter of a `peak` phase that belongs beside `counter`: the system keeps peaks of some only."""
    return {"cuda_allocated_bytes": "cuda_peak_allocated_bytes"}.get(counter, "peak_rss_bytes")


def memory_groups(result: Result, name: str, phase: str, counter: str) -> list[Array]:
    """By block, the bytes of one counter in one phase; blocks without it are left out."""
    frame = result.memory_frame()
    chosen = (
        (frame["trial"] == name)
        & (frame["phase"] == phase)
        & (frame["counter"] == counter)
        & (frame["bytes"] > 0)
    )
    return [group["bytes"].to_numpy(dtype=float) for _, group in frame[chosen].groupby("block", sort=False)]


def capacity(result: Result) -> pd.DataFrame:
    """Largest batch in the budget by treatment: lowest, median and highest over blocks."""
    rows = []
    for name in treatments(result):
        groups = result.groups(name, "largest_batch")
        if groups:
            values = np.concatenate(groups)
            rows.append(
                {
                    "treatment": name,
                    "largest_batch": np.median(values),
                    "low": values.min(),
                    "high": values.max(),
                    "blocks": len(groups),
                }
            )
    return pd.DataFrame(rows, columns=["treatment", "largest_batch", "low", "high", "blocks"])


def kernels(result: Result) -> pd.DataFrame:
    """Which kernel ran, by treatment and layer type, as the profiler saw it (distinct rows over blocks).

    Columns: trial, layer_type, expected, ran, implementation (the library's own name), layers, weight_bytes.
    """
    frame = result.kernels_frame()
    if "implementation" not in frame:
        frame = frame.assign(implementation=None)
    frame["implementation"] = [_implementations(seen) for seen in frame["implementation"]]
    columns = ["trial", "layer_type", "expected", "ran", "implementation", "layers", "weight_bytes"]
    return frame[columns].drop_duplicates().reset_index(drop=True)


def _implementations(seen: Any) -> str:
    """`{"decode": [...], "prefill": [...]}` as one text; both phases only where they differ."""
    if not isinstance(seen, dict):
        return ""
    texts = {phase: ", ".join(names) for phase, names in seen.items() if names}
    if len(set(texts.values())) <= 1:
        return next(iter(texts.values()), "")
    return "; ".join(f"{phase}: {text}" for phase, text in texts.items())


HIDDEN = ("checked_now", "gate_key")  # of use to the runner only


def correctness(result: Result) -> pd.DataFrame:
    """The quality gate of each treatment: what was compared, what it gave, whether it passed."""
    rows = {
        name: dict(trial.correctness or {}) for block in result.blocks for name, trial in block.trials.items()
    }
    frame = pd.DataFrame([{"treatment": n, **_flat(rows[n])} for n in treatments(result) if n in rows])
    return frame.dropna(axis=1, how="all")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; lists are left to the record."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, str) and len(value) > 16:
            out[prefix + key] = value[:12]  # a digest
        elif key not in HIDDEN and not isinstance(value, list | tuple):
            out[prefix + key] = value
    return out


def summary(results: dict[str, Result], over: str = "standard", under: str = "flash") -> pd.DataFrame:
    """The baseline in one table: what each build needs, and the paired ratio Flash / Standard.

    Every row is a quantity of which less is better, so a ratio above 1 means that Flash needs more.
    Columns: quantity, unit, standard, flash (medians), value, low, high, blocks, observations.
    """
    rows = []
    paired = {name: paired_blocks(result, over, under) for name, result in results.items()}
    for quantity, groups, unit, scale in _quantities(paired):
        a, b = groups(over), groups(under)
        if not a or len(a) != len(b):
            continue
        ratio = stats.paired_ratio(list(zip(b, a, strict=True)))
        values = {"standard": stats.median_ci(a).value * scale, "flash": stats.median_ci(b).value * scale}
        rows.append({"quantity": quantity, "unit": unit, **values, **row(ratio)})
    return pd.DataFrame(rows, columns=["quantity", "unit", "standard", "flash", *_ESTIMATE])


def paired_blocks(result: Result, *names: str) -> Result:
    """`result` with only the complete blocks in which every one of `names` ended `ok`.

    Groups taken from it line up block by block; a block in which one side failed counts for neither.
    """

    def both(block: Any) -> bool:
        return block.complete and all(n in block.trials and block.trials[n].status == "ok" for n in names)

    return replace(result, blocks=[block for block in result.blocks if both(block)])


def _quantities(results: dict[str, Result]) -> list[tuple[str, Callable[[str], list[Array]], str, float]]:
    """(quantity, treatment -> groups by block, unit, scale), of the experiments there are."""
    out: list[tuple[str, Callable[[str], list[Array]], str, float]] = []
    if (run := results.get("task")) is not None:
        out.append(("time for the task", lambda name: slowest(run, name), "s", 1.0))
    if (latency := results.get("latency")) is not None:
        sizes = levels(latency, "itl_s", "batch")
        for batch in dict.fromkeys([*sizes[:1], *sizes[-1:]]):
            out.append(
                (f"time to first token, batch {batch}", _at(latency, "ttft_s", batch=batch), "ms", 1e3)
            )
            out.append((f"time per token, batch {batch}", _at(latency, "itl_s", batch=batch), "ms", 1e3))
    if (context := results.get("context")) is not None:
        for tokens in levels(context, "itl_s", "context_tokens")[-1:]:
            out.append(
                (
                    f"time per token at {tokens:,} tokens of context",
                    _at(context, "itl_s", context_tokens=tokens),
                    "ms",
                    1e3,
                )
            )
    if (mem := results.get("memory")) is not None and (counter := main_counter(mem)):
        peak = peak_counter(counter)
        for phase, which in (("steady", counter), ("initialisation_peak", peak), ("peak", peak)):
            words = f"{phase.replace('_', ' ')} memory ({which.removesuffix('_bytes')})"
            out.append((words, _memory_at(mem, phase, which), "MiB", 2.0**-20))
        out.append(("resident weights", lambda name: resident(mem, name), "MiB", 2.0**-20))
    return out


def _at(result: Result, metric: str, **filters: int) -> Callable[[str], list[Array]]:
    return lambda name: result.groups(name, metric, **filters)


def _memory_at(result: Result, phase: str, counter: str) -> Callable[[str], list[Array]]:
    return lambda name: memory_groups(result, name, phase, counter)


def resident(result: Result, name: str) -> list[Array]:
    """By block, the bytes of the build's resident weights."""
    values = [(b.trials[name].build or {}).get("resident_bytes") for b in result.blocks if name in b.trials]
    return [np.array([float(v)]) for v in values if v]


def running_medians(result: Result, window: int) -> pd.DataFrame:
    """Medians of `window` consecutive tokens of each true generation: treatment, context_tokens, value [s]."""
    frame = result.frame("itl_s")
    if frame.empty:
        return pd.DataFrame(columns=["treatment", "context_tokens", "value"])
    bins = frame["iteration"] // window
    keys = [frame["trial"].rename("treatment"), bins.rename("bin")]
    medians = frame.groupby(keys).agg(context_tokens=("context_tokens", "mean"), value=("value", "median"))
    return medians.reset_index()[["treatment", "context_tokens", "value"]]


def growth(result: Result) -> pd.DataFrame:
    """Time per token at the longest context over that at the shortest, by treatment, paired by block."""
    ends = levels(result, "itl_s", "context_tokens")
    rows = []
    for name in treatments(result) if len(ends) > 1 else []:
        short, long = (result.groups(name, "itl_s", context_tokens=end) for end in (ends[0], ends[-1]))
        if short and len(short) == len(long):
            estimate = stats.paired_ratio(list(zip(long, short, strict=True)))
            rows.append({"treatment": name, "from": ends[0], "to": ends[-1], **row(estimate)})
    return pd.DataFrame(rows, columns=["treatment", "from", "to", *_ESTIMATE])


def long_check(context: Result, long: Result, window: int = 64) -> pd.DataFrame:
    """A true generation's time per token over that of a prefilled cache, near each context length both reach.

    Columns: treatment, context_tokens, generated_ms (median of the `window` tokens around), prefilled_ms, ratio.
    """
    steps = long.frame("itl_s")
    rows = []
    for r in medians(context, "itl_s", "context_tokens").itertuples():
        near = (steps["trial"] == r.treatment) & (
            (steps["context_tokens"] - r.context_tokens).abs() <= window // 2
        )
        if near.any():
            generated = float(steps.loc[near, "value"].median())
            rows.append((r.treatment, r.context_tokens, generated * 1e3, r.value * 1e3, generated / r.value))
    return pd.DataFrame(
        rows, columns=["treatment", "context_tokens", "generated_ms", "prefilled_ms", "ratio"]
    )


def side_by_side(ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """Two `summary` tables, here and reference: quantity, both ratios with intervals, and whether these overlap."""
    columns = ["quantity", "value", "low", "high", "blocks"]
    both = ours[columns].merge(theirs[columns], on="quantity", suffixes=("_here", "_reference"))
    overlap = (both["low_here"] <= both["high_reference"]) & (both["low_reference"] <= both["high_here"])
    known = both.filter(regex="low|high").notna().all(axis=1)
    return both.assign(intervals_overlap=overlap.astype(object).where(known, None))
