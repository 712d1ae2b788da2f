"""The tables of `03_quantization`: what 4 bits cost in quality, and what they buy in time and memory.

The one idea: quality is compared *by window* of one and the same text, as time is by block: the difference
of two builds' losses in a window is free of how hard the window is. No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from flashgap import limits, stats, tables
from flashgap.look import name_of

if TYPE_CHECKING:
    from flashgap.results import Result

MIB = 1024**2
SHOWN_TIMES = 1.96  # standard errors, for means over dozens of windows


def losses(result: Result) -> pd.DataFrame:
    """Loss of each build less Standard's, and KL, by window: treatment, window, extra_nats, kl_nats, top1."""
    frame = result.frame()
    if frame.empty:
        return pd.DataFrame(columns=["treatment", "window", "extra_nats", "kl_nats", "top1"])
    wide = frame.pivot_table(index=["trial", "iteration"], columns="metric", values="value").reset_index()
    return pd.DataFrame(
        {
            "treatment": wide["trial"],
            "window": wide["iteration"],
            "extra_nats": wide["loss_nats"] - wide["standard_loss_nats"],
            "kl_nats": wide["kl_nats"],
            "top1": wide["top1_agreement"],
        }
    )


def quality(result: Result) -> pd.DataFrame:
    """By build: perplexity over Standard's with its interval over windows, KL in nats, top-1 agreement.

    Columns: treatment, value, low, high (perplexity ratio), kl_nats, top1, windows. Best first.
    """
    rows = []
    for treatment, group in losses(result).groupby("treatment", sort=False):
        low, mean, high = _mean(group["extra_nats"].to_numpy())
        rows.append(
            {
                "treatment": treatment,
                "value": np.exp(mean),
                "low": np.exp(low),
                "high": np.exp(high),
                "kl_nats": group["kl_nats"].mean(),
                "top1": group["top1"].mean(),
                "windows": len(group),
            }
        )
    columns = ["treatment", "value", "low", "high", "kl_nats", "top1", "windows"]
    return pd.DataFrame(rows, columns=columns).sort_values("value", ignore_index=True)


def removed(result: Result) -> pd.DataFrame:
    """Share of round-to-nearest's extra loss that each other build does not have, paired by window.

    Like for like: builds with the output head at 16 bits are compared with rounding that leaves it so. Columns:
    treatment, floor, value, low, high (shares, 1 is all), `lower`: whether the difference of losses excludes 0.
    """
    wide = losses(result).pivot_table(index="window", columns="treatment", values="extra_nats")
    rows = []
    for treatment in wide:
        floor = "rtn_head16" if treatment.endswith("_head16") else "rtn"
        if treatment == floor or floor not in wide or wide[floor].mean() <= 0:
            continue
        base = wide[floor].mean()
        low, mean, high = _mean((wide[floor] - wide[treatment]).to_numpy())
        shares = {"value": mean / base, "low": low / base, "high": high / base}
        rows.append({"treatment": treatment, "floor": floor, **shares, "lower": bool(low > 0)})
    return pd.DataFrame(rows, columns=["treatment", "floor", "value", "low", "high", "lower"])


def _mean(values: np.ndarray) -> tuple[float, float, float]:
    """Mean with a 95 % interval from the spread of its windows; NaN ends for a single one."""
    mean = float(values.mean())
    arm = SHOWN_TIMES * float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return mean - arm, mean, mean + arm


def speedups(
    result: Result, standard: str, flash: str, metric: str = "itl_s", by: str = "batch"
) -> pd.DataFrame:
    """Standard's time over Flash's at each level of `by`: above 1 Flash is faster."""
    table = tables.ratios(result, metric, by, over=flash, under=standard)
    return table.assign(standard=standard, flash=flash)


def crossing(table: pd.DataFrame, by: str = "batch") -> int | None:
    """The first level at which Flash is not shown faster (the interval reaches 1); None if there is none."""
    behind = table[~(table["low"] > 1)]
    return int(behind[by].iloc[0]) if len(behind) else None


def memory(result: Result) -> pd.DataFrame:
    """By build in MiB, medians of blocks: weights of the saved build, and the process: `above start` is what it grew by
    since the trial began, model code included, so every layout and copy of the weights that a build keeps counts."""
    frame = result.memory_frame()
    if frame.empty:
        return pd.DataFrame()
    wide = frame.pivot_table(index=["trial", "block"], columns=["phase", "counter"], values="bytes") / MIB
    grown = wide.copy()
    if ("start", "rss_bytes") in wide:
        grown[("steady", "grown")] = wide["steady"]["rss_bytes"] - wide["start"]["rss_bytes"]
    columns = {
        "above start": ("steady", "grown"),
        "steady": ("steady", "rss_bytes"),
        "peak to first token": ("initialisation_peak", "peak_rss_bytes"),
        "peak": ("peak", "peak_rss_bytes"),
    }
    medians = grown.groupby("trial").median()
    table = pd.DataFrame({name: medians[key] for name, key in columns.items() if key in medians})
    table.insert(0, "weights of the build", pd.Series(sizes_mib(result)))
    if {"peak", "steady"} <= set(table):
        table["peak / steady"] = table["peak"] / table["steady"]
    return table.rename_axis("treatment").reset_index()


def memory_ratio(
    result: Result, flash: str, standard: str, phase: str, counter: str
) -> dict[str, Any] | None:
    """Paired ratio of a memory counter, Flash over Standard; None without a complete block."""
    both = tables.paired_blocks(result, flash, standard)
    groups = (tables.memory_groups(both, name, phase, counter) for name in (flash, standard))
    pairs = list(zip(*groups, strict=True))
    return tables.row(stats.paired_ratio(pairs)) if pairs else None


def graph_kernels(result: Result) -> pd.DataFrame:
    """What each compiled graph calls: build, graph, expected, ran, calls."""
    rows = []
    for block in result.blocks[:1]:
        for name, trial in block.trials.items():
            for graph, row in trial.kernels.items():
                calls = "; ".join(c for phase in row.get("operators", {}).values() for c in phase)
                rows.append((name_of(name), graph, row["expected"], row["ran"], calls))
    return pd.DataFrame(rows, columns=["build", "graph", "expected", "ran", "calls"])


def pareto(qualities: pd.DataFrame, sizes: dict[str, float]) -> pd.DataFrame:
    """Builds with their size: `treatment, value, low, high, mib, front` (no other is both smaller and better)."""
    known = qualities[qualities["treatment"].isin(sizes)].copy()
    known["mib"] = [sizes[name] for name in known["treatment"]]
    known["front"] = [
        not ((known["mib"] < row.mib) & (known["value"] <= row.value)).any()
        and not ((known["mib"] <= row.mib) & (known["value"] < row.value)).any()
        for row in known.itertuples()
    ]
    return known


def sizes_mib(*results: Result) -> dict[str, float]:
    """Weights held in memory by build, MiB."""
    return {n: held / MIB for result in results for n, held in limits.weights_bytes(result).items()}
