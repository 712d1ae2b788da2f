"""Structured pruning: a smaller, plain transformers model with the least important heads, channels or blocks gone.

The one idea: *what* goes is decided by importance, *how much* by a plan of shapes (`flashgap.shapes`), and the two do not
know of each other. What is left is cut out of the weights and put into an ordinary model of the smaller configuration,
so it saves, loads and generates like any other, and its grouped-query structure is legal by construction: a key head goes
with its query heads.

Importance, summed over a structure's weights or tokens:
magnitude, the squared weights (Li et al. 2017, arXiv:1608.08710, with squares);
activation, squared weights that read a channel times the mean square of what they read (Sun et al. 2023,
arXiv:2306.11695, summed by structure); blocks by how little they turn their input: 1 - cos (Men et al. 2024, arXiv:2403.03853);
taylor, the squared sum of weight times gradient (Molchanov et al. 2019, arXiv:1906.10771, equation 8).
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flashgap import model_support, shapes
from flashgap.builds.calibration import calibration_chunks, calibration_text
from flashgap.builds.recovery import recovered
from flashgap.builds.weights import BuildError
from flashgap.cost import ModelShape
from flashgap.progress import note
from flashgap.treatment import PruningConfig

IMPORTANCE = ("magnitude", "activation", "taylor")
BATCH = 4  # calibration pieces of a forward pass


@dataclass
class Scores:
    """Importance by block: `channels` [L][I] of MLP channels, `groups` [L][kv heads], `blocks` [L]. Higher stays."""

    channels: list[Tensor] = field(default_factory=list)
    groups: list[Tensor] = field(default_factory=list)
    blocks: Tensor = field(default_factory=lambda: torch.empty(0))


def pruned_model(model: Any, tokenizer: Any, spec: PruningConfig) -> tuple[Any, dict[str, Any]]:
    """`model` pruned as `spec` says, and facts: sizes left, `removed` (share of parameters, counted), `broken` rules, seconds."""
    start_s = time.perf_counter()
    shape = ModelShape.from_config(model.config.get_text_config())
    planned = {"naive": shapes.naive, "aligned": shapes.aligned}[spec.plan]
    if spec.method == "depth":
        planned = shapes.by_depth
    try:
        plan = planned(shape, spec.target, shapes.KERNELS[spec.kernel], spec.group_size, spec.tensor_parallel)
    except shapes.PlanError as error:
        raise BuildError(f"pruning: {error}") from None
    chunks = calibration_chunks(tokenizer, spec.calibration) if spec.calibration else None
    before = sum(p.numel() for p in model.parameters())
    smaller = prune(model, plan.shape, importance(model, chunks, spec.importance))
    recovery = None
    if spec.recovery:
        smaller, recovery = recovered(smaller, model, tokenizer, spec.recovery, note)
    facts = {
        "layers": plan.shape.layers,
        "heads": plan.shape.heads,
        "kv_heads": plan.shape.kv_heads,
        "intermediate": plan.shape.intermediate,
        "removed": 1 - sum(p.numel() for p in smaller.parameters()) / before,
        "broken": list(plan.broken),
        "calibration_sha256": calibration_text(spec.calibration.text)[1] if spec.calibration else None,
        "recovery": recovery,
        "made_s": time.perf_counter() - start_s,
    }
    return smaller.requires_grad_(False), facts


def importance(model: Any, chunks: Tensor | None, kind: str) -> Scores:
    """Score every structure of `model`; `chunks` [samples, tokens] of calibration ids, needed unless by magnitude.

    Raises `BuildError` for an unknown kind, missing calibration, or scores that are NaN or infinite.
    """
    if kind not in IMPORTANCE:
        raise BuildError(f"pruning.importance: '{kind}' is none of {', '.join(IMPORTANCE)}")
    if kind != "magnitude" and chunks is None:
        raise BuildError(f"pruning.importance: {kind} looks at data; set pruning.calibration")
    scored = {"magnitude": _by_magnitude, "activation": _by_activation, "taylor": _by_taylor}[kind](
        model, chunks
    )
    for tensor in (*scored.channels, *scored.groups, scored.blocks):
        if not torch.isfinite(tensor).all():
            raise BuildError(
                f"pruning: importance by {kind} is NaN or infinite; the weights or the calibration hold such values"
            )
    return scored


def prune(model: Any, shape: ModelShape, scores: Scores) -> Any:
    """A new model of `shape` with the structures of `model` that score highest, in their order; `model` is left as it is.

    Depth first: whole blocks go by `scores.blocks`, then heads and channels inside those that stay.
    """
    blocks = _highest(scores.blocks, shape.layers)
    config = smaller_config(model.config, shape, blocks)
    state: dict[str, Tensor] = {}
    decoder = re.compile(r"^(.*\blayers\.)(\d+)\.(.*)$")
    position = {int(old): new for new, old in enumerate(blocks)}
    for name, tensor in model.state_dict().items():
        match = decoder.match(name)
        if match is None:
            state[name] = tensor
        elif int(match[2]) in position:
            old = int(match[2])
            keep = _Keep(
                _highest(scores.groups[old], shape.kv_heads),
                _highest(scores.channels[old], shape.intermediate),
                shape.heads // shape.kv_heads,
                shape.head_dim,
                scores.channels[old].numel(),
            )
            state[f"{match[1]}{position[old]}.{match[3]}"] = keep.cut(match[3], tensor)
    smaller = model_support.skeleton(config, str(model.dtype).removeprefix("torch."))
    return _finished(smaller, {name: tensor.clone() for name, tensor in state.items()}, model)


def smaller_config(config: Any, shape: ModelShape, blocks: Tensor) -> Any:
    """`config` with the sizes of `shape`; settings that are given by block keep those of `blocks`."""
    smaller = copy.deepcopy(config)
    text = smaller.get_text_config()
    text.num_hidden_layers, text.intermediate_size = shape.layers, shape.intermediate
    text.num_attention_heads, text.num_key_value_heads = shape.heads, shape.kv_heads
    text.head_dim = shape.head_dim  # else it follows from the number of heads
    kinds = getattr(text, "layer_types", None)
    if kinds:
        text.layer_types = [kinds[int(block)] for block in blocks]
    return smaller


def decoder_blocks(model: Any) -> nn.ModuleList:
    """The list of decoder blocks; `BuildError` for a model whose blocks are not of the known form."""
    blocks: nn.ModuleList = model.get_decoder().layers
    for block in blocks:
        attention, mlp = getattr(block, "self_attn", None), getattr(block, "mlp", None)
        known = all(hasattr(attention, n) for n in ("q_proj", "k_proj", "v_proj", "o_proj"))
        if not known or not hasattr(mlp, "down_proj"):
            raise BuildError(
                f"pruning: model '{model.config.model_type}' has blocks without q, k, v, o and down projections of their own; "
                "Llama-like and GLM-like decoders are pruned"
            )
    return blocks


@dataclass(frozen=True)
class _Keep:
    """Which rows and columns of one block's tensors stay."""

    groups: Tensor
    channels: Tensor
    group_heads: int
    head_dim: int
    width: int  # MLP channels before

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """The part of the tensor `name` (within its block) that stays; what belongs to no structure stays whole."""
        module = name.rsplit(".", 1)[0].rsplit(".", 1)[-1]
        if module in ("k_proj", "v_proj"):
            return tensor[_spans(self.groups, self.head_dim)]
        if module == "q_proj":
            return tensor[_spans(self.groups, self.head_dim * self.group_heads)]
        if module == "o_proj" and tensor.dim() == 2:
            return tensor[:, _spans(self.groups, self.head_dim * self.group_heads)]
        if module in ("gate_proj", "up_proj"):
            return tensor[self.channels]
        if module == "gate_up_proj":
            return tensor[torch.cat((self.channels, self.channels + self.width))]
        if module == "down_proj" and tensor.dim() == 2:
            return tensor[:, self.channels]
        return tensor


def _spans(which: Tensor, width: int) -> Tensor:
    """Indices of the runs of `width` that `which` numbers."""
    return (which[:, None] * width + torch.arange(width)).flatten()


def _highest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, ascending; of equal ones the first."""
    return torch.argsort(scores, descending=True, stable=True)[:count].sort().values


def _finished(smaller: Any, state: dict[str, Tensor], model: Any) -> Any:
    from flashgap.builds.load import fill

    made = fill(smaller, state, str(model.device), "pruning: tensors {} do not fit the smaller configuration")
    made.generation_config = copy.deepcopy(model.generation_config)
    return made.eval()


# ---------------------------------------------------------------------- importance


def _weights_of(block: Any) -> dict[str, list[tuple[Tensor, str]]]:
    """Weights of a block by structure, each with the axis along which its channels or heads lie."""
    mlp, attention = block.mlp, block.self_attn
    fused = getattr(mlp, "gate_up_proj", None)
    gates = [(half, "rows") for half in fused.weight.chunk(2)] if fused is not None else [
        (mlp.gate_proj.weight, "rows"), (mlp.up_proj.weight, "rows")
    ]  # fmt: skip
    heads = [(getattr(attention, n).weight, "rows") for n in ("q_proj", "k_proj", "v_proj")]
    return {
        "channels": [*gates, (mlp.down_proj.weight, "columns")],
        "groups": [*heads, (attention.o_proj.weight, "columns")],
    }


def _by_structure(weights: list[tuple[Tensor, str]], count: int, score: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum of `score(weight)` (of the weight's shape) over each of `count` equal spans along the structure's axis."""
    total = torch.zeros(count)
    for weight, axis in weights:
        values = score(weight.float())
        along = values.sum(1 if axis == "rows" else 0)
        total += along.view(count, -1).sum(1).cpu()
    return total


def _counts(model: Any) -> tuple[int, int]:
    text = model.config.get_text_config()
    return text.intermediate_size, text.num_key_value_heads


@torch.no_grad()
def _by_magnitude(model: Any, chunks: Tensor | None) -> Scores:
    channels, kv_heads = _counts(model)
    found, blocks = Scores(), []
    for block in decoder_blocks(model):
        weights = _weights_of(block)
        found.channels.append(_by_structure(weights["channels"], channels, torch.square))
        found.groups.append(_by_structure(weights["groups"], kv_heads, torch.square))
        blocks.append(found.channels[-1].sum() + found.groups[-1].sum())
    found.blocks = torch.stack(blocks)
    return found


@torch.no_grad()
def _by_activation(model: Any, chunks: Tensor | None) -> Scores:
    assert chunks is not None
    channels, kv_heads = _counts(model)
    layers = decoder_blocks(model)
    squares: dict[nn.Module, Tensor] = {}
    turned = torch.zeros(len(layers))
    handles = []

    def reads(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen = inputs[0].float().square().flatten(0, -2).sum(0)
        squares[module] = squares.get(module, 0) + seen

    def turns(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], out: Any) -> None:
            after = out[0] if isinstance(out, tuple) else out
            cosine = nn.functional.cosine_similarity(inputs[0].float(), after.float(), dim=-1)
            turned[number] += float((1 - cosine).sum())

        return hook

    for number, block in enumerate(layers):
        handles += [block.mlp.down_proj.register_forward_pre_hook(reads)]
        handles += [block.self_attn.o_proj.register_forward_pre_hook(reads)]
        handles += [block.register_forward_hook(turns(number))]
    try:
        for part in chunks.split(BATCH):
            model(input_ids=part.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    tokens, found = chunks.numel(), Scores(blocks=turned / chunks.numel())
    for block in layers:
        for module, count, kept in (
            (block.mlp.down_proj, channels, found.channels),
            (block.self_attn.o_proj, kv_heads, found.groups),
        ):
            by_column = module.weight.float().square().sum(0) * squares[module] / tokens
            kept.append(by_column.view(count, -1).sum(1).cpu())
    return found


def _by_taylor(model: Any, chunks: Tensor | None) -> Scores:
    """Gradients of the next-token loss, summed over the calibration, of the weights that read each structure."""
    assert chunks is not None
    channels, kv_heads = _counts(model)
    layers = decoder_blocks(model)
    readers = [m.weight for block in layers for m in (block.mlp.down_proj, block.self_attn.o_proj)]
    usual = {parameter: parameter.requires_grad for parameter in model.parameters()}
    wanted = set(readers)
    for parameter in usual:
        parameter.requires_grad_(parameter in wanted)
    try:
        with torch.enable_grad():
            for part in chunks.split(BATCH):
                ids = part.to(model.device)
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
                nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"
                ).backward()
        found, blocks = Scores(), []
        with torch.no_grad():
            for block in layers:
                moved = []
                for module, count, kept in (
                    (block.mlp.down_proj, channels, found.channels),
                    (block.self_attn.o_proj, kv_heads, found.groups),
                ):
                    change = (
                        (module.weight.float() * module.weight.grad.float()).sum(0).view(count, -1).sum(1)
                    )
                    kept.append(change.square().cpu())
                    moved.append(change.sum())
                blocks.append(torch.stack(moved).sum().square().cpu())
        found.blocks = torch.stack(blocks)
    finally:
        for parameter, wants in usual.items():
            parameter.grad = None
            parameter.requires_grad_(wants)
    return found
