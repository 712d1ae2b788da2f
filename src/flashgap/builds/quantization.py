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

from flashgap.treatment import Quantization

LEVELS = 15  # largest code of 4 bits
SYMMETRIC_ZERO = 8  # code that stands for 0 in the symmetric scheme, codes 1..15 used


class BuildError(RuntimeError):
    """A build that cannot be made or loaded; the message names the layer or file and the numbers."""


class DequantizedLinear(nn.Module):
    """A linear layer at rest in 4 bits: weight [N, K] as `packed` [N, K/2], two codes a byte, low nibble
    first; `scales` and `zeros` [N, K/group_size, 1] in the dtype of the computation."""

    def __init__(self, packed: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, groups = scales.shape[:2]
        self.in_features = packed.shape[1] * 2
        self.group_size = self.in_features // groups
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        self.bias = nn.Parameter(bias) if bias is not None else None

    @classmethod
    def from_linear(cls, linear: nn.Linear, spec: Quantization) -> DequantizedLinear:
        """Quantize the weights of `linear` where they are; its bias is kept as it is."""
        bias = linear.bias.detach() if linear.bias is not None else None
        return cls(*quantize(linear.weight.detach(), spec), bias)

    @classmethod
    def empty_like(cls, linear: nn.Linear, spec: Quantization) -> DequantizedLinear:
        """The same shapes on the device of `linear` (`meta` for a skeleton), values undefined."""
        weight = linear.weight
        rows, columns = weight.shape
        packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(rows, columns // spec.group_size, 1, dtype=weight.dtype, device=weight.device)
        bias = linear.bias.detach() if linear.bias is not None else None
        return cls(packed, scales, torch.empty_like(scales), bias)

    def weight(self) -> Tensor:
        """The dense weight [N, K] in the dtype of the scales, made anew at every call."""
        low, high = self.packed & 15, self.packed >> 4
        codes = torch.stack((low, high), dim=-1).view(self.out_features, -1, self.group_size)
        dense = (codes.to(self.scales.dtype) - self.zeros) * self.scales
        return dense.view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]"""
        return nn.functional.linear(x, self.weight(), self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, 4 bits, group {self.group_size}"


def quantize(weight: Tensor, spec: Quantization) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of `weight` [N, K]: packed uint8 [N, K/2], and two [N, K/g, 1] in its dtype."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // spec.group_size, spec.group_size)
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


def targets(model: nn.Module, spec: Quantization) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that `spec` quantizes, by name; `BuildError` if a group does not divide one."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or any(name.endswith(suffix) for suffix in spec.skip):
            continue
        if module.in_features % spec.group_size or spec.group_size % 2:
            raise BuildError(
                f"{name}: {module.in_features} input features are not whole groups of {spec.group_size}; choose an "
                f"even group_size that divides {module.in_features}, or add the layer to quantization.skip"
            )
        yield name, module


def quantize_in_place(model: nn.Module, spec: Quantization, skeleton: bool = False) -> nn.Module:
    """Replace the target layers one by one, each freed before the next; `skeleton` only makes the shapes."""
    make = DequantizedLinear.empty_like if skeleton else DequantizedLinear.from_linear
    names = [name for name, _ in targets(model, spec)]  # all are checked before any is changed
    if not names:
        raise BuildError(f"no linear layer is left to quantize after skip {list(spec.skip)}")
    for name in names:
        model.set_submodule(name, make(model.get_submodule(name), spec))  # type: ignore[arg-type]
    return model


def error_in_scales(original: Tensor, layer: DequantizedLinear) -> float:
    """Largest |w - dequantized w| in units of the group's scale: 0.5 by rounding, a little more by dtype."""
    difference = (original.detach().float() - layer.weight().float()).abs()
    grouped = difference.view(layer.out_features, -1, layer.group_size)
    return float((grouped / layer.scales.float()).max())
