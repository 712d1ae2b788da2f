"""The sentences of `03_quantization`, each computed from records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from flashgap import tables_quantization as tq
from flashgap.look import name_of
from flashgap.notebook import interval

if TYPE_CHECKING:
    from flashgap.results import Result

NEVER_SLOWER = 0.97


def quantization(results: Mapping[str, Result], used: pd.DataFrame) -> list[str]:
    """What the page has found, most important first; says what is not there."""
    lines = _decode(results["best"]) + _prefill(results["prefill"]) + _eager(results["eager"])
    lines += _memory(results["best_memory"]) + _quality(results["quality"]) + _use(used)
    return lines or ["No experiment of this page has a complete block yet."]


def _said(row: pd.Series) -> str:
    return interval(row["value"], row["low"], row["high"])


def _decode(best: Result) -> list[str]:
    table = tq.speedups(best, "standard_best", "flash_optimised")
    if table.empty:
        return []
    first, last = table.iloc[0], table.iloc[-1]
    worst = table.loc[table["low"].idxmin()]
    behind = tq.crossing(table)
    never = "never slower" if worst["low"] >= NEVER_SLOWER else "slower in places"
    lines = [
        f"Both compiled: optimised Flash decodes **{first['value']:.2f} times as fast** as Standard at batch "
        f"{int(first['batch'])} ({_said(first)}) and {last['value']:.2f} times at batch {int(last['batch'])} ({_said(last)}).",
        f"From batch {int(first['batch'])} to {int(last['batch'])} it is **{never}** than {NEVER_SLOWER} of Standard's speed: its "
        f"lowest interval is {_said(worst)}, at batch {int(worst['batch'])}.",
    ]
    where = (
        "At no batch measured does Standard draw level."
        if behind is None
        else f"From batch {behind} on Flash is no longer shown faster."
    )
    return [*lines, where]


def _prefill(prefill: Result) -> list[str]:
    table = tq.speedups(prefill, "standard_best", "flash_optimised", "ttft_s", "context_tokens")
    return [
        f"Prefill of {int(row['context_tokens'])} tokens, both compiled: Standard / Flash is {_said(row)}."
        for _, row in table.iterrows()
    ]


def _eager(eager: Result) -> list[str]:
    lines = []
    for flash in ("flash", "flash_packed"):
        table = tq.speedups(eager, "standard", flash)
        if len(table):
            first, last = table.iloc[0], table.iloc[-1]
            lines.append(
                f"Eager, {name_of(flash)}: Standard / Flash is {_said(first)} at batch {int(first['batch'])} and "
                f"{_said(last)} at batch {int(last['batch'])}."
            )
    return lines


def _memory(memory: Result) -> list[str]:
    table = tq.memory(memory)
    held = table.set_index("treatment") if len(table) else table
    lines = []
    if {"flash_packed", "standard"} <= set(held.index):
        small, large = (held.loc[name, "weights of the build"] for name in ("flash_packed", "standard"))
        lines.append(
            f"The saved 4-bit build holds {small:.0f} MiB of weights, Standard {large:.0f}: **{1 - small / large:.0%} less**."
        )
    for flash, standard in (
        ("flash_packed", "standard"),
        ("flash_optimised", "standard_best"),
        ("flash_optimised", "standard"),
    ):
        if {flash, standard} <= set(held.index) and "above start" in held:
            small, large = held.loc[flash, "above start"], held.loc[standard, "above start"]
            lines.append(
                f"{name_of(flash)} adds {small:.0f} MiB to its process, {name_of(standard)} {large:.0f}: {1 - small / large:.0%} less."
            )
    for flash, standard in (("flash_packed", "standard"), ("flash_optimised", "standard_best")):
        ratio = tq.memory_ratio(memory, flash, standard, "initialisation_peak", "peak_rss_bytes")
        if ratio:
            said = interval(ratio["value"], ratio["low"], ratio["high"])
            lines.append(
                f"Peak to the first token, {name_of(flash)} / {name_of(standard)}: {said} (published: 1.23)."
            )
    return lines


def _quality(quality: Result) -> list[str]:
    table, removed = tq.quality(quality), tq.removed(quality)
    lines = [
        f"{_first_upper(name_of(row.treatment))}: perplexity {row.value:.3f} times Standard's "
        f"({interval(row.value, row.low, row.high)}), KL {row.kl_nats:.3f} nats, same best token {row.top1:.0%}."
        for row in table.itertuples()
    ]
    for row in removed[removed["treatment"].isin(["awq", "awq_head16"])].itertuples():
        shown = "the difference excludes zero" if row.lower else "the difference does not exclude zero"
        head = "16 bits" if row.treatment.endswith("_head16") else "4 bits, which no search touches"
        lines.append(
            f"What the search bought, output head at {head}: AWQ removes **{row.value:.0%}** of round-to-nearest's extra loss "
            f"({interval(row.value, row.low, row.high)}); {shown}."
        )
    return lines


def _use(used: pd.DataFrame) -> list[str]:
    rows = used[(used["metric"] == "mbu") & (used["batch"] == 1)] if len(used) else used
    return [
        f"{name_of(row.treatment)} at batch 1 uses {row.value:.0%} of the measured bandwidth "
        f"({interval(row.value, row.low, row.high)})."
        for row in rows.itertuples()
    ]


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
