"""AutoAWQ 0.2.9 on a CPU: its own search over scales and clips, its result read before it is packed.

The one idea: the library lets a caller pass its own quantizer class, and that is where four things are
mended without touching its files. *Wrong on CPU*: its scale search keeps the weights to restore with
`.cpu()`, which copies from a GPU but on a CPU is the weight itself, so every trial scales what the last one
left and the model is destroyed in silence. *Slow on CPU*: its clip search multiplies activations and weights
element by element for 512 tokens at ten clip levels (about 5e11 half-precision products for a 135M model);
the same error is a quadratic form of each group's activation moments, a small matrix product. *Packing*
loops over single columns in Python; the codes are taken from the same arithmetic at once. *Skipped layers*
are matched by the suffix of the full name, and are neither clipped nor rounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flashgap.builds.calibration import calibration_chunks
from flashgap.builds.quantizers import Layers, Progress, checked, quiet_libraries
from flashgap.builds.weights import BuildError, GroupedWeight

CLIP_STEPS, CLIP_SHRINK = 20, 0.5  # the library's own grid: 10 levels from 1 down to 0.55
PARALLEL_SAMPLES = 8  # of a forward pass; bounds memory, costs no time


def quantize(
    model: Any, tokenizer: Any, config: Any, layers: Layers, tell: Progress
) -> dict[str, GroupedWeight]:
    """Codes by layer. Layers outside the decoder blocks, such as the output head, are rounded plainly."""
    if config.disable_search:
        return {name: _rounded(name, layer, config) for name, layer in layers.items()}
    chunks = calibration_chunks(tokenizer, config.calibration)
    with quiet_libraries():
        found = _search(model, tokenizer, config, layers, chunks, tell)
        rest = {name: _rounded(name, layer, config) for name, layer in layers.items() if name not in found}
    return found | rest


def _search(
    model: Any, tokenizer: Any, config: Any, layers: Layers, chunks: Tensor, tell: Progress
) -> dict[str, GroupedWeight]:
    from awq.models.auto import AWQ_CAUSAL_LM_MODEL_MAP

    family = model.config.model_type
    if family not in AWQ_CAUSAL_LM_MODEL_MAP:
        known = ", ".join(sorted(AWQ_CAUSAL_LM_MODEL_MAP))
        raise BuildError(f"autoawq: model family {family} is unknown to it ({known}); use llmcompressor")
    quantizer = _quantizer_class(layers, chunks.shape, tell)
    wrapped = AWQ_CAUSAL_LM_MODEL_MAP[family](model, family, False, model.config, None, None)
    wrapped.quantize(
        tokenizer,
        {"zero_point": True, "q_group_size": config.group_size, "w_bit": config.bits, "version": "GEMM"},
        calib_data=chunks.tolist(),
        max_calib_samples=chunks.shape[0],
        max_calib_seq_len=chunks.shape[1],
        n_parallel_calib_samples=PARALLEL_SAMPLES,
        quantizer_cls=quantizer,
    )
    found: dict[str, GroupedWeight] = wrapped.quantizer.found
    return found


def _rounded(name: str, layer: nn.Linear, config: Any) -> GroupedWeight:
    return checked(
        name, layer.weight.detach(), read_codes(layer.weight.detach(), config.bits, config.group_size)
    )


def read_codes(weight: Tensor, bits: int, group: int) -> GroupedWeight:
    """What `WQLinear_GEMM.from_linear` would pack for `weight` [N, K], in its half precision throughout."""
    rows, columns = weight.shape
    levels = 2**bits - 1
    grouped = weight.half().view(-1, group)
    low, high = grouped.amin(1, keepdim=True), grouped.amax(1, keepdim=True)
    scales = (high - low).clamp(min=1e-5) / levels
    zeros = (-torch.round(low / scales)).clamp(0, levels)
    dense = (torch.clamp(torch.round(grouped / scales) + zeros, 0, levels) - zeros) * scales
    codes = torch.round((dense + zeros * scales) / scales).to(torch.uint8)
    shape = (rows, columns // group)
    return GroupedWeight(
        codes.view(rows, columns), scales.view(shape).float(), zeros.view(shape).to(torch.uint8), bits
    )


def _quantizer_class(layers: Layers, expected: tuple[int, int], tell: Progress) -> Any:
    """A subclass of the library's quantizer that knows which layers are wanted and records their codes."""
    from awq.quantize.quantizer import AwqQuantizer

    names = {layer: name for name, layer in layers.items()}

    class Quantizer(AwqQuantizer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.found: dict[str, GroupedWeight] = {}
            self.blocks = 0
            super().__init__(*args, **kwargs)
            if tuple(self.inps.shape[:2]) != tuple(expected):
                raise BuildError(
                    f"autoawq: calibration kept {tuple(self.inps.shape[:2])} of {tuple(expected)} samples x tokens"
                )

        def _get_input_feat(self, layer: nn.Module, named_linears: dict[str, nn.Linear]) -> dict[str, Tensor]:
            features: dict[str, Tensor] = super()._get_input_feat(layer, named_linears)
            for name, x in features.items():
                if not torch.isfinite(x).all():
                    raise BuildError(
                        f"block {self.blocks} {name}: NaN or infinity in the calibration activations"
                    )
            return features

        def _compute_best_scale(self, *args: Any, **kwargs: Any) -> Tensor:
            inspected = kwargs["module2inspect"] if "module2inspect" in kwargs else args[3]
            with restorable(inspected):
                scales: Tensor = super()._compute_best_scale(*args, **kwargs)
            return scales

        def _search_best_clip(self, layer: Any, named_linears: dict[str, nn.Linear], input_feat: Any) -> Any:
            wanted = {name: linear for name, linear in named_linears.items() if linear in names}
            return super()._search_best_clip(layer, wanted, input_feat)

        def _compute_best_clip(self, w: Tensor, input_feat: Tensor, **_: Any) -> Tensor:
            return best_clip(w, input_feat, self.group_size, self.pseudo_quantize_tensor)

        def _apply_quant(self, module: nn.Module, named_linears: dict[str, nn.Linear]) -> None:
            for linear in named_linears.values():
                if linear in names:
                    weight = linear.weight.detach().cpu()
                    name = names[linear]
                    self.found[name] = checked(name, weight, read_codes(weight, self.w_bit, self.group_size))
            module.cpu()  # a block is searched on an accelerator if there is one
            self.blocks += 1
            tell(f"autoawq: {self.blocks} of {len(self.modules)} blocks")

    return Quantizer


@contextlib.contextmanager
def restorable(module: nn.Module) -> Iterator[None]:
    """`module.state_dict()` is a copy meanwhile, as the library expects of it."""
    views = module.state_dict
    module.state_dict = lambda: {name: tensor.clone() for name, tensor in views().items()}  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.state_dict


def best_clip(weight: Tensor, inputs: Tensor, group: int, pseudo_quantize: Any) -> Tensor:
    """Largest magnitude to keep in each group [N, K / group, 1]: least mean squared error of its output.

    With D the change of a group's weights [group] and M = X^T X / tokens [group, group] the moments of its
    inputs, that error is D M D^T: the library's sum over tokens, taken once for all clips.
    """
    rows, columns = weight.shape
    x = inputs.reshape(-1, columns // group, group).float()
    moments = (torch.einsum("tgi,tgj->gij", x, x) / x.shape[0]).to(weight.device)
    grouped = weight.view(rows, -1, group)
    largest = grouped.abs().amax(-1, keepdim=True)
    best, least = largest.clone(), torch.full_like(largest, torch.inf, dtype=torch.float32)
    for step in range(int(CLIP_SHRINK * CLIP_STEPS)):
        limit = largest * (1 - step / CLIP_STEPS)
        cut = torch.clamp(grouped, -limit, limit)
        change = (pseudo_quantize(cut)[0].view_as(grouped) - grouped).float()
        error = (torch.einsum("ngi,gij->ngj", change, moments) * change).sum(-1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, limit, best)
    return best
