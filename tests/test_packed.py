"""Packed layers: a wrong layout computes something, fast; a wrong rule of legality crashes or falls back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgap.builds import dispatch
from flashgap.builds.packed import HeadEmbedding, PackedLinear, illegal, regrouped
from flashgap.builds.quantization import DequantizedLinear
from flashgap.builds.weights import BuildError, GroupedWeight


def made(rows: int, columns: int, group_size: int, free_zeros: bool = False, seed: int = 0) -> GroupedWeight:
    torch.manual_seed(seed)
    groups = columns // group_size
    zeros = (
        torch.rand(rows, groups) * 15
        if free_zeros
        else torch.randint(0, 16, (rows, groups), dtype=torch.uint8)
    )
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    return GroupedWeight(codes, torch.rand(rows, groups) * 0.1 + 0.01, zeros, 4)


@pytest.mark.parametrize("free_zeros", [False, True])
@pytest.mark.parametrize("rows_of_input", [1, 3, 40])
def test_the_packed_kernel_multiplies_with_the_weight_it_was_given(rows_of_input, free_zeros):
    weight = made(64, 128, 32, free_zeros)
    layer = PackedLinear.from_grouped("layer", weight, torch.float32, torch.arange(64.0))
    x = torch.randn(2, rows_of_input, 128)
    expected = x @ weight.dequantize().T + torch.arange(64.0)
    torch.testing.assert_close(layer(x), expected, atol=2e-3, rtol=1e-3)


def test_both_executions_are_of_the_same_weight():
    """If this fails, packed and expanded builds of one quantizer are different models."""
    weight = made(32, 64, 32)
    x = torch.randn(5, 64)
    packed = PackedLinear.from_grouped("a", weight, torch.float32, None)(x)
    expanded = DequantizedLinear.from_grouped("a", weight, torch.float32, None)(x)
    torch.testing.assert_close(packed, expanded, atol=2e-3, rtol=1e-3)


def test_eight_bits_rest_as_bytes():
    codes = torch.randint(0, 256, (16, 64), dtype=torch.uint8)
    weight = GroupedWeight(
        codes, torch.rand(16, 2) + 0.1, torch.randint(0, 256, (16, 2), dtype=torch.uint8), 8
    )
    layer = DequantizedLinear.from_grouped("a", weight, torch.float32, None)
    torch.testing.assert_close(layer.weight(), weight.dequantize())
    with pytest.raises(BuildError, match="a: no packed kernel: 8 bits in groups of 32 with zero points"):
        PackedLinear.from_grouped("a", weight, torch.float32, None)


def test_one_scale_a_channel_is_repeated_for_the_kernel():
    """The published configuration: the kernel wants groups, the weight has one scale a channel."""
    weight = made(32, 576, 576)
    assert regrouped(weight).group_size == 64
    torch.testing.assert_close(regrouped(weight).dequantize(), weight.dequantize())
    layer = PackedLinear.from_grouped("a", weight, torch.float32, None)
    x = torch.randn(3, 576)
    torch.testing.assert_close(layer(x), x @ weight.dequantize().T, atol=1e-2, rtol=1e-2)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 12).map(lambda n: n * 8),
    columns=st.integers(1, 12).map(lambda n: n * 32),
    group_size=st.sampled_from([16, 32, 48, 64, 128]),
)
def test_legal_shapes_run_and_illegal_ones_say_why(rows, columns, group_size):
    """If this fails, a plan promises a kernel that refuses the shape, or refuses one that it takes."""
    reason = illegal(rows, columns, group_size)
    if columns % group_size:
        assert reason is not None
        return
    weight = made(rows, columns, group_size)
    if reason:
        assert any(str(number) in reason for number in (rows, columns, group_size))
        return
    layer = PackedLinear.from_grouped("layer", weight, torch.float32, None)
    x = torch.randn(2, columns)
    torch.testing.assert_close(layer(x), x @ weight.dequantize().T, atol=2e-2, rtol=1e-2)


def bytes_of(rows: int, columns: int, seed: int = 0) -> GroupedWeight:
    """8 bits, symmetric, one scale a channel."""
    torch.manual_seed(seed)
    codes = torch.randint(1, 256, (rows, columns), dtype=torch.uint8)
    zeros = torch.full((rows, 1), 128, dtype=torch.uint8)
    return GroupedWeight(codes, torch.rand(rows, 1) * 0.01 + 0.001, zeros, 8)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 70), columns=st.integers(1, 20).map(lambda n: n * 8), inputs=st.integers(1, 40))
def test_the_byte_kernel_is_only_given_shapes_that_it_multiplies_rightly(rows, columns, inputs):
    """torch's kernel reads past the end, or adds wrongly, where features are not whole tiles of 16."""
    weight = bytes_of(rows, columns)
    reason = illegal(rows, columns, columns, 8)
    if columns % 16:
        assert str(columns) in reason
        return
    layer = PackedLinear.from_grouped("a", weight, torch.float32, None)
    x = torch.randn(inputs, columns)
    torch.testing.assert_close(layer(x), x @ weight.dequantize().T, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("weight", [made(128, 96, 32), made(64, 64, 32, free_zeros=True), bytes_of(40, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_the_same_on_either_side_of_its_threshold(weight, dtype):
    """If this fails, a build answers otherwise to a long prompt than to a short one."""
    layer = PackedLinear.from_grouped("a", weight, dtype, None)
    if not dispatch.expandable(layer):
        pytest.skip("this processor packs 4 bits in another layout, and the layer never expands")
    x = torch.randn(9, weight.shape[1]).to(dtype)
    packed = layer(x)
    layer.many_rows = 9
    exact = dtype is torch.float32
    bound = 1e-3 if exact else 0.02 * float(packed.abs().max())
    torch.testing.assert_close(layer(x), packed, atol=bound, rtol=1e-3 if exact else 0.02)
    assert layer.dispatch(x[:8]).equal(layer.multiply(x[:8]))


def test_an_embedding_from_the_packed_head_reads_its_rows():
    head = PackedLinear.from_grouped("head", bytes_of(50, 32), torch.float32, None)
    ids = torch.tensor([[0, 49], [7, 7]])
    torch.testing.assert_close(HeadEmbedding(head)(ids), bytes_of(50, 32).dequantize()[ids])
    assert HeadEmbedding(head).packed.data_ptr() == head.packed.data_ptr()


@pytest.mark.parametrize(
    ("dense_wins_from", "expected"),
    [(1, 1), (37, 40), (64, 64), (10_000, None)],
)
def test_the_threshold_is_where_the_slower_way_becomes_the_faster(dense_wins_from, expected):
    """By a clock of our own: seconds are given, not measured. Three halvings leave an eighth of the gap."""

    def timed(_, rows):
        return (2.0, 1.0) if rows >= dense_wins_from else (1.0, 2.0)

    assert dispatch.crossing([], timed) == expected


def test_a_way_that_is_too_slow_to_time_decides_nothing():
    assert dispatch.crossing([], lambda _, rows: (2.0, 1.0) if rows < 64 else None) == 1
    assert dispatch.crossing([], lambda *_: None) is None
