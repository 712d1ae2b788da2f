"""The process that measures one trial, or checks one build, and reports what happened.

The one idea: whatever goes wrong in here is data. Each step is timed, every failure becomes an outcome
with a status and one line of text, and nothing is timed for a build without a passing verdict. Heavy
libraries are imported inside, so the caller can look verdicts up without torch.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from typing import Any

from flashgap.gate import gate_key as _gate_key
from flashgap.gate import gate_verdict as _gate_verdict
from flashgap.treatment import WITHOUT_MODEL, CeilingsWorkload, GemmWorkload, TrialSpec


def gate_key(spec: TrialSpec | str) -> str:
    """Key of the verdict that `spec` (or its JSON) needs. Torch-free."""
    return _gate_key(_parsed(spec))


def gate_verdict(spec: TrialSpec | str) -> dict[str, Any] | None:
    """The kept verdict for `spec` (or its JSON), None if `gate` must run first. Torch-free."""
    return _gate_verdict(_parsed(spec))


def gate(spec_json: str, conn: Any, log_path: str = "") -> None:
    """Child target: check the build and engine of `spec_json` now, keep the verdict, send it."""
    from flashgap import gate as checks

    spec = _parsed(spec_json)
    start_s = time.perf_counter()
    try:
        _settle(spec)
        verdict = checks.check(spec)
    except BaseException as error:  # noqa: BLE001 - a child must always answer
        verdict = {"status": status_of(error), "error": one_line(error), "correctness": {}, "kernels": {}}
        traceback.print_exc()
    verdict["check_s"] = time.perf_counter() - start_s
    if verdict["status"] in checks.LASTING:
        checks.keep_verdict(spec, verdict)
    conn.send(verdict)


def main(
    spec_json: str, conn: Any, replica: int = 0, replicas: int = 1, barrier: Any = None, log_path: str = ""
) -> None:
    """Child target: run one trial (one replica of it) and send its outcome as a dict."""
    conn.send(run_trial(_parsed(spec_json), replica, replicas, barrier))


def run_trial(spec: TrialSpec, replica: int = 0, replicas: int = 1, barrier: Any = None) -> dict[str, Any]:
    """Measure `spec` in this process. Never raises for what the trial does: see `status`."""
    outcome: dict[str, Any] = {
        "status": "ok",
        "error": None,
        "observations": {},
        "kernels": {},
        "correctness": {},
        "memory": {},
        "timings_s": {"start": process_age_s()},
        "build": {},
        "model": {},
        "facts": {},
    }
    entered_s = time.perf_counter()
    try:
        _steps(spec, outcome, replica, replicas, barrier)
    except BaseException as error:  # noqa: BLE001 - every failure of a trial is a record
        outcome |= {"status": status_of(error), "error": one_line(error)}
        traceback.print_exc()
        if barrier is not None:
            barrier.abort()  # the other replicas must not wait for this one
    outcome["timings_s"]["total"] = time.perf_counter() - entered_s
    return outcome | {"modules": _modules()}


class _Refused(RuntimeError):
    """A trial that must not be timed; carries the verdict's status."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


def _steps(spec: TrialSpec, outcome: dict[str, Any], replica: int, replicas: int, barrier: Any) -> None:
    """Import, look the verdict up, load, measure, and see once more which kernels run."""
    lap = _Laps(outcome["timings_s"])
    _settle(spec)
    from flashgap.trial import Observations, Trial

    observations = Observations(replica if replicas > 1 else -1)
    outcome["observations"] = observations.columns
    if spec.workload.kind in WITHOUT_MODEL:
        lap("import")
        _without_model(spec, observations)
        lap("measure")
        return
    from flashgap import kernels, measure
    from flashgap.builds.load import load_build
    from flashgap.engine import Engine

    lap("import")
    verdict = _passing_verdict(spec, outcome)
    lap("check")
    trial = Trial(spec, None, observations, outcome["memory"], outcome["facts"], replica, replicas, barrier)
    trial.phase("start")
    engine = spec.treatment.engine
    if engine.ahead_of_time:
        from flashgap import compiled

        build, trial.engine = compiled.load(spec)
    else:
        build = load_build(spec.model, spec.treatment.build, spec.device)
        trial.engine = Engine(build.model, engine.cache, engine.compile, spec.device)
    _describe(spec, build, verdict, outcome)
    trial.phase("weights_loaded")
    lap("load")
    gc.collect()
    gc.freeze()  # what is loaded now is not searched again for garbage in the middle of a sample
    measure.run(trial)
    lap("measure")
    if not engine.ahead_of_time:  # a graph has no other kernels than those that were read from its code
        _same_kernels(kernels.spot_check(build.model), verdict)
    lap("kernels")


def _passing_verdict(spec: TrialSpec, outcome: dict[str, Any]) -> dict[str, Any]:
    verdict = gate_verdict(spec)
    if verdict is None:
        raise _Refused(
            "incorrect", "not checked yet: no verdict for this build on this machine; run its gate first"
        )
    outcome["kernels"] = verdict["kernels"]
    outcome["correctness"] = {**verdict["correctness"], "checked_now": False, "gate_key": gate_key(spec)}
    if verdict["status"] != "ok":
        raise _Refused(verdict["status"], verdict["error"])
    return verdict


def _describe(spec: TrialSpec, build: Any, verdict: dict[str, Any], outcome: dict[str, Any]) -> None:
    """Identity of what was loaded; refuses a build other than the one that was checked."""
    from flashgap import models

    resolved = models.resolve(spec.model, progress=lambda *_, **__: None)
    outcome["model"] = {
        "label": resolved.label,
        "digest": resolved.digest,
        "requantized": resolved.requantized,
        "random_weights": resolved.random_weights,
        "config": _sizes(resolved.config),
    }
    outcome["build"] = {
        "digest": build.digest,
        "resident_bytes": build.resident_bytes,
        "parameters": build.parameters,
        "in_process": build.in_process,
        **build.quantizer,
        **({"pruning": build.pruning} if build.pruning else {}),
    }
    if build.digest != verdict["build"]:
        from flashgap import gate as checks

        checks.forget_verdict(spec)
        raise _Refused("incorrect", "the model's files changed since the build was checked; run again")


def _sizes(config: Any) -> dict[str, Any]:
    """The plain values of a model's configuration, from which a replay without the model draws its bounds."""
    values = config.get_text_config().to_dict().items()
    return {k: v for k, v in values if isinstance(v, int | float | str) and not k.startswith("_")}


def _same_kernels(found: dict[str, str], verdict: dict[str, Any]) -> None:
    for kind, ran in found.items():
        expected = verdict["kernels"].get(kind, {}).get("expected", "nothing of that type")
        if not set(ran.split(" | ")) <= set(expected.split(" | ")):  # layers of a type may differ
            raise _Refused("kernel_mismatch", f"{kind}: expected {expected}, ran {ran}")


def _without_model(spec: TrialSpec, observations: Any) -> None:
    from flashgap import gemm, hardware

    w = spec.workload
    if isinstance(w, GemmWorkload):
        found = gemm.measure_gemm(w, spec.device, spec.threads)
    else:
        assert isinstance(w, CeilingsWorkload)
        found = hardware.measure_ceilings(w, spec.device, spec.threads)
    for row in found:
        known = {k: row[k] for k in ("batch", "context_tokens", "request", "iteration") if k in row}
        observations.add(row["metric"], row["value"], **known)


def _settle(spec: TrialSpec) -> None:
    """Import torch, quiet transformers, set threads and the device."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import torch
    import transformers.utils.logging as logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    if spec.device == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("hardware.device is 'cuda' but no GPU is visible; choose another profile")
        torch.cuda.init()


class _Laps:
    """Seconds between calls, by name."""

    def __init__(self, into: dict[str, float]) -> None:
        self.into, self.last_s = into, time.perf_counter()

    def __call__(self, name: str) -> None:
        now_s = time.perf_counter()
        self.into[name] = now_s - self.last_s
        self.last_s = now_s


def process_age_s() -> float:
    """Seconds since the operating system started this process, to a hundredth.

    Both ends are on the boot clock: the time of day of the boot is only known to the second.
    """
    with open("/proc/self/stat") as stat:
        started_ticks = int(stat.read().rsplit(")", 1)[1].split()[19])  # field 22 of proc(5)
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK"))


def status_of(error: BaseException) -> str:
    """The status that `error` means for a trial."""
    from flashgap import trial
    from flashgap.quality import QualityError

    if isinstance(error, _Refused):
        return error.status
    if trial.is_out_of_memory(error):
        return "out_of_memory"
    finite = isinstance(error, trial.NotFinite | FloatingPointError)
    if finite or (isinstance(error, QualityError) and "NaN" in str(error)):
        return "nan"
    return "failed"


def one_line(error: BaseException) -> str:
    """The first line of `error`, with its type where the message alone says nothing."""
    from flashgap import context

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    named = type(error).__module__.startswith("flashgap")
    return context.scrub(text if named and text else f"{type(error).__name__}: {text}")[:400]


def _modules() -> dict[str, str]:
    from flashgap import context

    return context.module_digests(context.measured_modules())


def _parsed(spec: TrialSpec | str) -> TrialSpec:
    return spec if isinstance(spec, TrialSpec) else TrialSpec.model_validate_json(spec)
