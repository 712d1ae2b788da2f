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
WITHIN, WORTH = 1.05, 1.3  # of Standard's perplexity, and of its speed at batch 1: a build to ship
DISPATCH_PRICE = 1.03


def quantization(results: Mapping[str, Result], used: pd.DataFrame) -> list[str]:
    """What the page has found, most important first; says what is not there."""
    lines = _decode(results["best"]) + _prefill(results["prefill"]) + _task(results["task"])
    lines += _copies(results["best"], results["prefill"])
    lines += _ship(results["bits"], results["quality"]) + _eager(results["latency"], results["eager"])
    lines += (
        _crossover(results["crossover"])
        + _memory(results["best_memory"])
        + _quality(results["quality"])
        + _use(used)
    )
    return lines or ["No experiment of this page has a complete block yet."]


def _said(row: pd.Series | Mapping[str, float]) -> str:
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


def _copies(*results: Result) -> list[str]:
    """Where many rows read a 16-bit copy, and from how many rows on in each phase."""
    table = tq.races(*results)
    table = table[table["treatment"] == "flash_optimised"]
    lines = []
    for phase, group in table.groupby("phase", sort=False):
        copied = group[group["copy"]]
        rows = ", ".join(
            f"{r.rows} ({r.packed_ms:.1f} ms packed, {r.copy_ms:.1f} on the copy)"
            for r in copied.itertuples()
        )
        lines.append(
            f"In {phase}, optimised Flash reads a 16-bit copy at {rows} rows."
            if rows
            else f"In {phase}, the packed kernels held against a 16-bit copy at every number of rows ({', '.join(map(str, group['rows']))})."
        )
    return lines


def _task(task: Result) -> list[str]:
    lines = []
    for standard, said in (
        ("standard_best", "both compiled: Standard's"),
        ("standard", "eager Standard's"),
        ("flash", "eager Flash's"),
    ):
        ratio = tq.task_ratio(task, standard, "flash_optimised")
        if ratio:
            lines.append(f"The task, {said} time over optimised Flash's: {_said(ratio)}.")
    return lines


def _ship(bits: Result, quality: Result) -> list[str]:
    """Which build holds quality and is still faster: the configurations of `bits` beside their quality."""
    qualities = tq.quality(quality).set_index("treatment")
    lines, good = [], []
    for compiled, build in tq.COMPILED.items():
        table = tq.speedups(bits, "standard_best", compiled)
        if table.empty or build not in qualities.index:
            continue
        speed, cost = table.iloc[0], qualities.loc[build]
        lines.append(
            f"{_first_upper(name_of(build))}: {speed['value']:.2f} times Standard's decode speed at batch {int(speed['batch'])} "
            f"({_said(speed)}), both compiled, at {cost['value']:.3f} times its perplexity ({_said(cost)})."
        )
        if cost["high"] <= WITHIN and speed["low"] >= WORTH:
            good.append(name_of(build))
    if lines:
        lines.append(
            f"Within {WITHIN - 1:.0%} of Standard's perplexity and at least {WORTH} times as fast at batch 1, by both intervals: "
            f"**{', '.join(good) or 'none of them'}**."
        )
    return lines


def _crossover(result: Result) -> list[str]:
    table = tq.crossover(result)
    if table.empty:
        return []
    lines = []
    for row in tq.boundaries(table[table["treatment"] == "flash_packed"]).itertuples():
        low = "no number of rows" if pd.isna(row.faster_to) else f"{int(row.faster_to)} rows"
        high = "none that was tried" if pd.isna(row.slower_from) else f"{int(row.slower_from)}"
        lines.append(
            f"Eager, {row.bits} bits, {row.features_in} to {row.features_out} features: packed is shown faster than dense up to {low}, "
            f"slower from {high} on."
        )
    worst = table.loc[table["over"].idxmax()]
    shown = (table["over_low"] > DISPATCH_PRICE).sum()
    return [
        *lines,
        f"As dispatched over the faster of its two ways: median {table['over'].median():.3f}, worst "
        f"{interval(worst['over'], worst['over_low'], worst['over_high'])} at {int(worst['rows'])} rows; shown above "
        f"{DISPATCH_PRICE} in {shown} of {len(table)} cells.",
    ]


def _eager(latency: Result, eager: Result) -> list[str]:
    lines = []
    for result, flash in ((latency, "flash"), (eager, "flash_packed")):
        table = tq.speedups(result, "standard", flash)
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
        ("flash_small", "standard_best"),
        ("flash_optimised", "standard_best"),
    ):
        if {flash, standard} <= set(held.index) and "above start" in held:
            small, large = held.loc[flash, "above start"], held.loc[standard, "above start"]
            lines.append(
                f"{name_of(flash)} adds {small:.0f} MiB to its process, {name_of(standard)} {large:.0f}: {1 - small / large:.0%} less."
            )
    for flash, standard in (
        ("flash_packed", "standard"),
        ("flash_small", "standard_best"),
        ("flash_optimised", "standard_best"),
    ):
        ratio = tq.memory_ratio(memory, flash, standard, "initialisation_peak", "peak_rss_bytes")
        if ratio:
            lines.append(
                f"Peak to the first token, {name_of(flash)} / {name_of(standard)}: {_said(ratio)} (published: 1.23)."
            )
    return lines


def _quality(quality: Result) -> list[str]:
    table, removed = tq.quality(quality), tq.removed(quality)
    lines = [
        f"{_first_upper(name_of(row.treatment))}: perplexity {row.value:.3f} times Standard's "
        f"({interval(row.value, row.low, row.high)}), KL {row.kl_nats:.3f} nats, same best token {row.top1:.0%}."
        for row in table.itertuples()
    ]
    for row in removed.itertuples():
        shown = "the difference excludes zero" if row.lower else "the difference does not exclude zero"
        lines.append(
            f"What the search bought: {name_of(row.treatment)} removes **{row.value:.0%}** of the extra loss of "
            f"{name_of(row.floor)} ({interval(row.value, row.low, row.high)}); {shown}."
        )
    written = tq.generation(quality)
    looping = [
        f"{name_of(w.treatment)} ({w.loops} of {w.prompts} prompts)" for w in written.itertuples() if w.loops
    ]
    if len(written):
        lines.append(
            f"Writing greedily on their own, in a loop where Standard is not: {', '.join(looping) or 'no build'}."
        )
    marked = table[table["rounding"] < tq.ON_GRID]["treatment"]
    known = table["rounding"].notna().sum()
    if known:
        lines.append(
            f"On the grid of the file that the weights came out of (they do not count): {', '.join(map(name_of, marked)) or 'none'} of the "
            f"{known} builds whose rounding is known."
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
