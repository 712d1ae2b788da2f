"""The two passes of a decoder as graphs of fixed shape: what is exported and compiled ahead of time.

The one idea: decode and prefill want different graphs. `DecodeStep` makes one token for each row, writes
into a cache that it is given, and lets every row stand at a position of its own, so unequal prompts need
no padding on the left. `Prefill` runs one prompt with plain causal attention and hands its keys and values
out, to be copied into the cache of a batch: prompts are prefilled one by one, as serving engines do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = "grouped_fixed"  # without the word "flash", by which transformers chooses another path


class GraphError(RuntimeError):
    """A model that cannot be run as fixed graphs; the message says why."""


@dataclass(frozen=True, order=True)
class Shape:
    """A graph's fixed sizes. `decode`: `batch` rows over a cache of `tokens`; `prefill`: one prompt of `tokens`."""

    phase: str
    batch: int
    tokens: int

    @property
    def name(self) -> str:
        """As a file name."""
        return f"{self.phase}_b{self.batch}_t{self.tokens}"

    @property
    def rows(self) -> int:
        """Rows that its linear layers multiply at once."""
        return self.batch if self.phase == "decode" else self.batch * self.tokens


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Fused attention without copying keys for the heads that share them.

    `query` [B, H, S, D], `key` and `value` [B, H / g, L, D]. With one query a head (decode), the g heads of a
    group are the rows of one attention over their keys; with many, torch's own grouped form is used.
    """
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    if rows == 1 and attention_mask is not None:
        grouped = query.view(batch, kv_heads, heads // kv_heads, width)
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(batch, 1, heads, width), None
    repeated = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (key, value))
    out = scaled_dot_product_attention(query, *repeated, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


def prepare(model: Any) -> None:
    """Make `model` use `grouped_attention`; `GraphError` for attention that it does not compute."""
    from transformers import AttentionInterface

    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "attn_logit_softcapping", None):
        raise GraphError(
            f"model '{config.model_type}': attention of kind {sorted(kinds)} has no fixed graph; use ahead_of_time: false"
        )
    AttentionInterface.register(ATTENTION, grouped_attention)
    model.set_attn_implementation(ATTENTION)  # without a mask function of its own: masks are ours


class _Given:
    """What a transformers decoder asks of a cache, over tensors [B, H, L, D] that are given; rows write at `positions`."""

    is_compileable = True
    layers: tuple = ()

    def __init__(self, keys: list[Tensor], values: list[Tensor], positions: Tensor) -> None:
        self.keys, self.values, self.positions = keys, values, positions
        self.rows = torch.arange(positions.shape[0], device=positions.device)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys[layer][self.rows, :, self.positions] = key[:, :, 0]
        self.values[layer][self.rows, :, self.positions] = value[:, :, 0]
        return self.keys[layer], self.values[layer]

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        return self.keys[0].shape[2], 0


class _Collected:
    """A cache that starts empty and keeps what one forward pass gives it."""

    is_compileable = True
    layers: tuple = ()

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.append(key)
        self.values.append(value)
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, query: int, *_: Any) -> tuple[int, int]:
        return int(query), 0


class DecodeStep(nn.Module):
    """(tokens [B, 1], positions [B], keys, values) -> (next tokens [B, 1], logits [B, V]); the cache is changed."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, positions: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        length = keys[0].shape[2]
        seen = torch.arange(length, device=tokens.device)[None] <= positions[:, None]
        out = self.model(
            input_ids=tokens,
            attention_mask=seen[:, None, None],
            position_ids=positions[:, None],
            past_key_values=_Given(keys, values, positions),
            use_cache=True,
        )
        logits = out.logits[:, -1]
        return logits.argmax(-1, keepdim=True), logits


class Prefill(nn.Module):
    """(tokens [1, S], last [1]) -> (next token [1, 1], logits [1, V], keys and values of every layer).

    `last` is the index of the last real token: what is padded on its right is not seen by it.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, last: Tensor) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        cache = _Collected()
        out = self.model(
            input_ids=tokens,
            position_ids=torch.arange(tokens.shape[1], device=tokens.device)[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=last,
        )
        logits = out.logits[:, -1]
        return logits.argmax(-1, keepdim=True), logits, cache.keys, cache.values


def example(model: Any, shape: Shape, device: str) -> tuple[Any, ...]:
    """Inputs of the shape that a graph is exported for."""
    if shape.phase == "prefill":
        return (
            torch.ones(1, shape.tokens, dtype=torch.long, device=device),
            torch.tensor([shape.tokens - 1], device=device),
        )
    tokens = torch.ones(shape.batch, 1, dtype=torch.long, device=device)
    positions = torch.arange(shape.batch, device=device) % shape.tokens
    return tokens, positions, *empty_cache(model.config, shape, model.dtype, device)


def empty_cache(
    config: Any, shape: Shape, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values [B, kv heads, L, head width] of every layer, zero."""
    text = config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    sizes = (shape.batch, text.num_key_value_heads, shape.tokens, width)
    keys, values = (
        [torch.zeros(sizes, dtype=dtype, device=device) for _ in range(text.num_hidden_layers)]
        for _ in ("keys", "values")
    )
    return keys, values


def module(model: Any, shape: Shape) -> nn.Module:
    """The graph's code for `shape`."""
    return DecodeStep(model) if shape.phase == "decode" else Prefill(model)


def smallest(shapes: Iterable[Shape], phase: str, batch: int, tokens: int) -> Shape | None:
    """The least of `shapes` that holds `tokens` in `phase` at exactly `batch` rows."""
    fitting = [s for s in shapes if s.phase == phase and s.batch == batch and s.tokens >= tokens]
    return min(fitting, default=None)
