"""Linear layers that multiply with packed 4- or 8-bit weights as they are, on kernels that torch ships.

The one idea: the CPU's `aten::_weight_int4pack_mm_for_cpu` and the GPU's tinygemm
`aten::_weight_int4pack_mm` compute the same thing, `x @ ((code - 8) * scale + zero)^T`, from layouts of their
own, so a layer is packed once for its device and the operator is never ours; 8 bits go to
`aten::_weight_int8pack_mm`, `(x @ code^T) * scale`. Inductor replaces the CPU operators by matrix kernels of
its own where they are faster for the rows at hand (`flashgap.artefact`). The operators' time grows with the
rows, so from `many_rows` on (measured by `flashgap.builds.dispatch`) a layer expands its weight first.
Whether a layer *can* use a kernel is arithmetic on its shape, asked before anything is packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flashgap.builds.weights import BuildError, GroupedWeight

GROUP_SIZES = (32, 64, 128, 256)  # that the operators are written for
TILE_N = {"cpu": 16, "cuda": 8}  # output features must come in whole tiles
TILE_K = {"cpu": 2, "cuda": 128}
BYTE_TILE_K = 16
MIDDLE = 8  # the 4-bit operators subtract it from every code
BYTE_MIDDLE = 128  # and this is the code that stands for 0 in 8 symmetric bits
BLOCK_N = 64  # output features that the CPU's layout keeps together, where vectors have 512 bits
INNER_K_TILES = 8  # of the GPU layout: 128 input features at a time


def illegal(
    rows: int,
    columns: int,
    group_size: int,
    bits: int = 4,
    device: str = "cpu",
    symmetric: bool = True,
) -> str | None:
    """Why a weight [rows, columns] cannot use a packed kernel, None if it can. Pure."""
    if bits == 8:
        if columns % BYTE_TILE_K:  # it computes something else, or crashes (torch 2.13)
            return f"{columns} input features are not whole tiles of {BYTE_TILE_K}"
        if group_size == columns and symmetric:
            return None
        return f"8 bits in groups of {group_size}{'' if symmetric else ' with zero points'}; the packed kernel wants one symmetric scale a channel"
    if bits != 4:
        return f"{bits} bits; the packed kernels are for 4 and 8"
    if group_size not in GROUP_SIZES:
        return f"group size {group_size}; the packed kernel knows {', '.join(map(str, GROUP_SIZES))}"
    if columns % group_size:
        return f"{columns} input features are not whole groups of {group_size}"
    if columns % TILE_K[device]:
        return f"{columns} input features are not whole tiles of {TILE_K[device]}"
    if rows % TILE_N[device]:
        return f"{rows} output features are not whole tiles of {TILE_N[device]}"
    return None


class PackedLinear(nn.Module):
    """A linear layer on packed weights: `packed` in the device's layout. Its kinds differ in bits."""

    bits: int
    packed: Tensor
    dtype: torch.dtype  # of the computation

    def __init__(self, group_size: int, shape: tuple[int, int], bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.group_size = group_size
        self.many_rows: int | None = None
        self.bias = nn.Parameter(bias) if bias is not None else None

    @staticmethod
    def from_grouped(
        name: str, weight: GroupedWeight, dtype: torch.dtype, bias: Tensor | None
    ) -> PackedLinear:
        """Pack `weight` for its device. `BuildError` names the layer `name` if no kernel takes its shape."""
        device = weight.codes.device.type
        weight = regrouped(weight)
        reason = illegal(*weight.shape, weight.group_size, weight.bits, device, weight.symmetric)
        if reason:
            raise BuildError(
                f"{name}: no packed kernel: {reason}; choose another group_size, or skip the layer"
            )
        return KINDS[weight.bits].pack(weight, dtype, bias)

    @classmethod
    def pack(cls, weight: GroupedWeight, dtype: torch.dtype, bias: Tensor | None) -> PackedLinear:
        """A layer of this kind from `weight`, whose shape is legal."""
        raise NotImplementedError

    @staticmethod
    def empty_like(name: str, linear: nn.Linear, group_size: int, bits: int = 4) -> PackedLinear:
        """The same shapes on the device of `linear` (`meta` for a skeleton of a CPU build), values undefined."""
        rows, columns = linear.weight.shape
        codes = torch.empty(rows, columns, dtype=torch.uint8, device=linear.weight.device)
        scales = torch.empty(rows, columns // group_size, device=linear.weight.device)
        weight = GroupedWeight(codes, scales, scales, bits)
        bias = linear.bias.detach() if linear.bias is not None else None
        return KINDS[bits].pack(weight, linear.weight.dtype, bias)

    def multiply(self, x: Tensor) -> Tensor:
        """[M, K] contiguous -> [M, N] on the packed kernel."""
        raise NotImplementedError

    def multiply_dense(self, x: Tensor) -> Tensor:
        """The same, the weight expanded on the way: for many rows."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]"""
        flat = x.reshape(-1, self.in_features).contiguous()  # the last position of a prompt is not
        out = self.dispatch(flat).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def dispatch(self, x: Tensor) -> Tensor:
        """[M, K] contiguous -> [M, N], the way that is faster for so many rows."""
        many = self.many_rows is not None and x.shape[0] >= self.many_rows
        return self.multiply_dense(x) if many else self.multiply(x)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.bits} bits packed, group {self.group_size}"


class PackedInt4Linear(PackedLinear):
    """4 bits by group: `scales_and_zeros` [K / group_size, N, 2] in the dtype of the computation."""

    bits = 4

    def __init__(
        self,
        packed: Tensor,
        scales_and_zeros: Tensor,
        group_size: int,
        shape: tuple[int, int],
        bias: Tensor | None,
    ) -> None:
        super().__init__(group_size, shape, bias)
        self.dtype = scales_and_zeros.dtype
        self.register_buffer("packed", packed)
        self.register_buffer("scales_and_zeros", scales_and_zeros)

    @classmethod
    def pack(cls, weight: GroupedWeight, dtype: torch.dtype, bias: Tensor | None) -> PackedInt4Linear:
        if weight.codes.is_meta:
            rows, columns = weight.shape
            packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta")
        else:
            packed = pack_codes(weight.codes)
        return cls(packed, pack_scales(weight, dtype), weight.group_size, weight.shape, bias)

    def multiply(self, x: Tensor) -> Tensor:
        kernel = (
            torch.ops.aten._weight_int4pack_mm
            if x.device.type == "cuda"
            else torch.ops.aten._weight_int4pack_mm_for_cpu
        )
        out: Tensor = kernel(x, self.packed, self.group_size, self.scales_and_zeros)
        return out

    def multiply_dense(self, x: Tensor) -> Tensor:
        codes = unpack_codes(self.packed, self.out_features)
        scales, zeros = self.scales_and_zeros.unbind(-1)
        grouped = codes.to(scales.dtype).view(-1, self.group_size, self.out_features)
        grouped.mul_(scales.unsqueeze(1)).add_((zeros - MIDDLE * scales).unsqueeze(1))
        return x @ grouped.view(self.in_features, self.out_features)


class PackedInt8Linear(PackedLinear):
    """8 bits with one symmetric scale a channel: `packed` int8 [N, K], `scales` [N] in the dtype of the computation."""

    bits = 8

    def __init__(self, packed: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__(packed.shape[1], (packed.shape[0], packed.shape[1]), bias)
        self.dtype = scales.dtype
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)

    @classmethod
    def pack(cls, weight: GroupedWeight, dtype: torch.dtype, bias: Tensor | None) -> PackedInt8Linear:
        signed = (weight.codes.to(torch.int16) - BYTE_MIDDLE).to(torch.int8)
        return cls(signed.contiguous(), weight.scales[:, 0].to(dtype).contiguous(), bias)

    def multiply(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, self.packed, self.scales)

    def multiply_dense(self, x: Tensor) -> Tensor:
        return (
            torch.nn.functional.linear(x, self.packed.to(x.dtype)) * self.scales
        )  # a byte is exact in bfloat16


@contextmanager
def expanded(model: nn.Module) -> Iterator[None]:
    """While open, each packed layer of `model` is a plain linear layer: the same weights, rounded to the computation's dtype."""
    packed = {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}
    for name, layer in packed.items():
        model.set_submodule(name, dense(layer))
    try:
        yield
    finally:
        for name, layer in packed.items():
            model.set_submodule(name, layer)


@torch.no_grad()
def dense(layer: PackedLinear) -> nn.Linear:
    """`layer` as a plain linear layer, its weight [N, K] read through its kernel."""
    eye = torch.eye(layer.in_features, dtype=layer.dtype, device=layer.packed.device)
    with torch.device("meta"):
        linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    linear.weight = nn.Parameter(layer.multiply(eye).T.contiguous(), requires_grad=False)
    linear.bias = layer.bias
    return linear


KINDS: dict[int, type[PackedLinear]] = {4: PackedInt4Linear, 8: PackedInt8Linear}


class HeadEmbedding(nn.Module):
    """A tied embedding that reads its rows from the packed output head, so that no 16-bit copy is kept."""

    def __init__(self, head: PackedInt8Linear) -> None:
        super().__init__()
        self.register_buffer("packed", head.packed, persistent=False)
        self.register_buffer("scales", head.scales, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., K]"""
        scales: Tensor = self.scales  # type: ignore[assignment]
        return self.packed[ids].to(scales.dtype) * scales[ids].unsqueeze(-1)  # type: ignore[index]


def regrouped(weight: GroupedWeight) -> GroupedWeight:
    """`weight` with its scales repeated for the largest groups that a kernel knows: the same weight.

    One scale a channel is an ordinary group size to the kernel this way, at the price of more scales.
    """
    fitting = [size for size in GROUP_SIZES if weight.group_size % size == 0]
    if weight.bits != 4 or weight.group_size in GROUP_SIZES or not fitting:
        return weight
    times = weight.group_size // max(fitting)
    scales, zeros = (t.repeat_interleave(times, dim=1) for t in (weight.scales, weight.zeros))
    return GroupedWeight(weight.codes, scales, zeros, weight.bits)


def pack_codes(codes: Tensor) -> Tensor:
    """Codes [N, K] in the layout that the device's operator reads."""
    if codes.device.type == "cuda":
        pairs = ((codes[:, ::2] << 4) | codes[:, 1::2]).contiguous()  # even feature in the high nibble
        return torch.ops.aten._convert_weight_to_int4pack(pairs, INNER_K_TILES)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int().contiguous(), 1)


def unpack_codes(packed: Tensor, rows: int) -> Tensor:
    """Codes [K, N] of what `pack_codes` made on a CPU with 512-bit vectors, `rows` (N) in whole blocks.

    A block is [K, 32] bytes: feature n of it in the low nibbles, n + 32 in the high. Whether a processor's
    layout is this one is asked by `flashgap.builds.dispatch` before it is relied on.
    """
    blocks = packed.view(rows // BLOCK_N, -1, BLOCK_N // 2)
    codes = torch.empty(blocks.shape[1], blocks.shape[0], 2, BLOCK_N // 2, dtype=packed.dtype)
    codes[:, :, 0] = (blocks & 15).transpose(0, 1)
    codes[:, :, 1] = (blocks >> 4).transpose(0, 1)
    return codes.view(-1, rows)


def pack_scales(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Scales and zeros [K / group_size, N, 2]: the operators add `zero`, in units of the weight, to `(code - 8) * scale`."""
    scales = weight.scales.float()
    zeros = (MIDDLE - weight.zeros.float()) * scales
    return torch.stack((scales, zeros), dim=-1).transpose(0, 1).contiguous().to(dtype)
