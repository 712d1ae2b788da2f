"""Counts against real models, against torch's own FLOP counter, and against each other."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgap import cost
from flashgap.cost import CostError, ModelShape

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 101,
    "pad_token_id": 0,
}
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
shapes = st.builds(
    ModelShape,
    layers=st.integers(1, 8),
    hidden=st.sampled_from([64, 128, 320]),
    intermediate=st.sampled_from([128, 448]),
    heads=st.sampled_from([4, 8]),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([32, 64]),
    vocab=st.integers(10, 5000),
    tied=st.booleans(),
)
few = st.integers(1, 64)


def tiny_model(family: str, **changes):
    """A real transformers model without memory behind it."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(TINY | changes))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", cost.KNOWN_FAMILIES)
def test_parameters_are_those_of_the_real_model(family, tied, biased):
    model = tiny_model(family, tie_word_embeddings=tied, attention_bias=biased, mlp_bias=biased)
    shape = ModelShape.from_config(model.config)
    assert shape.family_known
    assert cost.parameters(shape) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "glm4"])
def test_linear_parameters_are_those_of_the_real_layers(family):
    import torch

    model = tiny_model(family)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    weights = {name: module.weight.numel() for name, module in linears.items()}
    shape = ModelShape.from_config(model.config)
    assert cost.linear_parameters(shape, head=True) == sum(weights.values())
    assert cost.linear_parameters(shape) == sum(weights.values()) - weights["lm_head"]


def counted_flops(model, batch: int, tokens: int, past: int = 0) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    ids = torch.zeros(batch, past or 1, dtype=torch.long, device="meta")
    with torch.no_grad():
        if past:
            model(ids, past_key_values=cache, attention_mask=None)
        step = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
        with FlopCounterMode(display=False) as counter:
            model(step, past_key_values=cache, logits_to_keep=1)
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["llama", "glm4"])
def test_flops_are_those_torch_counts(family):
    """torch counts every matrix product of the eager model, masked half of the attention included."""
    model = tiny_model(family)
    shape = ModelShape.from_config(model.config)
    batch, tokens = 3, 24
    masked_half = batch * cost._attention_flops(shape, tokens * (tokens - 1) // 2)
    rotary = shape.head_dim * (1 if family == "llama" else 0.5)  # positions x frequencies, once for the batch
    prefill, decode = counted_flops(model, batch, tokens), counted_flops(model, batch, 1, past=tokens)
    assert cost.prefill_flops(shape, batch, tokens) == prefill - masked_half - rotary * tokens
    assert cost.decode_flops(shape, batch, tokens + 1) == decode - rotary


def test_the_embedded_model():
    """SmolLM2-135M: 134,515,008 parameters, 269 MB in bf16; 23 kB of cache a token."""
    shape = ModelShape.from_config(SMOLLM2)
    assert cost.parameters(shape) == 134_515_008
    assert cost.weight_bytes(shape) == 269_030_016
    assert cost.kv_cache_bytes(shape, 1, 1) == 2 * 30 * 3 * 64 * 2
    assert cost.weight_bytes(shape, bits=4, group_size=64) == 106_168_320 * (4 / 8 + 4 / 64) + 28_346_688 * 2


def test_packed_bytes_are_those_of_the_real_build():
    """If this fails, the 4-bit build's bound is drawn for weights of another size."""
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("flashgap.builds.quantization")
    from flashgap.treatment import QuantizationConfig

    model = tiny_model("llama").to(torch.bfloat16)
    shape = ModelShape.from_config(model.config)
    quantization.quantize_in_place(model, QuantizationConfig(group_size=32))
    held = [*model.parameters(), *(b for n, b in model.named_buffers() if "inv_freq" not in n)]
    assert cost.weight_bytes(shape, bits=4, group_size=32) == sum(t.nbytes for t in held)


# --- properties ---------------------------------------------------------------------------------------


@given(shapes, few, few)
def test_decoding_a_prompt_costs_its_prefill_and_all_its_logits(shape, batch, tokens):
    """Token by token or at once, the same products are needed."""
    steps = sum(cost.decode_flops(shape, batch, context) for context in range(1, tokens + 1))
    assert steps == cost.prefill_flops(shape, batch, tokens, logits_tokens=tokens)


@given(shapes, few, few)
def test_flops_and_cache_grow_in_proportion_to_the_batch(shape, batch, tokens):
    assert cost.prefill_flops(shape, batch, tokens) == batch * cost.prefill_flops(shape, 1, tokens)
    assert cost.decode_flops(shape, batch, tokens) == batch * cost.decode_flops(shape, 1, tokens)
    assert cost.kv_cache_bytes(shape, batch, tokens) == batch * tokens * cost.kv_cache_bytes(shape, 1, 1)


@given(shapes, few, few)
def test_decode_reads_the_weights_once_whatever_the_batch(shape, batch, context):
    weights = cost.weight_bytes(shape)
    moved = cost.decode_bytes(shape, batch, context, weights)
    cache = cost.kv_cache_bytes(shape, batch, context)
    assert cost.linear_parameters(shape, head=True) * 2 <= moved - cache <= weights


@given(shapes, st.sampled_from([16, 32, 64]))
def test_packed_weights_are_smaller_and_smaller_groups_cost_more(shape, group_size):
    packed = cost.weight_bytes(shape, bits=4, group_size=group_size)
    assert cost.linear_parameters(shape) / 2 < packed < cost.weight_bytes(shape)
    assert packed < cost.weight_bytes(shape, bits=4, group_size=group_size // 2)
    assert cost.weight_bytes(shape) == 2 * cost.parameters(shape)


@given(shapes)
def test_tying_saves_one_table(shape):
    tied, untied = (cost.parameters(dataclasses.replace(shape, tied=t)) for t in (True, False))
    assert untied - tied == shape.vocab * shape.hidden


@given(st.floats(1, 1e12), st.floats(1, 1e12), st.floats(1, 1e12), st.floats(1, 1e12))
def test_the_roofline_is_the_slower_of_two(flops, moved, flops_per_s, bytes_per_s):
    bound_s = cost.roofline_s(flops, moved, flops_per_s, bytes_per_s)
    assert bound_s in (flops / flops_per_s, moved / bytes_per_s)
    assert bound_s * flops_per_s >= flops * (1 - 1e-12)
    assert bound_s * bytes_per_s >= moved * (1 - 1e-12)


# --- what cannot be counted ---------------------------------------------------------------------------


def test_a_missing_key_is_named():
    with pytest.raises(CostError, match="'intermediate_size' is missing"):
        ModelShape.from_config({k: v for k, v in SMOLLM2.items() if k != "intermediate_size"})


def test_an_unknown_family_is_counted_as_llama_and_says_so():
    shape = ModelShape.from_config(SMOLLM2 | {"model_type": "olmo2"})
    assert not shape.family_known


def test_a_tied_head_cannot_be_quantized_and_ceilings_are_positive():
    with pytest.raises(CostError, match="tied"):
        cost.weight_bytes(ModelShape.from_config(SMOLLM2), bits=4, group_size=64, quantize_head=True)
    with pytest.raises(CostError, match="positive"):
        cost.roofline_s(1, 1, 0, 1)
