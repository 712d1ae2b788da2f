"""The claims ledger: every figure of the published study, its arithmetic, what we measured, a verdict.

The one idea: a claim is *data* (`params/claims.yaml`), and a verdict is computed from it twice over. The
arithmetic verdict needs only the printed figures: do they follow from each other? The measured verdict
compares a ratio measured here, with its interval, with the published ratio and a named tolerance. A
claim can carry both, and a published figure never stands in for a measured one.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from flashgap.study import StudyError, describe, params_dir
from flashgap.treatment import Frozen

Verdict = Literal[
    "reproduced",
    "not reproduced",
    "contradicted",
    "inconsistent as published",
    "not measurable here",
    "not yet measured",
]
Relation = Literal["rounds to", "equals", "at least", "at most", "more than"]
Number = float | str


class Figure(Frozen):
    """A figure as printed. `exact`: a count or a name, not a rounded quantity."""

    value: float | int | str
    unit: str
    exact: bool = False

    @property
    def half_digit(self) -> float:
        """Half a unit of the last printed digit: how far rounding may have moved the figure."""
        if self.exact or isinstance(self.value, str):
            return 0.0
        return 0.5 * 10.0 ** int(Decimal(repr(self.value)).as_tuple().exponent)


class Tolerance(Frozen):
    """How close is close enough, and why: `relative` to the expected ratio, or a band `low`..`high`."""

    why: str
    relative: PositiveFloat | None = None
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Tolerance:
        if (self.relative is None) == (self.low is None or self.high is None):
            raise ValueError("give either 'relative' or both 'low' and 'high'")
        return self

    def band(self, expected: float | None) -> tuple[float, float]:
        """The ratios that count as agreement; `relative` is symmetric on the log scale."""
        if self.relative is None:
            return float(self.low or 0.0), float(self.high or math.inf)
        if expected is None:
            raise ValueError("a relative tolerance needs an expected ratio")
        return expected / (1 + self.relative), expected * (1 + self.relative)


class Operand(Frozen):
    """One side of a ratio: observations of `metric`, a memory `phase`, or a fact of the `build`.

    `reduce: max` takes the largest value of a block (the slowest replica decides a task's time).
    `counters` names the memory counter by device; the device's own counter is used.
    """

    treatment: str
    metric: str | None = None
    reduce: Literal["max"] | None = None
    from_context_tokens: PositiveInt | None = None
    shortest_context: bool = False
    phase: str | None = None
    counters: dict[str, str] | None = None
    build: Literal["resident_bytes"] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Operand:
        if sum(source is not None for source in (self.metric, self.phase, self.build)) != 1:
            raise ValueError("give exactly one of 'metric', 'phase' and 'build'")
        if (self.phase is None) != (self.counters is None):
            raise ValueError("'phase' and 'counters' go together")
        return self


class Measure(Frozen):
    """What is measured here for a claim: numerator / denominator in one experiment.

    Without `denominator` it is a plain value. `relative_to` divides by a second ratio of the same
    blocks. `count`: both are whole numbers, known to within one, of which one block is enough.
    `beside`: shown, not judged.
    """

    what: str
    experiment: str
    unit: str = "x"
    numerator: Operand
    denominator: Operand | None = None
    relative_to: tuple[Operand, Operand] | None = None
    count: bool = False
    expected: str | None = None
    direction: Literal["higher", "lower"] | None = None
    tolerance: str | None = None
    beside: bool = False

    @model_validator(mode="after")
    def _judgeable(self) -> Measure:
        if self.denominator and not self.beside and self.direction is None:
            raise ValueError(f"'{self.what}': give 'direction', or 'beside: true' if it is only shown")
        return self


class Needs(Frozen):
    """Hardware without which a claim cannot be measured."""

    why: str
    gpus: PositiveInt = 1
    gpu_names: tuple[str, ...] = ()


class Remark(Frozen):
    """Something to say about a claim that is not arithmetic; `inconsistent` counts against it."""

    text: str
    inconsistent: bool = False


class Claim(Frozen):
    """One claim of the published study, in our words. `notebook` is the one that measures it."""

    id: str
    area: str
    text: str
    published: str
    figures: dict[str, Figure] = Field(default={})
    notebook: str
    not_measurable: str | None = None
    needs: Needs | None = None
    measures: tuple[Measure, ...] = ()
    remarks: tuple[Remark, ...] = ()


class Check(Frozen):
    """`left relation right` over printed figures; `text` says it with the numbers filled in."""

    claims: tuple[str, ...] = Field(min_length=1)
    left: str
    relation: Relation
    right: str
    show: dict[str, str] = Field(default={})
    text: str


class Claims(Frozen):
    """The whole of `params/claims.yaml`."""

    source: str
    flash_here: str
    minimum_blocks: PositiveInt
    facts: dict[str, Figure]
    tolerances: dict[str, Tolerance]
    claims: tuple[Claim, ...]
    checks: tuple[Check, ...]

    @model_validator(mode="after")
    def _names_resolve(self) -> Claims:
        ids = [claim.id for claim in self.claims]
        if len(set(ids)) != len(ids):
            raise ValueError(f"claims: an id is used twice in {ids}")
        for i, check in enumerate(self.checks):
            if unknown := set(check.claims) - set(ids):
                raise ValueError(f"checks.{i}.claims: {sorted(unknown)} are not claims")
            run_check(check, self)
        for claim in self.claims:
            for measure in claim.measures:
                if measure.tolerance and measure.tolerance not in self.tolerances:
                    raise ValueError(
                        f"{claim.id}: tolerance '{measure.tolerance}': not one of {[*self.tolerances]}"
                    )
                if measure.expected:
                    evaluate(measure.expected, self.figures)
        return self

    @property
    def figures(self) -> dict[str, Figure]:
        """Every printed figure by the name that expressions use, `ID.figure`."""
        own = {f"{c.id}.{name}": figure for c in self.claims for name, figure in c.figures.items()}
        return own | {f"facts.{name}": figure for name, figure in self.facts.items()}

    def __getitem__(self, claim_id: str) -> Claim:
        return next(claim for claim in self.claims if claim.id == claim_id)

    @property
    def printed(self) -> dict[str, dict[str, float | int | str]]:
        """The printed values by claim and name, for `{ID[figure]}` in texts."""
        facts = {name: figure.value for name, figure in self.facts.items()}
        return {"facts": facts} | {c.id: {n: f.value for n, f in c.figures.items()} for c in self.claims}

    @property
    def experiments(self) -> tuple[str, ...]:
        """The experiments whose records the ledger reads, in order of first use."""
        return tuple(dict.fromkeys(m.experiment for claim in self.claims for m in claim.measures))


def load_claims(path: Path | None = None) -> Claims:
    """Read and validate the claims; `StudyError` names file and key in one line."""
    path = path or params_dir() / "claims.yaml"
    try:
        return Claims.model_validate_json(json.dumps(yaml.safe_load(path.read_text())))
    except OSError as error:
        raise StudyError(f"{path}: cannot be read ({error.strerror}); restore it with git") from None
    except yaml.YAMLError as error:
        raise StudyError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise StudyError(f"{path}: " + "; ".join(describe(e) for e in error.errors()[:5])) from None


# --- arithmetic on the printed figures -----------------------------------------------------------------


OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(
    expression: str, figures: Mapping[str, Figure], shift: Mapping[str, float] | None = None
) -> Number:
    """The value of `expression` (+ - * / over numbers and `ID.figure` names).

    `shift` moves figures by so much, to see what rounding could have hidden. Raises `ValueError` that
    names what is not understood.
    """

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if f"{owner}.{name}" in figures:
                printed, moved = figures[f"{owner}.{name}"].value, (shift or {}).get(f"{owner}.{name}", 0)
                return printed if isinstance(printed, str) else printed + moved
        raise ValueError(f"'{expression}': '{ast.unparse(node)}' is not a number, a known figure or + - * /")

    try:
        return value(ast.parse(" ".join(expression.split()), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"'{expression}' is not an expression") from None
    except ZeroDivisionError:
        raise ValueError(f"'{expression}' divides by zero") from None


def figures_in(expression: str) -> list[str]:
    """The figure names that `expression` uses."""
    nodes = ast.walk(ast.parse(" ".join(expression.split()), mode="eval"))
    return sorted({ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)})


def rounding_range(expression: str, figures: Mapping[str, Figure]) -> tuple[float, float]:
    """Lowest and highest value of `expression` over all that its figures could be rounded from.

    Evaluated at the corners, which is exact for expressions monotone in each figure, as ours are.
    """
    names = [name for name in figures_in(expression) if figures[name].half_digit]
    corners = itertools.product(*[(-figures[name].half_digit, figures[name].half_digit) for name in names])
    shifts = [dict(zip(names, corner, strict=True)) for corner in corners]
    values = [float(evaluate(expression, figures, shift)) for shift in shifts]
    return min(values), max(values)


@dataclass(frozen=True)
class CheckResult:
    """One check evaluated: the numbers and the sentence that says them."""

    check: Check
    holds: bool
    left: Number
    right: Number
    text: str


def check_arithmetic(claims: Claims) -> list[CheckResult]:
    """Evaluate every check of the claims on the printed figures alone."""
    return [run_check(check, claims) for check in claims.checks]


def run_check(check: Check, claims: Claims) -> CheckResult:
    """Evaluate one check; for a figure that should round to another, say how it misses."""
    figures = claims.figures
    left, right = evaluate(check.left, figures), evaluate(check.right, figures)
    digits = decimals(check.right, figures) if check.relation == "rounds to" else 0
    holds = relation_holds(check.relation, left, right, digits)
    shown = {name: evaluate(text, figures) for name, text in check.show.items()}
    try:
        text = check.text.format(left=left, right=right, **shown, **claims.printed)
    except (KeyError, ValueError) as error:
        raise ValueError(f"'{check.text}': cannot fill in {error}") from None
    if check.relation == "rounds to" and not holds:
        text += f": {miss(float(left), float(right), rounding_range(check.left, figures), digits)}"
    return CheckResult(check, holds, left, right, text)


def decimals(expression: str, figures: Mapping[str, Figure]) -> int:
    """Digits printed after the point of the single figure that `expression` is; 0 for whole numbers."""
    figure = figures.get(expression.strip())
    if figure is None or isinstance(figure.value, str):
        raise ValueError(f"'{expression}': 'rounds to' needs one printed number on its right")
    return max(0, -int(Decimal(repr(figure.value)).as_tuple().exponent))


def relation_holds(relation: Relation, left: Number, right: Number, digits: int = 0) -> bool:
    """Whether `left relation right`; equality of numbers allows for floating point only."""
    if isinstance(left, str) or isinstance(right, str):
        return left == right
    equal = math.isclose(left, right, rel_tol=1e-9)
    match relation:
        case "rounds to":
            return math.isclose(round(left, digits), right, rel_tol=1e-9)
        case "equals":
            return equal
        case "at least":
            return left > right or equal
        case "at most":
            return left < right or equal
        case "more than":
            return left > right and not equal


def miss(left: float, right: float, allowed: tuple[float, float], digits: int) -> str:
    """How a published `right` misses the computed `left`: by truncation, or plainly, and whether the
    rounding of the figures that `left` is computed from could explain it."""
    scale = 10.0**digits
    truncated = math.isclose(math.trunc(left * scale) / scale, right, rel_tol=1e-9)
    how = "truncated, not rounded" if truncated else "does not follow"
    explains = "could" if allowed[0] <= right <= allowed[1] else "cannot"
    return f"{how} (rounding of its inputs, {allowed[0]:.1f} to {allowed[1]:.1f}, {explains} explain it)"


def arithmetic_verdict(claim: Claim, results: Sequence[CheckResult]) -> tuple[str, str]:
    """`consistent`, `inconsistent as published` or empty (nothing to check), and why."""
    mine = [result for result in results if claim.id in result.check.claims]
    failed = [r.text for r in mine if not r.holds] + [m.text for m in claim.remarks if m.inconsistent]
    held = [f"consistent: {r.text}" for r in mine if r.holds]
    noted = [m.text for m in claim.remarks if not m.inconsistent]
    word = "inconsistent as published" if failed else "consistent" if held else ""
    return word, "; ".join([*failed, *held, *noted])
