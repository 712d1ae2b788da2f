"""A quantized build that is wrong, half saved, or secretly holds its dense weights would spoil every comparison."""

from __future__ import annotations

import pytest
import torch
from tiny import LLAMA
from torch import nn

from flashgap import kernels, models
from flashgap.builds import load
from flashgap.builds.quantization import (
    BuildError,
    DequantizedLinear,
    error_in_scales,
    quantize,
    quantize_in_place,
)
from flashgap.engine import Engine
from flashgap.treatment import BuildSpec, ModelSpec, QuantizationConfig

CONFIG = {
    **LLAMA,
    "vocab_size": 128,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
RANDOM = ModelSpec(source="random", dtype="float32", config=CONFIG)
FLASH = BuildSpec(quantization=QuantizationConfig(group_size=32))


@pytest.fixture
def folder_model(tmp_path, monkeypatch):
    """A tiny bf16 model saved as a folder, and an empty cache."""
    monkeypatch.setenv("FLASHGAP_CACHE", str(tmp_path / "cache"))
    model = models.load(RANDOM.model_copy(update={"dtype": "bfloat16"}), "cpu")
    model.save_pretrained(tmp_path / "model")
    return ModelSpec(source="folder", id=str(tmp_path / "model"), dtype="bfloat16")


@pytest.mark.parametrize("scheme", ["asymmetric", "symmetric"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_rounded_to_its_nearest_code(scheme, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(128, 24, dtype=dtype)
    layer = DequantizedLinear.from_linear(linear, QuantizationConfig(group_size=32, scheme=scheme))
    assert error_in_scales(linear.weight, layer) < (0.501 if dtype == torch.float32 else 0.6)
    assert layer.weight().dtype == dtype


def test_packing_keeps_the_order_of_the_codes():
    spec = QuantizationConfig(group_size=16)
    codes = torch.arange(16.0)[None]  # exactly the sixteen levels of one group with scale 1
    packed, scales, zeros = quantize(codes, spec)
    assert packed.shape == (1, 8)
    assert packed[0, 0].item() == 0 | (1 << 4)
    assert (scales.item(), zeros.item()) == (1.0, 0.0)
    assert torch.equal(DequantizedLinear(packed, scales, zeros, None).weight(), codes)


def test_forward_is_the_dense_product_of_the_rounded_weight_with_bias():
    linear = nn.Linear(64, 10)
    layer = DequantizedLinear.from_linear(linear, QuantizationConfig(group_size=16))
    x = torch.randn(3, 5, 64)
    assert torch.allclose(layer(x), x @ layer.weight().T + linear.bias, atol=1e-5)


@pytest.mark.parametrize("scheme", ["asymmetric", "symmetric"])
@pytest.mark.parametrize("value", [0.0, 0.5, -0.5])
def test_constant_groups_survive(scheme, value):
    linear = nn.Linear(32, 2, bias=False)
    nn.init.constant_(linear.weight, value)
    layer = DequantizedLinear.from_linear(linear, QuantizationConfig(group_size=32, scheme=scheme))
    assert torch.allclose(layer.weight(), linear.weight, atol=1e-6)


def test_a_group_that_does_not_divide_names_the_layer_and_changes_nothing():
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    with pytest.raises(BuildError, match=r"1: 96 input features .* groups of 64"):
        quantize_in_place(model, QuantizationConfig(group_size=64))
    assert all(isinstance(m, nn.Linear) for m in model)


def test_skipping_everything_is_an_error():
    with pytest.raises(BuildError, match="no linear layer"):
        quantize_in_place(nn.Sequential(nn.Linear(64, 8)), QuantizationConfig(skip=("0",)))


def test_random_models_are_quantized_in_process_and_counted_alike():
    standard, flash = load.load_build(RANDOM, BuildSpec(), "cpu"), load.load_build(RANDOM, FLASH, "cpu")
    assert flash.in_process
    assert not standard.in_process
    assert flash.parameters == standard.parameters
    assert flash.resident_bytes < standard.resident_bytes
    assert flash.digest != standard.digest
    assert isinstance(flash.model.lm_head, nn.Linear)  # skipped


def test_prepared_build_equals_in_place_quantization_and_never_holds_dense_weights(folder_model, monkeypatch):
    expected = quantize_in_place(models.load(folder_model, "cpu"), FLASH.quantization)
    folder = load.prepare_build(folder_model, FLASH)
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("dense weights were loaded"))
    build = load.load_build(folder_model, FLASH, "cpu")
    ids = torch.arange(1, 20)[None]
    assert torch.equal(build.model(ids).logits, expected(ids).logits)
    assert build.digest == folder.name
    assert build.model.lm_head.weight is build.model.model.embed_tokens.weight
    assert build.resident_bytes == load.resident_bytes(expected)


@pytest.mark.parametrize("build", [BuildSpec(), FLASH])
def test_prefill_folds_rows_into_one_matmul(build):
    """Frozen weights make torch copy the output layer for every row of a batch: seconds, and gigabytes."""
    model = load.load_build(RANDOM, build, "cpu").model
    engine = Engine(model)
    ids = torch.ones(3, 8, dtype=torch.long)
    seen = kernels.observe(model, {"prefill": lambda: engine.prefill(ids, None, 9)}, build)
    assert kernels.mismatches(seen) == []
    model.requires_grad_(False)
    frozen = kernels.observe(model, {"prefill": lambda: engine.prefill(ids, None, 9)}, build)
    assert frozen["lm_head"]["ran"] == kernels.COPIED  # if torch mends this, `_unfreeze` can go


def test_preparing_twice_does_the_work_once(folder_model, monkeypatch):
    first = load.prepare_build(folder_model, FLASH)
    monkeypatch.setattr(load, "_save", lambda *_: pytest.fail("prepared again"))
    assert load.prepare_build(folder_model, FLASH) == first


def test_an_interrupted_preparation_leaves_nothing_that_looks_ready(folder_model, monkeypatch):
    import safetensors.torch

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(BuildError, match="No space left"):
        load.prepare_build(folder_model, FLASH)
    assert not [p for p in (models.cache_dir() / "builds").iterdir() if p.is_dir()]


def test_another_group_size_is_another_build(folder_model):
    other = BuildSpec(quantization=QuantizationConfig(group_size=16))
    assert load.build_digest(folder_model, FLASH) != load.build_digest(folder_model, other)


def test_a_prepared_build_with_missing_tensors_is_named(folder_model):
    from safetensors.torch import load_file, save_file

    path = load.prepare_build(folder_model, FLASH) / "model.safetensors"
    state = load_file(path)
    state.pop("model.layers.1.mlp.up_proj.scales")
    save_file(state, path)
    with pytest.raises(BuildError, match=r"up_proj\.scales"):
        load.load_build(folder_model, FLASH, "cpu")
