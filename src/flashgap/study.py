"""A study: one validated `params/*.yaml`.

The one idea: everything that can be got wrong in a parameter file is found here, before anything
runs, and said with the file and the key. Values are strict: YAML reads `1e-5` as text, and text is
refused where a number is meant.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from flashgap.treatment import (
    LINEAR_WAYS,
    AnyWorkload,
    BuildSpec,
    Checkpoint,
    Correctness,
    EngineSpec,
    Frozen,
    ModelSpec,
    Treatment,
    TrialSpec,
)


class StudyError(ValueError):
    """A study that cannot be used; the message names file, key and cure in one line."""


class Hardware(Frozen):
    """Where trials run. `replicas` processes, one device each; limits are per process.

    `price_per_hour` is stated by the user, never measured.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    threads: PositiveInt | None = None
    memory_limit_bytes: PositiveInt | None = None
    price_per_hour: PositiveFloat | None = None


class Sampling(Frozen):
    """How many blocks: at least `min_blocks`, then until every ratio to the first treatment is known to
    `target_half_width` (relative, 95 %), or `max_blocks`, or `budget_s` seconds are spent."""

    min_blocks: PositiveInt = 5
    max_blocks: PositiveInt = 5
    target_half_width: PositiveFloat = 0.03
    budget_s: PositiveFloat = 600.0
    trial_timeout_s: PositiveFloat = 900.0

    @model_validator(mode="after")
    def _ordered(self) -> Sampling:
        if self.max_blocks < self.min_blocks:
            raise ValueError(f"max_blocks ({self.max_blocks}) is below min_blocks ({self.min_blocks})")
        return self


SERVING = {"ttft_s", "itl_s", "e2e_s"}
# What each kind of workload measures at every one of its points: a series stops by one of these.
PRIMARY_METRICS = {
    "latency": SERVING | {"tpot_s", "throughput_tokens_per_s"},
    "prefill": {"ttft_s"},
    "context": {"itl_s"},
    "generation": SERVING,
    "task": {"task_s", "throughput_tokens_per_s"},
    "capacity": {"largest_batch"},
    "quality": {"kl_nats", "loss_nats", "top1_agreement"},
    "crossover": {f"{way}_linear_s" for way in LINEAR_WAYS},
    "ceilings": {"read_bytes_per_s", "copy_bytes_per_s", "gemv_bytes_per_s", "matmul_bfloat16_flops_per_s"},
    "gemm": {"dense_gemm_s", "packed_gemm_s"},
    "reference": {"decode_step_s", "prefill_s"},
}


class TreatmentParams(Frozen):
    """A treatment as written in a parameter file: `build` names an entry of `builds`."""

    build: str
    engine: EngineSpec = EngineSpec()
    replica: int = Field(default=0, ge=0)
    planted_slowdown: float = Field(default=0.0, ge=0.0, le=10.0)


class Experiment(Frozen):
    """A set of treatments compared on one workload. The first treatment is the denominator of ratios."""

    treatments: tuple[str, ...] = Field(min_length=1)
    workload: AnyWorkload
    primary_metric: str
    sampling: Sampling = Sampling()
    opt_in: bool = False


class Study(Frozen):
    """One validated parameter file."""

    profile: str
    description: str
    seed: int
    model: ModelSpec
    hardware: Hardware = Hardware()
    correctness: Correctness = Correctness()
    builds: dict[str, BuildSpec]
    treatments: dict[str, TreatmentParams]
    experiments: dict[str, Experiment]

    @model_validator(mode="after")
    def _names_resolve(self) -> Study:
        for name, treatment in self.treatments.items():
            if treatment.build not in self.builds:
                raise ValueError(
                    f"treatments.{name}.build: '{treatment.build}' is not one of {sorted(self.builds)}"
                )
        for name, experiment in self.experiments.items():
            metrics = PRIMARY_METRICS[experiment.workload.kind]
            if experiment.primary_metric not in metrics:
                raise ValueError(
                    f"experiments.{name}.primary_metric: '{experiment.primary_metric}' is not measured by a workload of kind "
                    f"{experiment.workload.kind}; it has {sorted(metrics)}"
                )
            unknown = [t for t in experiment.treatments if t not in self.treatments]
            if unknown:
                raise ValueError(f"experiments.{name}.treatments: {unknown} not in {sorted(self.treatments)}")
        return self

    @classmethod
    def load(cls, profile: str = "auto", folder: Path | None = None) -> Study:
        """Load `params/<profile>.yaml`; `auto` picks by `FLASHGAP_PROFILE`, else by the hardware.

        Raises `StudyError` with one line that names the file, the key and the cure.
        """
        folder = folder or params_dir()
        name = resolve_profile(profile)
        return parse(read_params(name, folder), folder / f"{name}.yaml")

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The compressed checkpoints that builds are loaded from."""
        return [build.checkpoint for build in self.builds.values() if build.checkpoint]

    def experiment(self, name: str) -> Experiment:
        """The experiment called `name`; `StudyError` names those there are."""
        if name not in self.experiments:
            raise StudyError(
                f"params/{self.profile}.yaml: experiments.{name}: missing; there are {sorted(self.experiments)}"
            )
        return self.experiments[name]

    def treatment(self, name: str) -> Treatment:
        """The treatment called `name` with its build resolved."""
        params = self.treatments[name]
        return Treatment(
            build=self.builds[params.build],
            engine=params.engine,
            replica=params.replica,
            planted_slowdown=params.planted_slowdown,
        )

    def trials(self, experiment: str) -> dict[str, TrialSpec]:
        """Treatment name -> trial specification, in the order of the parameter file."""
        spec = self.experiment(experiment)
        return {
            name: TrialSpec(
                model=self.model,
                treatment=self.treatment(name),
                workload=spec.workload,
                correctness=self.correctness,
                device=self.hardware.device,
                threads=self.hardware.threads,
                memory_limit_bytes=self.hardware.memory_limit_bytes,
            )
            for name in spec.treatments
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the whole validated study, for provenance."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def project_root() -> Path:
    """The checkout: `FLASHGAP_ROOT`, else the folder that holds this source tree."""
    root = os.environ.get("FLASHGAP_ROOT")
    return Path(root) if root else Path(__file__).resolve().parents[2]


def params_dir() -> Path:
    """Where the parameter files are: `params/` of the checkout."""
    return project_root() / "params"


def resolve_profile(profile: str) -> str:
    """`auto` becomes `FLASHGAP_PROFILE` if set, else the profile that fits the hardware found."""
    if profile != "auto":
        return profile
    chosen = os.environ.get("FLASHGAP_PROFILE", "auto")
    return chosen if chosen != "auto" else detect_profile()


def detect_profile() -> str:
    """`a100x8` on eight A100, `h200` on any other NVIDIA GPU, else `cpu`; asks `nvidia-smi` only."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return "cpu"
    gpus = [line for line in listing.splitlines() if line.startswith("GPU ")]
    if not gpus:
        return "cpu"
    return "a100x8" if len(gpus) >= 8 and all("A100" in gpu for gpu in gpus) else "h200"


class UniqueKeys(yaml.SafeLoader):
    """YAML whose mappings say each key once: the plain loader keeps the last one, without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"'{key.value}' is there twice; keep one", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_params(profile: str, folder: Path, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The merged mapping of `folder/profile.yaml` and the profiles its `base` key names."""
    path = folder / f"{profile}.yaml"
    if profile in seen:
        raise StudyError(
            f"{path}: base: '{profile}' includes itself; remove one of {' -> '.join((*seen, profile))}"
        )
    if not path.is_file():
        known = sorted(p.stem for p in folder.glob("*.yaml") if p.stem != "claims")
        raise StudyError(f"unknown profile '{profile}': {path} does not exist; choose one of {known}")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8"
        raise StudyError(f"{path}: cannot be read: {reason}; save it as UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise StudyError(f"{path}:{line} is not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(data, dict):
        raise StudyError(f"{path}: expected a mapping of keys at the top level")
    base = data.pop("base", None)
    if base is None:
        return data
    merged = merge(read_params(str(base), folder, (*seen, profile)), data)
    merged["profile"] = data.get("profile", profile)
    return merged


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with `over` laid on it, key by key; `model` is replaced whole, since its keys depend on each other."""
    out = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(out.get(key), dict) and key != "model"
        out[key] = merge(out[key], value) if nested else value
    return out


def parse(data: dict[str, Any], path: Path) -> Study:
    """Validate `data` strictly; `StudyError` names the file and each wrong key in one line."""
    try:
        text = json.dumps(data)
    except TypeError as error:
        raise StudyError(f"{path}: holds a value that is not plain data ({error}); quote it") from None
    try:
        study = Study.model_validate_json(text)
    except ValidationError as error:
        raise StudyError(f"{path}: " + "; ".join(describe(e) for e in error.errors()[:5])) from None
    if study.profile != path.stem:
        raise StudyError(f"{path}: profile: is '{study.profile}', must be the file's name '{path.stem}'")
    return study


def describe(error: Any) -> str:
    """One pydantic error as `key: what is wrong; what to do`."""
    key = ".".join(str(part) for part in error["loc"]) or "(top level)"
    kind, value = error["type"], error.get("input")
    if kind == "extra_forbidden":
        return f"{key}: unknown key; check its spelling or remove it"
    if kind == "missing":
        return f"{key}: missing; add it"
    if isinstance(value, str) and looks_numeric(value):
        return f"{key}: '{value}' is text, not a number; write it without quotes and with a decimal point ({float(value):.1e})"
    message = error["msg"].removeprefix("Value error, ")
    return f"{key}: {message} (got {value!r:.80})" if not isinstance(value, dict) else f"{key}: {message}"


def looks_numeric(text: str) -> bool:
    """Whether `text` is a number that YAML or a user quoted."""
    try:
        float(text)
    except ValueError:
        return False
    return True
