"""Wrong tokens decode as plausible nonsense, so every path is compared with `model.generate`."""

from __future__ import annotations

import pytest
import torch

from flashgap.engine import Engine, EngineError, pad


def tiny(kind: str = "llama", **over):
    """A random float32 model with two layers, grouped heads and a 128-token context."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": 97,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
            "initializer_range": 0.3,
            **over,
        },
    )
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def prompts(lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def reference(model, batch, new_tokens):
    ids, mask = pad(batch, "cpu")
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, eos_token_id=None
    )
    return out[:, ids.shape[1] :].tolist()


@pytest.fixture(scope="module", params=["llama", "glm4"])
def model(request):
    return tiny(request.param)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("lengths", [(9,), (6, 6, 6), (3, 11, 7)])
def test_eager_tokens_equal_generate(model, cache, lengths):
    batch = prompts(lengths)
    result = Engine(model, cache=cache).generate(batch, 16)
    assert result.tokens == reference(model, batch, 16)
    assert result.finite
    assert len(result.step_s) == 15


def test_tokens_vary_so_that_equality_means_something(model):
    tokens = Engine(model).generate(prompts((9,)), 16).tokens[0]
    assert len(set(tokens)) > 4


def test_static_cache_is_clean_when_used_again(model):
    engine = Engine(model, cache="static")
    first = engine.generate(prompts((8, 8)), 10).tokens
    engine.generate(prompts((5, 5)), 13)
    assert engine.generate(prompts((8, 8)), 10).tokens == first


def test_counts_are_exact_per_request_and_ignore_end_of_sequence(model):
    batch = prompts((4, 9, 6))
    result = Engine(model).generate(batch, [1, 7, 3])
    assert [len(t) for t in result.tokens] == [1, 7, 3]
    assert result.tokens == [t[:n] for t, n in zip(reference(model, batch, 7), (1, 7, 3), strict=True)]


def test_a_padded_row_gives_the_tokens_it_gives_alone(model):
    batch = prompts((3, 12))
    together = Engine(model, cache="static").generate(batch, 8).tokens
    assert together == [Engine(model).generate([p], 8).tokens[0] for p in batch]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_extend_in_chunks_equals_one_prefill(model, cache):
    (prompt,) = prompts((40,))
    ids = torch.tensor([prompt])
    engine = Engine(model, cache=cache)
    _, state = engine.prefill(ids[:, :5], None, 60)
    engine.extend(state, ids[:, 5:], chunk_tokens=16)
    tokens = [state.tokens.item()] + [engine.decode_step(state).item() for _ in range(7)]
    assert tokens == reference(model, [prompt], 8)[0]
    assert state.length == 47


def test_compiled_tokens_equal_and_nothing_recompiles_after_warmup():
    model = tiny()
    engine = Engine(model, cache="static", compile=True)
    equal, unequal = prompts((8, 8)), prompts((5, 8))
    engine.warmup(2, 18)
    engine.warmup(2, 18, padded=True)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    assert engine.generate(equal, 10).tokens == reference(model, equal, 10)
    assert engine.generate(unequal, 10).tokens == reference(model, unequal, 10)
    assert engine.generate(equal, 10).tokens == reference(model, equal, 10)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_on_step_is_inside_the_timed_step_and_first_token_outside():
    seen = []
    result = Engine(tiny()).generate(
        prompts((4,)), 4, on_step=lambda s: seen.append(s), on_first_token=lambda: seen.append("first")
    )
    assert seen[0] == "first"
    assert len(seen) == 4
    assert all(step >= inner for step, inner in zip(result.step_s, seen[1:], strict=True))


def test_nan_weights_are_reported_as_not_finite():
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    assert not Engine(model).generate(prompts((4,)), 2).finite


def test_gaps_show_how_near_the_second_best_token_was(model):
    result = Engine(model).generate(prompts((4, 6)), 5, gaps=True)
    assert [len(g) for g in result.logits_gap] == [5, 5]
    assert min(min(g) for g in result.logits_gap) >= 0


@pytest.mark.parametrize(
    ("batch", "new_tokens", "words"),
    [
        ([], 4, "batch of zero"),
        ([[]], 4, "zero tokens"),
        ([[5] * 126], 4, "context of 130, the model has 128"),
        ([[5]], 0, "at least 1"),
        ([[5]], [1, 2], "1 prompts but 2 numbers"),
    ],
)
def test_impossible_batches_are_refused_in_one_line(batch, new_tokens, words):
    with pytest.raises(EngineError, match=words) as error:
        Engine(tiny()).generate(batch, new_tokens)
    assert "\n" not in str(error.value)


def test_compile_needs_a_static_cache():
    with pytest.raises(EngineError, match="static"):
        Engine(tiny(), compile=True)
