"""Matrix products by width: a time that stands beside another shape's FLOPs would draw a picture of nothing."""

from __future__ import annotations

import numpy as np
import pytest
from test_figures import made

from flashgap import gemm, tables_shapes
from flashgap.treatment import GemmWorkload

SHAPES = ((64, 64), (60, 64), (64, 96))


def test_every_shape_is_timed_as_often_and_only_legal_ones_are_packed():
    rows = gemm.measure_gemm(GemmWorkload(kind="gemm", shapes=SHAPES, rows=(1, 4), group_size=32, repeats=3))
    seen = {}
    for row in rows:
        place = (row["metric"], row["request"], row["context_tokens"], row["batch"])
        seen.setdefault(place, []).append(row["value"])
    assert all(len(values) == 3 and min(values) > 0 for values in seen.values())
    packed = {place[1:3] for place in seen if place[0] == "packed_gemm_s"}
    assert packed == {(64, 64), (64, 96)}, "60 output features are no whole tiles"
    assert {place[1:3] for place in seen if place[0] == "dense_gemm_s"} == set(SHAPES)


@pytest.fixture
def result():
    """A machine of 100 GFLOP/s where widths are whole tens of 64, of 50 elsewhere."""

    def sample(rng, name):
        return [
            {
                "metric": "dense_gemm_s",
                "value": 2 * rows * out * inside / (1e11 if out % 64 == 0 else 5e10) * rng.normal(1, 0.01),
                "batch": rows,
                "request": out,
                "context_tokens": inside,
                "iteration": i,
            }
            for out, inside in SHAPES
            for rows in (1, 8)
            for i in range(5)
        ]

    return made("gemm", ["standard"], 6, sample)


def test_efficiency_is_needed_arithmetic_over_time(result):
    table = tables_shapes.efficiency(result)
    for row in table.itertuples():
        expected = 100 if row.features_out % 64 == 0 else 50
        assert row.low < expected * 1.03
        assert row.high > expected * 0.97
        assert row.value == pytest.approx(1e-9 / row.seconds_a_flop)
    assert set(table["kind"]) == {"dense"}


def test_a_width_costs_what_its_flops_take_longer(result):
    table = tables_shapes.cost_of_width(result, aligned=(64, 64), other=(60, 64))
    assert table["rows"].tolist() == [1, 8]
    assert table["value"].tolist() == pytest.approx([2, 2], rel=0.02)
    assert np.isfinite(table["high"]).all()
    assert tables_shapes.cost_of_width(result, (64, 64), (60, 64), "packed").empty
