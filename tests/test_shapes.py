"""The shape planner: a plan that is legal on paper and falls back on the machine is the fault it is there to prevent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgap import shapes
from flashgap.builds.packed import illegal
from flashgap.cost import ModelShape, parameters
from flashgap.limits import EMBEDDED
from flashgap.shapes import KERNELS, PlanError

GLM = ModelShape(
    layers=40, hidden=4096, intermediate=13696, heads=32, kv_heads=2, head_dim=128, vocab=151552, tied=False
)
CPU4, TINY = KERNELS["int4_cpu"], KERNELS["int4_tinygemm"]


def test_forty_percent_of_the_embedded_model_is_forty_percent():
    """By width and by depth, within the percent that is asked for; the aligned plan keeps every kernel."""
    for plan in (
        shapes.aligned(EMBEDDED, 0.4, CPU4, 64),
        shapes.naive(EMBEDDED, 0.4, CPU4, 64),
        shapes.by_depth(EMBEDDED, 0.4, CPU4, 64),
    ):
        assert plan.removed == pytest.approx(0.4, abs=0.0101 if plan.shape.layers == 30 else 0.014)
        assert plan.removed == pytest.approx(1 - parameters(plan.shape) / parameters(EMBEDDED))
    assert shapes.aligned(EMBEDDED, 0.4, CPU4, 64).legal
    naive = shapes.naive(EMBEDDED, 0.4, CPU4, 64)
    assert any("down_proj" in line and "groups of 64" in line for line in naive.broken)


def test_the_plan_for_eight_devices_is_legal_on_each():
    """A GLM shape has two key heads: two devices can share them, eight cannot, and the refusal says so."""
    plan = shapes.aligned(GLM, 0.4, TINY, 128, tensor_parallel=2)
    assert plan.removed == pytest.approx(0.4, abs=0.01)
    assert plan.shape.intermediate % (128 * 2) == 0
    with pytest.raises(PlanError, match="2 key heads are not whole shares of 8 devices"):
        shapes.aligned(GLM, 0.4, TINY, 128, tensor_parallel=8)


def test_an_illegal_request_names_the_width_and_the_rule():
    with pytest.raises(PlanError, match=r"576 input features a device are not whole groups of 128"):
        shapes.aligned(EMBEDDED, 0.4, CPU4, 128)
    with pytest.raises(PlanError, match=r"between 0 and 0\.5"):
        shapes.aligned(EMBEDDED, 0.7, CPU4, 64)
    with pytest.raises(PlanError, match="group size 48 is none of"):
        shapes.aligned(EMBEDDED, 0.4, CPU4, 48)


@settings(max_examples=60, deadline=None)
@given(
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([32, 64, 128]),
    hidden=st.integers(1, 24).map(lambda n: n * 64),
    intermediate=st.integers(64, 4096),
    target=st.floats(0, 0.5),
    group_size=st.sampled_from([32, 64, 128]),
    tensor_parallel=st.sampled_from([1, 2, 4]),
)
def test_a_legal_plan_is_one_that_the_packed_kernel_takes(
    kv_heads, group, head_dim, hidden, intermediate, target, group_size, tensor_parallel
):
    """The planner's rules against the build's own: they were written apart, and must agree on every shard."""
    shape = ModelShape(
        layers=4, hidden=hidden, intermediate=intermediate, heads=kv_heads * group, kv_heads=kv_heads,
        head_dim=head_dim, vocab=512, tied=True,
    )  # fmt: skip
    try:
        plan = shapes.aligned(shape, target, CPU4, group_size, tensor_parallel)
    except PlanError:
        return
    assert plan.legal
    assert plan.shape.heads % plan.shape.kv_heads == 0
    assert plan.shape.kv_heads % tensor_parallel == 0
    assert plan.shape.intermediate <= intermediate
    for rows, columns in shapes.shards(plan.shape, tensor_parallel).values():
        assert rows == int(rows)
        assert illegal(int(rows), int(columns), group_size) is None
    nearest = min(
        abs(p.removed - target) for p in shapes.legal_plans(shape, CPU4, group_size, tensor_parallel)
    )
    assert abs(plan.removed - target) <= max(nearest, shapes.WITHIN) + 1e-12


def test_prediction_counts_every_layer_once_and_takes_the_nearest_shape():
    """Twice the blocks take twice as long; an unmeasured width has its neighbour's efficiency."""
    measured = {(576, 576): 1e-12, (1536, 576): 2e-12}
    one = shapes.predicted_s(replace(EMBEDDED, layers=1), 4, measured)
    assert shapes.predicted_s(replace(EMBEDDED, layers=2), 4, measured) == pytest.approx(2 * one)
    q, kv, mlp = 576 * 576, 192 * 576, 1536 * 576
    expected = 2 * 4 * (2 * q * 1e-12 + 2 * kv * 1e-12 + 2 * mlp * 2e-12)
    down = 2 * 4 * mlp * 1e-12  # (576, 1536) lies as near to (576, 576) as (1536, 576) does not
    assert one == pytest.approx(expected + down)
    with pytest.raises(PlanError, match="no GEMM efficiency"):
        shapes.predicted_s(EMBEDDED, 1, {})
