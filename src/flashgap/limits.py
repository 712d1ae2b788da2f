"""Times beside their bounds: what a build needs, over what this machine was measured to reach.

The one idea: decode must read every weight once for each token, so its bound is bytes over bytes/s *at
the size of the weights*; prefill multiplies them with many tokens, so its bound is FLOPs over FLOP/s.
Both come from `cost` and from the experiment `ceilings`. A bound is for the build as it is stored: 4-bit
weights need less traffic, whether or not a kernel makes use of that. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from flashgap import cost, hardware, metrics, stats, tables
from flashgap.cost import ModelShape
from flashgap.plan import EMBEDDED_CONFIG
from flashgap.study import Study
from flashgap.treatment import Dtype, LatencyWorkload

if TYPE_CHECKING:
    from flashgap.results import Result

DTYPE_BYTES: dict[Dtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
# The embedded model's sizes, as its file says that `embedded.py` pins by hash: a replay has no model at hand.
EMBEDDED = ModelShape.from_config(EMBEDDED_CONFIG)
BOUND_COLUMNS = ["treatment", "batch", "context_tokens", "ttft_s", "itl_s", "throughput_tokens_per_s"]


def model_shape(study: Study, *results: Result) -> ModelShape | None:
    """The sizes of the study's model: from its parameter file, from the records, or from the model itself.

    None in replay where neither names them: a model is not fetched only to draw a line.
    """
    if study.model.config:
        return ModelShape.from_config(study.model.config)
    if study.model.source == "embedded":
        return EMBEDDED
    trials = [trial for result in results for block in result.blocks for trial in block.trials.values()]
    stored = next((t.model["config"] for t in trials if t.model.get("config")), None)
    if stored:
        return ModelShape.from_config(stored)
    if os.environ.get("FLASHGAP_REPLAY") == "1":
        return None
    from flashgap import models

    return ModelShape.from_config(models.resolve(study.model, progress=lambda *_, **__: None).config)


@dataclass(frozen=True)
class Machine:
    """Measured ceilings as plain functions of what is asked of the machine."""

    ceilings: pd.DataFrame
    dtype: Dtype

    @classmethod
    def of(cls, study: Study, ceilings: Result) -> Machine | None:
        """None if there is no ceiling, or if this study's bounds would mean nothing (`smoke`: all in cache)."""
        frame = ceilings.frame()
        return None if frame.empty or study.profile == "smoke" else cls(frame, study.model.dtype)

    def bytes_per_s(self, working_set_bytes: float) -> float:
        """The fastest way to read that many bytes: a plain read, or the matrix-vector product decode is made of."""
        known = [m for m in ("read_bytes_per_s", "gemv_bytes_per_s") if (self.ceilings["metric"] == m).any()]
        return max(hardware.ceiling_at(self.ceilings, metric, working_set_bytes) for metric in known)

    @property
    def flops_per_s(self) -> float:
        """Of a matrix product in the model's number type, else the fastest measured."""
        metric = f"matmul_{self.dtype}_flops_per_s"
        if (self.ceilings["metric"] == metric).any():
            return hardware.ceiling_at(self.ceilings, metric)
        return max(
            hardware.ceiling_at(self.ceilings, m)
            for m in self.ceilings["metric"].unique()
            if m.startswith("matmul_")
        )


def weights_bytes(result: Result) -> dict[str, float]:
    """Bytes of resident weights by treatment, as loaded (median over blocks)."""
    found = {name: tables.resident(result, name) for name in tables.treatments(result)}
    return {name: float(np.median(np.concatenate(groups))) for name, groups in found.items() if groups}


def bounds(study: Study, result: Result, ceilings: Result, shape: ModelShape | None) -> pd.DataFrame:
    """Least seconds for each treatment at each batch and context of `result`, by the roofline.

    Columns `BOUND_COLUMNS`; empty without a shape or ceilings. `itl_s` is for the context of the row.
    """
    machine = Machine.of(study, ceilings)
    if machine is None or shape is None:
        return pd.DataFrame(columns=BOUND_COLUMNS)
    width = DTYPE_BYTES[study.model.dtype]
    workload = study.experiment(result.experiment).workload
    generated = workload.generated_tokens if isinstance(workload, LatencyWorkload) else 0
    rows = []
    for name, held in weights_bytes(result).items():
        for batch, tokens in _conditions(result):
            first = _roofline(
                machine,
                cost.prefill_flops(shape, batch, tokens),
                cost.prefill_bytes(shape, batch, tokens, int(held), width),
                held,
            )
            context = tokens + max(generated, 1) // 2
            step = _decode_bound(machine, shape, batch, context, held, width)
            total = first + max(generated - 1, 0) * step
            rate = metrics.throughput_tokens_per_s(batch * generated, total) if generated else np.nan
            rows.append((name, batch, tokens, first, step, rate))
    return pd.DataFrame(rows, columns=BOUND_COLUMNS)


def _conditions(result: Result) -> Iterable[tuple[int, int]]:
    frame = result.frame("itl_s")
    return [
        (int(b), int(c))
        for b, c in frame[["batch", "context_tokens"]]
        .drop_duplicates()
        .sort_values(["batch", "context_tokens"])
        .to_numpy()
    ]


def _decode_bound(
    machine: Machine, shape: ModelShape, batch: int, context: int, held: float, width: int
) -> float:
    moved = cost.decode_bytes(shape, batch, context, int(held), width)
    return _roofline(machine, cost.decode_flops(shape, batch, context), moved, moved)


def _roofline(machine: Machine, flops: float, moved: float, working_set: float) -> float:
    return cost.roofline_s(flops, moved, machine.flops_per_s, machine.bytes_per_s(working_set))


UTILIZATION_COLUMNS = ["treatment", "metric", "batch", "value", "low", "high", "blocks", "observations"]


def utilization(study: Study, result: Result, ceilings: Result, shape: ModelShape | None) -> pd.DataFrame:
    """MFU of prefill and MBU of decode by treatment and batch, intervals from the times.

    MBU counts the bytes the *stored* weights need: a build that expands 4-bit weights on every pass moves
    far more than it needs, and shows a low MBU for it. Both ceilings are taken as exact.
    """
    machine = Machine.of(study, ceilings)
    if machine is None or shape is None:
        return pd.DataFrame(columns=UTILIZATION_COLUMNS)
    width = DTYPE_BYTES[study.model.dtype]
    workload: Any = study.experiment(result.experiment).workload
    context = workload.prompt_tokens + workload.generated_tokens // 2
    rows = []
    for name, held in weights_bytes(result).items():
        for batch in tables.levels(result, "itl_s", "batch"):
            flops = cost.prefill_flops(shape, batch, workload.prompt_tokens)
            moved = cost.decode_bytes(shape, batch, context, int(held), width)
            for metric, sample, share in (
                ("mfu", "ttft_s", lambda t, f=flops: metrics.mfu(f, t, machine.flops_per_s)),
                ("mbu", "itl_s", lambda t, m=moved: metrics.mbu(m, t, machine.bytes_per_s(m))),
            ):
                groups = result.groups(name, sample, batch=batch)
                if groups:
                    rows.append(
                        {"treatment": name, "metric": metric, "batch": batch, **_inverted(groups, share)}
                    )
    return pd.DataFrame(rows, columns=UTILIZATION_COLUMNS)


def _inverted(groups: list[np.ndarray], share: Any) -> dict[str, Any]:
    """A share of a ceiling from times: the longest time is the lowest share."""
    time = stats.median_ci(groups)
    low = share(time.high) if np.isfinite(time.high) else -np.inf
    high = share(time.low) if np.isfinite(time.low) and time.low > 0 else np.inf
    return tables.row(time) | {"value": share(time.value), "low": low, "high": high}


def over_the_limit(data: pd.DataFrame) -> list[str]:
    """What lies above its ceiling, with the likely reason; empty if nothing does."""
    above = data[data["low"] > 1.0]
    return [
        f"{r.metric.upper()} of {r.treatment} at batch {r.batch} is {r.value:.0%}: above 100 %, so part of the work ran faster "
        "than the ceiling says (weights that stay in a cache, or a shape that suits the machine better than the square one)"
        for r in above.itertuples()
    ]
