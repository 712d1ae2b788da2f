"""From how many rows on a packed layer had better expand its weight: measured, a shape at a time.

The one idea: the packed operators' time grows with the rows, a dense matmul's hardly does until there are
many, so there is one crossing a shape, and where it lies is a fact of the processor. It is measured on the
layers of the build themselves, in turn, so that weights come from memory as they do in a decode step, both
ways interleaved; what was found is kept with the build.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from flashgap.builds.packed import BLOCK_N, PackedInt4Linear, PackedLinear, pack_codes, unpack_codes

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REFINEMENTS = 3  # halvings between the rows that enclose the crossing
REPEATS = (
    7  # timings of each way at each number of rows; the least counts, since whatever else runs only adds
)
LONGEST_S = 0.05  # of one call; a slower one decides nothing that fewer rows have not
SAMPLE = 12  # layers of a shape that take turns


def thresholds(model: nn.Module) -> dict[str, int]:
    """`many_rows` of each packed layer that has one, by module name. On a CPU only."""
    found: dict[int, int] = {}
    for layers in by_shape(model):
        if layers[0].packed.device.type == "cpu" and expandable(layers[0]):
            rows = crossing(layers[:SAMPLE])
            if rows is not None:
                found |= {id(layer): rows for layer in layers}
    return {name: found[id(layer)] for name, layer in model.named_modules() if id(layer) in found}


def by_shape(model: nn.Module) -> list[list[PackedLinear]]:
    """The packed layers of `model`, those of one shape, number of bits and group size together."""
    shapes: dict[tuple[int, int, int, int], list[PackedLinear]] = defaultdict(list)
    for layer in model.modules():
        if isinstance(layer, PackedLinear):
            shapes[(layer.bits, layer.out_features, layer.in_features, layer.group_size)].append(layer)
    return list(shapes.values())


def apply(model: nn.Module, many_rows: dict[str, int]) -> None:
    """Set `many_rows` on the layers that it names."""
    for name, rows in many_rows.items():
        model.get_submodule(name).many_rows = rows


def expandable(layer: PackedLinear) -> bool:
    """Whether `multiply_dense` reads the layer's packed layout rightly on this processor."""
    if not isinstance(layer, PackedInt4Linear):
        return True
    if layer.out_features % BLOCK_N:
        return False
    codes = torch.arange(layer.out_features * layer.in_features).view(layer.out_features, -1)
    codes = (codes * 7 % 16).to(torch.uint8)
    return torch.equal(unpack_codes(pack_codes(codes), layer.out_features), codes.T)


@torch.no_grad()
def crossing(
    layers: list[PackedLinear], timed: Callable[..., tuple[float, float] | None] | None = None
) -> int | None:
    """The fewest rows from which expanding the weight is faster for every number that was tried, None if for none."""
    time_both = timed or _time_both
    behind, ahead = 0, None
    for rows in ROWS:
        pair = time_both(layers, rows)
        if pair is None:
            break
        packed_s, dense_s = pair
        if packed_s <= dense_s:
            behind, ahead = rows, None
        elif ahead is None:
            ahead = rows
    if ahead is None:
        return None
    for _ in range(REFINEMENTS):
        middle = (behind + ahead) // 2
        pair = time_both(layers, middle) if behind < middle < ahead else None
        if pair is None:
            break
        behind, ahead = (middle, ahead) if pair[0] <= pair[1] else (behind, middle)
    return ahead


def _time_both(layers: list[PackedLinear], rows: int) -> tuple[float, float] | None:
    """Least seconds of a call (packed, dense) for `rows` [rows, K]; None where a call takes too long."""
    x = torch.randn(rows, layers[0].in_features).to(layers[0].dtype)
    samples: tuple[list[float], list[float]] = ([], [])
    turn = turns(layers)
    for repeat in range(-1, REPEATS):  # the first is discarded
        for way, kept in enumerate(samples):
            start_s = time.perf_counter()
            for _ in layers:
                layer = next(turn)
                layer.multiply_dense(x) if way else layer.multiply(x)
            elapsed_s = (time.perf_counter() - start_s) / len(layers)
            if repeat >= 0:
                kept.append(elapsed_s)
            elif elapsed_s > LONGEST_S and way == 0:
                return None
    return min(samples[0]), min(samples[1])


def turns(layers: list[Any]) -> Iterator[Any]:
    """`layers` again and again, so that each finds its weights in memory and not in a cache."""
    while True:
        yield from layers
