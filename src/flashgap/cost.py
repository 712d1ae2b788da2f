"""What a decoder must compute and move, from its configuration alone.

The one idea: prefill multiplies every weight with many tokens and is bound by arithmetic; decode reads
every weight for one token a sequence and is bound by memory. Counting both says what a time is worth
before anything is timed. These are needed amounts: expanding packed weights, padding or a mask computed
in full are extra, and show as lower utilisation. Pure arithmetic on a dense Llama- or GLM-like decoder.

Sources: Kaplan et al. 2020 (arXiv:2001.08361, section 2.1: 2 FLOPs a weight and token); Chowdhery et al.,
PaLM 2022 (arXiv:2204.02311, appendix B: attention, 4 L H Q T a token forward); Pope et al. 2022
(arXiv:2211.05102: KV cache and weight traffic of decode); Williams et al. 2009 (the roofline).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What a family's configuration does not tell about its small parameters.
KNOWN_FAMILIES = (
    "llama", "glm", "glm4", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi3", "granite", "smollm3",
)  # fmt: skip
NORMS_PER_LAYER = {"glm4": 4, "gemma2": 4}
HEAD_NORMS = ("qwen3",)
ALWAYS_QKV_BIAS = ("qwen2",)
NEVER_BIAS = ("mistral", "phi3")  # they know no attention_bias
OUTPUT_WITHOUT_BIAS = ("glm", "glm4", "qwen2")  # there attention_bias means q, k and v only
WITH_MLP_BIAS = ("llama", "granite", "smollm3")


class CostError(RuntimeError):
    """A configuration or a request that cannot be counted; the message names the key."""


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a dense decoder that decide its cost. `family_known`: counts are tested for it."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    norms_per_layer: int = 2
    family_known: bool = True

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """From a transformers configuration or a mapping. Raises `CostError` naming a missing key."""
        family = _get(config, "model_type", "")
        hidden, heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
        bias = bool(_get(config, "attention_bias", False)) and family not in NEVER_BIAS
        return cls(
            layers=_need(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_need(config, "intermediate_size"),
            heads=heads,
            kv_heads=_get(config, "num_key_value_heads", heads),
            head_dim=_get(config, "head_dim", hidden // heads),
            vocab=_need(config, "vocab_size"),
            tied=bool(_get(config, "tie_word_embeddings", False)),
            qkv_bias=bias or family in ALWAYS_QKV_BIAS,
            output_bias=bias and family not in OUTPUT_WITHOUT_BIAS,
            mlp_bias=bool(_get(config, "mlp_bias", False)) and family in WITH_MLP_BIAS,
            head_norms=family in HEAD_NORMS,
            norms_per_layer=NORMS_PER_LAYER.get(family, 2),
            family_known=family in KNOWN_FAMILIES,
        )

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Name -> (out, in) features of the linear layers of one block; `gate` and `up` may be one matrix."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (q, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, q),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }


def linear_parameters(shape: ModelShape, head: bool = False) -> int:
    """Weights of the linear layers of all blocks (no biases); `head` adds the output head, tied or not."""
    block = sum(rows * columns for rows, columns in shape.linear_shapes.values())
    return shape.layers * block + (shape.vocab * shape.hidden if head else 0)


def parameters(shape: ModelShape) -> int:
    """All parameters, a tied output head counted once: what `model.parameters()` holds."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = shape.norms_per_layer * shape.hidden + (2 * shape.head_dim if shape.head_norms else 0)
    biases = shape.qkv_bias * (q + 2 * kv) + shape.output_bias * shape.hidden
    biases += shape.mlp_bias * (2 * shape.intermediate + shape.hidden)
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    return linear_parameters(shape) + shape.layers * (norms + biases) + embeddings + shape.hidden


def prefill_flops(shape: ModelShape, batch: int, tokens: int, logits_tokens: int = 1) -> int:
    """FLOPs to prefill `batch` prompts of `tokens`: 2 a weight and token, and causal attention.

    Token i attends to i tokens: 4 x heads x head_dim x i FLOPs a layer. The output head runs on the last
    `logits_tokens` of each prompt only. A kernel that computes the masked half does up to twice the attention.
    """
    linear = 2 * linear_parameters(shape) * tokens + 2 * shape.vocab * shape.hidden * logits_tokens
    attention = _attention_flops(shape, tokens * (tokens + 1) // 2)
    return batch * (linear + attention)


def decode_flops(shape: ModelShape, batch: int, context: int) -> int:
    """FLOPs of one decode step of `batch` sequences; `context` tokens attended to, the new one included."""
    return batch * (2 * linear_parameters(shape, head=True) + _attention_flops(shape, context))


def weight_bytes(
    shape: ModelShape,
    bits: int = 16,
    group_size: int | None = None,
    scale_bytes: int = 2,
    zero_bytes: int = 2,
    dtype_bytes: int = 2,
    quantize_head: bool = False,
) -> int:
    """Bytes of all weights at rest.

    The linear layers of the blocks take `bits` a weight; with a `group_size` also a scale and a zero for
    each group of input features (`zero_bytes` 0 if none is stored). The rest stays in `dtype_bytes`, the
    head too unless `quantize_head` (impossible for a tied one: the embedding needs it).
    """
    if quantize_head and shape.tied:
        raise CostError("quantize_head: the head is tied to the embedding, which is read by row; leave it")
    matrices = list(shape.linear_shapes.values()) * shape.layers
    matrices += [(shape.vocab, shape.hidden)] if quantize_head else []
    weights = sum(rows * columns for rows, columns in matrices)
    groups = sum(rows * -(-columns // group_size) for rows, columns in matrices) if group_size else 0
    packed = weights * bits // 8 + groups * (scale_bytes + zero_bytes)
    return packed + (parameters(shape) - weights) * dtype_bytes


def kv_cache_bytes(shape: ModelShape, batch: int, tokens: int, dtype_bytes: int = 2) -> int:
    """Keys and values of `tokens` tokens of `batch` sequences: 2 x layers x kv_heads x head_dim each."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype_bytes * batch * tokens


def decode_bytes(shape: ModelShape, batch: int, context: int, weight_bytes: int, dtype_bytes: int = 2) -> int:
    """Bytes one decode step must move: weights once, the cache of `context` tokens read, one token written.

    `weight_bytes`: all weights at rest (`weight_bytes()` or as recorded). Of an untied embedding only
    `batch` rows are read; a tied one is the head and is read whole. `context` includes the new token.
    """
    cache = kv_cache_bytes(shape, batch, context, dtype_bytes)
    return _read_weight_bytes(shape, batch, weight_bytes, dtype_bytes) + cache


def prefill_bytes(shape: ModelShape, batch: int, tokens: int, weight_bytes: int, dtype_bytes: int = 2) -> int:
    """Least bytes of a prefill: the weights once and the cache written; activations are taken to stay in cache."""
    cache = kv_cache_bytes(shape, batch, tokens, dtype_bytes)
    return _read_weight_bytes(shape, batch * tokens, weight_bytes, dtype_bytes) + cache


def dequantize_bytes(shape: ModelShape, dtype_bytes: int = 2) -> int:
    """Extra traffic of a forward pass that expands packed weights first: each written and read once in
    `dtype_bytes`. A lower bound; unfused unpacking writes intermediates as well."""
    return 2 * linear_parameters(shape) * dtype_bytes


def roofline_s(flops: float, moved_bytes: float, flops_per_s: float, bytes_per_s: float) -> float:
    """Least seconds for that work on a machine with those ceilings (Williams et al. 2009)."""
    if not (flops_per_s > 0 and bytes_per_s > 0):
        raise CostError(
            f"roofline_s: ceilings must be positive, got {flops_per_s} FLOP/s and {bytes_per_s} bytes/s"
        )
    return max(flops / flops_per_s, moved_bytes / bytes_per_s)


def _attention_flops(shape: ModelShape, attended: int) -> int:
    """Scores and weighted values, 2 FLOPs each a multiply-add, over all layers."""
    return 4 * shape.layers * shape.heads * shape.head_dim * attended


def _read_weight_bytes(shape: ModelShape, tokens: int, weight_bytes: int, dtype_bytes: int) -> int:
    if shape.tied:
        return weight_bytes
    return weight_bytes - (shape.vocab - min(tokens, shape.vocab)) * shape.hidden * dtype_bytes


def _get(config: Any, key: str, default: Any) -> Any:
    """A value from a mapping or an object; None counts as absent, as transformers means it."""
    value = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    return default if value is None else value


def _need(config: Any, key: str) -> int:
    value = _get(config, key, None)
    if not isinstance(value, int):
        raise CostError(
            f"model configuration: '{key}' is missing or no whole number; use a dense decoder's config"
        )
    return value
