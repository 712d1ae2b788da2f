"""The worker is where a wrong build could be timed, or a failure lost; each test is one such way."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from tiny import LLAMA

from flashgap import gate, kernels, models, worker
from flashgap.builds import load, quantization
from flashgap.builds.load import load_build
from flashgap.capacity import capacity
from flashgap.cost import ModelShape
from flashgap.engine import Engine
from flashgap.treatment import (
    BuildSpec,
    CapacityWorkload,
    Correctness,
    EngineSpec,
    ModelSpec,
    QuantizationConfig,
    Treatment,
    TrialSpec,
)
from flashgap.trial import Observations, Trial, is_out_of_memory, spin

CONFIG = {
    **LLAMA,
    "vocab_size": 300,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MODEL = ModelSpec(source="random", dtype="float32", config=CONFIG)
FLASH = BuildSpec(quantization=QuantizationConfig(group_size=32))
LATENCY = {"kind": "latency", "batch_sizes": (1, 2), "prompt_tokens": 8, "generated_tokens": 5}


class Pipe:
    """The sending end of a connection, kept in a list."""

    def __init__(self):
        self.sent = []

    def send(self, item):
        self.sent.append(item)


def trial_spec(workload=LATENCY, **over):
    data = {
        "model": MODEL,
        "treatment": Treatment(),
        "workload": workload,
        "correctness": Correctness(tokens=128),
        **over,
    }
    return TrialSpec(**data)


def run(spec, check=True):
    """Gate if asked, then the trial; the outcome must be plain data."""
    pipe = Pipe()
    if check:
        worker.gate(spec.model_dump_json(), pipe)
    worker.main(spec.model_dump_json(), pipe)
    outcome = pipe.sent[-1]
    json.dumps(outcome)
    return outcome


def metric(outcome, name, **at):
    columns = outcome["observations"]
    rows = range(len(columns["metric"]))
    return [
        columns["value"][i]
        for i in rows
        if columns["metric"][i] == name and all(columns[k][i] == v for k, v in at.items())
    ]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGAP_CACHE", str(tmp_path))
    monkeypatch.setenv("FLASHGAP_FINGERPRINT", "test machine")


def test_latency_gives_every_sample_and_every_phase():
    outcome = run(trial_spec())
    assert (outcome["status"], outcome["error"]) == ("ok", None)
    for batch in (1, 2):
        first, steps = metric(outcome, "ttft_s", batch=batch), metric(outcome, "itl_s", batch=batch)
        assert (len(first), len(steps)) == (1, 4)
        assert metric(outcome, "e2e_s", batch=batch)[0] == pytest.approx(first[0] + sum(steps))
    phases = outcome["memory"]
    assert set(phases) == {"start", "weights_loaded", "first_token", "initialisation_peak", "steady", "peak"}
    assert all("peak" in name for name in phases["peak"])
    assert outcome["model"]["random_weights"]
    assert outcome["kernels"]["q_proj"]["ran"] == kernels.DENSE
    assert "flashgap.engine" in outcome["modules"]
    assert {"start", "import", "check", "load", "measure", "total"} <= set(outcome["timings_s"])
    lengths = {len(column) for column in outcome["observations"].values()}
    assert len(lengths) == 1


def test_nothing_is_timed_without_a_verdict():
    outcome = run(trial_spec(), check=False)
    assert outcome["status"] == "incorrect"
    assert "run its gate first" in outcome["error"]
    assert outcome["observations"]["metric"] == []


def test_a_wrong_build_is_incorrect_and_not_timed(monkeypatch):
    def shifted(weight, spec, _right=quantization.quantize):
        packed, scales, zeros = _right(weight, spec)
        return packed.roll(1, dims=0), scales, zeros

    monkeypatch.setattr(quantization, "quantize", shifted)
    outcome = run(trial_spec(treatment=Treatment(build=FLASH)))
    assert outcome["status"] == "incorrect"
    assert "quantization steps off" in outcome["error"]
    assert outcome["observations"]["metric"] == []


def test_a_wrong_engine_is_incorrect(monkeypatch):
    def wrong_positions(length, mask, device):
        return torch.zeros(1, length, dtype=torch.long, device=device)

    sharp = MODEL.model_copy(update={"config": {**CONFIG, "initializer_range": 0.3}})
    monkeypatch.setattr("flashgap.engine._positions", wrong_positions)
    outcome = run(trial_spec(model=sharp))
    assert outcome["status"] == "incorrect"
    assert "greedy tokens differ from generate" in outcome["error"]


def test_a_build_left_dense_is_a_kernel_mismatch(monkeypatch):
    def forgets_a_layer(model, spec):
        done = quantization.quantize_in_place(model, spec)
        done.model.layers[1].mlp.up_proj = torch.nn.Linear(64, 96, bias=False)
        return done

    monkeypatch.setattr(load, "quantize_in_place", forgets_a_layer)
    outcome = run(trial_spec(treatment=Treatment(build=FLASH)))
    assert outcome["status"] == "kernel_mismatch"
    assert outcome["error"].startswith("up_proj: expected dequantize, then dense matmul")


def test_flash_passes_its_gate_and_says_what_ran():
    outcome = run(trial_spec(treatment=Treatment(build=FLASH)))
    assert outcome["status"] == "ok", outcome["error"]
    assert outcome["kernels"]["up_proj"]["ran"] == kernels.DEQUANTIZED
    assert outcome["kernels"]["lm_head"]["ran"] == kernels.DENSE
    assert outcome["correctness"]["max_weight_error_scales"] < 0.6
    assert outcome["build"]["in_process"]
    assert outcome["facts"]["minor_page_faults"] >= 0
    stored = ModelShape.from_config(outcome["model"]["config"])
    assert stored == ModelShape.from_config(CONFIG), "a replay without the model could not draw its bounds"


def test_nan_weights_are_a_nan_record(monkeypatch):
    def poisoned(model, device, _right=models.load):
        loaded = _right(model, device)
        loaded.lm_head.weight[0, 0] = float("nan")
        return loaded

    monkeypatch.setattr(models, "load", poisoned)
    outcome = run(trial_spec())
    assert outcome["status"] == "nan"
    assert outcome["observations"]["metric"] == []


def test_a_prompt_beyond_the_context_fails_in_one_line():
    outcome = run(trial_spec({**LATENCY, "prompt_tokens": 600}))
    assert outcome["status"] == "failed"
    assert "context of 605, the model has 512" in outcome["error"]
    assert "\n" not in outcome["error"]


def test_context_samples_lie_at_their_lengths():
    outcome = run(trial_spec({"kind": "context", "context_tokens": (16, 64), "steps": 3}))
    assert outcome["status"] == "ok", outcome["error"]
    for length in (16, 64):
        assert len(metric(outcome, "itl_s", context_tokens=length)) == 3


def test_generation_gives_each_position():
    outcome = run(trial_spec({"kind": "generation", "prompt_tokens": 8, "generated_tokens": 6}))
    contexts = [
        c
        for c, m in zip(*[outcome["observations"][k] for k in ("context_tokens", "metric")], strict=True)
        if m == "itl_s"
    ]
    assert contexts == [9, 10, 11, 12, 13]


def test_task_counts_slots_and_orders_requests():
    w = {
        "kind": "task",
        "requests": 5,
        "prompt_scale": 0.02,
        "generated_scale": 0.05,
        "max_context_tokens": 256,
        "max_batch": 3,
        "draw_seed": 4,
    }
    outcome = run(trial_spec(w))
    assert outcome["status"] == "ok", outcome["error"]
    useful, computed = metric(outcome, "useful_slots")[0], metric(outcome, "computed_slots")[0]
    assert 0 < useful <= computed
    ends = [metric(outcome, "e2e_s", request=i)[0] for i in range(5)]
    assert max(ends) == pytest.approx(metric(outcome, "task_s")[0], rel=1e-6)
    assert min(ends[3:]) > max(ends[:3])  # the second batch ends after the first


def test_reference_times_both_clocks_and_compares_tokens():
    w = {"kind": "reference", "prompt_tokens": 8, "context_tokens": 16, "generated_tokens": 4, "repeats": 3}
    outcome = run(trial_spec(w))
    assert outcome["status"] == "ok", outcome["error"]
    names = ("prefill_s", "prefill_reference_s", "decode_step_s", "decode_step_reference_s")
    assert all(len(metric(outcome, name)) == 3 for name in names)
    assert outcome["facts"]["tokens_equal_generate"]


def test_capacity_bisects_between_what_fits_and_what_does_not(monkeypatch):
    fits = []

    def probe(trial, w, batch):
        fits.append(batch)
        return batch <= 11

    monkeypatch.setattr("flashgap.capacity._fits", probe)
    w = CapacityWorkload(kind="capacity", budget_bytes=1, prompt_tokens=4, generated_tokens=2, max_batch=64)
    engine = Engine(load_build(MODEL, BuildSpec(), "cpu").model)
    trial = Trial(trial_spec(w), engine, Observations())
    capacity(trial, w)
    assert trial.facts["largest_batch"] == 11
    assert not trial.facts["capped"]
    assert fits == [1, 2, 4, 8, 16, 12, 10, 11]


def test_a_budget_is_a_real_allocation_failure():
    """In a process of its own: the limit is on the whole process, this one has its own memory."""
    script = """
import json, sys
from flashgap import worker
class Pipe:
    def send(self, item): self.last = item
pipe = Pipe()
worker.gate(sys.argv[1], pipe)
worker.main(sys.argv[1], pipe)
print(json.dumps({k: pipe.last[k] for k in ("status", "error", "facts")}))
"""
    wide = MODEL.model_copy(
        update={"config": {**CONFIG, "vocab_size": 300_000}}
    )  # a megabyte of logits a row
    w = {
        "kind": "capacity",
        "budget_bytes": 1_200_000_000,
        "prompt_tokens": 4,
        "generated_tokens": 2,
        "max_batch": 4096,
    }
    spec = trial_spec(w, model=wide).model_dump_json()
    done = subprocess.run([sys.executable, "-c", script, spec], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["status"] == "ok", outcome
    assert 0 < outcome["facts"]["largest_batch"] < 4096


def test_ceilings_need_no_model_and_no_verdict():
    w = {"kind": "ceilings", "working_sets_bytes": (65536,), "matmul_size": 32, "repeats": 2}
    outcome = run(trial_spec(w), check=False)
    assert outcome["status"] == "ok", outcome["error"]
    assert outcome["observations"]["value"]


def test_planted_slowdown_takes_its_share_of_the_step():
    import time

    burn = spin(0.5)
    start_s = time.perf_counter()
    burn(0.02)
    assert time.perf_counter() - start_s >= 0.01
    assert spin(0.0) is None


def test_gate_key_ignores_what_cannot_change_the_answer_and_sees_what_can(monkeypatch):
    key = worker.gate_key(trial_spec())
    assert key == worker.gate_key(trial_spec(treatment=Treatment(replica=1, planted_slowdown=0.5)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # a replica on its own device finds the same verdict
    assert key == worker.gate_key(trial_spec())
    others = [
        trial_spec(treatment=Treatment(build=FLASH)),
        trial_spec(treatment=Treatment(engine=EngineSpec(cache="static"))),
        trial_spec(correctness=Correctness(tokens=129)),
        trial_spec(model=MODEL.model_copy(update={"dtype": "bfloat16"})),
    ]
    assert len({key, *map(worker.gate_key, others)}) == 5


def test_looking_a_verdict_up_does_not_import_torch():
    script = (
        "import sys; from flashgap import worker;"
        "print(worker.gate_verdict(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    spec = trial_spec().model_dump_json()
    done = subprocess.run([sys.executable, "-c", script, spec], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "None"


def test_a_changed_model_drops_its_verdict(monkeypatch):
    spec = trial_spec()
    worker.gate(spec.model_dump_json(), Pipe())
    verdict = gate.gate_verdict(spec)
    gate.keep_verdict(spec, {**verdict, "build": "of before"})
    outcome = run(spec, check=False)
    assert outcome["status"] == "incorrect"
    assert "changed since" in outcome["error"]
    assert gate.gate_verdict(spec) is None


def test_first_difference_counts_only_with_its_margin():
    same = gate.compare_tokens([[1, 2, 3]], [[1, 2, 3]], [[9, 9, 9]])
    assert same["first_difference"] is None
    split = gate.compare_tokens([[1, 2, 3], [4, 5, 6]], [[1, 9, 9], [4, 5, 7]], [[1, 0.1, 9], [1, 1, 0.2]])
    assert (split["first_difference"], split["tie_margin"]) == (2, 0.2)


def test_generate_as_reference_ignores_end_of_sequence():
    model = models.load(MODEL.model_copy(update={"config": {**CONFIG, "initializer_range": 0.3}}), "cpu")
    (tokens,) = gate.reference_tokens(model, [[5, 6, 7]], 8)
    model.generation_config.eos_token_id = tokens[2]
    assert gate.reference_tokens(model, [[5, 6, 7]], 8) == [tokens]
    assert model.generation_config.eos_token_id == tokens[2]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("shapes do not match"), False),
    ],
)
def test_running_out_of_memory_is_recognised(error, expected):
    assert is_out_of_memory(error) is expected


def test_static_and_dynamic_show_fused_attention():
    model = models.load(MODEL, "cpu")
    for cache in ("dynamic", "static"):
        engine = Engine(model, cache)
        ids = torch.ones(1, 8, dtype=torch.long)
        _, state = engine.prefill(ids, None, 20)
        seen = kernels.observe(model, {"decode": lambda e=engine, s=state: e.decode_step(s)}, BuildSpec())
        assert seen["attention"]["ran"] == kernels.FUSED
        assert kernels.mismatches(seen) == []


def test_onednn_lines_are_given_to_their_layer():
    line = (
        "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_amx,undef,"
        "src:bf16::blocked:ab::f0 wei:bf16::blocked:ba::f0 dst:bf16::blocked:ab::f0,,,1x576:576x576,0.1"
    )
    found = kernels._parse_onednn([line, "flashgap::q_proj", line, "flashgap::", line])
    assert found == {"q_proj": {"matmul brg_matmul:avx512_core_amx bf16xbf16xbf16"}}
