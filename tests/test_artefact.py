"""Compiled builds: a graph that is not the model, or a kernel that is not the one claimed, must not pass."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import LLAMA

from flashgap import artefact, gate, graphs, models, worker, workload
from flashgap.artefact import count_calls
from flashgap.builds.load import load_build
from flashgap.compiled import ArtefactEngine, race_missing
from flashgap.engine import Engine, EngineError
from flashgap.graphs import Shape
from flashgap.treatment import (
    BuildSpec,
    Correctness,
    EngineSpec,
    LatencyWorkload,
    ModelSpec,
    PrefillWorkload,
    QuantizationConfig,
    TaskWorkload,
    Treatment,
    TrialSpec,
)

CONFIG = {
    **LLAMA,
    "vocab_size": 320,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
MODEL = ModelSpec(source="random", config=CONFIG, dtype="float32")
PACKED = BuildSpec(quantization=QuantizationConfig(group_size=32, skip=(), execution="packed"))
SPEC = TrialSpec(
    model=MODEL,
    treatment=Treatment(build=PACKED, engine=EngineSpec(cache="static", ahead_of_time=True)),
    workload=LatencyWorkload(kind="latency", batch_sizes=(2,), prompt_tokens=16, generated_tokens=8),
    correctness=Correctness(tokens=64, max_kl_nats=5.0, max_perplexity_ratio=50.0),
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Graphs of a tiny packed model, and the eager engine they must agree with."""
    at = tmp_path_factory.mktemp("graphs") / "key"
    build = load_build(MODEL, PACKED, "cpu")
    shapes = [Shape(*shape) for shape in workload.fixed_shapes(SPEC.workload)]
    artefact.compile_missing(build, at, shapes, "cpu", tell=lambda _: None)
    return at, build, shapes


def test_tokens_are_those_of_the_eager_engine_for_unequal_prompts(compiled):
    at, build, _ = compiled
    engine = ArtefactEngine(at, build.model.config, torch.float32)
    prompts = [list(range(5, 18)), list(range(40, 47))]
    truth = Engine(build.model).generate(prompts, 6, gaps=True)
    ours = engine.generate(prompts, 6)
    assert ours.tokens == truth.tokens
    assert engine.generate(prompts, 6).tokens == truth.tokens, "a kept cache changed the answer"
    assert len(ours.step_s) == 5


def test_every_quantized_layer_runs_a_packed_kernel(compiled):
    at, build, shapes = compiled
    rows = artefact.kernel_rows(at, build.model, shapes)
    assert set(rows) == {"prefill_b1_t16", "decode_b2_t24"}
    for row in rows.values():
        assert row["layers"] == 15
        assert row["expected"] == row["ran"] == "packed 4-bit matmul x 15"


def test_a_graph_that_is_not_there_is_named(compiled):
    at, build, _ = compiled
    engine = ArtefactEngine(at, build.model.config, torch.float32)
    with pytest.raises(EngineError, match=r"batch 3 and 24 tokens \(there are: decode_b2_t24\)"):
        engine.warmup(3, 24)
    with pytest.raises(EngineError, match="no compiled prefill graph for batch 1 and 40 tokens"):
        engine.prefill(torch.ones(2, 40, dtype=torch.long), None, 40)  # type: ignore[arg-type]


def test_compiled_graphs_are_not_compiled_again(compiled):
    at, build, shapes = compiled
    told: list[str] = []
    before = {path: path.stat().st_mtime_ns for path in at.glob("*.pt2")}
    artefact.compile_missing(build, at, shapes, "cpu", tell=told.append)
    assert told == []
    assert {path: path.stat().st_mtime_ns for path in at.glob("*.pt2")} == before
    assert json.loads((at / "build.json").read_text())["digest"] == build.digest


def test_many_rows_may_read_a_copy_where_it_was_faster(tmp_path):
    """If this fails, a prompt runs on the slower of two graphs, or on one whose weights are not the build's."""
    build = load_build(MODEL, PACKED, "cpu")
    few, many = Shape("decode", 2, 24), Shape("prefill", 1, 16)
    told: list[str] = []
    artefact.compile_missing(build, tmp_path, [few, many], "cpu", told.append, copies=True)
    assert sum(line.startswith("compiling") for line in told) == 3, "few rows want no copy"
    assert artefact.available(tmp_path, copies=True)[many]["file"] == "prefill_b1_t16.pt2", "not raced yet"

    facts = json.loads((tmp_path / "prefill_b1_t16_copy.json").read_text())
    artefact.write(tmp_path / "prefill_b1_t16_copy.json", {**facts, "race": {"packed_s": 2.0, "copy_s": 1.0}})
    assert artefact.available(tmp_path)[many]["file"] == "prefill_b1_t16.pt2", "copies were not asked for"
    engine = ArtefactEngine(tmp_path, build.model.config, torch.float32, copies=True)
    assert engine.graphs[many]["file"] == "prefill_b1_t16_copy.pt2"
    prompts = [list(range(5, 18)), list(range(40, 47))]
    assert engine.generate(prompts, 6).tokens == Engine(build.model).generate(prompts, 6).tokens
    rows = artefact.kernel_rows(tmp_path, build.model, [few, many], copies=True)
    assert rows[many.name]["expected"] == rows[many.name]["ran"] == "dense matmul"
    assert rows[many.name]["race"] == {"packed_s": 2.0, "copy_s": 1.0}
    assert rows[few.name]["ran"] == "packed 4-bit matmul x 15"

    (tmp_path / "prefill_b1_t16_copy.pt2").unlink()
    told.clear()
    artefact.compile_missing(build, tmp_path, [few, many], "cpu", told.append, copies=True)
    assert [line.split(" (")[0] for line in told[:1]] == ["compiling prefill_b1_t16 on a 16-bit copy"]
    race_missing(tmp_path, build.model, "cpu", told.append)
    won = artefact.races(tmp_path)[many]
    assert won["packed_s"] > 0
    assert won["copy_s"] > 0
    lost = not artefact.copy_wins({"race": won})
    assert (tmp_path / "prefill_b1_t16_copy.pt2").is_file() != lost
    told.clear()
    artefact.compile_missing(build, tmp_path, [few, many], "cpu", told.append, copies=True)
    race_missing(tmp_path, build.model, "cpu", told.append)
    assert told == [], "what lost is not made again"


def test_a_verdict_is_void_without_its_graphs(tmp_path, monkeypatch):
    """If this fails, a trial starts on graphs that someone deleted, and fails in every block."""
    monkeypatch.setenv("FLASHGAP_CACHE", str(tmp_path))
    at = tmp_path / "artefacts" / "key"
    at.mkdir(parents=True)
    files = ["prefill_b1_t16.pt2", "prefill_b1_t16.json"]
    for name in ("build.json", *files):
        (at / name).touch()
    verdict = {"status": "ok", "error": None, "correctness": {}, "kernels": {}, "build": "x"}
    gate.keep_verdict(SPEC, {**verdict, "graphs": {"folder": "key", "files": files}})
    assert gate.gate_verdict(SPEC) is not None
    (at / files[0]).unlink()
    assert gate.gate_verdict(SPEC) is None


TASK = SPEC.model_copy(
    update={
        "workload": TaskWorkload(
            kind="task",
            requests=2,
            prompt_scale=0.01,
            generated_scale=0.05,
            max_context_tokens=128,
            max_batch=2,
            draw_seed=1,
        )
    }
)


@pytest.mark.parametrize("spec", [SPEC, TASK], ids=["latency", "task"])
def test_a_trial_on_compiled_graphs(tmp_path, monkeypatch, compiled, spec):
    """From gate to record, with the graphs that are there or are made now."""
    at, _, _ = compiled
    monkeypatch.setenv("FLASHGAP_CACHE", str(tmp_path))
    monkeypatch.setattr(artefact, "folder", lambda *_: at)
    monkeypatch.setattr(models, "cache_dir", lambda: tmp_path)
    link = tmp_path / "artefacts"
    link.mkdir()
    (link / at.name).symlink_to(at)
    assert worker.gate_verdict(spec) is None

    class Pipe:
        def send(self, value):
            self.value = value

    pipe = Pipe()
    worker.gate(spec.model_dump_json(), pipe)
    assert pipe.value["status"] == "ok", pipe.value["error"]
    outcome = worker.run_trial(spec)
    assert outcome["status"] == "ok", outcome["error"]
    assert all(row["ran"].startswith("packed 4-bit matmul") for row in outcome["kernels"].values())
    expected = {"itl_s": 7} if spec is SPEC else {"task_s": 1, "e2e_s": 2}
    for metric, count in expected.items():
        assert outcome["observations"]["metric"].count(metric) == count
    assert outcome["build"]["resident_bytes"] > 0


def test_calls_are_counted_by_what_they_multiply():
    """If this fails, a layer that fell back to a dense kernel is counted as packed, or not at all."""
    code = (
        'inline void cpp_a_micro_gemm_amx_kernel_16_2(\ncpp_a_micro_gemm(\nextern "C"\n'
        "void cpp_a(const at::BFloat16* X, const uint8_t* W, const at::BFloat16* qscale_and_zeros)\n"
        'inline void cpp_c_micro_gemm(\nextern "C"\nvoid cpp_c(const at::BFloat16* X, const int8_t* W)\n'
        'inline void cpp_b_micro_gemm(\nextern "C"\nvoid cpp_b(const float* X, const float* W)\n'
    )
    wrapper = (
        'extern "C" void cpp_a(const at::BFloat16* X);\nextern "C" void cpp_b(const float* X);\n'
        "cpp_a(x, y);\ncpp_a(x, y);\ncpp_b(x);\ncpp_c(x);\naoti_torch_cpu__weight_int4pack_mm_cpu_tensor(q);\n"
        "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(q);\naoti_torch_cpu_addmm_out(q);\n"
    )
    assert count_calls(wrapper, code) == {
        "addmm_out": 1,
        "dense: generated, AVX-512": 1,
        "packed 4-bit: generated, AMX": 2,
        "packed 4-bit: weight_int4pack_mm_cpu_tensor": 1,
        "packed 8-bit: generated, AVX-512": 1,
        "scaled_dot_product_flash_attention_for_cpu": 1,
    }


def test_shapes_follow_the_workload():
    latency = LatencyWorkload(kind="latency", batch_sizes=(1, 4), prompt_tokens=16, generated_tokens=8)
    assert workload.fixed_shapes(latency) == [("prefill", 1, 16), ("decode", 1, 24), ("decode", 4, 24)]
    prefill = PrefillWorkload(kind="prefill", prompt_tokens=(16, 64))
    assert workload.fixed_shapes(prefill) == [("prefill", 1, 16), ("prefill", 1, 64)]
    task = TaskWorkload(
        kind="task", requests=3, prompt_scale=0.1, max_context_tokens=512, max_batch=2, draw_seed=1
    )
    shapes = workload.fixed_shapes(task)
    drawn = workload.draw_task(task)
    for group in workload.batches(drawn, 2):
        room = max(r.prompt_tokens for r in group) + max(r.generated_tokens for r in group)
        assert ("decode", len(group), room) in shapes
        assert all(any(p == "prefill" and n >= r.prompt_tokens for p, _, n in shapes) for r in group)


def test_attention_that_has_no_fixed_graph_is_refused():
    config = {**CONFIG, "model_type": "mistral", "sliding_window": 8}
    model = models.load(ModelSpec(source="random", config=config, dtype="float32"), "cpu")
    model.config.layer_types = ["sliding_attention"] * 2
    with pytest.raises(graphs.GraphError, match="sliding_attention"):
        graphs.prepare(model)
