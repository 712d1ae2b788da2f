"""Formats: a nibble in the wrong place is a model that talks nonsense at full speed."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import LLAMA

from flashgap import models
from flashgap.builds import formats, load, quantizers
from flashgap.builds.quantization import replace
from flashgap.builds.weights import BuildError, GroupedWeight
from flashgap.treatment import BuildSpec, Checkpoint, ModelSpec, QuantizationConfig

CONFIG = {
    **LLAMA,
    "vocab_size": 320,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
MODEL = ModelSpec(source="random", config=CONFIG, dtype="float32")
IDS = torch.arange(3, 40)[None]


def quantized(**changes):
    model = models.load(MODEL, "cpu")
    config = QuantizationConfig(**{"group_size": 32, "skip": (), **changes})
    return model, quantizers.quantize_model(model, None, config)


def same(one: GroupedWeight, other: GroupedWeight) -> bool:
    return (
        torch.equal(one.codes, other.codes)
        and torch.equal(one.zeros, other.zeros)
        and torch.equal(one.scales.float(), other.scales.float())
        and one.bits == other.bits
    )


def expected_logits(model, weights):
    return replace(model, weights, "dequantize", torch.float32)(input_ids=IDS).logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scheme": "symmetric"},
        {"bits": 8},
        {"per_channel": True, "group_size": None},
        {"skip": ("lm_head", "down_proj")},
        {"eight_bits": ("o_proj",)},
    ],
)
def test_compressed_tensors_round_trip_is_bit_equal(tmp_path, changes):
    model, weights = quantized(**changes)
    formats.write_compressed_tensors(tmp_path, model, weights)
    read = formats.read_checkpoint(tmp_path)
    assert read.format == formats.sniff(tmp_path) == "compressed-tensors"
    assert read.weights.keys() == weights.keys()
    assert all(same(read.weights[name], weights[name]) for name in weights)


def test_awq_round_trip_is_bit_equal_and_autoawq_reads_it(tmp_path):
    from awq.utils.packing_utils import dequantize_gemm

    model, weights = quantized()
    formats.write_awq(tmp_path, model, weights)
    read = formats.read_checkpoint(tmp_path)
    assert read.format == "awq"
    assert all(same(read.weights[name], weights[name]) for name in weights)
    files = load_file(tmp_path / "model.safetensors")
    for name in ("model.layers.0.mlp.up_proj", "lm_head"):
        parts = (files[f"{name}.{kind}"] for kind in ("qweight", "qzeros", "scales"))
        theirs = dequantize_gemm(*parts, 4, 32)
        torch.testing.assert_close(theirs.T.float(), weights[name].dequantize(), atol=1e-6, rtol=1e-5)


def test_transformers_loads_what_is_written(tmp_path):
    """If this fails, the format is ours alone."""
    from transformers import AutoModelForCausalLM

    model, weights = quantized(skip=("lm_head",))
    formats.write_compressed_tensors(tmp_path, model, weights)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(input_ids=IDS).logits, expected_logits(model, weights), atol=1e-4, rtol=1e-4
        )


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 6), eights=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_packing_is_undone_by_unpacking(rows, eights, seed):
    torch.manual_seed(seed)
    codes = torch.randint(0, 16, (rows, eights * 8), dtype=torch.uint8)
    for order in (formats.AWQ_ORDER, formats.PLAIN_ORDER):
        assert torch.equal(formats.unpack_columns(formats.pack_columns(codes, order), order), codes)


def write_gptq(folder, model, weights, checkpoint_format, scattered=False):
    """GPTQ's layout by its description: input features packed in eights, zero points along output features."""
    less = 1 if checkpoint_format == "gptq" else 0
    state = {n: t for n, t in model.state_dict().items() if n.removesuffix(".weight") not in weights}
    for name, weight in weights.items():
        state[f"{name}.qweight"] = formats.pack_columns(weight.codes, formats.PLAIN_ORDER).T.contiguous()
        state[f"{name}.qzeros"] = formats.pack_columns(weight.zeros.T - less, formats.PLAIN_ORDER)
        state[f"{name}.scales"] = weight.scales.T.contiguous()
        index = torch.arange(weight.shape[1]) // weight.group_size
        state[f"{name}.g_idx"] = (index.flip(0) if scattered else index).int()
    save_file({n: t.clone() for n, t in state.items()}, folder / "model.safetensors")
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "checkpoint_format": checkpoint_format,
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
def test_gptq_zero_points_of_both_versions(tmp_path, checkpoint_format):
    model, weights = quantized()
    weights = {n: GroupedWeight(w.codes, w.scales, w.zeros.clamp(min=1), 4) for n, w in weights.items()}
    write_gptq(tmp_path, model, weights, checkpoint_format)
    read = formats.read_checkpoint(tmp_path)
    assert all(same(read.weights[name], weights[name]) for name in weights)


def test_scattered_groups_are_refused(tmp_path):
    model, weights = quantized()
    write_gptq(tmp_path, model, weights, "gptq_v2", scattered=True)
    with pytest.raises(BuildError, match="desc_act"):
        formats.read_checkpoint(tmp_path)


@pytest.mark.parametrize("execution", ["packed", "dequantize"])
def test_a_users_checkpoint_is_a_build(tmp_path, monkeypatch, execution):
    """The question people bring is asked about files that exist already."""
    monkeypatch.setattr(models, "cache_dir", lambda: tmp_path / "cache")
    model, weights = quantized()
    formats.write_awq(tmp_path / "theirs", model, weights)
    spec = BuildSpec(checkpoint=Checkpoint(id=str(tmp_path / "theirs"), execution=execution))
    build = load.load_build(MODEL, spec, "cpu")
    with torch.no_grad():
        expected = expected_logits(model, weights)
        torch.testing.assert_close(build.model(input_ids=IDS).logits, expected, atol=5e-3, rtol=5e-3)
    assert build.parameters == sum(w.codes.numel() for w in weights.values()) + sum(
        p.numel() for n, p in build.model.named_parameters()
    )
    again = load.load_build(MODEL, spec, "cpu")
    with torch.no_grad():
        assert torch.equal(again.model(input_ids=IDS).logits, build.model(input_ids=IDS).logits)
    assert again.digest == build.digest


def test_what_is_wrong_with_a_checkpoint_is_one_line(tmp_path):
    model, weights = quantized()
    formats.write_awq(tmp_path, model, weights)
    files = load_file(tmp_path / "model.safetensors")
    lost = {n: t for n, t in files.items() if n != "lm_head.scales"}
    save_file(lost, tmp_path / "model.safetensors")
    with pytest.raises(BuildError, match="lm_head: tensor 'scales' is missing"):
        formats.read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(BuildError, match=r"model\.safetensors: damaged"):
        formats.read_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "squeezellm"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BuildError, match="squeezellm: not a compressed checkpoint that is known here"):
        formats.read_checkpoint(tmp_path)
    loose = {n: GroupedWeight(w.codes, w.scales, w.zeros.float(), 4) for n, w in weights.items()}
    with pytest.raises(BuildError, match="free zero points"):
        formats.write_compressed_tensors(tmp_path / "x", model, loose)
