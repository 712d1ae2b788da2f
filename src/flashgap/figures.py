"""The pictures, one function each.

The one idea: a picture adds nothing to the numbers. It takes what `tables` computed (or a `Result`) and
returns a matplotlib figure in the one look of `flashgap.look`; `save` writes it and gives it to the page.
Dots are what was measured, bars are 95 % intervals, dashed lines are bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashgap import tables
from flashgap.figures_environment import ceilings, noise, trust
from flashgap.figures_ratios import claims_ledger, summary
from flashgap.look import (
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
    machine_name,
    marker,
    name_of,
    nice_bytes,
    nothing,
    output_dir,
    percent,
    reach,
    records_line,
    save,
)
from flashgap.notebook import number

if TYPE_CHECKING:
    from flashgap.results import Result

__all__ = [
    "ceilings",
    "claims_ledger",
    "machine_name",
    "noise",
    "output_dir",
    "records_line",
    "save",
    "summary",
    "trust",
]

# --- 01_baseline ---------------------------------------------------------------------------------------


@look
def task(result: Result) -> Figure:
    """Task time by block with its interval, and when each request had its last token."""
    data = tables.task(result)
    if data.empty:
        return nothing("Time for the task", "No complete block of the experiment `task`.")
    requests = result.frame("e2e_s")["request"].nunique()
    figure, (ax, right) = canvas(
        "Time for the task: Standard against Flash",
        f"Left: one dot a block (n = {int(data['blocks'].max())}), the median with its 95 % interval beside it. Right: "
        f"share of the task's {requests} requests that had their last token, each block a line.",
        records_line(result),
        (1, 1.35),
        left_in=0.55,
        gap_in=0.85,
        right_in=0.75,
    )
    top = 0.0
    for x, row in enumerate(data.itertuples()):
        values = np.concatenate(tables.slowest(result, row.treatment))
        top = max(top, values.max())
        ax.plot(
            np.full(len(values), x - 0.12),
            values,
            "o",
            color=colour(row.treatment),
            alpha=0.45,
            markeredgewidth=0,
        )
        bar = arms([row.value], [row.low], [row.high])
        ax.errorbar([x + 0.08], [row.value], yerr=bar, fmt=marker(row.treatment), color=colour(row.treatment))
        ax.text(x + 0.17, row.value, f"{number(row.value)} s", color=colour(row.treatment), va="center")
    ax.set_xticks(range(len(data)), [name_of(n) for n in data["treatment"]])
    ax.tick_params(axis="x", labelsize=8, labelcolor=INK, length=0)
    from_zero(ax, max(reach(data)[1], top))
    ax.set(xlim=(-0.45, len(data) - 0.3), title="Whole task, s")
    _request_curves(right, result)
    return figure


def _request_curves(ax: Axes, result: Result) -> None:
    for line, name in enumerate(tables.treatments(result)):
        groups = result.groups(name, "e2e_s")
        for values in groups:
            x, y = np.sort(values), np.arange(1, len(values) + 1) / len(values)
            ax.step([0, *x], [0, *y], where="post", color=colour(name), linewidth=0.9, alpha=0.6)
        if groups:
            text = f"{name_of(name)}: half of them after {number(float(np.median(np.concatenate(groups))))} s"
            ax.text(
                0.02,
                0.97 - 0.08 * line,
                text,
                transform=ax.transAxes,
                color=colour(name),
                fontsize=7.5,
                va="top",
            )
    percent(ax)
    ax.set(
        xlim=(0, None), ylim=(0, 1.25), xlabel="s since the task was handed over", title="Requests finished"
    )
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])


@look
def latency(result: Result, bounds: pd.DataFrame | None = None) -> Figure:
    """Time to first token, time per token and throughput against batch; `tables.bounds` as dashed lines."""
    if not tables.levels(result, "itl_s", "batch"):
        return nothing(
            "Latency and throughput against batch", "No complete block of the experiment `latency`."
        )
    panels = (
        ("ttft_s", 1e3, "ms", "Time to first token"),
        ("itl_s", 1e3, "ms", "Time per token"),
        ("throughput_tokens_per_s", 1.0, "tokens/s", "Throughput"),
    )
    bounds_said = (
        ""
        if bounds is None or bounds.empty
        else " Dashed: the bound, from bytes and FLOPs over measured ceilings."
    )
    data = {metric: tables.medians(result, metric, "batch", scale) for metric, scale, _, _ in panels}
    figure, axes = canvas(
        "Latency and throughput against batch",
        f"{INTERVALS} over n = {int(data['itl_s']['blocks'].max())} blocks (a fresh process each).{bounds_said}",
        records_line(result),
        (1, 1, 1),
        gap_in=0.55,
        left_in=0.48,
        right_in=1.02,
    )
    for ax, (metric, scale, unit, title) in zip(axes, panels, strict=True):
        _by_level(ax, data[metric], "batch")
        if bounds is not None and metric in bounds:
            _bound_lines(ax, bounds, "batch", metric, scale)
        if bounds is not None and len(bounds):
            lines = pd.concat([data[metric]["value"], bounds[metric] * scale])
            low, high = min(reach(data[metric])[0], lines.min()), max(reach(data[metric])[1], lines.max())
        else:
            low, high = reach(data[metric])
        _plain_log(ax, low, high)
        ax.set(xlabel="batch", title=f"{title}, {unit}")
    label_ends(axes[-1], _ends(data["throughput_tokens_per_s"], bounds, "throughput_tokens_per_s"))
    return figure


def _ends(
    data: pd.DataFrame, bounds: pd.DataFrame | None, metric: str, scale: float = 1.0
) -> list[tuple[float, str, str]]:
    """Where the lines and bounds end, with their names, for `label_ends`."""
    last = data.groupby("treatment").last()["value"]
    ends = [(last[name], name_of(name), colour(name)) for name in last.index]
    if bounds is not None and len(bounds):
        bound = bounds.groupby("treatment").last()[metric] * scale
        ends += [(bound[name], f"{name_of(name)} bound", colour(name)) for name in bound.index]
    return ends


def _by_level(ax: Axes, data: pd.DataFrame, by: str) -> None:
    for name, part in data.groupby("treatment", sort=False):
        interval_line(ax, part[by], part, str(name))
    log_ticks(ax, sorted(data[by].unique()), lambda x: f"{x:,.0f}")


def _bound_lines(ax: Axes, bounds: pd.DataFrame, by: str, metric: str, scale: float) -> None:
    for name, part in bounds.groupby("treatment", sort=False):
        ax.plot(
            part[by],
            part[metric] * scale,
            color=colour(str(name)),
            linestyle=(0, (4, 3)),
            linewidth=1,
            zorder=2,
        )


def _plain_log(ax: Axes, low: float, high: float) -> None:
    """A logarithmic vertical axis from `low` to `high` with four or more round numbers."""
    low, high = low / 1.15, high * 1.15
    for steps in (
        (1,),
        (1, 3),
        (1, 2, 5),
        (1, 1.5, 2, 3, 5, 7),
        tuple(np.arange(1, 10, 0.5)),
        tuple(np.arange(1, 10, 0.1)),
    ):
        decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
        ticks = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
        if len(ticks) >= 4:
            break
    log_ticks(ax, ticks, lambda y: f"{y:,.4g}", axis="y")
    ax.set_ylim(low, high)


@look
def utilization(data: pd.DataFrame, *results: Result) -> Figure:
    """MFU of prefill and MBU of decode against batch (`tables.utilization`)."""
    if data.empty:
        return nothing("How much of the machine is used", "No ceilings, or no latency records, to compare.")
    figure, axes = canvas(
        "How much of the machine is used",
        "Work the model needs, over time, over the measured ceiling (expanding 4-bit weights counts as no work). "
        f"{INTERVALS} over n = {int(data['blocks'].max())} blocks; dashed: 100 %.",
        records_line(*results),
        (1, 1),
        height_in=2.2,
        right_in=0.8,
    )
    titles = {"mfu": "Prefill: FLOP/s used (MFU)", "mbu": "Decode: bytes/s used (MBU)"}
    for ax, (metric, title) in zip(axes, titles.items(), strict=True):
        part = data[data["metric"] == metric]
        _by_level(ax, part, "batch")
        ax.axhline(1, color=INK, linestyle=(0, (4, 3)), linewidth=0.9)
        percent(ax)
        ax.set(xlabel="batch", title=title, ylim=(0, max(1.08, reach(part)[1] * 1.05)))
    label_ends(axes[-1], _ends(part, None, metric))
    return figure


@look
def context(result: Result, long: Result | None = None, bounds: pd.DataFrame | None = None) -> Figure:
    """Time per token against context for each build, and their paired ratio.

    `long`: true generations, drawn as thin lines of medians over 64 tokens.
    """
    data = tables.medians(result, "itl_s", "context_tokens", 1e3)
    if data.empty:
        return nothing("Time per token against context", "No complete block of the experiment `context`.")
    has_long = long is not None and bool(long.blocks)
    thin = " Thin: one true generation each, medians of 64 tokens." if has_long else ""
    dashed = "" if bounds is None or bounds.empty else " Dashed: bound by bytes over measured bytes/s."
    figure, (ax, right) = canvas(
        "Time per token against context",
        f"{INTERVALS} over n = {int(data['blocks'].max())} blocks, cache prefilled to each length, batch 1.{thin}{dashed}",
        records_line(*[r for r in (result, long) if r is not None]),
        (1.35, 1),
        gap_in=1.45,
        left_in=0.48,
        right_in=0.25,
    )
    if has_long and long is not None:
        for r in tables.running_medians(long, 64).groupby("treatment", sort=False):
            ax.plot(
                r[1]["context_tokens"],
                r[1]["value"] * 1e3,
                color=colour(str(r[0])),
                linewidth=0.7,
                alpha=0.75,
            )
    _by_level(ax, data, "context_tokens")
    if bounds is not None:
        _bound_lines(ax, bounds, "context_tokens", "itl_s", 1e3)
    ax.set_xscale("linear")
    top = max(data["context_tokens"])
    ax.set_xticks(_round_ticks(top), [f"{t:,}" for t in _round_ticks(top)])
    ax.set_xlim(0, None)
    from_zero(ax, reach(data)[1])
    ax.set(xlabel="tokens in the cache", title="Time per token, ms")
    label_ends(ax, _ends(data, bounds, "itl_s", 1e3))
    _context_ratio(right, tables.ratios(result, "itl_s", "context_tokens"), top)
    return figure


def _round_ticks(top: int) -> list[int]:
    step = next((s for s in (16, 64, 128, 512, 1024, 2048, 4096, 8192, 16384) if top / s <= 4), 32768)
    return list(range(0, int(top) + 1, step))


def _context_ratio(ax: Axes, ratio: pd.DataFrame, top: int) -> None:
    bars = arms(ratio["value"], ratio["low"], ratio["high"])
    ax.errorbar(ratio["context_tokens"], ratio["value"], yerr=bars, color=INK, marker="o", elinewidth=1.1)
    ax.axhline(1, color=INK, linewidth=0.8)
    ax.text(
        0.01,
        0.97,
        "equal",
        transform=ax.get_yaxis_transform(),
        va="top",
        fontsize=6.8,
        color=SOFT,
    )
    ax.set_xticks(_round_ticks(top), [f"{t:,}" for t in _round_ticks(top)])
    ax.set_xlim(0, None)
    from_zero(ax, max(1.0, reach(ratio)[1]) if len(ratio) else 1.0)
    ax.set(xlabel="tokens in the cache", title="Flash / Standard, ratio")


PHASE_NAMES = {
    "start": "start\n(imports done)",
    "weights_loaded": "weights\nloaded",
    "first_token": "first\ntoken",
    "steady": "steady",
    "initialisation_peak": "peak to\nfirst token",
    "peak": "peak of\nthe run",
}


@look
def memory(result: Result, capacity: Result | None = None) -> Figure:
    """Memory by phase for each build, in one named counter, and the largest batch in the budget."""
    counter = tables.main_counter(result)
    if counter is None:
        return nothing("Memory by phase", "No complete block of the experiment `memory`.")
    has_capacity = capacity is not None and not tables.capacity(capacity).empty
    peak = tables.peak_counter(counter)
    blocks = sum(block.complete for block in result.blocks)
    figure, axes = canvas(
        "Memory by phase",
        f"Median of n = {blocks} processes, a dot each. Counter: {counter.removesuffix('_bytes')}, for the two peaks "
        f"{peak.removesuffix('_bytes')}; every other counter is in the table.",
        records_line(*[r for r in (result, capacity) if r is not None]),
        (3, 1) if has_capacity else (1,),
        right_in=0.3,
        gap_in=0.65,
        left_in=0.48,
        bottom_in=0.42,
    )
    _phases(axes[0], result, counter, peak)
    if has_capacity and capacity is not None:
        _capacity(axes[1], capacity)
    return figure


def _phases(ax: Axes, result: Result, counter: str, peak: str) -> None:
    names = tables.treatments(result)
    width = 0.8 / len(names)
    for offset, name in enumerate(names):
        for x, phase in enumerate(PHASE_NAMES):
            groups = tables.memory_groups(result, name, phase, peak if "peak" in phase else counter)
            if not groups:
                continue
            values = np.concatenate(groups) / 2**20
            at = x + (offset - (len(names) - 1) / 2) * width
            ax.bar(
                at,
                np.median(values),
                width * 0.92,
                color=colour(name),
                alpha=0.55 if "peak" in phase else 0.9,
            )
            ax.plot(np.full(len(values), at), values, ".", color=INK, markersize=2.2)
            above = {"xy": (at, values.max()), "xytext": (0, 2.5), "textcoords": "offset points"}
            ax.annotate(f"{np.median(values):,.0f}", **above, ha="center", va="bottom", fontsize=6.3)
    ax.set_xticks(range(len(PHASE_NAMES)), list(PHASE_NAMES.values()))
    ax.tick_params(axis="x", length=0)
    ax.set_title("MiB")
    for i, name in enumerate(names):
        ax.text(
            0.1 + 0.16 * i,
            1.045,
            "■ " + name_of(name),
            color=colour(name),
            transform=ax.transAxes,
            va="center",
        )
    from_zero(ax, ax.dataLim.y1)


def _capacity(ax: Axes, result: Result) -> None:
    data = tables.capacity(result)
    for x, row in enumerate(data.itertuples()):
        ax.bar(x, row.largest_batch, 0.7, color=colour(row.treatment), alpha=0.9)
        ax.text(x, row.largest_batch, f"{row.largest_batch:.0f}", ha="center", va="bottom")
    ax.set_xticks(range(len(data)), [name_of(n) for n in data["treatment"]])
    ax.tick_params(axis="x", length=0)
    budget = next(iter(tables.facts(result, "budget_bytes")), None)
    ax.set(title="Largest batch" + (f" in {nice_bytes(budget)}" if budget else ""))
    from_zero(ax, data["largest_batch"].max())
