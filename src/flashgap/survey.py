"""What of an experiment is there already, what is missing, and when it is enough.

The one idea: sampling is a pure function of the blocks there are. The runner asks again before every
block, so an interrupted study, a second runner beside it and a repeated `make` all come to the same
answer. Nothing here starts a process.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from flashgap import context, stats
from flashgap.records import Block, Store
from flashgap.results import block_pairs
from flashgap.study import Experiment, Study
from flashgap.treatment import AnyWorkload

RESUMABLE_S = 3600.0  # trials further apart than this are not paired
RETRIED = {"failed", "killed", "interrupted"}  # the environment's fault as often as the treatment's
MAX_CONDITIONS = 32  # more (one per token position) are pooled


class RunnerError(RuntimeError):
    """An experiment that cannot be run as it is; one line with file, key and cure."""


class ReplayError(RunnerError):
    """A committed record that a replay needs and does not find."""


@dataclass(frozen=True)
class Wanted:
    """One experiment of one study: what is asked for."""

    study: Study
    name: str
    keys: dict[str, str]  # treatment name -> specification key

    @classmethod
    def of(cls, study: Study, name: str) -> Wanted:
        """Raises `RunnerError` if two treatments are the same thing."""
        keys = {treatment: spec.key for treatment, spec in study.trials(name).items()}
        twice = [key for key, count in Counter(keys.values()).items() if count > 1]
        if twice:
            same = [treatment for treatment, key in keys.items() if key == twice[0]]
            raise RunnerError(
                f"params/{study.profile}.yaml: experiments.{name}.treatments: {same} are the same; give one another 'replica'"
            )
        return cls(study, name, keys)

    @property
    def experiment(self) -> Experiment:
        return self.study.experiment(self.name)


@dataclass
class Survey:
    """What a store holds for a `Wanted`: usable blocks (as views), one to take up again, and why not others."""

    usable: list[Block] = field(default_factory=list)
    unfinished: Block | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ExperimentStatus:
    """For `plan`: blocks there are and are wanted, trials still to run, and how long one takes (None: unknown)."""

    experiment: str
    blocks_have: int
    min_blocks: int
    max_blocks: int
    trials_missing: int
    trials_missing_at_most: int
    expected_trial_s: float | None
    opt_in: bool
    notes: list[str]
    problems: list[str]


def survey(
    store: Store,
    wanted: Wanted,
    now: Mapping[str, Any],
    since: datetime | None,
    mine: frozenset[str] = frozenset(),
) -> Survey:
    """Sort the blocks of `store`. `now` is the present context; blocks begun before `since` do not count;
    `mine` are ids of blocks measured in this very call, which count however their trials ended."""
    blocks, problems = store.load_blocks(wanted.name)
    out = Survey(problems=problems)
    rejected: Counter[str] = Counter()
    for block in blocks:
        reason = unusable(block, wanted, now, since, block.block_id in mine)
        if reason is None and block.complete:
            out.usable.append(block.view(wanted.keys))
        elif reason is None:
            out.unfinished = block
        elif reason:
            rejected[reason] += 1
    out.notes = [
        f"{count} older block{'s' * (count > 1)} not used: {reason}" for reason, count in rejected.items()
    ]
    return out


def unusable(
    block: Block, wanted: Wanted, now: Mapping[str, Any], since: datetime | None, is_mine: bool = False
) -> str | None:
    """Why `block` does not count; None if it does, empty text if it never concerned this experiment."""
    lacking = block.lacks(wanted.keys) if block.complete else _differing(block, wanted)
    if lacking:
        return ""
    if since is not None and _time(block.header.started_utc) < since:
        return "asked to measure again"
    reasons = context.same_context(block.context, dict(now))
    if reasons:
        return f"measured in another context ({'; '.join(reasons[:3])}{'; …' * (len(reasons) > 3)})"
    if not block.complete and not resumable(block, now):
        return "interrupted too long ago to be paired"
    bad = sorted({r.status for r in block.view(wanted.keys).trials.values() if r.status in RETRIED})
    if bad and block.complete and not is_mine:
        return f"a trial ended {' or '.join(bad)}; tried again"
    return None


def _differing(block: Block, wanted: Wanted) -> list[str]:
    """An unfinished block is taken up only by exactly the experiment that began it."""
    return [] if block.header.keys == wanted.keys else ["keys"]


def resumable(block: Block, now: Mapping[str, Any]) -> bool:
    """Whether the rest of an unfinished block may still be paired with what it has: same boot, short pause."""
    pause_s = (datetime.now(UTC) - _time(block.header.updated_utc)).total_seconds()
    return block.header.provenance.get("boot") == now.get("boot") and 0 <= pause_s < RESUMABLE_S


def _time(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def present(study: Study) -> dict[str, Any]:
    """The context of this moment, as `survey` takes it."""
    return {**context.current_context(study.model, study.checkpoints), "boot": context.boot_digest()}


def block_order(seed: int, experiment: str, index: int, treatments: Sequence[str]) -> list[str]:
    """`treatments` in the random order of block number `index`; the same for the same arguments."""
    order = list(treatments)
    random.Random(f"{seed}/{experiment}/{index}").shuffle(order)
    return order


def stop_reason(experiment: Experiment, blocks: list[Block]) -> str | None:
    """Why no further block is needed, None if one is. See `Sampling`."""
    sampling, n = experiment.sampling, len(blocks)
    if n < sampling.min_blocks:
        return None
    if len(experiment.treatments) == 1:
        return f"min_blocks ({sampling.min_blocks}) measured; one treatment, nothing to compare"
    width = widest_ratio(experiment, blocks)
    if width is not None and width <= sampling.target_half_width:
        return f"interval narrow enough (±{width:.1%}, wanted ±{sampling.target_half_width:.1%})"
    widest = "" if width is None else f"; widest interval {'over ±100%' if width > 1 else f'±{width:.1%}'}"
    if n >= sampling.max_blocks:
        return f"max_blocks ({sampling.max_blocks}) measured{widest}"
    spent_s = sum(block.measured_s for block in blocks)
    if spent_s >= sampling.budget_s:
        return f"budget spent ({spent_s:.0f} of {sampling.budget_s:.0f} s){widest}"
    return None


def widest_ratio(experiment: Experiment, blocks: list[Block]) -> float | None:
    """Largest relative half width among the ratios to the first treatment, over every batch size or
    context length apart; None if no two treatments can be compared."""
    first, *others = experiment.treatments
    metric = experiment.primary_metric
    widths = []
    for condition in conditions(experiment, blocks):
        for other in others:
            pairs = block_pairs(blocks, other, first, metric, condition)
            try:
                widths.append(stats.paired_ratio(pairs, draws=500).half_width_relative if pairs else None)
            except stats.StatsError:
                widths.append(None)
    known = [width for width in widths if width is not None]
    return max(known) if known else None


def conditions(experiment: Experiment, blocks: list[Block]) -> list[dict[str, float]]:
    """Column filters within which samples may be pooled: each batch size, or each context length."""
    column = {"latency": "batch", "context": "context_tokens"}.get(experiment.workload.kind)
    if column is None:
        return [{}]
    values: set[int] = set()
    for block in blocks:
        table = block.observations
        values |= set(table.loc[table["metric"] == experiment.primary_metric, column].tolist())
    return [{column: value} for value in sorted(values)] if 0 < len(values) <= MAX_CONDITIONS else [{}]


def expected_trial_s(blocks: Sequence[Block], wanted: Wanted) -> float | None:
    """Median wall time of such trials in any block, whatever its context; None if there never was one."""
    exact: list[float] = []
    alike: list[float] = []
    for block in blocks:
        for record in block.header.trials:
            total_s = record.timings_s.get("total")
            if total_s:
                (exact if record.key in wanted.keys.values() else alike).append(total_s)
    return float(np.median(exact or alike)) if exact or alike else None


def status(study: Study, experiment: str) -> ExperimentStatus:
    """What of `experiment` is there and what is missing, without measuring anything."""
    wanted = Wanted.of(study, experiment)
    store, sampling = Store.local(study.profile), wanted.experiment.sampling
    found = survey(store, wanted, present(study), remeasure_since())
    have, size = len(found.usable), len(wanted.keys)
    enough = stop_reason(wanted.experiment, found.usable) is not None
    kept = len(found.unfinished.trials) if found.unfinished else 0
    return ExperimentStatus(
        experiment=experiment,
        blocks_have=have,
        min_blocks=sampling.min_blocks,
        max_blocks=sampling.max_blocks,
        trials_missing=0 if enough else max(0, max(sampling.min_blocks - have, 1) * size - kept),
        trials_missing_at_most=0 if enough else max(0, (sampling.max_blocks - have) * size - kept),
        expected_trial_s=expected_trial_s(store.load_blocks(experiment)[0], wanted),
        opt_in=wanted.experiment.opt_in,
        notes=found.notes,
        problems=found.problems,
    )


_PROCESS_START = datetime.now(UTC)


def remeasure_since() -> datetime | None:
    """With `REMEASURE=1`: blocks begun before `FLASHGAP_SINCE` (else before this process) do not count."""
    if os.environ.get("REMEASURE") != "1":
        return None
    text = os.environ.get("FLASHGAP_SINCE")
    if not text:
        return _PROCESS_START
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise RunnerError(
            f"FLASHGAP_SINCE: '{text}' is not a time; write it like 2026-12-01T05:00:00+00:00"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def context_needed_tokens(workload: AnyWorkload) -> int:
    """The longest context, in tokens, that `workload` asks of a model; 0 if it needs none."""
    match workload.kind:
        case "ceilings" | "gemm" | "crossover":
            return 0
        case "context":
            return max(workload.context_tokens) + workload.steps
        case "prefill":
            return max(workload.prompt_tokens)
        case "quality":
            return workload.window_tokens
        case "task":
            return workload.max_context_tokens
        case "reference":  # the timer runs each statement more than once
            return max(
                workload.context_tokens + 3 * workload.repeats + 1,
                workload.prompt_tokens + workload.generated_tokens,
            )
        case _:
            return workload.prompt_tokens + workload.generated_tokens


def check_context(study: Study, experiment: str, limit_tokens: int | None) -> None:
    """`RunnerError` if the workload of `experiment` is longer than the model's context of `limit_tokens`."""
    needed = context_needed_tokens(study.experiment(experiment).workload)
    if limit_tokens and needed > limit_tokens:
        raise RunnerError(
            f"params/{study.profile}.yaml: experiments.{experiment}.workload: prompt and generated tokens need a "
            f"context of {needed} tokens, the model has {limit_tokens}; shorten them"
        )
