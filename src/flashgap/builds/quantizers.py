"""Real quantizers behind one function: from a dense model and a configuration to codes by layer.

The one idea: what a quantizer *found* (codes, scales, zero points, and the scales it folded into norms and
earlier layers) is kept apart from how it packs and runs them. Each library is run as it is, its searches
included, and its result is read as `GroupedWeight`; `disable_search` is the same library rounding plainly.
A calibration that lost samples, met NaN or clipped a whole group is an error here, not a log line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flashgap.builds.weights import BuildError, GroupedWeight

Progress = Callable[[str], None]
Layers = dict[str, nn.Linear]
SMALLEST_SCALE = 1e-8


def quantize_model(
    model: Any, tokenizer: Any, config: Any, progress: Progress | None = None
) -> dict[str, GroupedWeight]:
    """Run `config.quantizer` on `model` (dense, in memory, changed in place); weights by module name.

    Every linear layer that `config.skip` does not name is in the result, the output head untied first.
    What the quantizer folded into other weights is in `model` afterwards; its quantized layers' own
    weights are dense and meaningless: the caller replaces them.
    """
    tell = progress or (lambda _: None)
    check_config(config)
    layers = target_layers(model, config)
    untie(model, layers)
    quantize = {"rtn": _rtn, "hqq": _hqq, "autoawq": _autoawq, "llmcompressor": _llmcompressor}
    try:
        with torch.no_grad():
            weights: dict[str, GroupedWeight] = quantize[config.quantizer](
                model, tokenizer, config, layers, tell
            )
    except BuildError:
        raise
    except Exception as error:  # each library has errors of its own; the reason is theirs, the form ours
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise BuildError(f"{config.quantizer}: {type(error).__name__}: {text}") from error
    missing = [name for name in layers if name not in weights]
    if missing:
        raise BuildError(
            f"{config.quantizer}: no codes for {len(missing)} of {len(layers)} layers: {missing[:3]}"
        )
    return weights


def check_config(config: Any) -> None:
    """Refuse what the quantizer cannot do, with the reason."""
    if config.quantizer == "autoawq":
        if config.scheme == "symmetric" or config.per_channel:
            what = "symmetric" if config.scheme == "symmetric" else "per channel"
            raise BuildError(
                f"autoawq: {what} is not possible, its packed layer stores a zero point for every group of input "
                "features; use llmcompressor"
            )
        if config.bits != 4:
            raise BuildError(
                f"autoawq: {config.bits} bits are not possible, it packs 4 bits only; use llmcompressor"
            )
    if config.quantizer == "hqq" and config.scheme == "symmetric":
        raise BuildError(
            "hqq: symmetric is not possible, it finds a free zero point; use rtn or llmcompressor"
        )
    if config.quantizer == "autoawq" and eight_bit_layers(config):
        raise BuildError(
            "autoawq: layers at 8 bits are not possible, it packs 4 bits only; use llmcompressor"
        )
    if _searches_activations(config) and config.calibration is None:
        raise BuildError(
            f"{config.quantizer}: its search needs a calibration; set it, or disable_search: true"
        )


def target_layers(model: nn.Module, config: Any) -> Layers:
    """The linear layers to quantize by name; `BuildError` if a group does not divide one or none is left."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not any(name.endswith(suffix) for suffix in config.skip)
    }
    if not layers:
        raise BuildError(f"no linear layer is left to quantize after skip {list(config.skip)}")
    for name, layer in layers.items():
        _, group, _ = layer_form(config, name, layer)
        if layer.in_features % group or group % 2:
            raise BuildError(
                f"{name}: group_size {group} does not divide {layer.in_features} input features into even groups; "
                f"legal: {legal_group_sizes(layer.in_features)}, per_channel, or the layer in skip"
            )
    return layers


def eight_bit_layers(config: Any) -> tuple[str, ...]:
    """Suffixes of layers that keep 8 bits in a configuration of 4."""
    return tuple(getattr(config, "eight_bits", ()))


def layer_form(config: Any, name: str, layer: nn.Linear) -> tuple[int, int, bool]:
    """(bits, input features a scale, symmetric) of the layer `name`."""
    if any(name.endswith(suffix) for suffix in eight_bit_layers(config)):
        return 8, layer.in_features, True
    group = layer.in_features if config.per_channel else int(config.group_size)
    return int(config.bits), group, config.scheme == "symmetric"


def legal_group_sizes(features: int) -> list[int]:
    """Multiples of 16 that divide `features`, or its even divisors if there are none."""
    even = [size for size in range(2, features + 1, 2) if features % size == 0]
    return [size for size in even if size % 16 == 0] or even


def untie(model: Any, layers: Layers) -> None:
    """Give a quantized output head its own weight, so that the embedding stays as it is."""
    embedding = model.get_input_embeddings()
    for layer in layers.values():
        if embedding is not None and layer.weight is embedding.weight:
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
            model.config.tie_word_embeddings = False


def checked(name: str, weight: Tensor, found: GroupedWeight) -> GroupedWeight:
    """`found`, if it stands for `weight` [N, K]; `BuildError` for NaN, bad scales or a group clipped whole."""
    if not torch.isfinite(weight).all():
        raise BuildError(f"{name}: the weight holds NaN or infinity, nothing can be quantized")
    bad = ~torch.isfinite(found.scales) | (found.scales <= 0)
    if found.zeros.is_floating_point():
        bad = bad | ~torch.isfinite(found.zeros)
    if bad.any():
        raise BuildError(
            f"{name}: {int(bad.sum())} of {bad.numel()} scales or zero points are NaN, infinite or 0"
        )
    error = (weight.float() - found.dequantize()).abs().view(weight.shape[0], -1, found.group_size)
    clipped = (error > 1.001 * found.scales.float().unsqueeze(-1)).all(-1)
    if clipped.any():
        raise BuildError(
            f"{name}: all codes are clipped in {int(clipped.sum())} of {clipped.numel()} groups: the zero point is "
            "outside the range of the codes; use another quantizer or skip the layer"
        )
    rounding = (error / found.scales.float().unsqueeze(-1)).square().mean().sqrt()
    return replace(found, rounding=float(rounding))


def round_to_nearest(weight: Tensor, bits: int, group: int, symmetric: bool) -> GroupedWeight:
    """Plain rounding of `weight` [N, K]; the scale is rounded to its dtype first, codes are nearest under it.

    Symmetric codes keep clear of the lowest, so that both signs reach as far (1..15 around 8).
    """
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // group, group)
    levels, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scales = grouped.abs().amax(-1) / (middle - 1)
        scales = scales.clamp(min=SMALLEST_SCALE).to(weight.dtype)
        zeros = torch.full_like(scales, middle, dtype=torch.uint8)
    else:  # the range is widened to hold 0, so that 0 is exact and its code exists
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = ((high - low) / levels).clamp(min=SMALLEST_SCALE).to(weight.dtype)
        zeros = (-low / scales.float()).round().clamp(0, levels).to(torch.uint8)
    codes = (grouped / scales.float().unsqueeze(-1)).round() + zeros.float().unsqueeze(-1)
    codes = codes.clamp(0, levels).to(torch.uint8).view(rows, columns)
    return GroupedWeight(codes, scales, zeros, bits)


def _searches_activations(config: Any) -> bool:
    return config.quantizer in ("autoawq", "llmcompressor") and not config.disable_search


def _rtn(model: Any, tokenizer: Any, config: Any, layers: Layers, tell: Progress) -> dict[str, GroupedWeight]:
    """No search either way: the floor that any search must beat."""
    weights = {}
    for name, layer in layers.items():
        weight = layer.weight.detach()
        weights[name] = checked(name, weight, round_to_nearest(weight, *layer_form(config, name, layer)))
    return weights


def _hqq(model: Any, tokenizer: Any, config: Any, layers: Layers, tell: Progress) -> dict[str, GroupedWeight]:
    """Half-quadratic search for a free zero point, without data; `disable_search` leaves the search out."""
    with quiet_libraries():
        from hqq.core.quantize import Quantizer
    weights = {}
    for number, (name, layer) in enumerate(layers.items(), 1):
        weight = layer.weight.detach()
        rows, columns = weight.shape
        bits, group, symmetric = layer_form(config, name, layer)
        if symmetric:  # a layer kept at 8 bits: it has no zero point to search for
            weights[name] = checked(name, weight, round_to_nearest(weight, bits, group, symmetric))
            continue
        codes, meta = Quantizer.quantize(
            weight,
            nbits=bits,
            group_size=group,
            optimize=not config.disable_search,
            axis=1,
            bitpack=False,
            device="cpu",
        )
        scales, zeros = (meta[key].view(rows, columns // group).to(weight.dtype) for key in ("scale", "zero"))
        found = GroupedWeight(codes.view(rows, columns).to(torch.uint8), scales, zeros, bits)
        weights[name] = checked(name, weight, found)
        if number % 50 == 0:
            tell(f"hqq: {number} of {len(layers)} layers")
    return weights


def _autoawq(
    model: Any, tokenizer: Any, config: Any, layers: Layers, tell: Progress
) -> dict[str, GroupedWeight]:
    from flashgap.builds import autoawq

    return autoawq.quantize(model, tokenizer, config, layers, tell)


def _llmcompressor(
    model: Any, tokenizer: Any, config: Any, layers: Layers, tell: Progress
) -> dict[str, GroupedWeight]:
    from flashgap.builds import llm_compressor

    return llm_compressor.quantize(model, tokenizer, config, layers, tell)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """No progress bars, no log lines of the libraries, no Python warnings."""
    import logging
    import warnings

    import tqdm

    init, level = tqdm.tqdm.__init__, logging.root.manager.disable

    def silent(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "disable": True})

    tqdm.tqdm.__init__ = silent  # type: ignore[method-assign]
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda *_, **__: None  # AutoAWQ sets filters of its own
            yield
    finally:
        tqdm.tqdm.__init__ = init  # type: ignore[method-assign]
        logging.disable(level)
