"""What every notebook shows around its own question: banner, tables, findings, provenance.

The one idea: a page says by itself where its numbers come from and what went wrong, so that a reader of
the HTML alone is not misled. `lint` checks that the notebooks follow the template.
"""

from __future__ import annotations

import html
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from flashgap import render
from flashgap.look import machine_name, nice_bytes
from flashgap.notebook_lint import lint
from flashgap.stats import Estimate
from flashgap.study import Study

if TYPE_CHECKING:
    from IPython.display import HTML, Markdown

    from flashgap.results import Result

__all__ = [
    "banner",
    "compare",
    "failures",
    "lint",
    "nice_bytes",
    "provenance",
    "reference",
    "show",
]

Results = Mapping[str, "Result"]

# A library's progress bar misses the widgets that these pages do without on purpose.
warnings.filterwarnings("ignore", message="IProgress not found")


def is_replay() -> bool:
    """Whether this page is made from committed records only."""
    return os.environ.get("FLASHGAP_REPLAY") == "1"


def banner(study: Study, results: Results) -> Markdown:
    """Who measured what, where: replay or not, random weights, unusable records, why old blocks were not used."""
    from IPython.display import Markdown

    used = [result for result in results.values() if result.blocks]
    machines = (
        ", ".join(dict.fromkeys(machine_name(result.machine) for result in used))
        or "no machine: nothing is measured yet"
    )
    lines = [f"**Profile `{study.profile}`**: {study.description}. **Measured on** {machines}."]
    if is_replay():
        lines = [f"**Replayed from committed records. Nothing was measured for this page.** {lines[0]}"]
    elif any(result.source == "reference" for result in used):
        names = ", ".join(f"`{n}`" for n, r in results.items() if r.source == "reference" and r.blocks)
        lines.append(f"{names}: reference records, not measured here.")
    if mark := render.watermark(study):
        lines.append(f"**{mark.capitalize()}.**")
    notes = [(n, text) for n, r in results.items() for text in [*r.problems, *r.notes]]
    lines += [f"- `{name}`: {text}" for name, text in dict.fromkeys(notes)]
    empty = [f"`{n}` ({r.stop_reason})" for n, r in results.items() if not r.blocks]
    lines += [f"No records of {', '.join(empty)}."] if empty else []
    return Markdown("\n\n".join(f"> {line}" if not line.startswith("- ") else line for line in lines))


def failures(results: Results) -> HTML | Markdown:
    """Trials that did not end `ok`, as a table; a sentence if there is none."""
    from IPython.display import Markdown

    tables = [
        result.failures.assign(experiment=name) for name, result in results.items() if len(result.failures)
    ]
    if not tables:
        trials = sum(len(block.trials) for result in results.values() for block in result.blocks)
        return Markdown(f"All {trials} trials ended `ok`.")
    return show(pd.concat(tables)[["experiment", "block", "trial", "status", "error"]])


def provenance(results: Results) -> pd.DataFrame:
    """One row an experiment: blocks, source, when, commit, machine, versions, why sampling stopped."""
    rows = [_provenance_row(name, result) for name, result in results.items()]
    return pd.DataFrame(rows)


def _provenance_row(name: str, result: Result) -> dict[str, Any]:
    frame = result.provenance_frame()
    if frame.empty:
        return {
            "experiment": name,
            "blocks": 0,
            "source": result.source,
            "stopped because": result.stop_reason,
        }

    def different(column: str) -> str:
        return ", ".join(
            dict.fromkeys(str(v) for v in frame.get(column, pd.Series(dtype=object)) if v not in (None, ""))
        )

    return {
        "experiment": name,
        "blocks": len(frame),
        "source": result.source,
        "stopped because": result.stop_reason,
        "first start (UTC)": min(frame["started_utc"])[:16].replace("T", " "),
        "last start (UTC)": max(frame["started_utc"])[:16].replace("T", " "),
        "commit": different("commit"),
        "machine": ", ".join(
            dict.fromkeys(machine_name(b.header.provenance.get("fingerprint") or {}) for b in result.blocks)
        ),
        "cores used": different("usable_cores"),
        "python": different("python"),
        "torch": different("torch"),
        "transformers": different("transformers"),
        "model": different("models"),
    }


def reference(study: Study, names: Iterable[str]) -> dict[str, Result]:
    """Committed results of the same experiments, to show beside local ones; empty in replay or without any."""
    from flashgap import runner

    found: dict[str, Result] = {}
    for name in [] if is_replay() else names:
        try:
            found[name] = runner.replay(study, name)
        except runner.ReplayError:
            continue
    return {name: result for name, result in found.items() if result.blocks}


def show(
    table: pd.DataFrame,
    digits: int = 3,
    with_interval: str = "median [95 % interval]",
    percents: Sequence[str] = (),
    **names: str,
) -> HTML:
    """A table as HTML; numbers to `digits` significant digits, `names` renames columns.

    Columns value, low and high become one, called `with_interval`: `2.09 [2.03, 2.15]`. `percents` are
    columns of shares, shown in per cent.
    """
    from IPython.display import HTML

    shown = table.copy()
    if {"value", "low", "high"} <= set(shown.columns):
        shown["value"] = [interval(r.value, r.low, r.high, digits) for r in table.itertuples()]
        shown = shown.drop(columns=["low", "high"]).rename(columns={"value": with_interval})
    for column in percents:
        shown[column] = [f"{100 * value:.1f} %" if np.isfinite(value) else "" for value in shown[column]]
    shown = shown.rename(columns=names)
    shown.columns.name = None
    for column in shown.columns:
        shown[column] = [_cell(value, digits) for value in shown[column]]
    return HTML(shown.to_html(index=False, escape=False, border=0))


USELESS = 100.0  # an interval whose ends differ by such a factor says nothing


def interval(value: float, low: float, high: float, digits: int = 3) -> str:
    """`2.09 [2.03, 2.15]`; says so where one block gives no interval, or few and noisy ones no useful one."""
    if not (np.isfinite(low) and np.isfinite(high)):
        return f"{number(value, digits)} [no interval]"
    if low > 0 and high / low > USELESS:
        return f"{number(value, digits)} [too few or too noisy blocks]"
    return f"{number(value, digits)} [{number(low, digits)}, {number(high, digits)}]"


def number(value: float, digits: int = 3) -> str:
    """`value` to `digits` significant digits, never in powers of ten between 1e-4 and 1e9."""
    if value == 0 or not np.isfinite(value):
        return f"{value:g}"
    size = int(np.floor(np.log10(abs(value))))
    return f"{value:,.{max(0, digits - 1 - size)}f}" if -5 < size < 9 else f"{value:.{digits - 1}e}"


def _cell(value: Any, digits: int) -> str:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else number(float(value), digits)
    return "" if value is None else html.escape(str(value))


def compare(ratio: Estimate | Any, more: str = "slower", less: str = "faster") -> str:
    """A paired ratio of something of which less is better, in words with its interval.

    `3.0 times as long (ratio ...)`, `11 % less (...)`, or that no difference is shown. Never "times slower",
    which may mean one time more.
    """
    bounds = f"[{ratio.low:.2f}, {ratio.high:.2f}]"
    if not (np.isfinite(ratio.low) and np.isfinite(ratio.high)):
        return f"{_amount(ratio.value, more, less)} (ratio {ratio.value:.2f}, one block, so no interval)"
    if ratio.low <= 0 or ratio.high / ratio.low > USELESS:
        return f"not shown to differ (ratio {ratio.value:.2f}, too few or too noisy blocks)"
    if ratio.low <= 1 <= ratio.high:
        return f"not shown to differ (ratio {ratio.value:.2f} {bounds})"
    return f"{_amount(ratio.value, more, less)} (ratio {ratio.value:.2f} {bounds})"


def _amount(ratio: float, more: str, less: str) -> str:
    """2.09 -> `2.1 times as long`; 1.12 -> `12 % slower`; 0.8 -> `20 % faster`."""
    if ratio >= 1.95:
        return f"**{ratio:.1f} times as {'long' if more == 'slower' else 'much'}**"
    return f"**{abs(ratio - 1):.0%} {more if ratio >= 1 else less}**".replace("%", " %")


def bullets(lines: Sequence[str]) -> Markdown:
    """Findings as a list."""
    from IPython.display import Markdown

    return Markdown("\n".join(f"- {line}" for line in lines))


def machine_warnings(results: Results) -> Markdown:
    """What may have spoiled these measurements, from the machine's state stored with each block, worst case."""
    from IPython.display import Markdown

    from flashgap import hardware

    blocks = [block for result in results.values() for block in result.blocks]
    if not blocks:
        return Markdown("Nothing is measured yet.")
    ceilings = results["ceilings"].frame().to_dict("records") if "ceilings" in results else None
    state = worst_state([block.header.provenance.get("machine_state") or {} for block in blocks])
    found = hardware.warnings_in_plain_words(
        state, blocks[-1].header.provenance.get("fingerprint") or {}, ceilings
    )
    return bullets([text[0].upper() + text[1:] + "." for text in found] or ["Nothing suspicious was seen."])


WORST_IS_HIGH = ("load_1m", "busy_percent", "steal_percent", "temperature_c", "swap_used_gib")
WORST_IS_LOW = ("free_memory_gib", "usable_cores", "cpu_quota_cores")


def worst_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One `hardware.machine_state` of several: the worst of each number, the last of everything else."""
    worst: dict[str, Any] = dict(states[-1]) if states else {}
    for names, choose in ((WORST_IS_HIGH, max), (WORST_IS_LOW, min)):
        for name in names:
            values = [state[name] for state in states if state.get(name) is not None]
            if values:
                worst[name] = choose(values)
    return worst


def quality_note(study: Study, results: Results) -> Markdown:
    """What the quality figures compare: they are deltas of a re-quantisation if the weights were quantised before."""
    from IPython.display import Markdown

    models = [t.model for r in results.values() for b in r.blocks for t in b.trials.values() if t.model]
    if study.model.source == "random":
        return Markdown(
            "**Random weights:** these figures test the gate; they say nothing about a model's quality."
        )
    if any(model.get("requantized") for model in models):
        return Markdown(
            "**Deltas of a re-quantisation.** The embedded model's weights were quantised once before we got them, so Flash "
            "against Standard here is a second quantisation on top of the first, not a loss against the original weights."
        )
    return Markdown("Flash against Standard on held-out text, the same tokens for both.")


def side_by_side(ours: pd.DataFrame, theirs: pd.DataFrame) -> HTML:
    """Two `tables.summary`, here and reference, with their intervals."""
    from flashgap import tables

    both = tables.side_by_side(ours, theirs)
    for where in ("here", "reference"):
        columns = [both[f"{name}_{where}"] for name in ("value", "low", "high")]
        both[where] = [interval(*row) for row in zip(*columns, strict=True)]
    shown = both[["quantity", "here", "blocks_here", "reference", "blocks_reference", "intervals_overlap"]]
    return show(shown.rename(columns=lambda name: name.replace("_", " ")))
