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
from flashgap.treatment import LINEAR_WAYS as WAYS

if TYPE_CHECKING:
    from flashgap.results import Result

MIB = 1024**2
SHOWN_TIMES = 1.96  # standard errors, for means over dozens of windows
# Rounding with the same settings and the output head alike: what each search starts from.
FLOORS = {"awq": "rtn_head8", "awq_unsearched": "rtn_head8", "hqq": "rtn_head8", "autoawq": "rtn_head16"}
COMPILED = {"flash_optimised": "awq", "eight_best": "eight"}  # treatment -> its build
SHOWN_CHARACTERS = 90
CROSSOVER_COLUMNS = [
    "treatment",
    "features_in",
    "features_out",
    "bits",
    "rows",
    "many_rows",
    "value",
    "low",
    "high",
    "blocks",
    "observations",
    "over",
    "over_low",
    "over_high",
]
ON_GRID = 0.1  # scales; rounding moves weights by 0.29 of them, one that lay on the grid already by none


def losses(result: Result) -> pd.DataFrame:
    """Loss of each build less Standard's, and KL, by window: treatment, window, extra_nats, kl_nats, top1."""
    frame = result.frame()
    frame = frame[frame["iteration"] >= 0]  # the rest is of generation
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

    Columns: treatment, value, low, high (perplexity ratio), kl_nats, top1, windows, rounding (root mean square of
    what it moved a weight, in scales; NaN if not known). Best first.
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
                "rounding": _rounding(result, str(treatment)),
            }
        )
    columns = ["treatment", "value", "low", "high", "kl_nats", "top1", "windows", "rounding"]
    return pd.DataFrame(rows, columns=columns).sort_values("value", ignore_index=True)


def generation(result: Result) -> pd.DataFrame:
    """Whether each build still writes: columns treatment, equal_tokens (mean over prompts, before its text leaves
    Standard's), standard_new_share and new_share (distinct runs of three tokens over all, lowest of the prompts), loops, text.

    `loops` counts prompts whose new share is below half of Standard's; `text` is the first answer's beginning.
    """
    frame = result.frame()
    frame = frame[frame["request"] >= 0]
    rows = []
    for treatment, group in frame.groupby("trial", sort=False):
        trial = next(block.trials[treatment] for block in result.blocks if treatment in block.trials)
        by_prompt = group.pivot_table(index=["block", "request"], columns="metric", values="value")
        ours, theirs = by_prompt["standard_new_share"], by_prompt["new_share"]
        rows.append(
            {
                "treatment": treatment,
                "equal_tokens": by_prompt["equal_tokens"].mean(),
                "standard_new_share": ours.min(),
                "new_share": theirs.min(),
                "loops": int((theirs < ours / 2).sum()),
                "prompts": len(by_prompt),
                "text": " ".join(trial.facts["generation"][0]["build"].split())[:SHOWN_CHARACTERS],
            }
        )
    columns = ["treatment", "equal_tokens", "standard_new_share", "new_share", "loops", "prompts", "text"]
    return pd.DataFrame(rows, columns=columns).sort_values("equal_tokens", ascending=False, ignore_index=True)


def _rounding(result: Result, treatment: str) -> float:
    trials = (block.trials.get(treatment) for block in result.blocks)
    known = [t.build["rounding"] for t in trials if t is not None and t.build.get("rounding") is not None]
    return known[0] if known else np.nan


def removed(result: Result) -> pd.DataFrame:
    """Share of round-to-nearest's extra loss that each search of `FLOORS` removes, paired by window.

    Columns: treatment, floor, value, low, high (shares, 1 is all), `lower`: whether the difference of losses
    excludes 0.
    """
    wide = losses(result).pivot_table(index="window", columns="treatment", values="extra_nats")
    rows = []
    for treatment, floor in FLOORS.items():
        if treatment not in wide or floor not in wide or wide[floor].mean() <= 0:
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


def task_ratio(result: Result, over: str, under: str) -> dict[str, Any] | None:
    """Paired ratio of the task's time, `over` / `under`, by the slowest replica; None without a complete block."""
    both = tables.paired_blocks(result, over, under)
    pairs = list(zip(tables.slowest(both, over), tables.slowest(both, under), strict=True))
    return tables.row(stats.paired_ratio(pairs)) if pairs else None


def compiled_speeds(result: Result, standard: str = "standard_best") -> dict[str, float]:
    """Decode speed of each build of `COMPILED` over Standard's at the smallest batch, both compiled, by build."""
    tables_of = {build: speedups(result, standard, name) for name, build in COMPILED.items()}
    return {build: float(table["value"].iloc[0]) for build, table in tables_of.items() if len(table)}


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


def races(*results: Result) -> pd.DataFrame:
    """Graphs of packed builds that were also made on a 16-bit copy: treatment, phase, rows, packed_ms, copy_ms, copy (whether
    it is the one that runs). What they were chosen by: the least of several passes in turn, when the graphs were made."""
    found = {}
    for result in results:
        for block in result.blocks[:1]:
            for name, trial in block.trials.items():
                for graph, row in trial.kernels.items():
                    if "race" in row:
                        found[(name, graph)] = row
    rows = []
    for (name, graph), row in found.items():
        phase, batch, tokens = graph.split("_")
        many = int(batch[1:]) * (1 if phase == "decode" else int(tokens[1:]))
        race = row["race"]
        times = {"packed_ms": race["packed_s"] * 1e3, "copy_ms": race["copy_s"] * 1e3}
        rows.append((name, phase, many, *times.values(), not row["ran"].startswith("packed")))
    columns = ["treatment", "phase", "rows", "packed_ms", "copy_ms", "copy"]
    return pd.DataFrame(rows, columns=columns).sort_values(columns[:3], ignore_index=True)


def pareto(qualities: pd.DataFrame, sizes: dict[str, float]) -> pd.DataFrame:
    """Builds with their size: `treatment, value, low, high, mib, front` (no other is both smaller and better).

    A build that gives back the grid of the file that its weights came from is on no front: it lost nothing there
    that it would keep elsewhere.
    """
    known = qualities[qualities["treatment"].isin(sizes)].copy()
    known["mib"] = [sizes[name] for name in known["treatment"]]
    counts = known[~(known["rounding"] < ON_GRID)]
    known["front"] = [
        not row.rounding < ON_GRID
        and not ((counts["mib"] < row.mib) & (counts["value"] <= row.value)).any()
        and not ((counts["mib"] <= row.mib) & (counts["value"] < row.value)).any()
        for row in known.itertuples()
    ]
    return known


def crossover(result: Result) -> pd.DataFrame:
    """Every shape of a build's layers by rows: dense time over packed (above 1 packed is faster), and what dispatch costs.

    Columns: treatment, features_in, features_out, bits, rows, many_rows (the build's threshold, NaN for none), value,
    low, high, then `over`, `over_low`, `over_high`: as dispatched, over the faster of its two ways.
    """
    out = []
    for name in dict.fromkeys(n for block in result.blocks for n in block.trials):
        alone = tables.paired_blocks(result, name)
        shapes = [block.trials[name].facts["shapes"] for block in alone.blocks]
        for number, shape in enumerate(shapes[0] if shapes else []):
            many = [s[number]["many_rows"] for s in shapes if s[number]["many_rows"] is not None]
            for rows in tables.levels(alone, "packed_linear_s", "batch"):
                at = {"batch": rows, "request": number}
                times = {way: alone.groups(name, f"{way}_linear_s", **at) for way in WAYS}
                if any(len(times[way]) < len(alone.blocks) for way in ("dense", "packed", "dispatched")):
                    continue
                over = stats.paired_ratio(list(zip(times["dispatched"], _faster(times), strict=True)))
                out.append(
                    {
                        "treatment": name,
                        **{key: shape[key] for key in ("features_in", "features_out", "bits")},
                        "rows": rows,
                        "many_rows": min(many) if many else np.nan,
                        **tables.row(
                            stats.paired_ratio(list(zip(times["dense"], times["packed"], strict=True)))
                        ),
                        "over": over.value,
                        "over_low": over.low,
                        "over_high": over.high,
                    }
                )
    return pd.DataFrame(out, columns=CROSSOVER_COLUMNS)


def _faster(times: dict[str, list[np.ndarray]]) -> list[np.ndarray]:
    """The samples of the faster of the two ways that a layer can take, block by block."""
    if len(times["expanded"]) < len(times["packed"]):
        return times["packed"]
    pairs = zip(times["packed"], times["expanded"], strict=True)
    return [min(pair, key=lambda samples: float(np.median(samples))) for pair in pairs]


def boundaries(table: pd.DataFrame) -> pd.DataFrame:
    """By shape of `crossover`'s table: packed is shown faster up to `faster_to` rows and slower from `slower_from` on.

    Between them, where neither is shown, lies the crossing. NaN where it is shown at no number of rows that was tried.
    """
    keys = ["treatment", "features_in", "features_out", "bits"]
    out = []
    for shape, group in table.groupby(keys, sort=False):
        group = group.sort_values("rows")
        ahead, behind = group["low"].to_numpy() > 1, group["high"].to_numpy() < 1
        rows = group["rows"].to_numpy()
        first = int(np.argmin(ahead)) if not ahead.all() else len(rows)  # the first that is not shown faster
        last = len(rows) - int(np.argmin(behind[::-1])) if not behind.all() else 0
        out.append(
            {
                **dict(zip(keys, shape, strict=True)),
                "faster_to": rows[first - 1] if first else np.nan,
                "slower_from": rows[last] if last < len(rows) else np.nan,
                "many_rows": group["many_rows"].iloc[0],
            }
        )
    return pd.DataFrame(out, columns=[*keys, "faster_to", "slower_from", "many_rows"])


def sizes_mib(*results: Result) -> dict[str, float]:
    """Weights held in memory by build, MiB."""
    return {n: held / MIB for result in results for n, held in limits.weights_bytes(result).items()}
