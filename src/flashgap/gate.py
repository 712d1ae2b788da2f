"""Correct first: what a build and an engine must show before anything of theirs is timed.

The one idea: the check runs in its own process, once for each combination of model, build, engine and
machine, so that it neither warms the caches nor swells the memory of a timed trial; its verdict is kept in
the cache folder under a key made of everything that could change the answer. Looking a verdict up needs no
torch. Exact changes must give equal greedy tokens; lossy builds must stay near Standard on held-out text.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from flashgap import context, models
from flashgap.treatment import WITHOUT_MODEL, BuildSpec, Correctness, TrialSpec
from flashgap.workload import fixed_shapes

CHECKED_MODULES = tuple(
    f"flashgap.{name}"
    for name in (
        "engine",
        "gate",
        "kernels",
        "models",
        "quality",
        "builds.load",
        "builds.quantization",
        "builds.packed",
        "builds.pruning",
    )
)
GRAPH_MODULES = tuple(
    f"flashgap.{name}" for name in ("artefact", "compiled", "graphs", "stored_weights", "tuning")
)
GRAPH_TOKENS = 8  # decoded by each compiled graph and compared with the eager engine
LASTING = ("ok", "incorrect", "kernel_mismatch", "nan")  # other outcomes may be different next time
NEW_TOKENS = 16
PROMPT_TOKENS = (40, 17, 29)  # one batch of unequal prompts; the first is also run alone
WINDOW = 256
EXACT_MARGIN = 1e-3  # float32 logits differ by rounding only, so a tie is far closer than in 16 bits
MAX_WEIGHT_ERROR_SCALES = 0.75  # rounding gives 0.5; 16-bit scales and products add some


class Incorrect(RuntimeError):
    """A check that failed; the message has the numbers."""


# ---------------------------------------------------------------------- verdicts, torch-free


def gate_key(spec: TrialSpec) -> str:
    """16 hex digits over all that could change the verdict: specification, code, libraries, machine."""
    checkpoint = spec.treatment.build.checkpoint
    now = context.current_context(spec.model, [checkpoint] if checkpoint else [])
    data = {
        "model": spec.model.model_dump(mode="json"),
        "build": spec.treatment.build.model_dump(mode="json"),
        "engine": spec.treatment.engine.model_dump(mode="json"),
        "correctness": spec.correctness.model_dump(mode="json"),
        "device": spec.device,
        "modules": context.module_digests(CHECKED_MODULES),
        "machine": now["fingerprint"],
        # which of several equal devices a replica was given changes no answer
        "environment": {k: v for k, v in now["environment"].items() if k != "CUDA_VISIBLE_DEVICES"},
        "model_files": now["model_files"],
        "versions": {name: now["versions"].get(name) for name in ("python", "torch", "transformers")},
    }
    if spec.workload.kind == "quality":
        data |= {"quality": "measured, not judged"}
    if spec.treatment.engine.ahead_of_time:
        data |= {
            "graphs": fixed_shapes(spec.workload),
            "graph_modules": context.module_digests(GRAPH_MODULES),
        }
        data |= {"threads": spec.threads}
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def gate_verdict(spec: TrialSpec) -> dict[str, Any] | None:
    """The kept verdict for `spec`, or None if there is none or the prepared build it speaks of is gone."""
    if spec.workload.kind in WITHOUT_MODEL:
        return {"status": "ok", "error": None, "correctness": {}, "kernels": {}}
    try:
        verdict = json.loads(_path(spec).read_text())
    except (OSError, ValueError):
        return None
    prepared = verdict.get("prepared")
    if prepared and not (models.cache_dir() / "builds" / prepared / "model.safetensors").is_file():
        return None
    graphs = verdict.get("graphs")
    if graphs:
        at = models.cache_dir() / "artefacts" / graphs["folder"]
        if not all((at / name).is_file() for name in ("build.json", *graphs["files"])):
            return None
    return verdict


def keep_verdict(spec: TrialSpec, verdict: dict[str, Any]) -> None:
    """Write `verdict` whole or not at all; a cache that cannot be written costs a repeated check only."""
    path = _path(spec)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as partial:
            json.dump(verdict, partial, indent=1)
        os.replace(partial.name, path)
    except OSError as error:
        print(f"{path}: the verdict cannot be kept: {error}")


def forget_verdict(spec: TrialSpec) -> None:
    """Drop the kept verdict: what it spoke of has changed."""
    _path(spec).unlink(missing_ok=True)


def _path(spec: TrialSpec) -> Path:
    return models.cache_dir() / "checks" / f"{gate_key(spec)}.json"


# ---------------------------------------------------------------------- the checks themselves


def check(spec: TrialSpec) -> dict[str, Any]:
    """Run every check for `spec` now: {status, error, correctness, kernels, build, prepared}."""
    from flashgap.builds.load import load_build
    from flashgap.engine import Engine
    from flashgap.kernels import mismatches

    build_spec, limits = spec.treatment.build, spec.correctness
    ids, digest = _held_out(spec)
    standard = _standard_facts(spec, ids) if build_spec.lossy else None
    build = load_build(spec.model, build_spec, spec.device)
    facts: dict[str, Any] = {"held_out_sha256": digest, "random_weights": spec.model.source == "random"}
    settings = spec.treatment.engine
    verdict: dict[str, Any] = {"build": build.digest}
    if build_spec.lossy and not build.in_process:
        verdict["prepared"] = build.digest
    if settings.ahead_of_time:
        problems, kernels, verdict["graphs"] = _check_graphs(spec, build, ids, facts)
        strangers = mismatches(kernels)
    else:
        engine = Engine(build.model, settings.cache, settings.compile, spec.device)
        problems = _check_tokens(build.model, engine, ids, _allowed_margin(spec), facts)
        kernels, strangers = _check_kernels(build.model, engine, ids, spec)
    if standard:
        found = _check_quality(build.model, standard, ids, limits, facts)
        # Where quality is what is measured, and of pruning alone, it is recorded and not judged.
        judged = spec.workload.kind != "quality" and (build_spec.quantization or build_spec.checkpoint)
        problems += found if judged else []
        facts["compared_with"] = standard["name"]
    status = "incorrect" if problems else "kernel_mismatch" if strangers else "ok"
    return {
        "status": status,
        "error": "; ".join(problems or strangers) or None,
        "correctness": {**facts, "passed": not problems},
        "kernels": kernels,
        **verdict,
    }


def _check_graphs(
    spec: TrialSpec, build: Any, ids: list[int], facts: dict[str, Any]
) -> tuple[list[str], dict[str, dict], dict[str, Any]]:
    """Compile what is missing; every graph must give the tokens of the eager engine of the same build.

    Gives problems, kernels, and the graphs' folder and files, without which the verdict is void.
    """
    import torch

    from flashgap import artefact
    from flashgap.compiled import ArtefactEngine, race_missing
    from flashgap.engine import Engine
    from flashgap.graphs import Shape
    from flashgap.progress import note

    copies = spec.treatment.engine.many_rows_copy

    shapes = [Shape(*shape) for shape in fixed_shapes(spec.workload)]
    at = artefact.folder(build.digest, spec)
    artefact.compile_missing(build, at, shapes, spec.device, note, copies)
    race_missing(at, build.model, spec.device, note)
    engine = ArtefactEngine(at, build.model.config, build.model.dtype, spec.device, copies)
    eager = Engine(build.model, device=spec.device)
    problems, comparisons = [], []
    for shape in shapes:
        new = GRAPH_TOKENS if shape.phase == "decode" else 1
        length = shape.tokens if shape.phase == "prefill" else min(PROMPT_TOKENS[1], shape.tokens - new)
        text = ids * (1 + (length + shape.batch) // len(ids))
        rows = [text[row : row + length - row % 2] for row in range(shape.batch)]
        truth = eager.generate(rows, new, gaps=True)
        if shape.phase == "prefill":
            ours = engine.prefill(torch.tensor(rows, device=spec.device), None, length)[0].tolist()
        else:
            ours = engine.generate(rows, new).tokens
        compared = compare_tokens(truth.tokens, ours, truth.logits_gap)
        comparisons.append({"with": shape.name, "batch": shape.batch, **compared})
        if compared["tie_margin"] > _allowed_margin(spec):
            problems.append(
                f"{shape.name}: greedy tokens differ from the eager engine at token {compared['first_difference']}, where the "
                f"two best logits are {compared['tie_margin']:.3g} apart (limit {_allowed_margin(spec):g})"
            )
    facts["tokens_equal"] = all(c["first_difference"] is None for c in comparisons)
    facts["token_comparisons"] = comparisons
    used = [Path(engine.graphs[shape]["file"]) for shape in shapes]
    files = [name for file in used for name in (file.name, file.with_suffix(".json").name)]
    kernels = artefact.kernel_rows(at, build.model, shapes, copies)
    return problems, kernels, {"folder": at.name, "files": files}


def _held_out(spec: TrialSpec) -> tuple[list[int], str]:
    from flashgap.quality import held_out_ids

    text, digest = models.held_out_text()
    tokenizer = models.tokenizer(spec.model)
    need = max(spec.correctness.tokens, sum(PROMPT_TOKENS))
    return held_out_ids(tokenizer.encode, text, need), digest


def _standard_facts(spec: TrialSpec, ids: list[int]) -> dict[str, Any]:
    """What is needed of Standard, so that it can be freed before the build is loaded.

    A pruned and quantized build is held against the pruned model at its dense dtype: what pruning cost is measured, and
    not for this check to judge, what packing it wrongly would cost is.
    """
    from flashgap.builds.load import load_build
    from flashgap.builds.quantization import targets
    from flashgap.quality import reference_logits

    build = spec.treatment.build
    if build.pruning and build.quantization:
        dense = BuildSpec(pruning=build.pruning)
        model, name = load_build(spec.model, dense, spec.device).model, "the pruned model"
    else:
        model, name = models.load(spec.model, spec.device), "Standard"
    window = _window(model)
    sample = []
    rounding = spec.treatment.build.quantization
    if rounding and (rounding.quantizer, rounding.execution) == ("rtn", "dequantize"):
        layers = list(targets(model, rounding))
        sample = [layers[0], layers[len(layers) // 2], layers[-1]]
    return {
        "name": name,
        "window": window,
        "logits": reference_logits(model, ids[: spec.correctness.tokens], window),
        "weights": {name: module.weight.detach().cpu().clone() for name, module in sample},
    }


def _window(model: Any) -> int:
    return min(WINDOW, getattr(model.config, "max_position_embeddings", WINDOW))


def _allowed_margin(spec: TrialSpec) -> float:
    limit = spec.correctness.max_tie_margin
    return min(limit, EXACT_MARGIN) if spec.model.dtype == "float32" else limit


def _check_tokens(
    model: Any, engine: Any, ids: list[int], allowed: float, facts: dict[str, Any]
) -> list[str]:
    """Greedy tokens of `generate`, of the eager engine and of `engine` itself, one prompt and a padded batch."""
    from flashgap.engine import Engine

    eager = Engine(model, device=engine.device)
    starts = [sum(PROMPT_TOKENS[:i]) for i in range(len(PROMPT_TOKENS))]
    batch = [ids[start : start + n] for start, n in zip(starts, PROMPT_TOKENS, strict=True)]
    problems, comparisons = [], []
    for prompts in (batch[:1], batch):
        engine.warmup(len(prompts), max(map(len, prompts)) + NEW_TOKENS, padded=len(prompts) > 1)
        truth = eager.generate(prompts, NEW_TOKENS, gaps=True)
        others = {"generate": reference_tokens(model, prompts, NEW_TOKENS)}
        if engine.static:
            others["engine"] = engine.generate(prompts, NEW_TOKENS).tokens
        for name, tokens in others.items():
            compared = compare_tokens(truth.tokens, tokens, truth.logits_gap)
            comparisons.append({"with": name, "batch": len(prompts), **compared})
            if not truth.finite:
                raise FloatingPointError("logits are NaN or infinite")
            if compared["tie_margin"] > allowed:
                problems.append(
                    f"greedy tokens differ from {name} (batch {len(prompts)}) at token {compared['first_difference']}, "
                    f"where the two best logits are {compared['tie_margin']:.3g} apart (limit {allowed:g})"
                )
    facts["tokens_equal"] = all(c["first_difference"] is None for c in comparisons)
    facts["token_comparisons"] = comparisons
    return problems


def compare_tokens(truth: list[list[int]], other: list[list[int]], gaps: list[list[float]]) -> dict[str, Any]:
    """Where `other` first leaves `truth`, and how nearly the two best tokens tied there: the worst row.

    Tokens after a first difference are not compared, since they answer another prompt.
    """
    worst: dict[str, Any] = {"first_difference": None, "tie_margin": 0.0, "tokens": sum(map(len, truth))}
    for ours, theirs, gap in zip(truth, other, gaps, strict=True):
        at = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if at is not None and (worst["first_difference"] is None or gap[at] > worst["tie_margin"]):
            worst.update(first_difference=at, tie_margin=gap[at])
    return worst


def reference_tokens(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What transformers' own `generate` makes of `prompts`, greedy, with end-of-sequence ignored."""
    import torch

    from flashgap.engine import pad

    ids, mask = pad(prompts, next(model.parameters()).device)
    settings, kept = model.generation_config, model.generation_config.eos_token_id
    settings.eos_token_id = None  # as an argument, None would mean the model's own
    try:
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
    finally:
        settings.eos_token_id = kept
    return out[:, ids.shape[1] :].tolist()


def _check_quality(
    model: Any, standard: dict[str, Any], ids: list[int], limits: Correctness, facts: dict[str, Any]
) -> list[str]:
    """KL, top-1 and perplexity against Standard, and that sampled weights are the right ones, rounded.

    Random weights have no preferred next token, so there top-1 agreement is recorded and not judged.
    """
    from flashgap.builds.quantization import error_in_scales
    from flashgap.quality import compare

    quality = compare(standard["logits"], model, ids[: limits.tokens], standard["window"])
    errors = [
        error_in_scales(weight.to(model.get_submodule(name).packed.device), model.get_submodule(name))
        for name, weight in standard["weights"].items()
    ]
    error = max(errors, default=0.0)
    facts |= quality.as_dict() | ({"max_weight_error_scales": error} if errors else {})
    problems = []
    if quality.kl_nats > limits.max_kl_nats:
        problems.append(f"KL to Standard is {quality.kl_nats:.3g} nats (limit {limits.max_kl_nats:g})")
    if quality.perplexity_ratio > limits.max_perplexity_ratio:
        problems.append(
            f"perplexity ratio is {quality.perplexity_ratio:.3g} (limit {limits.max_perplexity_ratio:g})"
        )
    if quality.top1_agreement < limits.min_top1_agreement and not facts["random_weights"]:
        problems.append(
            f"top-1 agreement is {quality.top1_agreement:.3g} (at least {limits.min_top1_agreement:g})"
        )
    if error > MAX_WEIGHT_ERROR_SCALES:
        problems.append(f"a weight is {error:.3g} quantization steps off (limit {MAX_WEIGHT_ERROR_SCALES:g})")
    return problems


def _check_kernels(
    model: Any, engine: Any, ids: list[int], spec: TrialSpec
) -> tuple[dict[str, dict], list[str]]:
    import torch

    from flashgap import kernels
    from flashgap.engine import Engine

    prompt = torch.tensor([ids[: PROMPT_TOKENS[0]]], device=engine.device)
    eager = Engine(model, "static" if engine.static else "dynamic", device=engine.device)
    room = prompt.shape[1] + NEW_TOKENS
    _, state = eager.prefill(prompt, None, room)
    forwards = {
        "decode": lambda: eager.decode_step(state),
        "prefill": lambda: eager.prefill(prompt, None, room),
    }
    seen = kernels.observe(model, forwards, spec.treatment.build)
    if engine.compiled:
        _, compiled_state = engine.prefill(prompt, None, room)
        engine.decode_step(compiled_state)
        seen |= kernels.observe_compiled(lambda: engine.decode_step(compiled_state))
    return seen, kernels.mismatches(seen)
