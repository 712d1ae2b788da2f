"""The page on quantisation: a share, a crossing or a front that is computed wrongly is a wrong recommendation."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from test_figures import ceilings_result, made

from flashgap import figures_quantization as pictures
from flashgap import findings_quantization as words
from flashgap import limits
from flashgap import tables_quantization as quantized
from flashgap.results import Result
from flashgap.study import Study

EXTRA = {"rtn_head8": 0.32, "awq": 0.16, "eight": 0.0}
STEP_MS = {
    "standard": 30.0,
    "flash": 100.0,
    "flash_packed": 20.0,
    "standard_best": 12.0,
    "flash_optimised": 5.0,
    "eight_best": 6.0,
}


def quality_result(windows: int = 32) -> Result:
    difficulty = np.random.default_rng(3).normal(3, 0.8, windows)  # the same windows for every build

    def sample(rng, name):
        rows = []
        for window in range(windows):
            values = {
                "standard_loss_nats": difficulty[window],
                "loss_nats": difficulty[window] + EXTRA[name] + rng.normal(0, 0.02),
                "kl_nats": EXTRA[name],
                "top1_agreement": 1 - EXTRA[name],
            }
            rows += [{"metric": m, "value": v, "iteration": window} for m, v in values.items()]
        return rows

    result = made("quality", list(EXTRA), 1, sample)
    for block in result.blocks:  # `made` gives each block its own luck, which a deterministic loss has not
        table = block.observations
        block.observations["value"] /= (
            table.loc[table["metric"] == "kl_nats", "value"].iloc[0] / EXTRA["rtn_head8"]
        )
    return result


def speed_result(
    experiment: str, names: list[str], blocks: int = 6, metric: str = "itl_s", by: str = "batch"
):
    def sample(rng, name):
        return [
            {"metric": m, "value": rng.normal(1, 0.01) * ms(name, level) / 1e3, "iteration": i, **at}
            for level in (1, 8, 32)
            for at in (
                [{"batch": level, "context_tokens": 128}]
                if by == "batch"
                else [{"batch": 1, "context_tokens": level}]
            )
            for m in {metric, "ttft_s"}
            for i in range(5)
        ]

    def ms(name, level):
        gains = {1: 1.0, 8: 1.6, 32: 2.6} if not name.startswith("standard") else {1: 1.0, 8: 1.1, 32: 1.2}
        return STEP_MS[name] * gains[level]

    return made(experiment, names, blocks, sample, memory=True)


SHAPES = [
    {"features_out": 64, "features_in": 32, "bits": 4, "group_size": 32, "layers": 2, "many_rows": 16},
    {"features_out": 32, "features_in": 32, "bits": 4, "group_size": 32, "layers": 2, "many_rows": None},
]


def crossover_result() -> Result:
    """Dense takes 8 us whatever the rows; packed 1 us a row, expanded 14; dispatched takes its way by the threshold."""

    def sample(rng, name):
        rows = []
        for number, shape in enumerate(SHAPES):
            for count in (1, 4, 8, 16, 64):
                times = {"dense": 8.0, "packed": 1.0 * count, "expanded": 14.0}
                if shape["many_rows"] is None:
                    del times["expanded"]
                many = shape["many_rows"] is not None and count >= shape["many_rows"]
                times["dispatched"] = times["expanded" if many else "packed"]
                for way, us in times.items():
                    for i in range(5):
                        value = us * 1e-6 * rng.normal(1, 0.01)
                        rows.append(
                            {
                                "metric": f"{way}_linear_s",
                                "value": value,
                                "batch": count,
                                "request": number,
                                "iteration": i,
                            }
                        )
        return rows

    result = made("crossover", ["flash_packed"], 6, sample)
    for block in result.blocks:
        block.trials["flash_packed"].facts["shapes"] = SHAPES
    return result


@pytest.fixture(scope="module")
def results():
    return {
        "quality": quality_result(),
        "eager": speed_result("eager", ["standard", "flash_packed"]),
        "latency": speed_result("latency", ["standard", "flash"]),
        "bits": speed_result("bits", ["standard_best", "flash_optimised", "eight_best"]),
        "task": speed_result(
            "task", ["standard", "flash", "standard_best", "flash_optimised"], metric="task_s"
        ),
        "crossover": crossover_result(),
        "best": speed_result("best", ["standard_best", "flash_optimised"]),
        "prefill": speed_result(
            "prefill", ["standard_best", "flash_optimised"], metric="ttft_s", by="context_tokens"
        ),
        "best_memory": speed_result(
            "best_memory", ["standard", "flash_packed", "standard_best", "flash_optimised"]
        ),
    }


def test_quality_is_the_mean_over_windows_of_the_difference(results):
    table = quantized.quality(results["quality"]).set_index("treatment")
    assert list(table.index) == ["eight", "awq", "rtn_head8"]
    for name, extra in EXTRA.items():
        assert table.loc[name, "value"] == pytest.approx(np.exp(extra), rel=0.02)
        assert table.loc[name, "low"] < np.exp(extra) * 1.01
        assert table.loc[name, "high"] > np.exp(extra) * 0.99
    # windows differ by 0.8 nats among themselves; the paired difference must not
    assert table.loc["rtn_head8", "high"] / table.loc["rtn_head8", "low"] < 1.05


def test_what_a_search_bought_is_a_share_of_the_floors_loss(results):
    table = quantized.removed(results["quality"]).set_index("treatment")
    assert table.loc["awq", "value"] == pytest.approx(0.5, abs=0.06)
    assert table.loc["awq", "low"] < 0.5 < table.loc["awq", "high"]
    assert table.loc["awq", "lower"]
    assert "rtn_head8" not in table.index


def test_speedup_is_standards_time_over_flashs_and_crosses_where_it_does(results):
    table = quantized.speedups(results["best"], "standard_best", "flash_optimised")
    assert table["value"].tolist() == pytest.approx([2.4, 2.4 * 1.1 / 1.6, 2.4 * 1.2 / 2.6], rel=0.03)
    assert quantized.crossing(table) is None
    packed = quantized.speedups(results["eager"], "standard", "flash_packed")
    assert packed["value"].iloc[-1] == pytest.approx(1.5 * 1.2 / 2.6, rel=0.03)
    assert quantized.crossing(packed) == 32
    assert quantized.crossing(quantized.speedups(results["latency"], "standard", "flash")) == 1


def test_the_front_holds_what_no_other_beats_in_both():
    table = quantized.quality(quality_result())
    points = quantized.pareto(table, {"rtn_head8": 120.0, "awq": 110.0, "eight": 200.0}).set_index(
        "treatment"
    )
    assert points["front"].to_dict() == {"awq": True, "eight": True, "rtn_head8": False}


def test_findings_say_the_numbers_of_the_records(results):
    used = limits.utilization(Study.load("cpu"), results["best"], ceilings_result(), limits.EMBEDDED)
    lines = words.quantization(results, used)
    assert any("2.4" in line and "times as fast" in line and "batch 1" in line for line in lines)
    assert any("never slower" in line for line in lines)
    assert any("AWQ removes" in line and "excludes zero" in line for line in lines)
    assert any("of the measured bandwidth" in line for line in lines)
    assert any("The task, both compiled" in line for line in lines)
    assert any("Within 5%" in line and "**8 bits**" in line for line in lines)


def test_nothing_is_found_where_nothing_was_measured():
    names = ("quality", "eager", "best", "prefill", "best_memory", "latency", "bits", "task", "crossover")
    empty = {n: Result(n, [], treatments=[]) for n in names}
    used = limits.utilization(Study.load("cpu"), empty["best"], Result("ceilings", [], treatments=[]), None)
    assert words.quantization(empty, used) == ["No experiment of this page has a complete block yet."]
    assert quantized.removed(empty["quality"]).empty
    for figure in (
        pictures.speed(empty["latency"], empty["eager"], empty["best"], empty["prefill"]),
        pictures.crossover(quantized.crossover(empty["crossover"]), empty["crossover"]),
        pictures.quality(quantized.quality(empty["quality"]), empty["quality"], True),
        pictures.front(quantized.pareto(quantized.quality(empty["quality"]), {}), None, {}, empty["quality"]),
        pictures.limits(used, empty["best"]),
        pictures.memory(quantized.memory(empty["best_memory"]), empty["best_memory"]),
    ):
        assert figure.texts


def test_pictures_are_drawn(results, tmp_path):
    table = quantized.quality(results["quality"])
    used = limits.utilization(Study.load("cpu"), results["best"], ceilings_result(), limits.EMBEDDED)
    figures = {
        "speed": pictures.speed(results["latency"], results["eager"], results["best"], results["prefill"]),
        "crossover": pictures.crossover(quantized.crossover(results["crossover"]), results["crossover"]),
        "quality": pictures.quality(table, results["quality"], requantized=True),
        "front": pictures.front(
            quantized.pareto(table, {"rtn_head8": 120.0, "awq": 110.0, "eight": 200.0}),
            257.0,
            {"awq": 2.4},
            results["quality"],
        ),
        "limits": pictures.limits(used, results["best"]),
        "memory": pictures.memory(quantized.memory(results["best_memory"]), results["best_memory"]),
    }
    for name, figure in figures.items():
        figure.savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    assert "Re-quantisation" in " ".join(t.get_text() for t in figures["quality"].texts)


def test_the_crossing_of_a_shape_lies_between_what_is_shown(results):
    """If this fails, the map's boundary is drawn where no interval says so."""
    table = quantized.crossover(results["crossover"])
    bounds = quantized.boundaries(table).set_index("features_out")
    assert bounds.loc[64, ["faster_to", "slower_from"]].tolist() == [4, 16]
    assert bounds.loc[64, "many_rows"] == 16
    assert np.isnan(bounds.loc[32, "many_rows"])
    one = table[(table["features_out"] == 64) & (table["rows"] == 4)].iloc[0]
    assert one["value"] == pytest.approx(2.0, rel=0.02)


def test_a_dispatch_that_chose_the_slower_way_shows(results):
    """At 16 rows the build expands (14 us) and is right; at 64 the shape without a threshold cannot expand."""
    table = quantized.crossover(results["crossover"])
    assert table["over"].max() < 1.02
    wrong = crossover_result()
    for block in wrong.blocks:
        frame = block.observations
        chosen = (frame["metric"] == "dispatched_linear_s") & (frame["batch"] == 64) & (frame["request"] == 0)
        frame.loc[chosen, "value"] *= 64 / 14
    table = quantized.crossover(wrong)
    assert table.loc[table["over"].idxmax(), "over"] == pytest.approx(64 / 14, rel=0.03)


def test_what_lies_on_the_files_own_grid_is_on_no_front(results):
    table = quantized.quality(results["quality"])
    table.loc[table["treatment"] == "awq", "rounding"] = 0.01
    points = quantized.pareto(table, {"rtn_head8": 120.0, "awq": 110.0, "eight": 200.0}).set_index(
        "treatment"
    )
    assert points["front"].to_dict() == {"awq": False, "eight": True, "rtn_head8": True}


def test_a_build_that_loops_where_standard_does_not_is_named(results):
    """If this fails, a build that repeats itself passes with a bearable perplexity."""
    result = quality_result()
    builds = {"awq": ("one  one\none one one", 0.1), "eight": ("Because light is scattered.", 0.9)}
    for block in result.blocks:
        rows = [
            {"trial": name, "metric": metric, "value": value, "request": 0, "iteration": -1}
            for name, (_, new) in builds.items()
            for metric, value in (("equal_tokens", 3.0), ("standard_new_share", 0.9), ("new_share", new))
        ]
        extra = pd.DataFrame(rows, columns=block.observations.columns).fillna(-1)
        block.frame = pd.concat([block.observations, extra], ignore_index=True)
        for name, (text, _) in builds.items():
            block.trials[name].facts["generation"] = [{"prompt": "p", "standard": "", "build": text}]
    table = quantized.generation(result).set_index("treatment")
    assert table["loops"].to_dict() == {"awq": 1, "eight": 0}
    assert table.loc["awq", "text"].startswith("one one one")
    assert any("Standard is not: AWQ (1 of 1 prompts)." in line for line in words._quality(result))
    assert len(quantized.quality(result)) == len(EXTRA)


def raced(best: Result, **races: dict[str, float]) -> Result:
    """`best` with a race for each graph by name, and the kernel that follows from it."""
    for block in best.blocks:
        for graph, race in races.items():
            won = race["copy_s"] < race["packed_s"]
            row = {"race": race, "ran": "dense" if won else "packed 4-bit x 2"}
            block.trials["flash_optimised"].kernels[graph] = row
    return best


def test_a_race_is_told_with_rows_and_winner():
    """If this fails, a reader takes a copy's time for the packed kernel's, or a batch for the tokens of a prompt."""
    best = raced(
        speed_result("best", ["standard_best", "flash_optimised"]),
        decode_b16_t192={"packed_s": 0.020, "copy_s": 0.015},
        decode_b8_t192={"packed_s": 0.010, "copy_s": 0.015},
        prefill_b1_t512={"packed_s": 0.300, "copy_s": 0.150},
    )
    table = quantized.races(best)
    assert list(zip(table["phase"], table["rows"], table["copy"], strict=True)) == [
        ("decode", 8, False),
        ("decode", 16, True),
        ("prefill", 512, True),
    ]
    decode, prefill = words._copies(best)
    assert "at 16 (20.0 ms packed, 15.0 on the copy) rows" in decode
    assert "at 512 (300.0 ms packed, 150.0 on the copy) rows" in prefill


def test_where_no_copy_won_it_is_said():
    best = raced(
        speed_result("best", ["standard_best", "flash_optimised"]),
        decode_b8_t192={"packed_s": 0.010, "copy_s": 0.015},
    )
    assert "held against a 16-bit copy" in words._copies(best)[0]
    assert quantized.races(speed_result("best", ["standard_best", "flash_optimised"])).empty
