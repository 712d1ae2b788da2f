"""The pictures of ratios: what Flash needs over what Standard needs, here and as published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashgap.look import (
    BLUE,
    FAINT,
    INK,
    SOFT,
    arms,
    canvas,
    colour,
    look,
    nothing,
    ratio_axis,
    reach,
    records_line,
)
from flashgap.notebook import interval, number

if TYPE_CHECKING:
    from flashgap.results import Result


@look
def summary(table: pd.DataFrame, *results: Result, beside: pd.DataFrame | None = None) -> Figure:
    """What Flash needs over what Standard needs, for each quantity of `tables.summary`.

    `beside`: the same table from reference records, drawn hollow.
    """
    if table.empty:
        return nothing("What Flash needs over what Standard needs", "No complete block to compare yet.")
    said = "" if beside is None else " Hollow: the reference records, measured on another day or machine."
    figure, (ax,) = canvas(
        "What Flash needs over what Standard needs",
        f"Paired ratio Flash / Standard with its 95 % interval; every row is a quantity of which less is better.{said}",
        records_line(*results),
        height_in=0.27 * len(table) + 0.25,
        left_in=2.75,
        right_in=1.55,
    )
    y = np.arange(len(table))[::-1]
    _ratio_rows(ax, table, y)
    if beside is not None and not beside.empty:
        other = beside.set_index("quantity").reindex(table["quantity"])
        bars = arms(other["value"], other["low"], other["high"])
        ax.errorbar(
            other["value"],
            y - 0.25,
            xerr=bars,
            fmt="o",
            color=SOFT,
            mfc="white",
            markersize=4,
            elinewidth=0.8,
        )
    ax.set_yticks(y, table["quantity"], color=INK)
    ax.text(1.02, 1.0, "ratio [95 % interval]", transform=ax.transAxes, fontsize=6.8, color=SOFT, va="bottom")
    ax.text(0.0, 1.0, "Flash needs less", transform=ax.transAxes, fontsize=7, color=BLUE, va="bottom")
    ax.text(
        1.0,
        1.0,
        "Flash needs more",
        transform=ax.transAxes,
        fontsize=7,
        color=colour("flash"),
        va="bottom",
        ha="right",
    )
    ax.set(ylim=(-0.6, len(table) - 0.4), xlabel="Flash / Standard")
    return figure


def _ratio_rows(ax: Axes, table: pd.DataFrame, y: np.ndarray) -> None:
    """One interval a row on a ratio axis, coloured by which side of 1 it is known to lie on, and as text."""
    ratio_axis(ax, *_ratio_range(table))
    for at, row in zip(y, table.itertuples(), strict=True):
        known = np.isfinite(row.low) and np.isfinite(row.high)
        shade = SOFT if not known or row.low <= 1 <= row.high else colour("flash") if row.value > 1 else BLUE
        ax.errorbar(
            [row.value],
            [at],
            xerr=arms([row.value], [row.low], [row.high]),
            fmt="o",
            color=shade,
            elinewidth=1.6,
        )
        said = interval(row.value, row.low, row.high) if known else f"{number(row.value)} [one block]"
        ax.text(1.02, at, said, transform=ax.get_yaxis_transform(), va="center", fontsize=7.5)


def _ratio_range(table: pd.DataFrame) -> tuple[float, float]:
    """The values and what is useful of their intervals."""
    low, high = reach(table)
    return max(low, 1e-3), high


# --- 06_results ----------------------------------------------------------------------------------------


@look
def claims_ledger(table: pd.DataFrame, results: Mapping[str, Result]) -> Figure:
    """Published ratios beside measured ones (`ledger.ratios`), the tolerance band pale."""
    rows = table[np.isfinite(table["value"].astype(float))] if len(table) else table
    if rows.empty:
        return nothing("The published study's ratios, and ours", "No ratio of the ledger is measured yet.")
    used = [results[name] for name in dict.fromkeys(rows["experiment"]) if name in results]
    figure, (ax,) = canvas(
        "The published study's ratios, and ours",
        "Filled: measured here, with 95 % interval (largest batch: bounds). Open diamond: published. Pale band: what "
        "counts as the published size. Right of 1 Flash needs, or has, more than Standard.",
        records_line(*used),
        height_in=0.3 * len(rows) + 0.2,
        left_in=3.0,
        right_in=1.55,
    )
    y = np.arange(len(rows))[::-1]
    published = pd.concat([rows[c] for c in ("published", "band_low", "band_high")])
    published = published[np.isfinite(published) & (published > 0)]
    _ratio_rows(ax, rows, y)
    shown = _ratio_range(rows)
    ratio_axis(ax, min([*published, *shown]), max([*published, *shown]))
    for at, row in zip(y, rows.itertuples(), strict=True):
        if np.isfinite(row.band_low) and np.isfinite(row.band_high):
            ax.barh(at, row.band_high - row.band_low, left=row.band_low, height=0.62, color=FAINT, zorder=0)
        if np.isfinite(row.published):
            ax.plot([row.published], [at], "D", mfc="white", mec=INK, markersize=5, zorder=2)
    ax.set_yticks(y, [f"{row.id}  {row.what}" for row in rows.itertuples()], color=INK)
    ax.text(1.02, 1.0, "measured [interval]", transform=ax.transAxes, fontsize=6.8, color=SOFT, va="bottom")
    ax.set(ylim=(-0.6, len(rows) - 0.4), xlabel="Flash / Standard")
    return figure
