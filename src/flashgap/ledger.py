"""From records to verdicts: each claim beside what was measured on this machine.

The one idea: a verdict follows from an interval, never from a point. The published direction is
*established* when the interval of the measured ratio excludes 1 on that side, *contradicted* when it
excludes 1 on the other, and the published size is *reproduced* when the interval also meets the named
tolerance band around it. Too few blocks give no verdict at all. Nothing here measures anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pandas as pd

from flashgap.claims import (
    Claim,
    Claims,
    Measure,
    Operand,
    Verdict,
    arithmetic_verdict,
    check_arithmetic,
    evaluate,
    load_claims,
)
from flashgap.stats import Estimate, median_ci, paired_ratio
from flashgap.study import Study

Band = tuple[float, float]
Results = Mapping[str, Any]  # experiment -> flashgap.records.Result

RATIO_COLUMNS = ["id", "what", "experiment", "published", "band_low", "band_high"]
RATIO_COLUMNS += ["value", "low", "high", "blocks", "verdict"]

VERDICTS: tuple[str, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Measured:
    """One measure of one claim: its estimate against the published ratio, and the verdict of that alone."""

    claim: Claim
    measure: Measure
    expected: float | None
    band: Band | None
    estimate: Estimate | None
    verdict: Verdict | None
    why: str


def ledger(study: Study, results: Results, claims: Claims | None = None) -> pd.DataFrame:
    """One row for each claim, in the published order.

    Columns: `id, area, claim, published, arithmetic, measured, verdict, why`. `arithmetic` is the verdict
    on the printed figures (`consistent`, `inconsistent as published`, or empty where there is nothing to
    check), `verdict` the one on the measurement; `why` gives the numbers behind both.
    """
    claims = claims or load_claims()
    checks = check_arithmetic(claims)
    measured = measure_all(study, results, claims)
    rows = []
    for claim in claims.claims:
        arithmetic, sentences = arithmetic_verdict(claim, checks)
        mine = [m for m in measured if m.claim.id == claim.id]
        word, why = claim_verdict(claim, mine, missing_hardware(claim, study, results))
        figures = "; ".join(f"{m.measure.what}: {show(m.estimate, m.measure)}" for m in mine if m.estimate)
        rows.append(
            {
                "id": claim.id,
                "area": claim.area,
                "claim": claim.text,
                "published": claim.published,
                "arithmetic": arithmetic,
                "measured": figures,
                "verdict": word,
                "why": "; ".join(part for part in (sentences, why) if part),
            }
        )
    return pd.DataFrame(rows)


def ratios(study: Study, results: Results, claims: Claims | None = None) -> pd.DataFrame:
    """One row for each measured ratio of two builds, for the ledger's figure.

    Columns: `id, what, experiment, published, band_low, band_high, value, low, high, blocks, verdict`;
    ratios are dimensionless, NaN where there is none (a published figure in words, a single block).
    """
    rows = []
    for m in measure_all(study, results, claims or load_claims()):
        under = m.measure.denominator
        if m.estimate is None or under is None or under.treatment == m.measure.numerator.treatment:
            continue
        low, high = m.band or (math.nan, math.nan)
        known = m.estimate.known
        rows.append(
            {
                "id": m.claim.id,
                "what": m.measure.what.removesuffix(", Flash / Standard"),
                "experiment": m.measure.experiment,
                "published": math.nan if m.expected is None else m.expected,
                "band_low": low,
                "band_high": high,
                "value": m.estimate.value,
                "low": m.estimate.low if known else math.nan,
                "high": m.estimate.high if known else math.nan,
                "blocks": m.estimate.n_blocks,
                "verdict": m.verdict or "",
            }
        )
    return pd.DataFrame(rows, columns=RATIO_COLUMNS)


def findings(table: pd.DataFrame, claims: Claims | None = None) -> str:
    """What the ledger says, as Markdown: counts and claim ids by verdict, computed from its rows."""
    claims = claims or load_claims()
    wrong = table.loc[table["arithmetic"] == "inconsistent as published", "id"]
    lines = [f"- **Inconsistent as published**: {len(wrong)} of {len(table)} claims ({listed(wrong)})."]
    for verdict in ("reproduced", "not reproduced", "contradicted", "not measurable here"):
        ids = table.loc[table["verdict"] == verdict, "id"]
        lines.append(f"- **{verdict.capitalize()}**: {len(ids)} ({listed(ids)}).")
    waiting = table.loc[table["verdict"] == "not yet measured", "id"]
    by_notebook = waiting.groupby([claims[i].notebook for i in waiting]).apply(listed)
    where = "; ".join(f"{ids} in `{notebook}`" for notebook, ids in by_notebook.items())
    lines.append(f"- **Not yet measured**: {len(waiting)} ({where or 'none'}).")
    judged = table[table["verdict"].isin(["reproduced", "not reproduced", "contradicted"])]
    for row in judged.itertuples():
        lines.append(f"- {row.id}, {row.claim} ({row.published}): {row.measured}. **{row.verdict}**.")
    return "\n".join([*lines, "", f"*{claims.flash_here}.*"])


def beside(table: pd.DataFrame, reference: pd.DataFrame) -> pd.DataFrame:
    """Claims with something measured in either ledger: figures and verdict here and in the reference records."""
    pair = table.merge(reference, on="id", suffixes=("_here", "_reference"))
    measured = (pair["measured_here"] != "") | (pair["measured_reference"] != "")
    columns = ["id", "measured_here", "verdict_here", "measured_reference", "verdict_reference"]
    return pair.loc[measured, columns].rename(columns=lambda name: name.replace("_", " "))


def tolerance_table(claims: Claims | None = None) -> pd.DataFrame:
    """How close is close enough: one row for each named tolerance, with the claims that use it and why."""
    claims = claims or load_claims()
    rows = []
    for name, tolerance in claims.tolerances.items():
        users = [claim.id for claim in claims.claims if any(m.tolerance == name for m in claim.measures)]
        size = f"a ratio of {tolerance.low} to {tolerance.high}"
        if tolerance.relative is not None:
            size = f"within {tolerance.relative:.0%} of the published ratio"
        rows.append(
            {"tolerance": name, "claims": ", ".join(users), "counts as agreement": size, "why": tolerance.why}
        )
    return pd.DataFrame(rows)


def listed(ids: pd.Series) -> str:
    """Claim ids in a row, or `none`."""
    return ", ".join(ids) or "none"


# --- verdicts ------------------------------------------------------------------------------------------


def judge(estimate: Estimate, direction: str, band: Band | None = None) -> tuple[Verdict, str]:
    """The verdict on a measured ratio against a published direction and, if given, size.

    `direction`: `higher` or `lower` than 1. `band`: the ratios that count as the published size.
    `contradicted` if the interval excludes 1 on the other side; `reproduced` if it excludes 1 on the
    published side, meets the band and is no wider than it; otherwise `not reproduced`, and why.
    """
    above, below = estimate.low > 1, estimate.high < 1
    agrees, opposes = (above, below) if direction == "higher" else (below, above)
    if opposes:
        return "contradicted", f"the interval lies on the other side of 1 (published: {direction})"
    if not agrees:
        return "not reproduced", "the interval includes 1, so no difference is shown"
    if band is None:
        return "reproduced", "same direction; no size is published"
    low, high = band
    if estimate.high < low or estimate.low > high:
        return "not reproduced", f"same direction, another size: {low:.2f} to {high:.2f} would have counted"
    if estimate.high - estimate.low > high - low:
        return "not reproduced", f"same direction, too uncertain to compare with {low:.2f} to {high:.2f}"
    return "reproduced", f"same direction, and the interval meets {low:.2f} to {high:.2f}"


def claim_verdict(claim: Claim, measured: Sequence[Measured], missing: str = "") -> tuple[Verdict, str]:
    """The verdict on a claim from those on its measures: all must reproduce it, one can contradict it."""
    if claim.not_measurable or missing:
        return "not measurable here", claim.not_measurable or missing
    judged = [m for m in measured if not m.measure.beside]
    verdicts = {m.verdict for m in judged}
    why = "; ".join(f"{m.measure.what}: {m.why}" if len(judged) > 1 else m.why for m in judged)
    if not judged:
        return "not yet measured", f"to be measured in notebook {claim.notebook}"
    if "contradicted" in verdicts:
        return "contradicted", why
    if "not yet measured" in verdicts:
        return "not yet measured", f"{why}; to be measured in notebook {claim.notebook}"
    return ("reproduced" if verdicts == {"reproduced"} else "not reproduced"), why


def missing_hardware(claim: Claim, study: Study, results: Results) -> str:
    """Why this machine cannot measure the claim; empty if it can, or if the machine is not known."""
    if claim.needs is None:
        return ""
    names = gpu_names(results)
    if names is None and study.hardware.device != "cpu":
        return ""
    names, wanted = names or [], claim.needs.gpu_names
    fitting = [name for name in names if not wanted or any(part in name for part in wanted)]
    if len(fitting) >= claim.needs.gpus:
        return ""
    return f"{claim.needs.why}; this machine has {', '.join(names) if names else 'no GPU'}"


def gpu_names(results: Results) -> list[str] | None:
    """The GPUs of the machine that measured, by name; None if no result knows its machine."""
    machines = [result.machine for result in results.values() if getattr(result, "machine", None)]
    if not machines:
        return None
    gpus = machines[0].get("gpus") or []
    return [str(gpu.get("name", gpu)) if isinstance(gpu, dict) else str(gpu) for gpu in gpus]


# --- estimates from records ----------------------------------------------------------------------------


def measure_all(study: Study, results: Results, claims: Claims) -> list[Measured]:
    """Every measure of every claim, with its estimate where there are records."""
    return [assess(c, measure, study, results, claims) for c in claims.claims for measure in c.measures]


def assess(claim: Claim, measure: Measure, study: Study, results: Results, claims: Claims) -> Measured:
    """One measure: estimate it from the records and judge it."""
    expected = float(evaluate(measure.expected, claims.figures)) if measure.expected else None
    band = claims.tolerances[measure.tolerance].band(expected) if measure.tolerance else None
    found = results.get(measure.experiment)
    if found is None:
        why = f"no records of {measure.experiment}"
        return Measured(claim, measure, expected, band, None, "not yet measured", why)
    estimate, why = estimate_measure(found, measure, study)
    if estimate is None:
        return Measured(claim, measure, expected, band, None, "not yet measured", why)
    if measure.beside or measure.denominator is None or measure.direction is None:
        return Measured(claim, measure, expected, band, estimate, None, why)
    needed = 1 if measure.count else claims.minimum_blocks
    if estimate.n_blocks < needed:
        why = f"{estimate.n_blocks} of the {needed} blocks that a verdict needs"
        return Measured(claim, measure, expected, band, estimate, "not yet measured", why)
    verdict, why = judge(estimate, measure.direction, band)
    return Measured(claim, measure, expected, band, estimate, verdict, why)


def estimate_measure(result: Any, measure: Measure, study: Study) -> tuple[Estimate | None, str]:
    """The estimate of one measure from its experiment's blocks, or None and the reason."""
    operands = [measure.numerator, measure.denominator, *(measure.relative_to or ())]
    operands = [operand for operand in operands if operand]
    device = study.hardware.device
    blocks = [[block_samples(block, operand, device) for operand in operands] for block in result.blocks]
    usable = [samples for samples in blocks if all(s.size for s in samples)]
    if not usable:
        return None, why_empty(result, measure)
    if measure.denominator is None:
        return median_ci([samples[0] for samples in usable]), ""
    if measure.count:
        most = getattr(study.experiments[measure.experiment].workload, "max_batch", math.inf)
        if all(s.max() >= most for samples in usable for s in samples):
            return (
                None,
                f"both builds reach the largest batch tried, {most}: raise max_batch or lower the budget",
            )
        return count_ratio([(s[0], s[1]) for s in usable], most), ""
    if measure.relative_to:
        medians = [[np.array([np.median(s)]) for s in samples] for samples in usable]
        return paired_ratio([(a / b, c / d) for a, b, c, d in medians]), ""
    return paired_ratio([(s[0], s[1]) for s in usable]), ""


def block_samples(block: Any, operand: Operand, device: str) -> np.ndarray:
    """What `operand` asks for in one block; empty if its trial is missing, failed or did not observe it."""
    trial = block.trials.get(operand.treatment)
    if not block.complete or trial is None or trial.status != "ok":
        return np.array([])
    if operand.build:
        return positive(trial.build.get(operand.build))
    if operand.phase and operand.counters:
        return positive(trial.memory.get(operand.phase, {}).get(operand.counters.get(device, "")))
    rows = block.observations
    rows = rows[(rows["trial"] == operand.treatment) & (rows["metric"] == operand.metric)]
    if operand.from_context_tokens:
        rows = rows[rows["context_tokens"] >= operand.from_context_tokens]
    if operand.shortest_context:
        rows = rows[rows["context_tokens"] == rows["context_tokens"].min()]
    values = rows["value"].to_numpy(dtype=float)
    return np.array([values.max()]) if operand.reduce == "max" and values.size else values


def positive(value: Any) -> np.ndarray:
    """A count of bytes as a sample of one; empty if there is none (a counter this machine lacks)."""
    return np.array([float(value)]) if value else np.array([])


def count_ratio(pairs: Sequence[tuple[np.ndarray, np.ndarray]], most: float = math.inf) -> Estimate:
    """Ratio of two largest counts (both fit, one more of either does not; `most` was the largest tried).

    A largest whole count c stands for a true capacity in [c, c + 1), or from c on if c is `most`, so the
    ratio of f to s lies between f / (s + 1) and (f + 1) / s, over the extremes of all blocks. Not a
    confidence interval: a bound.
    """
    f, s = np.array([a.max() for a, _ in pairs]), np.array([b.max() for _, b in pairs])
    f_top, s_top = (math.inf if counts.max() >= most else float(counts.max() + 1) for counts in (f, s))
    value = float(np.median(f) / np.median(s)) if np.median(s) else math.inf
    low, high = float(f.min()) / s_top, f_top / float(s.min()) if s.min() else math.inf
    return Estimate(value, low, high, 1.0, len(pairs), 2 * len(pairs), "bounds of two counts")


def why_empty(result: Any, measure: Measure) -> str:
    """Why an experiment's records hold nothing for a measure."""
    wanted = [o.treatment for o in (measure.numerator, measure.denominator) if o]
    trials = [trial for block in result.blocks for name, trial in block.trials.items() if name in wanted]
    failed = sorted({trial.status for trial in trials} - {"ok"})
    if failed:
        return f"trials of {measure.experiment} ended as {', '.join(failed)}"
    if measure.numerator.from_context_tokens and trials:
        return f"{measure.experiment} stays below {measure.numerator.from_context_tokens:,} tokens here"
    return f"no complete block of {measure.experiment}"


def show(estimate: Estimate, measure: Measure) -> str:
    """An estimate as text, to three significant digits, with its unit and number of blocks."""
    value = abs(estimate.value)
    decimals = 2 - math.floor(math.log10(value)) if 0 < value < math.inf else 2
    blocks = f", {estimate.n_blocks} block{'s' * (estimate.n_blocks != 1)}" if estimate.known else ""
    return f"{format(estimate, f'.{max(0, decimals)}f')} {measure.unit}{blocks}"
