"""llm-compressor's AWQ on a CPU: its pipeline as it is, codes by compressed-tensors' own `quantize`.

The one idea: AWQ is a search that changes the model and the rounding after it is compressed-tensors'; both
run in one pass over the decoder blocks. Two traps of version 0.14 without an accelerator are avoided at run
time, no file is touched: it pins memory that only CUDA can pin, and its loss is summed in the model's
bfloat16, whose 8 bits tie neighbouring grid points.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flashgap.builds.calibration import calibration_chunks
from flashgap.builds.quantizers import (
    Layers,
    Progress,
    checked,
    layer_form,
    quiet_libraries,
    round_to_nearest,
)
from flashgap.builds.weights import BuildError, GroupedWeight

GRID = 20  # scales tried per layer group
BATCH = 8  # samples of a forward pass
DUO_SCALING = True
OBSERVER = "memoryless_minmax"


def quantize(
    model: Any, tokenizer: Any, config: Any, layers: Layers, tell: Progress
) -> dict[str, GroupedWeight]:
    """Codes by layer; layers outside AWQ's mappings, such as the output head, are rounded plainly."""
    with quiet_libraries(), logged_warnings() as warned, without_pinning():
        from llmcompressor.modifiers.quantization import QuantizationModifier

        modifiers: list[Any] = [QuantizationModifier(config_groups=_groups(config, layers))]
        chunks = None
        if not config.disable_search:
            chunks = calibration_chunks(tokenizer, config.calibration)
            modifiers.insert(0, _awq(layers, chunks, tell))
        _run(model, modifiers, chunks)
        lost = [line for line in warned if "NaN" in line or "no activations" in line]
        if lost:
            raise BuildError(f"llmcompressor: {lost[0][:200]}")
        _remove_offloading(model)
        weights = {
            name: _read(name, layer, *layer_form(config, name, layer), config.bits)
            for name, layer in layers.items()
        }
    for name, layer in layers.items():
        model.set_submodule(name, _plain(layer))
    return weights


def _groups(config: Any, layers: Layers) -> dict[str, Any]:
    """One scheme for each number of bits, its layers by their exact names.

    Layers that are searched together must share a group size (version 0.14 fails otherwise), so the search sees
    8-bit layers in groups too; `_read` gives them their one scale a channel.
    """
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    by_bits: dict[int, list[str]] = {}
    for name, layer in layers.items():
        by_bits.setdefault(layer_form(config, name, layer)[0], []).append(name)
    return {
        f"bits_{bits}": QuantizationScheme(
            targets=names,
            weights=QuantizationArgs(
                num_bits=bits,
                type="int",
                symmetric=config.scheme == "symmetric",
                strategy="channel" if config.per_channel else "group",
                group_size=None if config.per_channel else config.group_size,
                observer=OBSERVER,
            ),
        )
        for bits, names in by_bits.items()
    }


def _run(model: Any, modifiers: list[Any], chunks: Tensor | None) -> None:
    """`oneshot` without its model loading: that would look the model's name up on the hub."""
    from llmcompressor.args import DatasetArguments
    from llmcompressor.core import active_session
    from llmcompressor.modeling.offset_norm import norm_calibration_context
    from llmcompressor.pipelines import CalibrationPipeline
    from torch.utils.data import DataLoader

    data = None
    if chunks is not None:
        rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in chunks]
        data = DataLoader(rows, batch_size=BATCH, shuffle=False)  # type: ignore[arg-type]
    session = active_session()
    session.reset()
    try:
        with norm_calibration_context(model):
            session.initialize(model=model, start=-1, recipe=modifiers, calib_data=data)
            pipeline = CalibrationPipeline.load_from_registry("datafree" if data is None else "sequential")
            pipeline(model, data, DatasetArguments(propagate_error=False))
            session.finalize()
    finally:
        session.reset()


def _awq(layers: Layers, chunks: Tensor, tell: Progress) -> Any:
    """The library's AWQ modifier, which also counts its tokens and sums its loss in float32."""
    from llmcompressor.modifiers.transform.awq import AWQModifier

    targets = set(layers.values())
    tokens = chunks.numel()

    class Modifier(AWQModifier):  # type: ignore[misc]
        def _set_resolved_mappings(self, model: nn.Module) -> None:
            super()._set_resolved_mappings(model)
            self._resolved_mappings = [
                mapping
                for mapping in self._resolved_mappings
                if any(layer in targets for layer in mapping.balance_layers)
            ]
            tell(f"llmcompressor: {len(self._resolved_mappings)} searches for scales")

        def _apply_smoothing(self, model: nn.Module) -> None:
            for name, (sums, count) in self._smooth_activation_stats.items():
                if not torch.isfinite(sums).all():
                    raise BuildError(f"{name}: NaN or infinity in the calibration activations")
                if int(count) != tokens:
                    raise BuildError(f"{name}: calibration kept {int(count)} of {tokens} tokens")
            super()._apply_smoothing(model)
            tell(f"llmcompressor: {len(self._error_metrics)} of {len(self._resolved_mappings)} searches done")

        def _compute_loss(self, fp16_outputs: list[Tensor], int_w_outputs: list[Tensor]) -> float:
            pairs = list(zip(fp16_outputs, int_w_outputs, strict=True))
            total = sum(float((a.float() - b.float()).square().sum(dtype=torch.float64)) for a, b in pairs)
            return total / sum(a.numel() for a, _ in pairs)

    return Modifier(n_grid=GRID, duo_scaling=DUO_SCALING)


def _read(name: str, layer: Any, bits: int, group: int, symmetric: bool, usual_bits: int) -> GroupedWeight:
    """Signed codes and zero points of the calibrated layer, moved to 0..2**bits - 1; a layer of other than the usual
    bits is rounded from the weight as the search left it."""
    if bits != usual_bits:
        return checked(name, layer.weight, round_to_nearest(layer.weight.detach(), bits, group, symmetric))
    from compressed_tensors.quantization import quantize as ct_quantize

    weight, scales = layer.weight.detach(), layer.weight_scale.detach()
    zeros = getattr(layer, "weight_zero_point", None)
    zeros = torch.zeros_like(scales, dtype=torch.int8) if zeros is None else zeros.detach()
    signed = ct_quantize(weight, scales, zeros, layer.quantization_scheme.weights, dtype=torch.int8)
    middle = 2 ** (bits - 1)
    codes, offset = ((t.to(torch.int16) + middle).to(torch.uint8) for t in (signed, zeros))
    return checked(name, weight, GroupedWeight(codes, scales.contiguous(), offset.contiguous(), bits))


def _remove_offloading(model: nn.Module) -> None:
    """The pipeline wraps every module's parameters and forward pass, even to offload from CPU to CPU."""
    from compressed_tensors.offload import remove_dispatch

    remove_dispatch(model)
    for module in model.modules():
        vars(module).pop("forward", None)  # the class's own again


def _plain(layer: nn.Linear) -> nn.Linear:
    """The layer without the library's wrapped forward, observers and calibration parameters."""
    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    plain.weight, plain.bias = layer.weight, layer.bias
    return plain


@contextlib.contextmanager
def logged_warnings() -> Iterator[list[str]]:
    """The library's own log sinks (stdout) give way to a list of its warnings."""
    from loguru import logger

    logger.disable("llmcompressor")  # its import logs already
    import llmcompressor  # noqa: F401  (adds its sinks)

    lines: list[str] = []
    logger.remove()
    logger.enable("llmcompressor")
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    try:
        yield lines
    finally:
        logger.remove(sink)


@contextlib.contextmanager
def without_pinning() -> Iterator[None]:
    """Leave the cache's memory unpinned where there is no accelerator to pin it for."""
    from llmcompressor.pipelines.cache import IntermediatesCache

    if torch.accelerator.is_available():
        yield
        return
    original = IntermediatesCache.pin_memory
    IntermediatesCache.pin_memory = lambda self, *args, **kwargs: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        IntermediatesCache.pin_memory = original  # type: ignore[method-assign]
