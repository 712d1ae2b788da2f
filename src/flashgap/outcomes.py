"""From what a child sent to a record and its observations.

The one idea: a worker is not trusted to make sense. What it sent is checked and typed here, and an
outcome that does not hold together is itself a failed trial.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import pandas as pd
from pydantic import ValidationError

from flashgap import context
from flashgap.processes import Ended
from flashgap.records import RecordError, Status, TrialRecord, empty_frame, typed_frame
from flashgap.treatment import TrialSpec

OUTCOME_FIELDS = ("kernels", "correctness", "memory", "build", "model", "modules", "facts")
MEASUREMENT = ("load", "check", "measure")  # child timings that are not overhead


def make_record(
    name: str, spec: TrialSpec, started_utc: str, ended: Sequence[Ended], worker: str
) -> tuple[TrialRecord, pd.DataFrame]:
    """The record and observations of a trial from what its process (or each replica's) sent.

    `worker` is the module that measured: its source counts when the trial could not say what it had
    loaded. Never raises for a bad outcome.
    """
    wall_s = max((one.wall_s for one in ended), default=0.0)
    outcomes = [one.outcome for one in ended]
    fields: dict[str, Any] = {
        "key": spec.key,
        "treatment": name,
        "spec": spec.model_dump(mode="json"),
        "started_utc": started_utc,
    }
    try:
        frame = observations(outcomes)
        record = TrialRecord(**fields, **_contents(outcomes, frame), timings_s=timings(outcomes, wall_s))
    except (RecordError, ValidationError, TypeError, ValueError, AttributeError) as fault:
        error = _clean(f"sent an outcome that does not hold together: {fault}")
        frame, record = (
            empty_frame(),
            TrialRecord(**fields, status="failed", error=error, timings_s={"total": wall_s}),
        )
    if not record.modules:
        record.modules = context.module_digests(context.reachable_modules(worker))
    return record, frame


def _contents(outcomes: Sequence[dict[str, Any]], frame: pd.DataFrame) -> dict[str, Any]:
    chosen = _decisive(outcomes)
    status, error = chosen["status"], chosen.get("error")
    if status not in get_args(Status):
        raise RecordError(f"unknown status '{status}'")
    bad = frame.loc[~frame["value"].map(math.isfinite), "metric"]
    if status == "ok" and len(bad):
        status, error = "nan", f"{len(bad)} observations of {bad.iloc[0]} are not finite numbers"
    contents = {field: chosen.get(field) or {} for field in OUTCOME_FIELDS}
    facts = {**contents["facts"], "replicas": len(outcomes)} if len(outcomes) > 1 else contents["facts"]
    return {
        **contents,
        "status": status,
        "error": _clean(error),
        "memory": largest_memory(outcomes),
        "facts": facts,
    }


def _decisive(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The outcome that speaks for all replicas: the first real failure, else any bad one, else the first."""
    bad = [outcome for outcome in outcomes if outcome["status"] != "ok"]
    return next(
        (outcome for outcome in bad if outcome["status"] != "interrupted"), (bad or list(outcomes))[0]
    )


def _clean(error: Any) -> str | None:
    return None if error is None else context.scrub(" ".join(str(error).split()))[:400]


def observations(outcomes: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Observations of all replicas in one frame. Of several, the task ends when the last one does:
    `task_s` is the largest, and each replica's own is kept as `task_replica_s`."""
    frames = [typed_frame(o.get("observations") or {"metric": [], "value": []}) for o in outcomes]
    if len(frames) == 1:
        return frames[0]
    table = pd.concat([frame.assign(replica=index) for index, frame in enumerate(frames)], ignore_index=True)
    own = table["metric"] == "task_s"
    if not own.any():
        return typed_frame(table)
    last = table[own].sort_values("value").iloc[[-1]].assign(replica=-1)
    return typed_frame(pd.concat([table.assign(metric=table["metric"].where(~own, "task_replica_s")), last]))


def largest_memory(outcomes: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """phase -> counter -> bytes, the largest among replicas (limits are per process)."""
    out: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        for phase, counters in (outcome.get("memory") or {}).items():
            held = out.setdefault(phase, {})
            for counter, value in counters.items():
                held[counter] = max(held.get(counter, 0), int(value))
    return out


def timings(outcomes: Sequence[dict[str, Any]], wall_s: float) -> dict[str, float]:
    """The child's phases (the slowest replica's), `child` its own total, `total` the parent's clock, and
    `overhead`: what of `total` was neither load nor check nor measurement. Seconds."""
    out: dict[str, float] = {}
    for outcome in outcomes:
        for phase, seconds in (outcome.get("timings_s") or {}).items():
            name = "child" if phase == "total" else phase
            out[name] = max(out.get(name, 0.0), float(seconds))
    useful_s = sum(out.get(phase, 0.0) for phase in MEASUREMENT)
    return {**out, "total": wall_s, "overhead": max(0.0, wall_s - useful_s)}
