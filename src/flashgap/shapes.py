"""Which widths a pruned decoder may have: planned with quantisation groups, kernel tiles and tensor parallelism at once.

The one idea: a target share of parameters names no shape. Many shapes hit it within a percent, and only some of them
keep every linear layer on its fast kernel when the layer is cut over `tensor_parallel` devices, so the plan is a search
over legal widths, nearest the target first, then nearest to taking attention and MLP alike. Attention goes by whole
groups of query heads with their key head, the MLP by channels, depth by blocks; the hidden width stays. Pure arithmetic.

Rules are per shard: a column-parallel layer (q, k, v, gate, up) is cut along its output features, a row-parallel
one (o, down) along its input features (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from flashgap.cost import ModelShape, parameters

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
WITHIN = 0.01  # of the target; among plans that near, the most even one wins


class PlanError(RuntimeError):
    """A request that no shape meets; the message names the width and the rule."""


@dataclass(frozen=True)
class Kernel:
    """What a matrix kernel asks of a shard [N out, K in]: whole tiles, and whole quantisation groups of K if it has groups."""

    name: str
    tile_n: int
    tile_k: int
    group_sizes: tuple[int, ...] = ()


# Tiles as the operators check them (ATen's int4 and int8 operators, torch 2.13; AMX bf16 tiles of 16 x 32 and the
# tensor cores' 8 x 16 where a width that is none falls back to padding or a slower path).
KERNELS = {
    "bf16_amx": Kernel("bf16_amx", 16, 32),
    "bf16_tensor_cores": Kernel("bf16_tensor_cores", 8, 8),
    "int4_cpu": Kernel("int4_cpu", 16, 2, (32, 64, 128, 256)),
    "int4_tinygemm": Kernel("int4_tinygemm", 8, 128, (32, 64, 128, 256)),
    "int8_cpu": Kernel("int8_cpu", 1, 16),
}


@dataclass(frozen=True)
class Plan:
    """A shape, what share of the original's parameters it lacks, and which rules it breaks (none if it is legal)."""

    shape: ModelShape
    removed: float
    broken: tuple[str, ...]

    @property
    def legal(self) -> bool:
        """Whether every layer keeps its kernel."""
        return not self.broken


def shards(shape: ModelShape, tensor_parallel: int = 1) -> dict[str, tuple[float, float]]:
    """Name -> (out, in) features of one device's part of each linear layer; not whole if it does not divide."""
    cut: dict[str, tuple[float, float]] = {}
    for name, (rows, columns) in shape.linear_shapes.items():
        along_rows = name in COLUMN_PARALLEL
        cut[name] = (rows / tensor_parallel, columns) if along_rows else (rows, columns / tensor_parallel)
    return cut


def broken_rules(
    shape: ModelShape, kernel: Kernel, group_size: int | None = None, tensor_parallel: int = 1
) -> tuple[str, ...]:
    """One line for each width that leaves its kernel, naming width and rule; empty for a legal shape.

    `group_size` is of the quantised weights, None for weights without groups.
    """
    found = []
    if shape.kv_heads % tensor_parallel:
        found.append(f"{shape.kv_heads} key heads are not whole shares of {tensor_parallel} devices")
    if shape.heads % shape.kv_heads:
        found.append(f"{shape.heads} heads are not whole groups of {shape.kv_heads} key heads")
    if shape.hidden % shape.heads:  # a rule of transformers' Llama, though heads have a width of their own
        found.append(f"hidden width {shape.hidden} is not a multiple of {shape.heads} heads")
    if kernel.group_sizes and group_size not in kernel.group_sizes:
        found.append(f"group size {group_size} is none of {kernel.name}'s {list(kernel.group_sizes)}")
    for name, (rows, columns) in shards(shape, tensor_parallel).items():
        if rows % kernel.tile_n:
            found.append(f"{name}: {rows:g} output features a device are not whole tiles of {kernel.tile_n}")
        if columns % kernel.tile_k:
            found.append(
                f"{name}: {columns:g} input features a device are not whole tiles of {kernel.tile_k}"
            )
        if group_size and columns % group_size:
            found.append(f"{name}: {columns:g} input features a device are not whole groups of {group_size}")
    return tuple(found)


def pruned(shape: ModelShape, kv_heads: int, intermediate: int, layers: int | None = None) -> ModelShape:
    """`shape` with so many key heads, each with its query heads, MLP channels and blocks."""
    heads = kv_heads * (shape.heads // shape.kv_heads)
    return replace(
        shape, kv_heads=kv_heads, heads=heads, intermediate=intermediate, layers=layers or shape.layers
    )


def removed_share(shape: ModelShape, smaller: ModelShape) -> float:
    """Share of the parameters of `shape` that `smaller` lacks."""
    return 1 - parameters(smaller) / parameters(shape)


def legal_plans(
    shape: ModelShape, kernel: Kernel, group_size: int | None = None, tensor_parallel: int = 1
) -> Iterator[Plan]:
    """Every legal shape by width that is not larger than `shape`; `PlanError` if the hidden width rules all out."""
    step = math.lcm(kernel.tile_n, kernel.tile_k, group_size or 1) * tensor_parallel
    first: tuple[str, ...] = ()
    any_legal = False
    for kv_heads in range(shape.kv_heads, 0, -1):
        for intermediate in range(shape.intermediate // step * step, 0, -step):
            smaller = pruned(shape, kv_heads, intermediate)
            broken = broken_rules(smaller, kernel, group_size, tensor_parallel)
            if not broken:
                any_legal = True
                yield Plan(smaller, removed_share(shape, smaller), ())
            first = first or broken
            if broken:
                break  # what breaks is not the intermediate width, which is a whole number of steps
    if not any_legal:
        reason = first[0] if first else f"{shape.intermediate} MLP channels are less than a step of {step}"
        raise PlanError(f"no legal width for {kernel.name} on {tensor_parallel} device(s): {reason}")


def aligned(
    shape: ModelShape, target: float, kernel: Kernel, group_size: int | None = None, tensor_parallel: int = 1
) -> Plan:
    """The legal plan by width nearest to removing `target` of all parameters.

    Of those within `WITHIN` of it, the one that takes attention and MLP most alike. Raises `PlanError`.
    """
    _check_target(target)

    def far(plan: Plan) -> tuple[float, float]:
        miss = abs(plan.removed - target)
        return (0.0 if miss <= WITHIN else miss, unevenness(shape, plan.shape) + miss)

    return min(legal_plans(shape, kernel, group_size, tensor_parallel), key=far)


def naive(
    shape: ModelShape, target: float, kernel: Kernel, group_size: int | None = None, tensor_parallel: int = 1
) -> Plan:
    """The plan that ignores shapes: key heads rounded to the same share, then whatever channels hit the target.

    Its `broken` says which kernels that costs. Raises `PlanError` if no number of channels hits the target.
    """
    _check_target(target)
    channels = parameters(pruned(shape, 1, shape.intermediate)) - parameters(
        pruned(shape, 1, shape.intermediate - 1)
    )
    blocks = parameters(shape) - parameters(replace(shape, layers=0))
    kept = max(0.0, 1 - target * parameters(shape) / blocks)
    kv_heads = min(shape.kv_heads, max(1, round(kept * shape.kv_heads)))
    surplus = parameters(pruned(shape, kv_heads, shape.intermediate)) - (1 - target) * parameters(shape)
    intermediate = round(shape.intermediate - surplus / channels)
    if not 0 < intermediate <= shape.intermediate:
        raise PlanError(
            f"removing {target:.0%} would leave {intermediate} of {shape.intermediate} MLP channels; the embedding is not pruned"
        )
    smaller = pruned(shape, kv_heads, intermediate)
    broken = broken_rules(smaller, kernel, group_size, tensor_parallel)
    return Plan(smaller, removed_share(shape, smaller), broken)


def by_depth(
    shape: ModelShape, target: float, kernel: Kernel, group_size: int | None = None, tensor_parallel: int = 1
) -> Plan:
    """Whole blocks removed, as near to the target as one block allows; widths, and so kernels, stay what they are."""
    _check_target(target)
    block = (parameters(shape) - parameters(replace(shape, layers=0))) / shape.layers
    layers = shape.layers - round(target * parameters(shape) / block)
    if layers < 1:
        raise PlanError(f"removing {target:.0%} would leave {layers} of {shape.layers} blocks")
    smaller = replace(shape, layers=layers)
    broken = broken_rules(smaller, kernel, group_size, tensor_parallel)
    return Plan(smaller, removed_share(shape, smaller), broken)


def unevenness(shape: ModelShape, smaller: ModelShape) -> float:
    """How differently attention and MLP were taken: difference of the shares that are kept."""
    return abs(smaller.kv_heads / shape.kv_heads - smaller.intermediate / shape.intermediate)


def predicted_s(
    shape: ModelShape, rows: int, seconds_a_flop: Mapping[tuple[int, int], float], tensor_parallel: int = 1
) -> float:
    """Seconds of all blocks' linear layers for `rows` tokens on one device, from measured seconds a FLOP by (out, in).

    A shape that was not measured takes the efficiency of the nearest one, by the logarithms of both widths.
    """
    if not seconds_a_flop:
        raise PlanError("no GEMM efficiency was measured; run the experiment that measures it")
    total = 0.0
    for out_features, in_features in shards(shape, tensor_parallel).values():
        near = min(
            seconds_a_flop,
            key=lambda known: abs(math.log(known[0] / out_features)) + abs(math.log(known[1] / in_features)),
        )
        total += 2 * rows * out_features * in_features * seconds_a_flop[near]
    return shape.layers * total


def _check_target(target: float) -> None:
    if not 0 <= target <= 0.5:
        raise PlanError(f"target {target:g}: a share of parameters between 0 and 0.5")
