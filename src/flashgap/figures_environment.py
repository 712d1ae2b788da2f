"""The pictures of `00_environment`: what this machine can reach, and what it can tell apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashgap import stats, tables
from flashgap.look import (
    BLUE,
    GREEN,
    INK,
    INTERVALS,
    ORANGE,
    PURPLE,
    arms,
    canvas,
    colour,
    from_zero,
    interval_line,
    label_ends,
    log_ticks,
    look,
    name_of,
    nice_bytes,
    nothing,
    percent,
    ratio_axis,
    reach,
    records_line,
)

if TYPE_CHECKING:
    from flashgap.results import Result

ACCESS = {"read": (BLUE, "o"), "copy": (GREEN, "^"), "gemv": (PURPLE, "s")}


@look
def ceilings(result: Result, weights_bytes: Mapping[str, float] | None = None) -> Figure:
    """Bytes/s against working set, by kind of access, and matmul FLOP/s by number type.

    `weights_bytes`: name -> bytes, drawn where a model's weights fall on the axis.
    """
    data = tables.byte_ceilings(result)
    flops = tables.flop_ceilings(result)
    if data.empty:
        return nothing("What this machine can reach", "No complete block of the experiment `ceilings`.")
    blocks = int(data["blocks"].max())
    subtitle = (
        f"{INTERVALS} over n = {blocks} processes. A working set that fits a cache is read faster than main "
        "memory: a bound must be taken at the size of the weights."
    )
    figure, (ax, right) = canvas(
        "What this machine can reach", subtitle, records_line(result), (2.2, 1), gap_in=1.45, right_in=0.55
    )
    ends = []
    for access, (shade, shape) in ACCESS.items():
        part = data[data["access"] == access]
        if len(part):
            interval_line(ax, part["working_set_bytes"], part, access, color=shade, marker=shape)
            ends.append((part["value"].iloc[-1], access, shade))
    log_ticks(ax, sorted(data["working_set_bytes"].unique()), lambda x: nice_bytes(x).replace(" ", "\n"))
    from_zero(ax, reach(data)[1])
    ax.set(xlabel="working set", title="Memory, GB/s")
    label_ends(ax, ends)
    _weights(ax, weights_bytes or {})
    _bars(right, flops)
    return figure


def _weights(ax: Axes, weights_bytes: Mapping[str, float]) -> None:
    """Where a model's weights fall on an axis of bytes."""
    low, high = ax.get_xlim()
    inside = {name: size for name, size in weights_bytes.items() if low <= size <= high}
    for row, (name, size) in enumerate(sorted(inside.items(), key=lambda item: -item[1])):
        ax.axvline(size, color=colour(name), linewidth=0.9, linestyle=":", zorder=1)
        at = {"xy": (size, 1.0 - 0.075 * row), "xycoords": ax.get_xaxis_transform()}
        text = f"{name_of(name)} weights, {nice_bytes(size)}"
        ax.annotate(
            text, **at, xytext=(3, -3), textcoords="offset points", color=colour(name), fontsize=6.8, va="top"
        )


def _bars(ax: Axes, flops: pd.DataFrame) -> None:
    y = np.arange(len(flops))[::-1]
    unit, scale = ("TFLOP/s", 1e-12) if len(flops) and flops["value"].max() >= 1e12 else ("GFLOP/s", 1e-9)
    values, low, high = (flops[c].to_numpy(dtype=float) * scale for c in ("value", "low", "high"))
    ax.barh(
        y, values, height=0.5, color="#9DB7CB", xerr=arms(values, low, high), error_kw={"elinewidth": 1.1}
    )
    limit = reach(flops)[1] * scale
    for at, value, top in zip(y, values, np.minimum(values + arms(values, low, high)[1], limit), strict=True):
        ax.annotate(f"{value:.3g}", (top, at), (4, 0), textcoords="offset points", va="center", fontsize=7.5)
    ax.set_yticks(y, flops["dtype"])
    ax.set(title=f"Matrix product, {unit}", xlim=(0, limit * 1.08), ylim=(-0.6, len(flops) - 0.4))
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")


@look
def noise(result: Result, curve: pd.DataFrame) -> Figure:
    """A/A and planted-slowdown ratios block by block, and what n blocks can see (`tables.power_curve`)."""
    groups = tables.noise(result)
    if len(groups[0]) < 2:
        return nothing(
            "Can this machine tell 5 % from nothing?", "Fewer than two complete blocks of `noise`."
        )
    figure, (ax, power, alarms) = canvas(
        "Can this machine tell 5 % from nothing?",
        f"Left: one dot a block (n = {len(groups[0])}), the paired ratio with its 95 % interval below. Middle and "
        "right: random subsets of those blocks; bands: 95 % Jeffreys intervals.",
        records_line(result),
        (1.5, 1, 1),
        right_in=0.3,
        gap_in=0.72,
    )
    _block_ratios(ax, groups)
    planted = _planted(result)
    _share_line(power, curve, "power", GREEN, tables.POWER_WANTED, "wanted 80 %", (0, 1.03))
    power.set_title(f"Finds the planted {100 * planted:.3g} %")
    top = max(0.12, float(curve["false_alarms_high"].max()) * 1.15 if len(curve) else 0.12)
    _share_line(alarms, curve, "false_alarms", ORANGE, tables.FALSE_ALARM_LIMIT, "limit 7 %", (0, top))
    alarms.set_title("False alarms (A/A)")
    return figure


def _planted(result: Result) -> float:
    trial = next((b.trials["standard_slowed"] for b in result.blocks if "standard_slowed" in b.trials), None)
    spec = (trial.spec if trial else {}).get("treatment") or {}
    return float(spec.get("planted_slowdown") or 0.05)


def _block_ratios(ax: Axes, groups: list[list[np.ndarray]]) -> None:
    base = groups[0]
    drawn: list[float] = []
    reached: list[float] = []
    for y, (name, group) in enumerate(zip(tables.AA[1:], groups[1:], strict=True)):
        dots = np.array([np.median(g) / np.median(b) for g, b in zip(group, base, strict=True)])
        estimate = stats.paired_ratio(list(zip(group, base, strict=True)))
        lift = np.linspace(-0.16, 0.16, len(dots)) if len(dots) > 1 else np.zeros(1)
        ax.plot(
            dots, 1 - y + 0.14 + lift, "o", color=colour(name), alpha=0.45, markersize=3.2, markeredgewidth=0
        )
        ends = (estimate.low, estimate.high) if estimate.known else (np.nan, np.nan)
        x = arms([estimate.value], ends[:1], ends[1:])
        ax.errorbar(
            [estimate.value],
            [1 - y - 0.2],
            xerr=x,
            marker="D",
            color=INK,
            markersize=4,
            elinewidth=1.6,
            zorder=4,
        )
        label = f"{name_of(name)}: {estimate:.3f}"
        ax.text(
            0, 1 - y + 0.43, label, transform=ax.get_yaxis_transform(), backgroundcolor="white", fontsize=7
        )
        drawn += [*dots]
        reached += [end for end in ends if np.isfinite(end)]
    low, high = np.quantile(drawn, [0.02, 0.98])
    low, high = (
        min([low, *(max(e, low / 1.2) for e in reached)]),
        max([high, *(min(e, high * 1.2) for e in reached)]),
    )
    ratio_axis(ax, low, high)
    if outside := sum(not low / 1.02 <= d <= high * 1.02 for d in drawn):
        ax.text(
            1,
            -0.4,
            f"{outside} beyond the axis",
            transform=ax.get_yaxis_transform(),
            ha="right",
            fontsize=6.5,
        )
    ax.set(ylim=(-0.45, 1.62), yticks=[], title="Time per token over Standard's")
    ax.spines["left"].set_visible(False)


def _share_line(
    ax: Axes,
    curve: pd.DataFrame,
    what: str,
    shade: str,
    wanted: float,
    text: str,
    limits: tuple[float, float],
) -> None:
    """A share against the number of blocks, with its band and the level wanted of it."""
    if len(curve):
        x = curve["blocks"]
        ax.fill_between(x, curve[f"{what}_low"], curve[f"{what}_high"], color=shade, alpha=0.2, linewidth=0)
        ax.plot(x, curve[what], marker="o", color=shade)
        ax.set_xticks(list(x))
    ax.axhline(wanted, color=INK, linestyle=(0, (4, 3)), linewidth=0.9)
    ax.text(
        0.99, wanted + 0.015 * limits[1], text, transform=ax.get_yaxis_transform(), ha="right", fontsize=6.8
    )
    percent(ax)
    ax.set(xlabel="blocks", ylim=limits)


@look
def trust(reference: pd.DataFrame, overheads_s: np.ndarray, *results: Result) -> Figure:
    """Our clock against an independent one (`tables.reference_check`), and the overhead of a trial."""
    figure, (ax, right) = canvas(
        "Do the clock and the process cost us anything?",
        f"Left: ours / torch.utils.benchmark on the same call, paired ratio with 95 % interval; pale: within "
        f"a factor of {1 + tables.REFERENCE_MARGIN:.2f}. Right: wall time of a trial beyond load, check and measurement, one dot a "
        f"trial (n = {len(overheads_s)}).",
        records_line(*results),
        (1, 1),
        height_in=1.35,
        left_in=0.95,
        right_in=0.3,
    )
    ax.axvspan(1 / (1 + tables.REFERENCE_MARGIN), 1 + tables.REFERENCE_MARGIN, color="#E3F1EC", zorder=0)
    y = np.arange(len(reference))[::-1]
    x = arms(reference["value"], reference["low"], reference["high"])
    ax.errorbar(reference["value"], y, xerr=x, fmt="o", color=GREEN, elinewidth=1.4)
    ends = [v for c in ("value", "low", "high") for v in reference[c] if np.isfinite(v)]
    ratio_axis(ax, min([0.93, *ends]), max([1.07, *ends]))
    ax.set_yticks(y, reference["call"], color=INK)
    ax.set(ylim=(-0.6, max(len(reference) - 0.4, 0.6)), title="Reference check: ratio of times")
    _overhead_dots(right, overheads_s)
    return figure


def _overhead_dots(ax: Axes, overheads_s: np.ndarray) -> None:
    ax.set(yticks=[], ylim=(0, 1), title="Overhead of a trial, s")
    ax.spines["left"].set_visible(False)
    ax.grid(visible=False)
    if len(overheads_s) == 0:
        return
    height = np.random.default_rng(0).uniform(0.15, 0.6, len(overheads_s))
    ax.plot(overheads_s, height, "o", color=PURPLE, alpha=0.35, markersize=3.2, markeredgewidth=0)
    middle = float(np.median(overheads_s))
    ax.axvline(middle, ymax=0.72, color=INK, linewidth=1.4)
    ax.text(middle, 0.76, f"median {middle:.2f} s", ha="center", fontsize=7.5)
    ax.axvline(tables.OVERHEAD_LIMIT_S, ymax=0.9, color=INK, linestyle=(0, (4, 3)), linewidth=0.9)
    ax.text(tables.OVERHEAD_LIMIT_S, 0.92, "limit for the median ", ha="right", fontsize=6.8)
    ax.set_xlim(0, max(tables.OVERHEAD_LIMIT_S * 1.1, float(np.quantile(overheads_s, 0.98)) * 1.05))
