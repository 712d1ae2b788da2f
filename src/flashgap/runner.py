"""Measures the blocks of an experiment that are missing, or replays committed ones.

The one idea: every trial is a fresh process whose end, whatever it is, becomes a record on disk before
the next one starts. So the study can be killed at any instant and taken up again, a failing treatment
does not stop the others, and asking twice for the same experiment measures once.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from flashgap import context, hardware, processes
from flashgap.lock import machine_lock
from flashgap.outcomes import make_record
from flashgap.progress import Progress
from flashgap.records import Block, Header, Store, TrialRecord, empty_frame, shown, write_error
from flashgap.results import Result
from flashgap.study import Study
from flashgap.survey import (
    ReplayError,
    RunnerError,
    Survey,
    Wanted,
    block_order,
    check_context,
    expected_trial_s,
    present,
    remeasure_since,
    status,
    stop_reason,
    survey,
)
from flashgap.treatment import WITHOUT_MODEL, TrialSpec

__all__ = ["ReplayError", "RunnerError", "fresh", "measure", "replay", "require_devices", "status"]

GATE_TIMEOUT_S = 5400.0  # a check may quantize with a search and compile a dozen graphs first
WORKER = "flashgap.worker"  # module with `main`, `gate` and `gate_verdict`; FLASHGAP_WORKER replaces it
NOT_MEASURED = "not measured: it is opt-in, run with LONG=1"
REPEATED_FAILURES = 2  # the same end so often in one call: not run again in it


def measure(study: Study, experiment: str) -> Result:
    """The blocks of `experiment`, measuring those that are missing.

    With `FLASHGAP_REPLAY=1` committed records are loaded instead and nothing is measured. An `opt_in`
    experiment is measured only with `LONG=1`. Raises `ReplayError`, `RunnerError`, `RecordError`.
    """
    if os.environ.get("FLASHGAP_REPLAY") == "1":
        return replay(study, experiment)
    if study.experiment(experiment).opt_in and os.environ.get("LONG") != "1":
        return _what_there_is(study, experiment)
    require_devices(study)
    return _measure(Wanted.of(study, experiment), remeasure_since())


def fresh(study: Study, experiment: str) -> Result:
    """Measure `experiment` anew, whatever is stored."""
    return _measure(Wanted.of(study, experiment), datetime.now(UTC))


def require_devices(study: Study) -> None:
    """`RunnerError` if `study` wants more GPUs than this machine has: said once, not by every trial."""
    if study.hardware.device != "cuda":
        return
    wanted = max(getattr(e.workload, "replicas", 1) for e in study.experiments.values())
    found = len(hardware.fingerprint().get("gpus", []))
    if found < wanted:
        raise RunnerError(
            f"profile {study.profile}: not measured: it wants {wanted} NVIDIA GPU(s) (hardware.device: cuda), this "
            f"machine has {found}; run it where they are, or choose PROFILE=cpu"
        )


# ---------------------------------------------------------------------- without measuring


def replay(study: Study, experiment: str) -> Result:
    """All committed blocks of `experiment`; `ReplayError` names a record that is missing or unreadable.

    An `opt_in` experiment that was never committed gives an empty result.
    """
    wanted, store = Wanted.of(study, experiment), Store.reference(study.profile)
    where = f"results/reference/{study.profile}/{experiment}"
    blocks, problems = store.load_blocks(experiment)
    if problems:
        raise ReplayError(f"replay of {experiment}: {problems[0]}")
    promised = {block_id for block in blocks for block_id in block.header.series}
    published = store.contents().get(experiment, {})
    promised |= set(published)
    gone = sorted(promised - {block.block_id for block in blocks})
    if gone:
        raise ReplayError(f"replay of {experiment}: {where}/{gone[0]}.json is missing; restore it from git")
    edited = [name for name, digest in published.items() if store.header_digest(experiment, name) != digest]
    if edited:
        raise ReplayError(
            f"replay of {experiment}: {where}/{edited[0]}.json is not what was published; restore it from git"
        )
    if not blocks and wanted.experiment.opt_in:
        return Result(experiment, [], [], NOT_MEASURED, "none", [], list(wanted.keys))
    if not blocks:
        raise ReplayError(f"replay of {experiment}: {where} holds no record; publish one with 'make publish'")
    complete = [block for block in blocks if block.complete]
    for block in complete:
        for name in block.lacks(wanted.keys):
            raise ReplayError(
                f"replay of {experiment}: {where}/{block.block_id}.json has no trial of '{name}' as params/"
                f"{study.profile}.yaml now specifies it (key {wanted.keys[name]}); measure and publish it again"
            )
    if not complete:
        raise ReplayError(
            f"replay of {experiment}: {where} holds no complete block; measure and publish it again"
        )
    views = [block.view(wanted.keys) for block in complete]
    notes = context.same_context(views[-1].context, present(study))
    return Result(experiment, views, [], _stored_reason(views), "reference", notes, list(wanted.keys))


def _what_there_is(study: Study, experiment: str) -> Result:
    """An opt-in experiment without `LONG=1`: local blocks, else committed ones, else nothing."""
    wanted = Wanted.of(study, experiment)
    found = survey(Store.local(study.profile), wanted, present(study), None)
    if found.usable:
        return _result(wanted, found, _stored_reason(found.usable))
    try:
        return replay(study, experiment)
    except ReplayError as error:
        return Result(
            experiment,
            [],
            [str(error), *found.problems],
            NOT_MEASURED,
            "none",
            found.notes,
            list(wanted.keys),
        )


def _stored_reason(blocks: Sequence[Block]) -> str:
    return next(
        (block.header.stop_reason for block in reversed(blocks) if block.header.stop_reason), "not finished"
    )


def _result(wanted: Wanted, found: Survey, reason: str) -> Result:
    return Result(wanted.name, found.usable, found.problems, reason, "local", found.notes, list(wanted.keys))


# ---------------------------------------------------------------------- measuring


@dataclass
class _Session:
    """One call of `measure`: what it writes to and what it has measured itself."""

    wanted: Wanted
    store: Store
    progress: Progress
    logs: Path
    mine: list[Block] = field(default_factory=list)

    @property
    def preload(self) -> tuple[str, ...]:
        return processes.preload_for(self.wanted.study.model)


def _measure(wanted: Wanted, since: datetime | None) -> Result:
    store, now = Store.local(wanted.study.profile), present(wanted.study)
    found = survey(store, wanted, now, since)
    reason = stop_reason(wanted.experiment, found.usable)
    if reason and _stored_series(found.usable):
        return _result(wanted, found, reason)
    store.check_writable(wanted.name)
    try:
        logs = Path(tempfile.mkdtemp(prefix="flashgap-logs-"))
    except OSError as error:
        raise write_error(Path(tempfile.gettempdir()), error) from None
    try:
        with _progress(wanted, store, found) as progress:
            return _until_enough(_Session(wanted, store, progress, logs), now, since, found.notes)
    finally:
        shutil.rmtree(logs, ignore_errors=True)


def _stored_series(blocks: list[Block]) -> bool:
    ids = [block.block_id for block in blocks]
    return all(block.header.series == ids for block in blocks)


def _progress(wanted: Wanted, store: Store, found: Survey) -> Progress:
    missing = (wanted.experiment.sampling.max_blocks - len(found.usable)) * len(wanted.keys)
    kept = len(found.unfinished.trials) if found.unfinished else 0
    blocks, _ = store.load_blocks(wanted.name)
    return Progress(wanted.name, max(0, missing - kept), expected_trial_s(blocks, wanted))


def _until_enough(session: _Session, now: dict[str, Any], since: datetime | None, notes: list[str]) -> Result:
    """Measure block after block; the survey is repeated under the lock, since another runner may have
    measured the same experiment while this one waited."""
    wanted, store = session.wanted, session.store
    for note in notes:
        session.progress.say(note)
    if wanted.experiment.workload.kind not in WITHOUT_MODEL:
        _provide_model(session)
    for _ in range(2 * wanted.experiment.sampling.max_blocks + 1):
        with _machine(session):
            mine = frozenset(block.block_id for block in session.mine)
            found = survey(store, wanted, now, since, mine)
            reason = stop_reason(wanted.experiment, found.usable)
            if reason:
                store.close_series(wanted.name, [block.block_id for block in found.usable], reason)
                found = survey(store, wanted, now, since, mine)
                found.notes = notes
                return _result(wanted, found, reason)
            _measure_block(session, found)
    raise RunnerError(
        f"{wanted.name}: source or machine keep changing while it is measured; run again when they rest"
    )


def _machine(session: _Session) -> AbstractContextManager[None]:
    return machine_lock(f"{session.wanted.study.profile}/{session.wanted.name}", session.progress.say)


def _measure_block(session: _Session, found: Survey) -> None:
    """Run what is missing of one block, storing it after every trial."""
    wanted = session.wanted
    specs = wanted.study.trials(wanted.name)
    block = found.unfinished or _new_block(session, len(found.usable))
    session.mine.append(block)
    todo = [name for name in block.header.order if _unfinished(block, name)]
    refused = _check_first(session, {name: specs[name] for name in todo})
    if any(specs[name].workload.process == "fork" for name in todo):
        processes.warm_fork_server(session.preload, session.logs)
    for name in todo:
        record, frame = _one_trial(session, block, name, specs[name], refused.get(name))
        block.add(record, frame, context.utc_now())
        session.store.save(block)
        session.progress.trial(len(found.usable) + 1, name, record.status, record.timings_s.get("total", 0.0))


def _unfinished(block: Block, treatment: str) -> bool:
    record = block.trials.get(treatment)
    return record is None or record.status == "interrupted"


def _new_block(session: _Session, index: int) -> Block:
    wanted, started = session.wanted, context.utc_now()
    stamp = datetime.fromisoformat(started).strftime("%Y%m%dT%H%M%S%f")[:-3]
    header = Header(
        experiment=wanted.name,
        block_id=f"{stamp}-{uuid.uuid4().hex[:6]}",
        keys=wanted.keys,
        order=block_order(wanted.study.seed, wanted.name, index, list(wanted.keys)),
        started_utc=started,
        updated_utc=started,
        provenance=context.provenance(wanted.study),
    )
    return Block(header, session.store.folder(wanted.name))


def _one_trial(
    session: _Session, block: Block, name: str, spec: TrialSpec, refused: dict[str, Any] | None
) -> tuple[TrialRecord, pd.DataFrame]:
    repeated = _repeated_failure(session.mine, name)
    if repeated is not None:
        return repeated, empty_frame()
    started, label = context.utc_now(), f"{block.block_id}-{name}"
    if refused is not None:
        return make_record(name, spec, started, [processes.Ended(refused, 0.0)], worker_module())
    try:
        ended = _run(session, spec, label)
    except KeyboardInterrupt:
        note = {"status": "interrupted", "error": "interrupted by the user"}
        record, frame = make_record(name, spec, started, [processes.Ended(note, 0.0)], worker_module())
        block.add(record, frame, context.utc_now())
        session.store.save(block)
        raise
    record, frame = make_record(name, spec, started, ended, worker_module())
    if record.status != "ok":
        _keep_logs(session, label)
    return record, frame


def _keep_logs(session: _Session, label: str) -> None:
    """What a bad trial printed, beside the records; only the local store has such a folder."""
    folder = session.store.folder(session.wanted.name) / "logs"
    for log in session.logs.glob(f"{label}*.log"):
        try:
            folder.mkdir(exist_ok=True)
            (folder / log.name).write_text(processes.log_tail(log), encoding="utf-8")
        except OSError:
            return  # the record matters, the log is a comfort
        session.progress.say(f"its log is {shown(folder / log.name)}")


def _repeated_failure(mine: list[Block], treatment: str) -> TrialRecord | None:
    """The record of a treatment that ended the same bad way in this call's latest blocks: time is not
    spent on it again until the next call."""
    last = [block.trials[treatment] for block in mine if treatment in block.trials][-REPEATED_FAILURES:]
    if (
        len(last) < REPEATED_FAILURES
        or last[-1].status in ("ok", "interrupted")
        or len({r.status for r in last}) > 1
    ):
        return None
    error = (last[-1].error or "").removeprefix("not run again: ")
    return last[-1].model_copy(update={"error": f"not run again: {error}", "timings_s": {}, "memory": {}})


def _run(session: _Session, spec: TrialSpec, label: str) -> list[processes.Ended]:
    """One trial in as many fresh processes as its workload has replicas."""
    replicas = getattr(spec.workload, "replicas", 1)
    text = spec.model_dump_json()
    return processes.run_children(
        f"{worker_module()}:main",
        [(text, index, replicas, None) for index in range(replicas)],
        start=spec.workload.process,
        preload=session.preload,
        log=session.logs / f"{label}.log",
        timeout_s=session.wanted.experiment.sampling.trial_timeout_s,
        memory_limit_bytes=spec.memory_limit_bytes,
        devices=_devices(replicas) if spec.device == "cuda" and replicas > 1 else None,
        barrier_position=3 if replicas > 1 else None,
    )


def _devices(replicas: int) -> list[str]:
    """One GPU a replica, of those this process may see."""
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    if visible and len(visible) < replicas:
        raise RunnerError(
            f"{replicas} replicas want {replicas} GPUs, CUDA_VISIBLE_DEVICES shows {len(visible)}"
        )
    return (visible or [str(index) for index in range(replicas)])[:replicas]


def worker_module() -> str:
    """The module that measures: `FLASHGAP_WORKER` or `WORKER`."""
    return os.environ.get("FLASHGAP_WORKER") or WORKER


# ---------------------------------------------------------------------- correct first


def _check_first(session: _Session, specs: dict[str, TrialSpec]) -> dict[str, dict[str, Any]]:
    """Run the correctness check, each in its own process, of every treatment without a kept verdict.

    Returns treatment -> outcome for those that could not be checked; one that was checked and failed
    keeps a verdict, and its trial refuses itself.
    """
    lookup = importlib.import_module(worker_module()).gate_verdict
    refused: dict[str, dict[str, Any]] = {}
    for name, spec in specs.items():
        if lookup(spec) is not None or _repeated_failure(session.mine, name) is not None:
            continue
        session.progress.say(f"checking that {name} computes what it should")
        outcome = _gate(session, spec, name)
        if outcome["status"] != "ok" and lookup(spec) is None:
            refused[name] = {**outcome, "error": f"correctness check: {outcome.get('error')}"}
    return refused


def _gate(session: _Session, spec: TrialSpec, name: str) -> dict[str, Any]:
    processes.warm_fork_server(session.preload, session.logs)
    label = f"gate-{name}"
    [ended] = processes.run_children(
        f"{worker_module()}:gate",
        [(spec.model_dump_json(),)],
        start="fork",
        preload=session.preload,
        log=session.logs / f"{label}.log",
        timeout_s=max(GATE_TIMEOUT_S, session.wanted.experiment.sampling.trial_timeout_s),
        memory_limit_bytes=spec.memory_limit_bytes,
    )
    if ended.outcome["status"] != "ok":
        _keep_logs(session, label)
    return ended.outcome


def _provide_model(session: _Session) -> None:
    """Fetch the model here, where a person sees its progress and its one-line errors, and see that the
    workload fits its context."""
    if worker_module() == WORKER:
        from flashgap import models

        study = session.wanted.study
        config = models.resolve(study.model, progress=session.progress.say).config
        limit_tokens = getattr(config.get_text_config(), "max_position_embeddings", None)
        check_context(study, session.wanted.name, limit_tokens)
