"""A quantizer that drops layers, samples or its search, or returns other codes than it would pack, spoils every comparison."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny import LLAMA
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from flashgap.builds.calibration import calibration_chunks, other_english_text
from flashgap.builds.quantizers import legal_group_sizes, quantize_model, round_to_nearest
from flashgap.builds.weights import BuildError
from flashgap.models import ByteTokenizer, held_out_text

VOCABULARY = 128
TOKENIZER = ByteTokenizer(VOCABULARY)
CALIBRATION = SimpleNamespace(text="python_docs", samples=4, length_tokens=32, seed=1)


def tiny(**changes):
    """A Llama of two blocks with grouped-query attention and a tied head; some channels are loud, as in real ones."""
    torch.manual_seed(0)
    shape = {
        **{name: value for name, value in LLAMA.items() if name != "model_type"},
        "vocab_size": VOCABULARY,
        "intermediate_size": 128,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).eval()
    for block in model.model.layers:
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.weight.data[::9] *= 12
    return model


def config(quantizer, **changes):
    fields = {
        "bits": 4,
        "scheme": "asymmetric",
        "per_channel": False,
        "quantizer": quantizer,
        "disable_search": False,
        "group_size": 32,
        "skip": ("lm_head",),
        "calibration": CALIBRATION,
    }
    return SimpleNamespace(**{**fields, **changes})


def linear_names(model, head=False):
    return {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and (head or n != "lm_head")}


def install(model, weights):
    for name, weight in weights.items():
        model.get_submodule(name).weight.data = weight.dequantize().to(model.dtype)


@torch.no_grad()
def output_error(model, weights, reference):
    """Mean squared error of the logits on text that was not calibrated on."""
    install(model, weights)
    return float((model(IDS).logits - reference).square().mean())


IDS = torch.tensor(
    [TOKENIZER.encode("The quick brown fox jumps over the lazy dog, and then it sleeps. " * 2)[:120]]
)

EVERY = [
    ("rtn", {}),
    ("rtn", {"scheme": "symmetric", "bits": 8}),
    ("rtn", {"per_channel": True, "group_size": None}),
    ("hqq", {}),
    ("hqq", {"per_channel": True, "group_size": None}),
    ("hqq", {"bits": 8}),
    ("autoawq", {}),
    ("llmcompressor", {}),
    ("llmcompressor", {"scheme": "symmetric"}),
    ("llmcompressor", {"scheme": "symmetric", "per_channel": True, "group_size": None}),
    ("llmcompressor", {"bits": 8}),
]


@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize(("quantizer", "changes"), EVERY)
def test_every_layer_has_codes_that_stand_for_its_weight(quantizer, changes, search):
    model = tiny()
    reference = model(IDS).logits.detach()
    spec = config(quantizer, disable_search=not search, **changes)
    weights = quantize_model(model, TOKENIZER, spec)
    assert set(weights) == linear_names(model)
    for name, weight in weights.items():
        rows, columns = weight.shape
        assert (rows, columns) == tuple(model.get_submodule(name).weight.shape)
        assert weight.codes.dtype == torch.uint8
        assert int(weight.codes.max()) < 2**spec.bits
        assert weight.bits == spec.bits
        assert weight.group_size == (columns if spec.per_channel else 32)
        assert weight.scales.dtype == torch.float32
        assert weight.zeros.is_floating_point() == (quantizer == "hqq")
        if spec.scheme == "symmetric":
            assert weight.symmetric
    relative = output_error(model, weights, reference) / float(reference.square().mean())
    assert relative < (1e-3 if spec.bits == 8 else 0.1)
    assert relative > 0


@pytest.mark.parametrize("quantizer", ["autoawq", "llmcompressor"])
def test_the_model_keeps_its_function_when_scales_are_folded(quantizer, monkeypatch):
    """Before rounding, AWQ's scales cancel: the changed norms and the changed weights give the same logits."""
    from flashgap.builds import autoawq

    monkeypatch.setattr(autoawq, "CLIP_SHRINK", 0.05)  # one level: nothing is clipped
    model = tiny()
    before = model.model.layers[0].input_layernorm.weight.detach().clone()
    reference = model(IDS).logits.detach()
    quantize_model(model, TOKENIZER, config(quantizer))
    assert not torch.equal(before, model.model.layers[0].input_layernorm.weight)
    torch.testing.assert_close(model(IDS).logits, reference, rtol=1e-3, atol=1e-4)


def test_searches_beat_plain_rounding_where_channels_differ():
    reference = tiny()(IDS).logits.detach()
    errors = {}
    for quantizer in ("rtn", "autoawq", "llmcompressor"):
        model = tiny()
        weights = quantize_model(model, TOKENIZER, config(quantizer))
        errors[quantizer] = output_error(model, weights, reference)
    assert errors["llmcompressor"] < 0.9 * errors["rtn"]
    assert errors["autoawq"] < 0.9 * errors["rtn"]


@pytest.mark.parametrize("quantizer", ["autoawq", "llmcompressor"])
def test_without_search_nothing_is_folded_and_codes_are_plain(quantizer):
    model, plain = tiny(), quantize_model(tiny(), TOKENIZER, config("rtn"))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    spec = config(quantizer, disable_search=True, calibration=None)
    weights = quantize_model(model, TOKENIZER, spec)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    for name, weight in weights.items():
        distance = (weight.dequantize() - plain[name].dequantize()).abs() / plain[name].scales.max()
        assert float(distance.max()) <= 1.01  # ties and half precision may fall to the next code
        assert float((distance > 0.1).float().mean()) < 0.02


def test_autoawq_codes_are_those_its_own_layer_packs():
    from awq.modules.linear import WQLinear_GEMM
    from awq.utils.packing_utils import reverse_awq_order, unpack_awq

    from flashgap.builds.autoawq import read_codes

    torch.manual_seed(0)
    linear = nn.Linear(128, 64, bias=False).bfloat16()
    found = read_codes(linear.weight.detach(), 4, 32)
    half = nn.Linear(128, 64, bias=False).half()
    half.weight.data = found.dequantize().half()  # the library's fake-quantized weight
    packed = WQLinear_GEMM.from_linear(
        half, 4, 32, scales=found.scales.half().t().contiguous(), zeros=found.zeros.half().t().contiguous()
    )
    codes, zeros = unpack_awq(packed.qweight, packed.qzeros, 4)
    codes, zeros = reverse_awq_order(codes, zeros, 4)
    assert torch.equal((codes & 15).t().to(torch.uint8), found.codes)
    assert torch.equal((zeros & 15).t().to(torch.uint8), found.zeros)


def test_the_fast_clip_search_is_the_library_s():
    from awq.quantize.quantizer import AwqQuantizer

    from flashgap.builds.autoawq import best_clip

    torch.manual_seed(0)
    weight, inputs = torch.randn(64, 128), torch.randn(1, 96, 128) * torch.linspace(0.1, 3, 128)
    library = AwqQuantizer.__new__(AwqQuantizer)
    library.group_size, library.w_bit, library.zero_point = 32, 4, True
    theirs = AwqQuantizer._compute_best_clip(library, weight, inputs)
    ours = best_clip(weight, inputs, 32, library.pseudo_quantize_tensor)
    assert ours.shape == theirs.shape
    assert float((ours == theirs).float().mean()) > 0.99  # rounding may break a near tie
    assert float((theirs < weight.view(64, -1, 32).abs().amax(-1, keepdim=True)).float().mean()) > 0.1


@pytest.mark.parametrize(
    "changes", [{}, {"scheme": "symmetric"}, {"per_channel": True, "group_size": None}, {"bits": 8}]
)
def test_llmcompressor_codes_are_what_its_own_forward_pass_emulates(changes, monkeypatch):
    from compressed_tensors.quantization import fake_quantize

    from flashgap.builds import llm_compressor

    monkeypatch.setattr(
        llm_compressor, "_plain", lambda layer: layer
    )  # keep the library's parameters to compare
    model = tiny()
    for name, found in quantize_model(model, TOKENIZER, config("llmcompressor", **changes)).items():
        layer = model.get_submodule(name)
        theirs = fake_quantize(
            layer.weight, layer.weight_scale, layer.weight_zero_point, layer.quantization_scheme.weights
        )
        torch.testing.assert_close(found.dequantize(), theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("quantizer", ["rtn", "autoawq", "llmcompressor"])
def test_a_quantized_head_is_untied_and_rounded_plainly(quantizer):
    model = tiny()
    embedding = model.model.embed_tokens.weight.detach().clone()
    weights = quantize_model(model, TOKENIZER, config(quantizer, skip=()))
    assert set(weights) == linear_names(model, head=True)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert model.config.tie_word_embeddings is False
    plain = round_to_nearest(embedding, 4, 32, symmetric=False).dequantize()
    assert float((weights["lm_head"].dequantize() - plain).abs().mean()) < 0.05 * float(
        embedding.abs().mean()
    )


@pytest.mark.parametrize("quantizer", ["rtn", "autoawq", "llmcompressor"])
def test_a_skipped_head_stays_tied(quantizer):
    model = tiny()
    quantize_model(model, TOKENIZER, config(quantizer))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("quantizer", ["autoawq", "llmcompressor"])
def test_skip_means_the_suffix_of_the_full_name(quantizer):
    model = tiny()
    skip = ("lm_head", "layers.1.mlp.down_proj", "q_proj")
    weights = quantize_model(model, TOKENIZER, config(quantizer, skip=skip))
    assert linear_names(model) - set(weights) == {
        "model.layers.1.mlp.down_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
    }
    assert (
        float(model.model.layers[1].mlp.down_proj.weight.unique().numel()) > 1000
    )  # neither rounded nor clipped


@pytest.mark.parametrize("quantizer", ["rtn", "hqq", "llmcompressor"])
def test_named_layers_keep_eight_bits(quantizer):
    spec = config(quantizer, eight_bits=("v_proj", "layers.0.mlp.down_proj"))
    bits = {name: weight.bits for name, weight in quantize_model(tiny(), TOKENIZER, spec).items()}
    assert bits["model.layers.0.mlp.down_proj"] == bits["model.layers.1.self_attn.v_proj"] == 8
    assert bits["model.layers.1.mlp.down_proj"] == bits["model.layers.0.self_attn.k_proj"] == 4


def test_llmcompressor_leaves_plain_layers_and_its_class_unpatched():
    from llmcompressor.pipelines.cache import IntermediatesCache

    before = IntermediatesCache.pin_memory
    model = tiny()
    quantize_model(model, TOKENIZER, config("llmcompressor"))
    assert IntermediatesCache.pin_memory is before
    for module in model.modules():
        assert not hasattr(module, "quantization_scheme")
        assert type(module._parameters) is dict
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert {name.rsplit(".", 1)[1] for name, _ in model.named_parameters()} == {"weight"}


@pytest.mark.parametrize("quantizer", ["autoawq", "llmcompressor"])
def test_nothing_is_printed(quantizer, capfd):
    quantize_model(tiny(), TOKENIZER, config(quantizer))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


@pytest.mark.parametrize(
    ("quantizer", "changes", "message"),
    [
        ("autoawq", {"scheme": "symmetric"}, "stores a zero point"),
        ("autoawq", {"per_channel": True, "group_size": None}, "stores a zero point"),
        ("autoawq", {"bits": 8}, "packs 4 bits only"),
        ("autoawq", {"eight_bits": ("v_proj",)}, "packs 4 bits only"),
        ("hqq", {"scheme": "symmetric"}, "free zero point"),
        ("llmcompressor", {"calibration": None}, "needs a calibration"),
        ("rtn", {"group_size": 48}, r"q_proj: group_size 48 does not divide 64.*legal: \[16, 32, 64\]"),
        ("rtn", {"skip": ("proj", "lm_head")}, "no linear layer is left"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(quantizer, changes, message):
    with pytest.raises(BuildError, match=message) as caught:
        quantize_model(tiny(), TOKENIZER, config(quantizer, **changes))
    assert "\n" not in str(caught.value)


def test_an_unknown_family_is_refused_by_autoawq():
    model = tiny()
    model.config.model_type = "unheard_of"
    with pytest.raises(BuildError, match=r"family unheard_of is unknown.*llama"):
        quantize_model(model, TOKENIZER, config("autoawq"))


@pytest.mark.parametrize("quantizer", ["rtn", "hqq", "autoawq", "llmcompressor"])
def test_a_weight_that_is_not_a_number_is_an_error(quantizer):
    model = tiny()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    with pytest.raises(BuildError, match="NaN"):
        quantize_model(model, TOKENIZER, config(quantizer))


@pytest.mark.parametrize("quantizer", ["autoawq", "llmcompressor"])
def test_an_activation_that_is_not_a_number_is_an_error(quantizer):
    model = tiny()
    model.model.embed_tokens.weight.data[TOKENIZER.encode("e")[0]] = torch.inf
    with pytest.raises(BuildError, match=r"NaN or infinity in the calibration activations"):
        quantize_model(model, TOKENIZER, config(quantizer))


def test_a_group_clipped_whole_is_an_error():
    """AutoAWQ's zero point stops at the lowest code: weights far from 0 on one side are lost to it."""
    model = tiny()
    model.model.layers[0].mlp.down_proj.weight.data[0, :32] = torch.linspace(5.0, 5.4, 32)
    quantize_model(model, TOKENIZER, config("rtn"))
    with pytest.raises(BuildError, match=r"layers.0.mlp.down_proj: all codes are clipped in 1 of"):
        quantize_model(model, TOKENIZER, config("autoawq", disable_search=True))


def test_rounding_is_nearest_under_the_stored_scale():
    torch.manual_seed(0)
    weight = torch.randn(8, 64).bfloat16()
    for bits in (4, 8):
        found = round_to_nearest(weight, bits, 32, symmetric=False)
        error = (weight.float() - found.dequantize()).abs().view(8, 2, 32) / found.scales.float().unsqueeze(
            -1
        )
        inside = (found.codes > 0) & (found.codes < 2**bits - 1)
        assert float(error.flatten()[inside.flatten()].max()) <= 0.5001


def test_legal_sizes_are_the_ones_that_divide():
    assert legal_group_sizes(576) == [16, 32, 48, 64, 96, 144, 192, 288, 576]
    assert legal_group_sizes(12) == [2, 4, 6, 12]


def test_calibration_draws_exactly_the_samples():
    chunks = calibration_chunks(TOKENIZER, CALIBRATION)
    again = calibration_chunks(TOKENIZER, CALIBRATION)
    other = calibration_chunks(TOKENIZER, SimpleNamespace(**{**vars(CALIBRATION), "seed": 2}))
    assert chunks.shape == (4, 32)
    assert torch.equal(chunks, again)
    assert not torch.equal(chunks, other)
    assert len({tuple(row.tolist()) for row in chunks}) == 4


def test_a_text_too_short_names_both_numbers(tmp_path):
    (tmp_path / "short.txt").write_text("x" * 100)
    spec = SimpleNamespace(text=str(tmp_path / "short.txt"), samples=4, length_tokens=32, seed=1)
    with pytest.raises(BuildError, match=r"has 3 pieces of 32 tokens, 4 samples"):
        calibration_chunks(TOKENIZER, spec)
    spec.text = str(tmp_path / "absent.txt")
    with pytest.raises(BuildError, match="No such file"):
        calibration_chunks(TOKENIZER, spec)


def test_the_other_text_is_long_prose_of_another_source():
    text, sha256 = other_english_text()
    assert (text, sha256) == other_english_text()
    assert len(text) > 100_000
    mine = {" ".join(p.split()) for p in held_out_text()[0].split("\n\n")}
    paragraphs = text.split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))
    assert not mine & set(paragraphs)
