"""What a notebook found, as sentences computed from its numbers.

The one idea: a finding that is typed is wrong after the next measurement. Every sentence here is made from
an estimate, says its interval, and says so when nothing is shown. Each function returns Markdown lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from flashgap import limits, stats, tables
from flashgap.look import name_of, nice_bytes
from flashgap.notebook import compare, interval, number

if TYPE_CHECKING:
    from flashgap.results import Result


# --- 00_environment ------------------------------------------------------------------------------------


def environment(
    ceilings: Result, noise: Result, curve: pd.DataFrame, reference: Result, overheads_s: np.ndarray
) -> list[str]:
    """Can this machine measure? Ceilings, noise, reference check, overhead."""
    return [
        *_ceilings(tables.byte_ceilings(ceilings)),
        *_noise(noise, curve),
        *_reference(reference),
        *_overhead(overheads_s),
    ]


def _ceilings(data: pd.DataFrame) -> list[str]:
    read = data[data["access"] == "read"]
    if read.empty:
        return ["No ceiling is measured, so no time here has a bound."]
    small, large = read.iloc[0], read.iloc[-1]
    return [
        f"Reading {nice_bytes(small['working_set_bytes'])} again and again reaches {number(small['value'])} GB/s, "
        f"{nice_bytes(large['working_set_bytes'])} reaches {number(large['value'])} GB/s: a bound depends on how much is read."
    ]


def _noise(noise: Result, curve: pd.DataFrame) -> list[str]:
    a, _b, _slowed = tables.noise(noise)
    if curve.empty:
        return [f"{len(a)} complete block(s) of `noise`: too few to say what this machine can see."]
    most, least = curve.iloc[-1], curve.iloc[0]
    worst = curve.loc[curve["false_alarms"].idxmax()]
    alarm = "within" if worst["false_alarms"] <= tables.FALSE_ALARM_LIMIT else "**above**"
    lines = [
        f"Same treatment twice: at most {_percent(worst['false_alarms'])} false alarms "
        f"[{_percent(worst['false_alarms_low'])}, {_percent(worst['false_alarms_high'])}] at 95 % confidence over all the "
        f"block counts tried, from {len(a)} real blocks: {alarm} the limit of {_percent(tables.FALSE_ALARM_LIMIT)}."
    ]
    if len(a) < 20:
        lines.append(
            f"{len(a)} blocks are fewer than the 20 that such rates need; read them as a test of the lab only."
        )
    needed = curve.loc[curve["power"] >= tables.POWER_WANTED, "blocks"]
    if len(needed):
        found = curve.loc[curve["blocks"] == needed.iloc[0]].iloc[0]
        lines.append(
            f"The planted 5 % slowdown is found in {_percent(found['power'])} [{_percent(found['power_low'])}, "
            f"{_percent(found['power_high'])}] of cases with **{int(found['blocks'])} blocks**."
        )
    else:
        lines.append(
            f"**This machine is too noisy to find 5 % reliably**: {int(most['blocks'])} blocks find it in {_percent(most['power'])} of cases."
        )
    lines.append(
        f"The smallest slowdown that is found in {_percent(tables.POWER_WANTED)} of cases is **{_percent(least['detectable'], 1)} "
        f"with {int(least['blocks'])} blocks** and {_percent(most['detectable'], 1)} with {int(most['blocks'])}."
    )
    return lines + [f"{warning}." for warning in stats.noise_warnings(a, "Standard, time per token")]


def _reference(reference: Result) -> list[str]:
    table = tables.reference_check(reference)
    lines = [
        f"{r.call.capitalize()}: ours / reference is {interval(r.value, r.low, r.high, 4)}: {r.verdict}."
        for r in table.itertuples()
    ]
    equal = tables.facts(reference, "tokens_equal_generate")
    if equal:
        lines.append(
            f"Our greedy tokens equal those of `model.generate` in {sum(map(bool, equal))} of {len(equal)} processes."
        )
    return lines


def _overhead(overheads_s: np.ndarray) -> list[str]:
    if len(overheads_s) == 0:
        return []
    middle = float(np.median(overheads_s))
    word = "within" if middle <= tables.OVERHEAD_LIMIT_S else "**above**"
    return [
        f"A forked trial costs {middle:.2f} s beyond load, check and measurement (median of "
        f"{len(overheads_s)} trials): {word} the limit of {tables.OVERHEAD_LIMIT_S} s."
    ]


def observer(noise: Result) -> list[str]:
    """What reading the clock costs beside one decode step, as timed before each block."""
    readings = [block.header.provenance.get("clock_s") for block in noise.blocks]
    known = [seconds for seconds in readings if seconds is not None]
    groups = noise.groups("standard", "itl_s")
    if not known or not groups:
        return ["These records do not hold the cost of our own clock: they are older than its measurement."]
    clock_s, step = float(np.median(known)), stats.median_ci(groups).value
    share = f"{2 * clock_s / step:.4%}".replace("%", " %")
    return [
        f"Our clock takes {clock_s * 1e9:.0f} ns a reading (median of {len(known)} blocks), two readings a step: {share} "
        f"of a decode step of {number(step * 1e3)} ms."
    ]


def _percent(share: float, decimals: int = 0) -> str:
    return f"{100 * share:.{decimals}f} %"


# --- 01_baseline ---------------------------------------------------------------------------------------


def baseline(results: Mapping[str, Result], bounds: pd.DataFrame | None = None) -> list[str]:
    """Standard against Flash: task, latency, context, memory, batch, kernels."""
    summary = tables.summary(dict(results)).set_index("quantity")
    lines = [_compared(name, summary) for name in summary.index if name.startswith("time")]
    lines += [*_growth(results["context"]), *_two_speeds(results["context"])] if "context" in results else []
    if "long" in results and "context" in results:
        lines += long_check(tables.long_check(results["context"], results["long"]))
    lines += [_memory(name, summary) for name in summary.index if not name.startswith("time")]
    lines += _peaks(results["memory"]) if "memory" in results else []
    lines += _capacity(results["capacity"]) if "capacity" in results else []
    lines += _bounds(results["latency"], bounds) if bounds is not None and "latency" in results else []
    return lines


def _compared(name: str, summary: pd.DataFrame) -> str:
    row = summary.loc[name]
    blocks = int(row["blocks"])
    return (
        f"{name[0].upper()}{name[1:]}: Flash against Standard {compare(row)}: {number(row['flash'])} against "
        f"{number(row['standard'])} {row['unit']}, n = {blocks} block{'s' * (blocks != 1)}."
    )


def _memory(name: str, summary: pd.DataFrame) -> str:
    row = summary.loc[name]
    return (
        f"{name[0].upper()}{name[1:]}: Flash against Standard {compare(row, 'more', 'less')}: {number(row['flash'])} "
        f"against {number(row['standard'])} {row['unit']}."
    )


def _growth(context: Result) -> list[str]:
    lines = [
        f"{name_of(r.treatment)}: a token at {r.to:,} tokens of context takes {interval(r.value, r.low, r.high)} times one at {r._2:,}."
        for r in tables.growth(context).rename(columns={"from": "_2"}).itertuples()
    ]
    ratio = tables.ratios(context, "itl_s", "context_tokens")
    if len(ratio) > 1:
        short, long = ratio.iloc[0], ratio.iloc[-1]
        apart = long["low"] > short["high"] or long["high"] < short["low"]
        word = (
            ("widens" if long["value"] > short["value"] else "narrows") if apart else "is not shown to change"
        )
        lines.append(
            f"With context the gap **{word}**: Flash / Standard is {interval(short['value'], short['low'], short['high'])} at "
            f"{int(short['context_tokens']):,} tokens and {interval(long['value'], long['low'], long['high'])} at {int(long['context_tokens']):,}."
        )
    return lines


TWO_SPEEDS = 1.5  # steps of one length that differ by more are not noise about one speed


def _two_speeds(context: Result) -> list[str]:
    """Treatments whose steps of the same context, in the same process, differ far more than noise."""
    lines = []
    for name in tables.treatments(context):
        spread = {
            length: float(np.median([np.quantile(g, 0.9) / np.quantile(g, 0.1) for g in groups]))
            for length in tables.levels(context, "itl_s", "context_tokens")
            if (groups := context.groups(name, "itl_s", context_tokens=length))
        }
        length = max(spread, key=spread.__getitem__, default=0)
        if spread and spread[length] > TWO_SPEEDS:
            lines.append(
                f"{name_of(name)} has no one speed: at {length:,} tokens its slow steps (9th decile) take {spread[length]:.1f} "
                "times its quick ones (1st) within one process. A known cause, not tested here, is memory given back and "
                "asked for again at each step. Read its median at any single length with care."
            )
    return lines


def long_check(table: pd.DataFrame) -> list[str]:
    """Whether true generations agree with the prefilled caches."""
    if table.empty:
        return [
            "No true long generation is recorded here: run with `LONG=1` to check the prefilled caches against one."
        ]
    worst = table.loc[(np.log(table["ratio"])).abs().idxmax()]
    return [
        f"True generation over prefilled cache, time per token at the same context: {table['ratio'].min():.2f} to "
        f"{table['ratio'].max():.2f} over {len(table)} places (furthest: {name_of(worst['treatment'])} at {int(worst['context_tokens']):,} tokens)."
    ]


def _peaks(memory: Result) -> list[str]:
    counter = tables.main_counter(memory)
    if counter is None:
        return []
    lines = []
    for name in tables.treatments(memory):
        peak = tables.memory_groups(memory, name, "initialisation_peak", tables.peak_counter(counter))
        steady = tables.memory_groups(memory, name, "steady", counter)
        if peak and len(peak) == len(steady):
            r = stats.paired_ratio(list(zip(peak, steady, strict=True)))
            lines.append(
                f"{name_of(name)}: its peak up to the first token is {r.value:.2f} times its steady memory."
            )
    return lines


def _capacity(capacity: Result) -> list[str]:
    data = tables.capacity(capacity)
    budget = next(iter(tables.facts(capacity, "budget_bytes")), None)
    if data.empty or not budget:
        return []
    parts = [f"{name_of(r.treatment)} {r.largest_batch:.0f}" for r in data.itertuples()]
    capped = " (the search stops there)" if any(tables.facts(capacity, "capped")) else ""
    return [f"Largest batch in {nice_bytes(budget)}: {', '.join(parts)}{capped}."]


def _bounds(latency: Result, bounds: pd.DataFrame) -> list[str]:
    lines = []
    for name, part in bounds.groupby("treatment", sort=False):
        batch, bound = int(part["batch"].iloc[0]), float(part["itl_s"].iloc[0])
        groups = latency.groups(str(name), "itl_s", batch=batch)
        if groups:
            times = stats.median_ci(groups).value / bound
            lines.append(
                f"{name_of(str(name))} at batch {batch}: a token takes {times:.1f} times its bound of {bound * 1e3:.1f} ms "
                "(bytes of its stored weights and cache over measured bytes/s)."
            )
    return lines


def utilization(data: pd.DataFrame) -> Sequence[str]:
    """What is above 100 % of a ceiling, explained."""
    return limits.over_the_limit(data) or ["Nothing runs above its measured ceiling."]
