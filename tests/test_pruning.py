"""Pruning: a model that kept the wrong rows still runs, so what is left is compared with the original masked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from flashgap import models
from flashgap.builds.load import build_digest, load_build
from flashgap.builds.pruning import IMPORTANCE, importance, prune
from flashgap.builds.recovery import divergence
from flashgap.builds.weights import BuildError
from flashgap.cost import ModelShape, parameters
from flashgap.treatment import BuildSpec, Calibration, ModelSpec, PruningConfig, QuantizationConfig, Recovery

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
}
CHUNKS = torch.randint(3, 128, (4, 24), generator=torch.Generator().manual_seed(5))


def model_of(family: str):
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(params=list(FAMILIES))
def model(request):
    return model_of(request.param)


def masked(model, scores, shape):
    """The original with what is pruned silenced: its key heads' and channels' output columns set to 0."""
    for number, block in enumerate(model.model.layers):
        width = shape.head_dim * shape.heads // shape.kv_heads
        gone = scores.groups[number].argsort(descending=True, stable=True)[shape.kv_heads :]
        for head in gone.tolist():
            block.self_attn.o_proj.weight.data[:, head * width : (head + 1) * width] = 0
        gone = scores.channels[number].argsort(descending=True, stable=True)[shape.intermediate :]
        block.mlp.down_proj.weight.data[:, gone] = 0
    return model


@pytest.mark.parametrize("kind", IMPORTANCE)
def test_the_smaller_model_computes_what_the_masked_one_does(model, kind, tmp_path):
    """If this fails, heads and channels of different places were cut together, and the loss is blamed on pruning."""
    shape = replace(ModelShape.from_config(model.config), kv_heads=2, heads=4, intermediate=40)
    scores = importance(model, CHUNKS, kind)
    smaller = prune(model, shape, scores)
    assert sum(p.numel() for p in smaller.parameters()) == parameters(shape)
    with torch.no_grad():
        expected = masked(model, scores, shape)(input_ids=CHUNKS).logits
        torch.testing.assert_close(smaller(input_ids=CHUNKS).logits, expected, atol=1e-5, rtol=1e-4)
    smaller.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=CHUNKS).logits, smaller(input_ids=CHUNKS).logits)
    assert again.generate(CHUNKS[:1], max_new_tokens=3, do_sample=False).shape == (1, 27)


def test_blocks_go_whole_and_the_rest_keeps_its_order(model):
    shape = replace(ModelShape.from_config(model.config), layers=2)
    scores = importance(model, CHUNKS, "activation")
    scores.blocks = torch.tensor([1.0, 0.0, 2.0])
    smaller = prune(model, shape, scores)
    assert sum(p.numel() for p in smaller.parameters()) == parameters(shape)
    kept = smaller.model.layers
    torch.testing.assert_close(kept[0].self_attn.q_proj.weight, model.model.layers[0].self_attn.q_proj.weight)
    torch.testing.assert_close(kept[1].self_attn.q_proj.weight, model.model.layers[2].self_attn.q_proj.weight)
    assert smaller.generate(CHUNKS[:1], max_new_tokens=3, do_sample=False).shape == (1, 27)


@pytest.mark.parametrize("kind", IMPORTANCE)
def test_what_does_nothing_goes_first(model, kind):
    """A channel and a head whose outputs are ignored must score lowest by every measure of importance."""
    block = model.model.layers[1]
    block.mlp.down_proj.weight.data[:, 17] = 0
    block.self_attn.o_proj.weight.data[:, 32:64] = 0  # the second key head's query heads
    if kind == "magnitude":  # it also counts what feeds them
        for weight in (
            block.self_attn.q_proj.weight,
            block.self_attn.k_proj.weight,
            block.self_attn.v_proj.weight,
        ):
            weight.data.view(3, -1, 48)[1] = 0
        fused = getattr(block.mlp, "gate_up_proj", None)
        for weight in (
            [fused.weight] if fused is not None else [block.mlp.gate_proj.weight, block.mlp.up_proj.weight]
        ):
            weight.data.view(-1, 96, 48)[:, 17] = 0
    scores = importance(model, CHUNKS, kind)
    assert int(scores.channels[1].argmin()) == 17
    assert int(scores.groups[1].argmin()) == 1
    assert all(p.grad is None for p in model.parameters())


def test_bad_requests_are_named():
    model = model_of("llama")
    with pytest.raises(BuildError, match="'guess' is none of"):
        importance(model, CHUNKS, "guess")
    with pytest.raises(BuildError, match=r"taylor looks at data; set pruning\.calibration"):
        importance(model, None, "taylor")
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(BuildError, match="NaN or infinite"):
        importance(model, None, "magnitude")


WIDE = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
FEW = Calibration(samples=2, length_tokens=32)


def pruning(**changes) -> PruningConfig:
    return PruningConfig(**{"target": 0.4, "group_size": 32, "calibration": FEW} | changes)


@pytest.fixture
def folder_model(tmp_path, monkeypatch):
    """A small model with random weights, saved as a folder with a tokenizer of bytes, and an empty cache."""
    monkeypatch.setenv("FLASHGAP_CACHE", str(tmp_path / "cache"))
    random = ModelSpec(source="random", config=WIDE)
    monkeypatch.setattr(models, "tokenizer", lambda _: models.ByteTokenizer(512))
    models.load(random, "cpu").save_pretrained(tmp_path / "model")
    return ModelSpec(source="folder", id=str(tmp_path / "model"))


PACKED = QuantizationConfig(group_size=32, skip=(), execution="packed")


@pytest.mark.parametrize("method", ["width", "depth"])
def test_a_pruned_build_is_made_once_and_then_quantized_like_any_model(folder_model, method):
    """If this fails, pruned builds are measured with other weights than were judged, or pruned anew for each."""
    alone = BuildSpec(pruning=pruning(method=method))
    build = load_build(folder_model, alone, "cpu")
    whole = load_build(folder_model, BuildSpec(), "cpu")
    assert build.parameters / whole.parameters == pytest.approx(1 - build.pruning["removed"])
    assert build.pruning["removed"] == pytest.approx(
        0.4, abs=0.15
    )  # of so small a model, a step is a large share
    assert build.digest != whole.digest
    assert load_build(folder_model, alone, "cpu").digest == build.digest
    both = load_build(folder_model, BuildSpec(pruning=alone.pruning, quantization=PACKED), "cpu")
    assert both.parameters == build.parameters + 512 * 96  # the head is untied
    assert both.resident_bytes < build.resident_bytes
    close = {name: p for name, p in build.model.named_parameters() if "norm" in name}
    for name, parameter in close.items():
        assert torch.equal(both.model.get_parameter(name), parameter)
    ids = CHUNKS[:1]
    with torch.no_grad():
        ours, packed = build.model(input_ids=ids).logits, both.model(input_ids=ids).logits
    assert nn.functional.cosine_similarity(ours.float(), packed.float(), dim=-1).mean() > 0.9


def test_naive_pruning_that_leaves_the_kernel_fails_with_the_reason(folder_model):
    spec = pruning(plan="naive", target=0.33)
    build = load_build(folder_model, BuildSpec(pruning=spec), "cpu")
    assert any("down_proj" in line for line in build.pruning["broken"])
    with pytest.raises(BuildError, match=r"down_proj: group_size 32 does not divide"):
        load_build(folder_model, BuildSpec(pruning=spec, quantization=PACKED), "cpu")


def test_random_weights_are_pruned_in_process():
    random = ModelSpec(source="random", config=WIDE)
    spec = pruning(importance="magnitude", calibration=None)
    build = load_build(random, BuildSpec(pruning=spec, quantization=PACKED), "cpu")
    assert build.in_process
    assert build.pruning["kv_heads"] < 3
    assert build.digest == build_digest(random, BuildSpec(pruning=spec, quantization=PACKED))


def test_a_target_that_no_width_meets_is_named(folder_model):
    with pytest.raises(BuildError, match=r"pruning: no legal width for int4_cpu.*96 input features"):
        load_build(folder_model, BuildSpec(pruning=pruning(group_size=64)), "cpu")


def test_recovery_brings_a_pruned_model_nearer_to_the_whole_one(folder_model):
    """Trained on purpose to a text of few symbols, so that there is something to lose and to win back."""
    steps = Recovery(text=Calibration(samples=8, length_tokens=32), steps=30, rank=8, learning_rate=5e-3)
    before = load_build(folder_model, BuildSpec(pruning=pruning()), "cpu")
    after = load_build(folder_model, BuildSpec(pruning=pruning(recovery=steps)), "cpu")
    assert after.parameters == before.parameters
    assert after.pruning["recovery"]["steps"] == 30
    assert after.pruning["recovery"]["last_loss"] < 0.8 * after.pruning["recovery"]["first_loss"]
    ids = models.ByteTokenizer(512).encode(models.held_out_text()[0])[-512:]
    truth = models.load(folder_model, "cpu")
    with torch.no_grad():
        ids = torch.tensor([ids])[:, :128]
        nearer, farther = (
            divergence(truth(input_ids=ids).logits, build.model(input_ids=ids).logits)
            for build in (after, before)
        )
    assert nearer < farther


def test_recovery_stops_within_its_time(folder_model):
    hurried = Recovery(text=Calibration(samples=4, length_tokens=16), steps=10_000, budget_s=1.0)
    build = load_build(folder_model, BuildSpec(pruning=pruning(recovery=hurried)), "cpu")
    assert 1 <= build.pruning["recovery"]["steps"] < 10_000
    assert build.pruning["recovery"]["seconds"] < 3.0
