"""The pictures of `03_quantization`: the crossover, quality, the front of quality and size, and use of the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flashgap import tables_quantization as tq
from flashgap.look import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    INTERVALS,
    SOFT,
    arms,
    canvas,
    colour,
    from_zero,
    interval_line,
    label_ends,
    log_ticks,
    look,
    name_of,
    nothing,
    percent,
    records_line,
)

if TYPE_CHECKING:
    from flashgap.results import Result


@look
def speed(latency: Result, eager: Result, best: Result, prefill: Result) -> Figure:
    """Standard's time over Flash's: decode by batch, eager and at their best, and prefill by prompt length."""
    decode = [
        tq.speedups(latency, "standard", "flash"),
        tq.speedups(eager, "standard", "flash_packed"),
        tq.speedups(best, "standard_best", "flash_optimised"),
    ]
    first = tq.speedups(prefill, "standard_best", "flash_optimised", "ttft_s", "context_tokens")
    shown = [table for table in decode if len(table)]
    if not shown:
        return nothing("Where 4 bits pay", "No complete block of `eager` or `best`.")
    figure, (left, right) = canvas(
        "Where 4 bits pay",
        f"{INTERVALS}. Standard's time over Flash's, like for like: eager with eager, compiled with compiled. Above 1 "
        "Flash is faster.",
        records_line(latency, eager, best, prefill),
        (1.5, 1),
        height_in=2.6,
        gap_in=1.55,
        right_in=0.4,
    )
    ends = []
    for table in shown:
        name = str(table["flash"].iloc[0])
        interval_line(left, table["batch"], table, name)
        ends.append((float(table["value"].iloc[-1]), name_of(name), colour(name)))
    log_ticks(left, sorted({int(b) for table in shown for b in table["batch"]}))
    left.axhline(1, color=INK, linewidth=0.8)
    from_zero(left, max(float(t["high"].replace(np.inf, np.nan).max()) for t in shown))
    left.set(xlabel="batch", title="Time per token: Standard / Flash")
    label_ends(left, ends)
    if len(first):
        interval_line(right, first["context_tokens"], first, "flash_optimised")
        log_ticks(right, [int(x) for x in first["context_tokens"]])
        from_zero(right, max(1.1, float(first["high"].max())))
    right.axhline(1, color=INK, linewidth=0.8)
    right.set(xlabel="prompt tokens", title="Time to first token, compiled")
    return figure


@look
def crossover(table: pd.DataFrame, result: Result) -> Figure:
    """Dense over packed time of each shape of the builds' layers, by rows, with the boundary and its interval."""
    if table.empty:
        return nothing("Where each shape crosses over", "No complete block of `crossover`.")
    table = table.sort_values(["bits", "features_out", "features_in", "rows"])
    table = table.assign(
        shape=[f"{r.bits} bits, {r.features_in} to {r.features_out}" for r in table.itertuples()]
    )
    table = table.drop_duplicates(["shape", "rows"])
    shapes, rows = list(dict.fromkeys(table["shape"])), sorted(set(table["rows"]))
    figure, (ax,) = canvas(
        "Where each shape crosses over",
        "Time of a dense 16-bit layer over the packed kernel's, one call, eager; blue: packed is faster, red: slower. Framed: the "
        "95 % interval holds 1, so the boundary runs there. Black line: from here on the build expands the weight first.",
        records_line(result),
        height_in=0.25 * len(shapes) + 0.1,
        left_in=1.5,
        right_in=0.2,
    )
    grid = table.pivot(index="shape", columns="rows", values="value").reindex(index=shapes, columns=rows)
    ax.pcolormesh(
        np.log2(grid.to_numpy(dtype=float)), cmap="RdBu", vmin=-3, vmax=3, edgecolor="white", linewidth=0.6
    )
    for row in table.itertuples():
        x, y = rows.index(row.rows), shapes.index(row.shape)
        shade = "white" if abs(np.log2(row.value)) > 2 else INK
        ax.text(x + 0.5, y + 0.5, f"{row.value:.2g}", ha="center", va="center", fontsize=6.5, color=shade)
        if not (row.low > 1 or row.high < 1):
            ax.add_patch(Rectangle((x + 0.06, y + 0.06), 0.88, 0.88, fill=False, edgecolor=INK, linewidth=1))
    for y, shape in enumerate(shapes):
        many = table.loc[table["shape"] == shape, "many_rows"].iloc[0]
        if np.isfinite(many):
            edge = float(np.interp(np.log2(many), np.log2(rows), np.arange(len(rows)))) + 0.5
            for ends in ((0.04, 0.26), (0.74, 0.96)):  # above and below the number
                ax.plot([edge, edge], [y + end for end in ends], color=INK, linewidth=2)
    ax.set_xticks(np.arange(len(rows)) + 0.5, [str(r) for r in rows])
    ax.set_yticks(np.arange(len(shapes)) + 0.5, shapes)
    ax.grid(visible=False)
    ax.set(xlabel="rows (tokens in one call)")
    return figure


@look
def quality(table: pd.DataFrame, result: Result, requantized: bool) -> Figure:
    """Perplexity over Standard's for each quantizer."""
    if table.empty:
        return nothing("What 4 bits cost in quality", "No record of the experiment `quality`.")
    kind = "Re-quantisation differences: these weights came out of a 4-bit file. " if requantized else ""
    figure, (ax,) = canvas(
        "What 4 bits cost in quality",
        f"{kind}Perplexity over Standard's on held-out text of another source than calibration; bars: 95 % intervals "
        f"over {int(table['windows'].max())} windows.",
        records_line(result),
        height_in=0.27 * len(table) + 0.25,
        left_in=2.2,
        right_in=1.5,
    )
    y = np.arange(len(table))[::-1]
    ax.errorbar(
        table["value"],
        y,
        xerr=arms(table["value"], table["low"], table["high"]),
        fmt="o",
        color=BLUE,
        elinewidth=1.6,
    )
    ax.axvline(1, color=INK, linewidth=0.8)
    ax.axvspan(1, 1.05, color=FAINT, zorder=0)
    ax.set_yticks(y, [name_of(name) for name in table["treatment"]], color=INK)
    for at, row in zip(y, table.itertuples(), strict=True):
        said = f"x{row.value:.3f}, KL {row.kl_nats:.3f}"
        ax.text(1.02, at, said, transform=ax.get_yaxis_transform(), va="center", fontsize=7.5)
    ax.set(ylim=(-0.6, len(table) - 0.4), xlabel="perplexity over Standard's (pale: within 5 %)")
    return figure


@look
def front(
    points: pd.DataFrame, standard_mib: float | None, speeds: dict[str, float], *results: Result
) -> Figure:
    """Size against quality, with the front of those that no other build beats in both."""
    if points.empty:
        return nothing("Size and quality", "No record of the experiment `quality`.")
    figure, (ax,) = canvas(
        "Size and quality",
        "Weights held in memory against perplexity over Standard's; filled: no other build is both smaller and better."
        + (" Number: decode speed at batch 1 over Standard's, both compiled." if speeds else ""),
        records_line(*results),
        left_in=0.7,
        right_in=1.6,
    )
    for row in points.itertuples():
        ax.plot(row.mib, row.value, "o", color=GREEN, mfc=GREEN if row.front else "white")
        faster = f" ({speeds[row.treatment]:.2f}x)" if row.treatment in speeds else ""
        said = f"{name_of(row.treatment)}{faster}"
        ax.annotate(said, (row.mib, row.value), (5, 3), textcoords="offset points", fontsize=7)
    ax.axhspan(1, 1.05, color=FAINT, zorder=0)
    if standard_mib:
        ax.plot(standard_mib, 1.0, "D", color=BLUE)
        ax.annotate("Standard", (standard_mib, 1.0), (5, 3), textcoords="offset points", fontsize=7)
    ax.set(xlabel="MiB of weights", ylabel="perplexity over Standard's", xlim=(0, None))
    return figure


@look
def limits(used: pd.DataFrame, *results: Result) -> Figure:
    """Share of the measured read bandwidth that each build's decode uses, at each batch, with the limit drawn."""
    rows = used[used["metric"] == "mbu"]
    if rows.empty:
        return nothing(
            "Use of the bandwidth", "No ceilings or no decode times (in `smoke` bounds mean nothing)."
        )
    names = list(dict.fromkeys(rows["treatment"]))
    batches = sorted({int(b) for b in rows["batch"]})
    figure, (ax,) = canvas(
        "Use of the bandwidth in decode (MBU)",
        f"{INTERVALS}. Bytes the stored weights and the cache need over the bytes that could be read in that time; line: "
        "all of it. Above, weights come from a cache that the ceiling did not see.",
        records_line(*results),
        right_in=1.4,
    )
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        table = rows[rows["treatment"] == name].sort_values("batch")
        x = (
            np.array([batches.index(int(b)) for b in table["batch"]])
            + (number - (len(names) - 1) / 2) * width
        )
        bars = arms(table["value"], table["low"], table["high"])
        ax.bar(
            x, table["value"], width * 0.92, color=colour(name), yerr=bars, ecolor=SOFT, label=name_of(name)
        )
    ax.axhline(1, color=INK, linewidth=0.8)
    ax.set_xticks(range(len(batches)), [str(b) for b in batches])
    percent(ax)
    ax.set(xlabel="batch")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=7.5)
    return figure


@look
def memory(table: pd.DataFrame, result: Result) -> Figure:
    """Weights, steady and peak memory of each build."""
    if table.empty:
        return nothing("Memory, like for like", "No record of the experiment `best_memory`.")
    columns = [c for c in ("weights of the build", "above start", "peak to first token") if c in table]
    figure, axes = canvas(
        "Memory, like for like",
        "MiB, medians of fresh processes. Above start: what the process grew by since the trial began, every copy "
        "and layout of the weights included. Peak: the whole process.",
        records_line(result),
        (1,) * len(columns),
        height_in=0.3 * len(table) + 0.3,
        left_in=1.6,
        gap_in=0.3,
    )
    y = np.arange(len(table))[::-1]
    for number, (ax, column) in enumerate(zip(axes, columns, strict=True)):
        ax.barh(y, table[column], color=[colour(n) for n in table["treatment"]], height=0.62)
        for at, value in zip(y, table[column], strict=True):
            ax.text(value, at, f" {value:.0f}", va="center", fontsize=7)
        ax.set_yticks(
            y, [name_of(n) for n in table["treatment"]] if number == 0 else [""] * len(y), color=INK
        )
        ax.set(title=column, xlim=(0, float(table[column].max()) * 1.2))
    return figure
