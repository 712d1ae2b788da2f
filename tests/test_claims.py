"""The claims ledger: the published arithmetic, the verdict rules, and records to rows."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgap.claims import (
    Claims,
    Figure,
    Measure,
    Tolerance,
    arithmetic_verdict,
    check_arithmetic,
    evaluate,
    load_claims,
    relation_holds,
    rounding_range,
)
from flashgap.ledger import Measured, beside, claim_verdict, count_ratio, findings, judge, ledger, ratios
from flashgap.stats import Estimate
from flashgap.study import Study, StudyError, params_dir

CLAIMS = load_claims()
AREAS = {"B": 5, "R": 8, "D": 3, "O": 6, "A": 5, "G": 3}
PUBLISHED_IDS = [f"{area}{i + 1}" for area, rows in AREAS.items() for i in range(rows)]
VERDICTS = {
    "reproduced",
    "not reproduced",
    "contradicted",
    "inconsistent as published",
    "not measurable here",
    "not yet measured",
}


# --- the printed figures ---------------------------------------------------------------------------------


def test_every_published_claim_is_there_in_order():
    assert [claim.id for claim in CLAIMS.claims] == PUBLISHED_IDS


@pytest.mark.parametrize(
    ("claim_id", "said"),
    [
        ("B2", "111.76 %, published as 111.7 %: truncated, not rounded"),
        ("B3", "2.12x"),
        ("R1", "0.50 of Standard's (R1) and 1.23"),
        ("R3", "3.53x"),
        ("R6", "Hopper; the A100 of the test bed is Ampere"),
        ("B4", "1.025 of Standard's"),
        ("A2", "1.025 of Standard's"),
        ("G2", "1.025 of Standard's"),
        ("A4", "73.9 % of Standard's speed, published as 80 %"),
        ("O1", "QuantizationConfig"),
        ("O2", "exactly equal length"),
    ],
)
def test_what_does_not_add_up_is_said_with_its_numbers(claim_id, said):
    word, why = arithmetic_verdict(CLAIMS[claim_id], check_arithmetic(CLAIMS))
    assert word == "inconsistent as published"
    assert said in why


@pytest.mark.parametrize(("claim_id", "said"), [("A1", "36.11 %"), ("A3", "50 %")])
def test_what_adds_up_is_not_accused(claim_id, said):
    word, why = arithmetic_verdict(CLAIMS[claim_id], check_arithmetic(CLAIMS))
    assert word == "consistent"
    assert said in why


def test_a2_is_right_by_itself_and_says_so():
    """Its own percentage follows; only together with B4 and G2 it does not."""
    _, why = arithmetic_verdict(CLAIMS["A2"], check_arithmetic(CLAIMS))
    assert "consistent: 1 - 35 / 42 is 16.67 %" in why


def test_rounding_excuses_b2_and_not_a4():
    """The printed minutes are rounded: that could explain 111.7, but never 80."""
    said = {result.check.claims: result.text for result in check_arithmetic(CLAIMS)}
    assert "could explain it" in said[("B2",)]
    assert "cannot explain it" in said[("A4",)]


def test_a_corrected_figure_changes_the_verdict():
    """The verdict is computed from the data: no row is convicted by name."""
    data = CLAIMS.model_dump(mode="json")
    next(c for c in data["claims"] if c["id"] == "A4")["figures"]["performance_percent"]["value"] = 74
    corrected = Claims.model_validate_json(json.dumps(data))
    assert arithmetic_verdict(corrected["A4"], check_arithmetic(corrected))[0] == "consistent"


def test_claims_without_checks_have_no_arithmetic_verdict():
    assert arithmetic_verdict(CLAIMS["R4"], check_arithmetic(CLAIMS)) == ("", "")


def test_the_published_snippet_really_names_no_class_of_transformers():
    """O1's remark is a statement about the library: it must be true of the one installed."""
    module = pytest.importorskip("transformers.utils.quantization_config")
    assert hasattr(module, "AwqConfig")
    assert not hasattr(module, "QuantizationConfig")


FIGURES = {"X.a": Figure(value=14.4, unit="min"), "X.b": Figure(value=3, unit="requests", exact=True)}


def test_expressions_know_arithmetic_and_nothing_else():
    assert evaluate("100 * (X.a / X.b - 1)", FIGURES) == pytest.approx(380)
    for wrong in ("X.c", "__import__('os')", "X.a ** 2", "1 +", "X.a / 0", "X.a.real"):
        with pytest.raises(ValueError, match=r"is not|divides by zero"):
            evaluate(wrong, FIGURES)


def test_rounding_moves_printed_figures_and_not_counts():
    assert rounding_range("X.a", FIGURES) == pytest.approx((14.35, 14.45))
    assert rounding_range("X.b", FIGURES) == (3, 3)


@given(st.floats(1, 100), st.floats(1, 100), st.integers(0, 2))
def test_the_true_value_lies_in_the_rounding_range(a, b, digits):
    """Whatever was rounded to print the figures, the range covers what they would have given."""
    printed = [round(x, digits) if digits else round(x) for x in (a, b)]
    figures = {name: Figure(value=x, unit="s") for name, x in zip(("X.a", "X.b"), printed, strict=True)}
    low, high = rounding_range("X.a / X.b", figures)
    assert low * (1 - 1e-9) <= a / b <= high * (1 + 1e-9)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_relations_exclude_each_other(left, right):
    assert relation_holds("more than", left, right) != relation_holds("at most", left, right)
    both = relation_holds("at least", left, right) and relation_holds("at most", left, right)
    assert both == relation_holds("equals", left, right)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("relative: 0.2", "relativ: 0.2", "tolerances.other_machine.relativ: unknown key"),
        ("{value: 6.8,", "{value: 6.8, digits: 1,", "claims.0.figures.task_min.digits: unknown"),
        ("tolerance: other_machine", "tolerance: othr", "othr"),
        ("left: B3.latency_ratio", "left: B3.latency", "B3.latency"),
        ("claims: [A3]", "claims: [A33]", "A33"),
        ("{right:.2f}x of the ordinary", "{wrong:.2f}x of the ordinary", "wrong"),
    ],
)
def test_a_wrong_claims_file_is_one_clear_line(tmp_path, old, new, said):
    text = (params_dir() / "claims.yaml").read_text()
    assert old in text
    path = tmp_path / "claims.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(StudyError) as error:
        load_claims(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_claims_file_is_one_clear_line(tmp_path):
    with pytest.raises(StudyError, match="cannot be read"):
        load_claims(tmp_path / "claims.yaml")


# --- the verdict rules -----------------------------------------------------------------------------------


def interval(low: float, high: float, blocks: int = 5) -> Estimate:
    return Estimate(math.sqrt(low * high), low, high, 0.95, blocks, 100, "made up")


BAND = Tolerance(why="test", relative=0.2).band(2.0)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.9, 2.1, "reproduced"),
        (2.3, 2.6, "reproduced"),  # meets the band's edge at 2.4
        (2.5, 2.6, "not reproduced"),  # same direction, another size
        (1.1, 1.2, "not reproduced"),
        (0.9, 1.1, "not reproduced"),  # no difference shown
        (1.1, 3.5, "not reproduced"),  # holds the published ratio, but says nothing
        (0.7, 0.9, "contradicted"),
    ],
)
def test_judge_examples(low, high, verdict):
    assert judge(interval(low, high), "higher", BAND)[0] == verdict


positive_interval = st.builds(
    lambda low, width: interval(low, low * width), st.floats(0.05, 20), st.floats(1.0001, 3)
)


@given(positive_interval, st.sampled_from(["higher", "lower"]))
def test_direction_alone_is_a_trichotomy(estimate, direction):
    """Without a size: reproduced, contradicted or undecided; the opposite claim gets the mirrored one."""
    mirrored = {"reproduced": "contradicted", "contradicted": "reproduced"}
    other = "lower" if direction == "higher" else "higher"
    verdict = judge(estimate, direction)[0]
    assert judge(estimate, other)[0] == mirrored.get(verdict, verdict)


@given(positive_interval, st.floats(1.05, 5), st.floats(0.05, 0.5))
def test_the_inverse_ratio_gets_the_same_kind_of_verdict(estimate, expected, relative):
    """Flash / Standard higher, or Standard / Flash lower: whichever way it is written (width rule aside)."""
    band = Tolerance(why="test", relative=relative).band(expected)
    flipped = replace(estimate, value=1 / estimate.value, low=1 / estimate.high, high=1 / estimate.low)
    inverse = Tolerance(why="test", relative=relative).band(1 / expected)
    a, b = judge(estimate, "higher", band), judge(flipped, "lower", inverse)
    assert (a[0] == "contradicted") == (b[0] == "contradicted")
    if "uncertain" not in a[1] + b[1]:
        edges = [estimate.high - band[0], estimate.low - band[1]]
        assert a[0] == b[0] or min(abs(edge) for edge in edges) < 1e-9


@given(positive_interval, st.floats(1.05, 5), st.floats(0.05, 0.5))
def test_reproduced_needs_direction_and_size(estimate, expected, relative):
    band = Tolerance(why="test", relative=relative).band(expected)
    if judge(estimate, "higher", band)[0] == "reproduced":
        assert estimate.low > 1
        assert estimate.low <= band[1]
        assert estimate.high >= band[0]
        assert estimate.high - estimate.low <= band[1] - band[0]


@given(st.floats(1.01, 10), st.floats(0.01, 0.5))
def test_an_interval_with_no_end_never_reproduces_nor_contradicts(expected, relative):
    """One block has an infinite interval: it decides nothing."""
    unknown = Estimate(expected, 0.0, math.inf, 0.95, 1, 10, "one block")
    band = Tolerance(why="test", relative=relative).band(expected)
    assert judge(unknown, "higher", band)[0] == "not reproduced"


def measured(verdict: str, beside: bool = False) -> Measured:
    claim = CLAIMS["R1"]
    measure = claim.measures[0].model_copy(update={"beside": beside})
    return Measured(claim, measure, 0.5, (0.4, 0.6), interval(0.4, 0.5), verdict, "because")


@given(st.lists(st.sampled_from(sorted(VERDICTS - {"inconsistent as published"})), min_size=1, max_size=4))
def test_a_claim_is_reproduced_only_by_all_its_measures(verdicts):
    word, _ = claim_verdict(CLAIMS["R1"], [measured(v) for v in verdicts])
    assert word in VERDICTS
    assert (word == "reproduced") == (set(verdicts) == {"reproduced"})
    assert (word == "contradicted") == ("contradicted" in verdicts)


def test_what_stands_beside_is_not_judged():
    both = [measured("reproduced"), measured("contradicted", beside=True)]
    assert claim_verdict(CLAIMS["R1"], both)[0] == "reproduced"


@given(st.integers(0, 500), st.integers(1, 500), st.floats(0, 0.999), st.floats(0, 0.999))
def test_the_count_bound_holds_every_capacity_it_could_be(flash, standard, more_flash, more_standard):
    estimate = count_ratio([(np.array([float(flash)]), np.array([float(standard)]))])
    true = (flash + more_flash) / (standard + more_standard)
    assert estimate.low <= true <= estimate.high
    assert estimate.low <= estimate.value <= estimate.high


def test_a_count_that_hit_the_end_of_the_search_has_no_upper_bound():
    """128 of at most 128 tried means 128 or more: only a smaller Flash can then be shown."""
    capped = count_ratio([(np.array([12.0]), np.array([128.0]))], most=128)
    assert capped.low == 0
    assert capped.high == 13 / 128
    assert count_ratio([(np.array([128.0]), np.array([12.0]))], most=128).high == math.inf


def test_a_measure_must_be_judgeable():
    operand = {"treatment": "flash", "metric": "itl_s"}
    with pytest.raises(ValueError, match="direction"):
        Measure.model_validate({"what": "w", "experiment": "e", "numerator": operand, "denominator": operand})


# --- from records to rows --------------------------------------------------------------------------------


@dataclass
class FakeTrial:
    status: str = "ok"
    memory: dict = field(default_factory=dict)
    build: dict = field(default_factory=dict)


@dataclass
class FakeBlock:
    trials: dict
    observations: pd.DataFrame
    complete: bool = True


def block(values: dict, metric: str, rng: np.random.Generator, **trials: FakeTrial) -> FakeBlock:
    """`values`: treatment -> context tokens -> true value, seen four times with 0.5 % noise."""
    rows = [
        {"trial": name, "metric": metric, "value": value * rng.normal(1, 0.005), "context_tokens": context}
        for name, by_context in values.items()
        for context, value in by_context.items()
        for _ in range(4)
    ]
    columns = ["trial", "metric", "value", "context_tokens"]
    names = {name: trials.get(name, FakeTrial()) for name in ("standard", "flash")}
    return FakeBlock(names, pd.DataFrame(rows, columns=columns))


def result(blocks: list[FakeBlock], gpus: list | None = None) -> SimpleNamespace:
    return SimpleNamespace(blocks=blocks, machine={"cpu": "made up", "gpus": gpus or []})


def results(slowdown: float = 2.1, long_slowdown: float = 1.8, blocks: int = 5) -> dict[str, SimpleNamespace]:
    rng = np.random.default_rng(0)
    standard = {
        "memory": {"initialisation_peak": {"peak_rss_bytes": 1000}, "steady": {"rss_bytes": 800}},
        "build": {"resident_bytes": 600},
    }
    flash = {
        "memory": {"initialisation_peak": {"peak_rss_bytes": 1230}, "steady": {"rss_bytes": 700}},
        "build": {"resident_bytes": 300},
    }
    trials = {"standard": FakeTrial(**standard), "flash": FakeTrial(**flash)}
    memory = [block({}, "ttft_s", rng, **trials) for _ in range(blocks)]
    task = {"standard": {-1: 40.0}, "flash": {-1: 40.0 * slowdown}}
    context = {
        "standard": {128: 0.01, 6144: 0.03},
        "flash": {128: 0.01 * slowdown, 6144: 0.03 * long_slowdown},
    }
    largest = block({"standard": {-1: 20}, "flash": {-1: 12}}, "largest_batch", np.random.default_rng(0))
    largest.observations["value"] = largest.observations["value"].round()
    return {
        "task": result([block(task, "task_s", rng) for _ in range(blocks)]),
        "context": result([block(context, "itl_s", rng) for _ in range(blocks)]),
        "memory": result(memory),
        "capacity": result([largest]),
    }


@pytest.fixture(scope="module")
def study() -> Study:
    return Study.load("cpu")


def verdicts(table: pd.DataFrame) -> dict[str, str]:
    return dict(zip(table["id"], table["verdict"], strict=True))


def test_without_records_everything_waits_for_its_notebook(study):
    table = ledger(study, {})
    assert list(table["id"]) == PUBLISHED_IDS
    assert set(table["verdict"]) == {"not yet measured", "not measurable here"}
    for row in table[table["verdict"] == "not yet measured"].itertuples():
        assert CLAIMS[row.id].notebook in row.why
    assert (table["measured"] == "").all()


def test_a_machine_like_the_study_reproduces_it(study):
    found = verdicts(ledger(study, results()))
    assert found["B2"] == found["B4"] == "reproduced"
    assert found["B5"] == "reproduced"


def test_one_claim_carries_both_verdicts(study):
    row = ledger(study, results()).set_index("id").loc["B2"]
    assert row["arithmetic"] == "inconsistent as published"
    assert row["verdict"] == "reproduced"
    assert "111.76" in row["why"]
    assert "x, 5 blocks" in row["measured"]


def test_a_faster_flash_contradicts(study):
    assert verdicts(ledger(study, results(slowdown=0.6)))["B2"] == "contradicted"


def test_much_slower_is_the_direction_but_not_the_size(study):
    row = ledger(study, results(slowdown=4.0)).set_index("id").loc["B2"]
    assert row["verdict"] == "not reproduced"
    assert "same direction" in row["why"]


def test_the_study_read_literally_contradicts_itself_on_long_text(study):
    """1.8x at length after 2.1x at ordinary length is a narrower gap: B3's two halves cannot both hold."""
    assert verdicts(ledger(study, results(2.1, 1.8)))["B3"] == "contradicted"


def test_half_the_weights_is_not_half_the_process(study):
    row = ledger(study, results()).set_index("id").loc["R1"]
    assert row["verdict"] == "not reproduced"
    assert "resident weights, Flash / Standard: same direction, and" in row["why"]


def test_too_few_blocks_give_no_verdict(study):
    row = ledger(study, results(blocks=4)).set_index("id").loc["B2"]
    assert row["verdict"] == "not yet measured"
    assert "4 of the 5 blocks" in row["why"]


def test_failed_trials_are_the_reason_given(study):
    found = results()
    for each in found["task"].blocks:
        each.trials["flash"].status = "out_of_memory"
    row = ledger(study, found).set_index("id").loc["B2"]
    assert row["verdict"] == "not yet measured"
    assert "out_of_memory" in row["why"]


def test_two_builds_at_the_end_of_the_search_are_not_compared(study):
    found = results()
    found["capacity"].blocks[0].observations["value"] = float(
        study.experiments["capacity"].workload.max_batch
    )
    row = ledger(study, found).set_index("id").loc["B5"]
    assert row["verdict"] == "not yet measured"
    assert "raise max_batch" in row["why"]


def test_half_blocks_are_not_paired(study):
    found = results()
    found["task"].blocks[0].complete = False
    assert "4 of the 5 blocks" in ledger(study, found).set_index("id").loc["B2"]["why"]


def test_minutes_are_shown_and_never_judged(study):
    row = ledger(study, results()).set_index("id").loc["B1"]
    assert row["verdict"] == "not measurable here"
    assert " s, 5 blocks" in row["measured"]


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([], "not measurable here"),
        (["NVIDIA A100-SXM4-80GB"], "not measurable here"),
        ([{"name": "NVIDIA H200"}], "not yet measured"),
    ],
)
def test_hopper_claims_need_a_hopper_card(study, gpus, expected):
    found = {"task": result([], gpus)}
    assert verdicts(ledger(study, found))["R6"] == expected
    assert verdicts(ledger(study, found))["R8"] == "not measurable here"  # one GPU has no other to talk to


def test_only_the_vocabulary_is_used(study):
    for found in ({}, results(), results(0.5), results(blocks=1)):
        table = ledger(study, found)
        assert set(table["verdict"]) <= VERDICTS
        assert set(table["arithmetic"]) <= {"", "consistent", "inconsistent as published"}


def test_the_figure_gets_ratios_with_their_bands(study):
    table = ratios(study, results())
    b2 = table[table["id"] == "B2"].iloc[0]
    assert b2["published"] == pytest.approx(14.4 / 6.8)
    assert b2["band_low"] < b2["value"] < b2["band_high"]
    assert b2["low"] < b2["value"] < b2["high"]
    assert "B1" not in set(table["id"])
    assert list(ratios(study, {}).columns) == list(table.columns)


def test_findings_are_counted_not_typed(study):
    text = findings(ledger(study, results()))
    assert "**Reproduced**: 3 (B2, B4, B5)" in text
    assert "**Contradicted**: 1 (B3)" in text
    waiting = findings(ledger(study, {}))
    assert "**Reproduced**: 0 (none)" in waiting
    assert "R3, R4, R7 in `02_root_causes`" in waiting


def test_the_reference_stands_beside_and_not_in_place(study):
    here, there = ledger(study, {}), ledger(study, results())
    table = beside(here, there).set_index("id")
    assert table.loc["B2", "verdict here"] == "not yet measured"
    assert table.loc["B2", "verdict reference"] == "reproduced"
    assert "R3" not in table.index
