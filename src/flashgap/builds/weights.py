"""One form for every group-quantized weight, whoever made it and however a file packs it.

The one idea: quantizers and file formats differ in packing, in where the zero point is stored and in what
they call things; kernels differ in the layout they read. Between them stands plain integer codes with a
scale and a zero point a group, so that each quantizer, format and kernel is one small translation, and
"loads back bit-equal" can be asked of the codes themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


class BuildError(RuntimeError):
    """A build that cannot be made or loaded; the message names the layer or file and the numbers."""


@dataclass(frozen=True)
class GroupedWeight:
    """A linear layer's weight [N, K] (N out, K in features): `w = (codes - zeros) * scales` by group.

    `codes` uint8 [N, K] in 0..2**bits - 1; `scales` [N, K / group_size] in the model's dtype or float32;
    `zeros` uint8 [N, K / group_size] (2**(bits - 1) throughout for a symmetric scheme), or floating where
    the quantizer leaves them free (HQQ, GGUF Q4_1). One scale a channel is `group_size == K`. `rounding` is the
    root mean square of what rounding moved, in scales, where the quantizer knows it: about 0.29 (1 / sqrt 12),
    and near 0 for weights that lay on this grid already.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    rounding: float | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out features, in features)"""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group_size(self) -> int:
        """Input features a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def symmetric(self) -> bool:
        """Whether every zero point is the middle code."""
        return bool((self.zeros == 2 ** (self.bits - 1)).all())

    def dequantize(self) -> Tensor:
        """The dense weight [N, K] in float32."""
        rows, columns = self.shape
        grouped = self.codes.view(rows, -1, self.group_size).float()
        dense = (grouped - self.zeros.float().unsqueeze(-1)) * self.scales.float().unsqueeze(-1)
        return dense.view(rows, columns)
