"""Round-to-nearest 4-bit weights that are expanded again on every forward pass.

The one idea: without a 4-bit matrix kernel, "4-bit" only changes where weights *rest*. Each forward pass
unpacks the nibbles, scales them to the model's dtype and calls the ordinary dense matmul, so it reads the
small weights, writes the big ones and reads them back: more traffic than the build it was to speed up. It
is written the straightforward way, neither slowed down nor tuned.

Round to nearest by group: for each `group_size` input features, `w ~ (q - zero) * scale` with q in 0..15
(Dettmers & Zettlemoyer 2023, arXiv:2212.09720, section 2; asymmetric as in AWQ, arXiv:2306.00978, eq. 1).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from flashgap.builds.packed import PackedLinear
from flashgap.builds.weights import BuildError, GroupedWeight
from flashgap.treatment import QuantizationConfig

LEVELS = 15  # largest code of 4 bits
SYMMETRIC_ZERO = 8  # code that stands for 0 in the symmetric scheme, codes 1..15 used


class DequantizedLinear(nn.Module):
    """A linear layer at rest in 4 or 8 bits: weight [N, K] as `packed`, [N, K/2] with two codes a byte, low
    nibble first, or [N, K]; `scales` and `zeros` [N, K/group_size, 1] in the dtype of the computation."""

    def __init__(
        self, packed: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, bits: int = 4
    ) -> None:
        super().__init__()
        self.bits = bits
        self.out_features, groups = scales.shape[:2]
        self.in_features = packed.shape[1] * (8 // bits)
        self.group_size = self.in_features // groups
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        self.bias = nn.Parameter(bias) if bias is not None else None

    @classmethod
    def from_linear(cls, linear: nn.Linear, spec: QuantizationConfig) -> DequantizedLinear:
        """Quantize the weights of `linear` where they are; its bias is kept as it is."""
        bias = linear.bias.detach() if linear.bias is not None else None
        return cls(*quantize(linear.weight.detach(), spec), bias)

    @classmethod
    def from_grouped(
        cls, name: str, weight: GroupedWeight, dtype: torch.dtype, bias: Tensor | None
    ) -> DequantizedLinear:
        """`weight` as its quantizer or file made it. `BuildError` names the layer `name` if it cannot be kept."""
        if weight.bits not in (4, 8) or weight.shape[1] % 2:
            raise BuildError(
                f"{name}: {weight.bits} bits, {weight.shape[1]} input features; wanted are 4 or 8 bits, even features"
            )
        codes = weight.codes
        packed = codes if weight.bits == 8 else codes[:, ::2] | (codes[:, 1::2] << 4)
        scales, zeros = (t.unsqueeze(-1).to(dtype).contiguous() for t in (weight.scales, weight.zeros))
        return cls(packed.contiguous(), scales, zeros, bias, weight.bits)

    @classmethod
    def empty_like(cls, name: str, linear: nn.Linear, group_size: int, bits: int = 4) -> DequantizedLinear:
        """The same shapes on the device of `linear` (`meta` for a skeleton), values undefined."""
        weight = linear.weight
        rows, columns = weight.shape
        packed = torch.empty(rows, columns * bits // 8, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(rows, columns // group_size, 1, dtype=weight.dtype, device=weight.device)
        bias = linear.bias.detach() if linear.bias is not None else None
        return cls(packed, scales, torch.empty_like(scales), bias, bits)

    def weight(self) -> Tensor:
        """The dense weight [N, K] in the dtype of the scales, made anew at every call."""
        codes = self.packed
        if self.bits == 4:
            codes = torch.stack((self.packed & 15, self.packed >> 4), dim=-1)
        codes = codes.view(self.out_features, -1, self.group_size)
        dense = (codes.to(self.scales.dtype) - self.zeros) * self.scales
        return dense.view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]"""
        # Made contiguous, because linear copies a frozen weight for every row of an input that is not.
        return nn.functional.linear(x.contiguous(), self.weight(), self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.bits} bits, group {self.group_size}"


def quantize(weight: Tensor, spec: QuantizationConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of `weight` [N, K]: packed uint8 [N, K/2], and two [N, K/g, 1] in its dtype."""
    rows, columns = weight.shape
    group_size = spec.group_size or columns
    grouped = weight.float().view(rows, columns // group_size, group_size)
    scales, zeros = _symmetric(grouped) if spec.scheme == "symmetric" else _asymmetric(grouped)
    scales = scales.to(weight.dtype)  # round first, so that codes are nearest under the stored scale
    codes = (grouped / scales.float() + zeros).round().clamp(0, LEVELS).to(torch.uint8).view(rows, columns)
    packed = codes[:, ::2] | (codes[:, 1::2] << 4)
    return packed.contiguous(), scales.contiguous(), zeros.to(weight.dtype).contiguous()


def _asymmetric(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """Range of each group, widened to hold 0, so that 0 is exact and the zero code fits 4 bits."""
    low = grouped.amin(-1, keepdim=True).clamp(max=0)
    high = grouped.amax(-1, keepdim=True).clamp(min=0)
    scales = ((high - low) / LEVELS).clamp(min=1e-8)
    return scales, (-low / scales).round().clamp(0, LEVELS)


def _symmetric(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 1..15 around 8: the largest magnitude of each group becomes 7 steps."""
    scales = (grouped.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-8)
    return scales, torch.full_like(scales, SYMMETRIC_ZERO)


def targets(model: nn.Module, spec: QuantizationConfig) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that `spec` quantizes, by name; `BuildError` if a group does not divide one."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or any(name.endswith(suffix) for suffix in spec.skip):
            continue
        group_size = spec.group_size or module.in_features
        if module.in_features % group_size or group_size % 2:
            raise BuildError(
                f"{name}: {module.in_features} input features are not whole groups of {group_size}; choose an "
                f"even group_size that divides {module.in_features}, or add the layer to quantization.skip"
            )
        yield name, module


def quantize_in_place(model: nn.Module, spec: QuantizationConfig) -> nn.Module:
    """Round the target layers one by one, each freed before the next."""
    names = [name for name, _ in targets(model, spec)]  # all are checked before any is changed
    if not names:
        raise BuildError(f"no linear layer is left to quantize after skip {list(spec.skip)}")
    for name in names:
        model.set_submodule(name, DequantizedLinear.from_linear(model.get_submodule(name), spec))  # type: ignore[arg-type]
    return model


def replace(
    model: nn.Module, weights: dict[str, GroupedWeight], execution: str, dtype: torch.dtype
) -> nn.Module:
    """Put `weights` into the linear layers they are named for, to be executed as `execution` says.

    A tied output layer that is quantized is untied by this: the embedding keeps its own tensor.
    """
    kind = LAYERS[execution]
    for name, weight in weights.items():
        linear = model.get_submodule(name)
        bias = linear.bias.detach() if getattr(linear, "bias", None) is not None else None
        model.set_submodule(name, kind.from_grouped(name, weight, dtype, bias))
    return model


def skeleton(model: nn.Module, layers: dict[str, tuple[int, int]], execution: str) -> nn.Module:
    """The layers of `replace` without values: `layers` has bits and group size of each quantized one."""
    for name, (bits, group_size) in layers.items():
        linear = model.get_submodule(name)
        model.set_submodule(name, LAYERS[execution].empty_like(name, linear, group_size, bits))  # type: ignore[arg-type]
    return model


def quantized_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Bits and group size of each quantized layer by name: what `skeleton` needs."""
    kinds = tuple(LAYERS.values())
    return {name: (m.bits, m.group_size) for name, m in model.named_modules() if isinstance(m, kinds)}


LAYERS: dict[str, type[DequantizedLinear] | type[PackedLinear]] = {
    "dequantize": DequantizedLinear,
    "packed": PackedLinear,
}


def error_in_scales(original: Tensor, layer: DequantizedLinear) -> float:
    """Largest |w - dequantized w| in units of the group's scale: 0.5 by rounding, a little more by dtype."""
    difference = (original.detach().float() - layer.weight().float()).abs()
    grouped = difference.view(layer.out_features, -1, layer.group_size)
    return float((grouped / layer.scales.float()).max())
