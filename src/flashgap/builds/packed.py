"""Linear layers that multiply with packed 4-bit weights as they are, on a kernel that torch ships.

The one idea: the CPU's `aten::_weight_int4pack_mm_for_cpu` and the GPU's tinygemm
`aten::_weight_int4pack_mm` compute the same thing, `x @ ((code - 8) * scale + zero)^T`, from layouts of their
own, so a layer is packed once for its device and the operator is never ours. Inductor replaces the CPU
operator by matrix kernels of its own where they are faster for the rows at hand (`flashgap.artefact`).
Whether a layer *can* use the kernel is arithmetic on its shape, asked before anything is packed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashgap.builds.weights import BuildError, GroupedWeight

GROUP_SIZES = (32, 64, 128, 256)  # that the operators are written for
TILE_N = {"cpu": 16, "cuda": 8}  # output features must come in whole tiles
TILE_K = {"cpu": 2, "cuda": 128}
MIDDLE = 8  # the operators subtract it from every code
INNER_K_TILES = 8  # of the GPU layout: 128 input features at a time


def illegal(rows: int, columns: int, group_size: int, bits: int = 4, device: str = "cpu") -> str | None:
    """Why a weight [rows, columns] cannot use the packed kernel, None if it can. Pure."""
    if bits != 4:
        return f"{bits} bits; the packed kernel is for 4"
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
    """A linear layer on packed 4-bit weights: `packed` in the device's layout, `scales_and_zeros`
    [K / group_size, N, 2] in the dtype of the computation."""

    def __init__(
        self,
        packed: Tensor,
        scales_and_zeros: Tensor,
        group_size: int,
        shape: tuple[int, int],
        bias: Tensor | None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.bits, self.group_size = 4, group_size
        self.register_buffer("packed", packed)
        self.register_buffer("scales_and_zeros", scales_and_zeros)
        self.bias = nn.Parameter(bias) if bias is not None else None

    @classmethod
    def from_grouped(
        cls, name: str, weight: GroupedWeight, dtype: torch.dtype, bias: Tensor | None
    ) -> PackedLinear:
        """Pack `weight` for its device. `BuildError` names the layer `name` if no kernel takes its shape."""
        device = weight.codes.device.type
        weight = regrouped(weight)
        reason = illegal(*weight.shape, weight.group_size, weight.bits, device)
        if reason:
            raise BuildError(
                f"{name}: no packed kernel: {reason}; choose another group_size, or skip the layer"
            )
        return cls(
            pack_codes(weight.codes), pack_scales(weight, dtype), weight.group_size, weight.shape, bias
        )

    @classmethod
    def empty_like(cls, name: str, linear: nn.Linear, group_size: int, bits: int = 4) -> PackedLinear:
        """The same shapes on the device of `linear` (`meta` for a skeleton of a CPU build), values undefined."""
        rows, columns = linear.weight.shape
        packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=linear.weight.device)
        scales = torch.empty(
            columns // group_size, rows, 2, dtype=linear.weight.dtype, device=linear.weight.device
        )
        bias = linear.bias.detach() if linear.bias is not None else None
        return cls(packed, scales, group_size, (rows, columns), bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]"""
        flat = x.reshape(-1, self.in_features).contiguous()  # the last position of a prompt is not
        if x.device.type == "cuda":
            out = torch.ops.aten._weight_int4pack_mm(
                flat, self.packed, self.group_size, self.scales_and_zeros
            )
        else:
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(
                flat, self.packed, self.group_size, self.scales_and_zeros
            )
        out = out.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, 4 bits packed, group {self.group_size}"


def regrouped(weight: GroupedWeight) -> GroupedWeight:
    """`weight` with its scales repeated for the largest groups that a kernel knows: the same weight.

    One scale a channel is an ordinary group size to the kernel this way, at the price of more scales.
    """
    fitting = [size for size in GROUP_SIZES if weight.group_size % size == 0]
    if weight.group_size in GROUP_SIZES or not fitting:
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


def pack_scales(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Scales and zeros [K / group_size, N, 2]: the operators add `zero`, in units of the weight, to `(code - 8) * scale`."""
    scales = weight.scales.float()
    zeros = (MIDDLE - weight.zeros.float()) * scales
    return torch.stack((scales, zeros), dim=-1).transpose(0, 1).contiguous().to(dtype)
