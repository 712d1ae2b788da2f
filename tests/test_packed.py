"""Packed layers: a wrong layout computes something, fast; a wrong rule of legality crashes or falls back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgap.builds.packed import PackedLinear, illegal, regrouped
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
    with pytest.raises(BuildError, match="a: no packed kernel: 8 bits"):
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
