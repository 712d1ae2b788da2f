"""What a study will cost before anything runs: trials, minutes, disk and memory.

The one idea: a duration comes from records of the same trials if there are any, here or committed; only
before the first one is it a guess from bytes and operations, and then it is called a guess.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgap.cost import CostError, ModelShape
from flashgap.model_files import ModelError, raw_config
from flashgap.records import Store
from flashgap.study import Study, project_root
from flashgap.survey import (
    ExperimentStatus,
    RunnerError,
    Wanted,
    check_context,
    expected_trial_s,
    status,
)
from flashgap.treatment import ModelSpec, TrialSpec
from flashgap.workload import batches, draw_task, fixed_shapes

GIB = 1024**3
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
EMBEDDED_PARAMETERS = 134_515_008  # SmolLM2-135M, tied embeddings
EMBEDDED_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
# For guesses only: a slow laptop and a recent data-centre GPU, so that a guess is rather too long.
ASSUMED = {"cpu": (10e9, 60e9), "cuda": (1.5e12, 150e12)}  # bytes/s, FLOP/s
PROCESS_S = 2.0  # start, imports, load and checks of one trial, beyond the measurement
PROCESS_BYTES = 700 * 2**20  # Python, torch and transformers
FLASH_SLOWDOWN = 3.0  # weights expanded on every pass: read, written and read again
OBSERVATION_BYTES = 12.0  # one row of a compressed column file


@dataclass(frozen=True)
class Cost:
    """One experiment: blocks there are and are wanted, trials to run, seconds one takes, and says who."""

    name: str
    have: int
    wanted: str
    trials: int
    trials_at_most: int
    trial_s: float
    basis: str
    opt_in: bool

    @property
    def total_s(self) -> float:
        """Seconds for the fewest trials that are enough."""
        return self.trials * self.trial_s

    @property
    def at_most_s(self) -> float:
        """Seconds if no interval becomes narrow early."""
        return self.trials_at_most * self.trial_s


def describe(study: Study, experiments: list[str]) -> str:
    """Markdown: a table of `experiments` of `study` and a line of totals; nothing runs."""
    if os.environ.get("FLASHGAP_REPLAY") == "1":
        return "A replay of committed records: nothing will be measured."
    costs = [cost(study, name) for name in experiments]
    active = [c for c in costs if not c.opt_in or opted_in()]
    rows = [f"| {c.name} | {c.have} of {c.wanted} | {c.trials} | {minutes(c)} | {note(c)} |" for c in costs]
    head = [
        "| experiment | blocks there | trials to run | about | duration from |",
        "| :-- | --: | --: | --: | :-- |",
    ]
    return "\n".join([*head, *rows, "", total_line(study, active)])


def refusals(study: Study) -> list[str]:
    """What would be refused once the model is at hand, one line each: prompts beyond its context, groups that divide no
    layer. Only as far as its sizes are known without fetching it."""
    config = known_config(study.model)
    try:
        shape = ModelShape.from_config(config) if config else None
    except CostError:
        shape = None
    if config is None or shape is None:
        return []
    found = []
    for name in study.experiments:
        try:
            check_context(study, name, config.get("max_position_embeddings"))
        except RunnerError as error:
            found.append(str(error))
    asked = (study.treatments[t].build for e in study.experiments.values() for t in e.treatments)
    for name in dict.fromkeys(asked):
        build = study.builds[name]
        found += [] if build.pruning else group_refusals(study, name, shape)
    return found


def group_refusals(study: Study, name: str, shape: ModelShape) -> list[str]:
    """The first layer that the groups of build `name` do not divide, if there is one."""
    spec = study.builds[name].quantization
    if spec is None or spec.group_size is None:
        return []
    layers = [(k, columns) for k, (_, columns) in shape.linear_shapes.items() if spec.bits_of(k) == spec.bits]
    return [
        f"params/{study.profile}.yaml: builds.{name}.quantization.group_size: {spec.group_size} does not divide the {columns} "
        f"input features of {layer}; choose a divisor, or name the layer in skip"
        for layer, columns in layers
        if columns % spec.group_size
    ][:1]


def known_config(model: ModelSpec) -> dict[str, Any] | None:
    """The model's configuration as plain values, if it is at hand without fetching anything."""
    if model.source == "random":
        return dict(model.config or {})
    if model.source == "embedded":
        return EMBEDDED_CONFIG
    try:
        return raw_config(project_root() / Path(str(model.id)).expanduser())
    except ModelError:
        return None


def opted_in() -> bool:
    """Whether `LONG=1` asks for the opt-in experiments."""
    return os.environ.get("LONG") == "1"


def cost(study: Study, name: str) -> Cost:
    """What is there of experiment `name` and what the rest takes."""
    found: ExperimentStatus = status(study, name)
    trial_s, basis = trial_seconds(study, name, found)
    low, high = found.min_blocks, found.max_blocks
    return Cost(
        name=name,
        have=found.blocks_have,
        wanted=str(low) if low == high else f"{low}-{high}",
        trials=found.trials_missing,
        trials_at_most=found.trials_missing_at_most,
        trial_s=trial_s,
        basis=basis,
        opt_in=found.opt_in,
    )


def trial_seconds(study: Study, name: str, found: ExperimentStatus) -> tuple[float, str]:
    """Seconds one trial takes, and what that is taken from."""
    if found.expected_trial_s is not None:
        return found.expected_trial_s, "records here"
    blocks, _ = Store.reference(study.profile).load_blocks(name)
    known = expected_trial_s(blocks, Wanted.of(study, name))
    if known is not None:
        return known, "reference records"
    trials = study.trials(name).values()
    return sum(guess_s(spec, parameters(spec.model)) for spec in trials) / len(
        trials
    ), "a guess, nothing measured yet"


def note(c: Cost) -> str:
    """Where the duration is from, or that the experiment waits for `LONG=1`."""
    if c.opt_in and not opted_in():
        return "opt-in: only with LONG=1"
    return c.basis if c.trials else "nothing to run"


def minutes(c: Cost) -> str:
    """`3 min` or `3-5 min`."""
    low, high = c.total_s / 60, c.at_most_s / 60
    return f"{low:.1f} min" if high - low < 0.5 else f"{low:.1f}-{high:.1f} min"


def total_line(study: Study, costs: list[Cost]) -> str:
    """Trials, minutes, disk and memory of all of `costs`."""
    trials, low, high = (sum(values) for values in zip(*((c.trials, c.total_s, c.at_most_s) for c in costs)))
    memory = memory_bytes(study)
    if not trials:
        return f"Nothing to measure: the records of profile '{study.profile}' are there."
    span = f"{low / 60:.0f}" if high - low < 60 else f"{low / 60:.0f} to {high / 60:.0f}"
    free = shutil.disk_usage(existing(project_root())).free
    where = "memory of the GPU" if study.hardware.device == "cuda" else "memory"
    model = disk_bytes(study)
    once = f"{size(model)} for the model and its builds, once, and " if model else ""
    return (
        f"{trials} trials, about {span} min; disk about {once}{size(records_bytes(study))} for records "
        f"({size(free)} free); about {size(memory)} of {where} a trial."
    )


def existing(path: Path) -> Path:
    """`path` or the nearest folder above it that exists."""
    return path if path.exists() or path == path.parent else existing(path.parent)


def size(count: float) -> str:
    """Bytes as `0.3 GiB` or `40 MiB`."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{max(count, 2**20) / 2**20:.0f} MiB"


def parameters(model: ModelSpec) -> int | None:
    """Number of weights; None where that is not known before the model is fetched."""
    if model.source == "embedded":
        return EMBEDDED_PARAMETERS
    if model.source == "random" and model.config:
        from flashgap.cost import ModelShape
        from flashgap.cost import parameters as count

        return int(count(ModelShape.from_config(model.config)))
    folder = project_root() / Path(str(model.id)).expanduser()
    if model.source == "folder" and folder.is_dir():
        stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return stored // DTYPE_BYTES[model.dtype]
    return None


def weight_bytes(model: ModelSpec) -> float:
    """Bytes of the 16- or 32-bit weights; those of 1e9 parameters where that is not known."""
    return float(parameters(model) or 1e9) * DTYPE_BYTES[model.dtype]


def memory_bytes(study: Study) -> float:
    """Rough peak of one trial: weights twice (one layer's expansion, cache and buffers) and the libraries."""
    host = 0 if study.hardware.device == "cuda" else PROCESS_BYTES
    return host + 2 * weight_bytes(study.model)


def disk_bytes(study: Study) -> float:
    """The fetched and converted model, and a third of it for every quantised build."""
    if study.model.source == "random":
        return 0.0
    quantised = sum(build.lossy for build in study.builds.values())
    fetched = 0.0 if study.model.source == "folder" else 1.0
    return weight_bytes(study.model) * (fetched + quantised / 3 + graphs(study))


def graphs(study: Study) -> float:
    """Compiled graphs that the study keeps, each with weights of its own, in units of the dense weights."""
    found, copied = set(), set()
    for experiment in study.experiments.values():
        for name in experiment.treatments:
            treatment = study.treatments[name]
            if treatment.engine.ahead_of_time:
                made = {(treatment.build, *shape) for shape in fixed_shapes(experiment.workload)}
                found |= made
                copied |= made if treatment.engine.many_rows_copy else set()
    return sum(0.7 if study.builds[build].lossy else 1.2 for build, *_ in found) + 1.2 * len(copied)


def records_bytes(study: Study) -> float:
    """Headers of about 40 KiB a block, and the observations."""
    blocks = sum(experiment.sampling.max_blocks for experiment in study.experiments.values())
    rows = sum(
        experiment.sampling.max_blocks * len(experiment.treatments) * steps(experiment.workload)[1]
        for experiment in study.experiments.values()
    )
    return blocks * 40 * 1024 + rows * OBSERVATION_BYTES


def guess_s(spec: TrialSpec, count: int | None) -> float:
    """Seconds of one trial from bytes read a step and operations a token at assumed speeds."""
    bytes_per_s, flops_per_s = ASSUMED[spec.device]
    if spec.workload.kind == "ceilings":
        return PROCESS_S + sum(spec.workload.working_sets_bytes) * spec.workload.repeats * 20 / bytes_per_s
    if spec.workload.kind == "gemm":  # each timing takes some milliseconds, or one call where that is longer
        flops = 2 * sum(a * b for a, b in spec.workload.shapes) * sum(spec.workload.rows)
        timings = len(spec.workload.shapes) * len(spec.workload.rows) * 2 * (spec.workload.repeats + 1)
        return PROCESS_S + timings * 0.004 + 10 * flops / flops_per_s
    weights = (count or 1e9) * DTYPE_BYTES[spec.model.dtype]
    tokens, decode_steps = steps(spec.workload)
    slower = FLASH_SLOWDOWN if spec.treatment.build.execution == "dequantize" else 1.0
    return (
        PROCESS_S + tokens * 2 * (count or 1e9) / flops_per_s + decode_steps * weights * slower / bytes_per_s
    )


def steps(workload: Any) -> tuple[float, float]:
    """(prompt tokens, decode steps) a workload runs through, discarded passes included; rough."""
    match workload.kind:
        case "latency":
            passes, sizes = workload.repeats + workload.warmup, workload.batch_sizes
            return passes * workload.prompt_tokens * sum(sizes), passes * workload.generated_tokens * len(
                sizes
            )
        case "prefill":
            return (workload.repeats + workload.warmup) * sum(workload.prompt_tokens), 0
        case "crossover":  # a shape is a small part of a layer of a decode step
            return 4 * workload.repeats * sum(workload.rows) / 5, 0
        case "quality":
            return 2 * workload.tokens, 0
        case "context":
            return max(workload.context_tokens), workload.steps * len(workload.context_tokens)
        case "generation":
            return workload.prompt_tokens, workload.generated_tokens
        case "task":
            requests = draw_task(workload)
            longest = [
                max(r.generated_tokens for r in batch) for batch in batches(requests, workload.max_batch)
            ]
            return sum(r.prompt_tokens for r in requests) / workload.replicas, sum(longest)
        case "capacity":
            return workload.max_batch * workload.prompt_tokens, workload.generated_tokens * 10
        case "reference":
            return (
                workload.repeats * 2 * workload.prompt_tokens,
                workload.repeats * 2 + workload.generated_tokens,
            )
    return 0.0, 1000.0
