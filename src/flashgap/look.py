"""How every picture looks, and where it is kept.

The one idea: a reader compares pictures, so they share one page width, one type, one colour for each
build, and the same four lines of text: a title that says what is shown, a line on how to read it, the
axis units, and a caption that names the records. Colours are Okabe and Ito's, which stay apart for the
colour-blind; markers and line styles repeat what the colour says, for print. seaborn's `ticks` style and
`paper` context are the base; what differs from them stands in `LOOK`.
"""

from __future__ import annotations

import functools
import math
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from flashgap import keys, render
from flashgap.study import Study

if TYPE_CHECKING:
    from IPython.display import Image

    from flashgap.results import Result

WIDTH_IN = 7.4
DPI = 200
INK, SOFT, FAINT = "#222222", "#666666", "#DDDDDD"
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#AA5A8F",
    "#E69F00",
    "#56B4E9",
)

COLOURS = {
    "standard": BLUE,
    "flash": VERMILLION,
    "standard_again": SKY,
    "standard_slowed": ORANGE,
    "standard_best": SKY,
    "flash_packed": ORANGE,
    "flash_optimised": GREEN,
    "flash_small": PURPLE,
    "eight_best": ORANGE,
}
MARKERS = {
    "standard": "o",
    "flash": "s",
    "standard_again": "D",
    "standard_slowed": "^",
    "standard_best": "D",
    "flash_packed": "^",
    "flash_optimised": "P",
    "flash_small": "X",
    "eight_best": "v",
}
NAMES = {
    "standard": "Standard",
    "flash": "Flash",
    "standard_again": "Standard again",
    "standard_slowed": "Standard, slowed",
    "standard_best": "Standard, compiled",
    "flash_packed": "Flash, packed kernel",
    "flash_optimised": "Flash, optimised",
    "flash_small": "Flash, optimised, no copy",
    "eight_best": "8 bits, compiled",
    "rtn": "round to nearest, head at 4 bits",
    "rtn_head8": "round to nearest",
    "rtn_head16": "round to nearest, head at 16 bits",
    "rtn_symmetric": "round to nearest, symmetric",
    "rtn_group32": "round to nearest, groups of 32",
    "awq": "AWQ",
    "awq_unsearched": "AWQ without its search",
    "autoawq": "AutoAWQ, head at 16 bits",
    "published": "published remedy",
    "hqq": "HQQ",
    "mixed": "mixed 4 and 8 bits",
    "eight": "8 bits",
}

INTERVALS = "Dots: medians; bars: 95 % intervals"

LOOK = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.labelcolor": INK,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "normal",
    "axes.titlecolor": INK,
    "axes.titlepad": 8,
    "axes.edgecolor": "#999999",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E8E8E8",
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "errorbar.capsize": 0,
    "text.color": INK,
    "text.parse_math": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}

Draw = TypeVar("Draw", bound=Callable[..., Figure])


def look(function: Draw) -> Draw:
    """Draw inside this module's style, whatever the notebook has set."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Figure:
        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(sns.axes_style("ticks") | sns.plotting_context("paper") | LOOK)
            return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def colour(treatment: str) -> str:
    """The colour of a treatment; one without its own gets that of the build its name starts with."""
    return COLOURS.get(treatment) or (BLUE if treatment.startswith("standard") else VERMILLION)


def marker(treatment: str) -> str:
    return MARKERS.get(treatment, "v")


def name_of(treatment: str) -> str:
    """A treatment's name for a person."""
    return NAMES.get(treatment, treatment.replace("_", " ").capitalize())


# --- the page ------------------------------------------------------------------------------------------


def canvas(
    title: str,
    subtitle: str,
    caption: str,
    widths: Sequence[float] = (1.0,),
    height_in: float = 2.5,
    left_in: float = 0.62,
    gap_in: float = 0.78,
    right_in: float = 0.72,
    bottom_in: float = 0.52,
) -> tuple[Figure, list[Axes]]:
    """A figure with one row of panels of relative `widths`, `height_in` inches high, and its texts.

    Margins are in inches, so that text keeps its size and place whatever the panels hold.
    """
    how_to_read = textwrap.wrap(subtitle, 124)
    records = textwrap.wrap(caption, 150)
    top_in = 0.52 + 0.15 * len(how_to_read) + 0.24
    foot_in = bottom_in + 0.12 + 0.115 * len(records)
    total_in = top_in + height_in + foot_in
    figure = Figure(figsize=(WIDTH_IN, total_in), dpi=DPI)
    free_in = WIDTH_IN - left_in - right_in - gap_in * (len(widths) - 1)
    axes, x_in = [], left_in
    for share in np.array(widths) / sum(widths):
        box = (x_in / WIDTH_IN, foot_in / total_in, free_in * share / WIDTH_IN, height_in / total_in)
        axes.append(figure.add_axes(box))
        x_in += free_in * share + gap_in
    edge = 0.1 / WIDTH_IN
    figure.text(edge, 1 - 0.1 / total_in, title, va="top", fontsize=11, fontweight="bold")
    figure.text(
        edge, 1 - 0.36 / total_in, "\n".join(how_to_read), va="top", fontsize=8, color=SOFT, linespacing=1.35
    )
    figure.text(
        edge, 0.06 / total_in, "\n".join(records), va="bottom", fontsize=6, color=SOFT, linespacing=1.3
    )
    return figure, axes


def machine_name(fingerprint: Mapping[str, Any]) -> str:
    """A machine in a few words: processor, cores, memory, GPUs (see `hardware.fingerprint`)."""
    if "override" in fingerprint:
        return str(fingerprint["override"])
    gpus = [str(gpu).split(",")[0] for gpu in fingerprint.get("gpus") or []]
    parts = [str(fingerprint.get("cpu") or "unknown processor")]
    parts += [f"{fingerprint['cores']} cores"] if fingerprint.get("cores") else []
    parts += [f"{fingerprint['memory_gib']} GiB"] if fingerprint.get("memory_gib") else []
    parts += [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return ", ".join(parts)


def records_line(*results: Result) -> str:
    """Which records a picture was drawn from, and on what machine they were measured."""
    used = [result for result in results if result is not None and result.blocks]
    if not used:
        return "No records."
    parts = [f"{r.experiment} ({len(r.blocks)} block{'s' * (len(r.blocks) != 1)}, {r.source})" for r in used]
    machines = dict.fromkeys(machine_name(result.machine) for result in used)
    models = {
        str(t.model.get("label"))
        for r in used
        for b in r.blocks
        for t in b.trials.values()
        if t.model.get("label")
    }
    model = f" Model: {', '.join(sorted(models))}." if models else ""
    return f"Records: {', '.join(parts)}. Machine: {'; '.join(machines)}.{model}"


# --- marks ---------------------------------------------------------------------------------------------


def arms(values: Sequence[float], low: Sequence[float], high: Sequence[float]) -> np.ndarray:
    """Error-bar arms [2, n]; none where an interval is not known."""
    middle, least, most = (np.asarray(x, dtype=float) for x in (values, low, high))
    both = np.stack([middle - least, most - middle])
    return np.where(np.isfinite(both), np.maximum(both, 0), 0)


def interval_line(ax: Axes, x: Sequence[float], table: Any, treatment: str, **style: Any) -> None:
    """A line of medians with 95 % intervals, in the treatment's colour and marker."""
    defaults = {"color": colour(treatment), "marker": marker(treatment), "elinewidth": 1.1, "zorder": 3}
    ax.errorbar(
        x, table["value"], yerr=arms(table["value"], table["low"], table["high"]), **(defaults | style)
    )


def label_ends(ax: Axes, ends: Iterable[tuple[float, str, str]], gap: float = 0.085, x: float = 1.02) -> None:
    """Direct labels right of the axes: (data y, text, colour), pushed apart where they would overlap."""
    ends = [(ax.transAxes.inverted().transform(ax.transData.transform((1, y)))[1], t, c) for y, t, c in ends]
    placed = spread(
        [min(max(y, 0.02), 1.0) for y, _, _ in ends], [gap * (1 + t.count("\n")) for _, t, _ in ends]
    )
    lift = max(0.0, 0.02 - min(placed, default=0.02))
    for at, (_, text, shade) in zip(placed, ends, strict=True):
        ax.text(
            x,
            at + lift,
            text,
            transform=ax.transAxes,
            color=shade,
            va="center",
            fontsize=7.5,
            linespacing=1.1,
        )


def spread(wanted: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Positions near `wanted`, in the same order, each at least half of both sizes from its neighbour."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = dict(enumerate(wanted))
    for _ in range(200):
        moved = False
        for lower, upper in pairwise(order):
            lack = (sizes[lower] + sizes[upper]) / 2 - (placed[upper] - placed[lower])
            if lack > 1e-6:
                placed[lower] -= lack / 2
                placed[upper] += lack / 2
                moved = True
        if not moved:
            break
    return [placed[i] for i in range(len(wanted))]


def log_ticks(
    ax: Axes, values: Sequence[float], text: Callable[[float], str] = "{:g}".format, axis: str = "x"
) -> None:
    """A log axis with ticks at the measured values only."""
    which = ax.xaxis if axis == "x" else ax.yaxis
    (ax.set_xscale if axis == "x" else ax.set_yscale)("log")
    which.set_major_locator(FixedLocator(list(values)))
    which.set_major_formatter(FuncFormatter(lambda x, _: text(x)))
    which.set_minor_locator(NullLocator())


def ratio_axis(ax: Axes, low: float, high: float) -> None:
    """A horizontal log axis for ratios around 1, with round ticks that cover [low, high]."""
    low, high = max(min(low, 0.97), 0.01), min(max(high, 1.03), 100.0)
    span = high / low
    steps = (
        [0.01, 0.1, 1, 10, 100]
        if span > 50
        else [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]
        if span > 6
        else [0.25, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5]
        if span > 1.6
        else [0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3]
        if span > 1.25
        else [0.9, 0.95, 1, 1.05, 1.1, 1.15]
    )
    margin = span**0.06
    low, high = low / margin, high * margin
    log_ticks(ax, [s for s in steps if low <= s <= high], lambda x: f"{x:g}")
    ax.set_xlim(low, high)
    ax.axvline(1, color=INK, linewidth=0.8, zorder=1)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")


def reach(table: pd.DataFrame, times: float = 2.0) -> tuple[float, float]:
    """Lowest and highest end of a table's intervals, but never `times` beyond its values.

    A useless interval (two noisy blocks) leaves the page instead of flattening everything else.
    """
    values = table["value"].to_numpy(dtype=float)
    low, high = (
        np.where(np.isfinite(table[c].astype(float)), table[c].astype(float), values) for c in ("low", "high")
    )
    return max(float(low.min()), float(values.min()) / times), min(
        float(high.max()), float(values.max()) * times
    )


def from_zero(ax: Axes, top: float, room: float = 1.08) -> None:
    """A linear vertical axis from 0 to a little above `top`, so that lengths compare."""
    ax.set_ylim(0, max(top * room, 1e-12))


def percent(ax: Axes) -> None:
    """A vertical axis of shares, in per cent."""
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))


def nice_bytes(value: float) -> str:
    """16 MiB, 1 GiB: bytes in a binary unit, for ticks and labels."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def nothing(title: str, why: str) -> Figure:
    """A page that says why there is no picture."""
    figure, (ax,) = canvas(title, why, "No records.", height_in=0.4)
    ax.set_axis_off()
    return figure


# --- keeping -------------------------------------------------------------------------------------------


def output_dir(profile: str) -> Path:
    """`figures/<profile>` in replay, where pictures come from committed records; else `figures/local/<profile>`."""
    folder = keys.output_dir(profile, os.environ.get("FLASHGAP_REPLAY") == "1")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save(figure: Figure, name: str, study: Study) -> Image:
    """Write `<name>.png` into the profile's folder and return that very picture for display.

    Pictures of a study with random weights carry the same mark as its pages.
    """
    from IPython.display import Image

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(LOOK)
        if mark := render.watermark(study):
            stamp(figure, mark, large=study.profile == "smoke")
        path = output_dir(study.profile) / f"{name}.png"
        figure.savefig(path, dpi=DPI, metadata={"Software": None})
    text = " ".join(t.get_text() for t in figure.texts[:2])
    return Image(
        data=path.read_bytes(), format="png", width=round(WIDTH_IN * 110), alt=" ".join(text.split())
    )


def stamp(figure: Figure, mark: str, large: bool) -> None:
    """Write `mark` once: across the page, or small in its corner."""
    if any(text.get_text() == mark for text in figure.texts):
        return
    width, height = figure.get_size_inches()
    if not large:
        figure.text(
            1 - 0.1 / width, 1 - 0.12 / height, mark, ha="right", va="top", fontsize=7, color=VERMILLION
        )
        return
    angle = math.degrees(math.atan2(height * 0.5, width))
    style: dict[str, Any] = {"fontsize": 26, "color": "#888888", "alpha": 0.22, "zorder": 10}
    figure.text(0.5, 0.5, mark, rotation=angle, ha="center", va="center", **style)
