"""The blocks of one experiment, as the tables a notebook asks for.

The one idea: a comparison is made inside a block. `groups` and `pairs` give one array per block, so
that the statistics see which samples came from the same process and the same minutes. Trials that did
not end `ok` are left out of numbers and shown by `failures`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from flashgap.records import COLUMNS, Block, TrialRecord

Array = np.ndarray


@dataclass
class Result:
    """What was measured for `experiment`, from store `source` (`local`, `reference` or `none`).

    `problems` names records that could not be used; `notes` says what a reader should know: why older
    blocks were measured again, or how the measuring machine differs from this one.
    """

    experiment: str
    blocks: list[Block]
    problems: list[str] = field(default_factory=list)
    stop_reason: str = ""
    source: str = "local"
    notes: list[str] = field(default_factory=list)
    treatments: list[str] = field(default_factory=list)

    @property
    def machine(self) -> dict[str, Any]:
        """Hardware fingerprint of the machine that measured the newest block; empty if there is none."""
        return dict(self.blocks[-1].header.provenance.get("fingerprint") or {}) if self.blocks else {}

    @property
    def failures(self) -> pd.DataFrame:
        """Trials that did not end `ok`: columns block, trial, status, error."""
        rows = [
            (block.block_id, record.treatment, record.status, record.error or "")
            for block, record in self._records()
            if record.status != "ok"
        ]
        return pd.DataFrame(rows, columns=["block", "trial", "status", "error"])

    def frame(self, metric: str | None = None) -> pd.DataFrame:
        """Raw observations of `ok` trials of complete blocks, tidy; of one metric if given.

        Columns: block, trial, metric, value, batch, context_tokens, request, iteration, replica.
        """
        tables = [_usable(block).assign(block=block.block_id) for block in self.blocks if block.complete]
        columns = ["block", *COLUMNS]
        table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)
        table = table[columns]
        return table if metric is None else table[table["metric"] == metric].reset_index(drop=True)

    def groups(self, treatment: str, metric: str, **filters: float) -> list[Array]:
        """One array of observations per complete block that has any; `filters` are column values."""
        arrays = [samples(block, treatment, metric, filters) for block in self.blocks if block.complete]
        return [array for array in arrays if array.size]

    def pairs(
        self, numerator: str, denominator: str, metric: str, **filters: float
    ) -> list[tuple[Array, Array]]:
        """For each complete block in which both ended `ok`: observations of both, for `stats.paired_ratio`."""
        return block_pairs(self.blocks, numerator, denominator, metric, filters)

    def memory_frame(self) -> pd.DataFrame:
        """Memory of `ok` trials: columns block, trial, phase, counter, bytes."""
        rows = [
            (block.block_id, record.treatment, phase, counter, value)
            for block, record in self._records(ok=True)
            for phase, counters in record.memory.items()
            for counter, value in counters.items()
        ]
        return pd.DataFrame(rows, columns=["block", "trial", "phase", "counter", "bytes"])

    def kernels_frame(self) -> pd.DataFrame:
        """Which kernel ran: columns block, trial, layer_type, expected, ran, layers, weight_bytes."""
        rows = [
            {"block": block.block_id, "trial": record.treatment, "layer_type": layer, **facts}
            for block, record in self._records()
            for layer, facts in record.kernels.items()
        ]
        columns = ["block", "trial", "layer_type", "expected", "ran", "layers", "weight_bytes"]
        return pd.DataFrame(rows, columns=columns if not rows else None)

    def timings_frame(self) -> pd.DataFrame:
        """Where the time of each `ok` trial went: columns block, trial, process, then one per phase, seconds."""
        rows = [
            {
                "block": block.block_id,
                "trial": record.treatment,
                "process": (record.spec.get("workload") or {}).get("process", ""),
                **record.timings_s,
            }
            for block, record in self._records(ok=True)
        ]
        return pd.DataFrame(
            rows, columns=["block", "trial", "process", "total", "overhead"] if not rows else None
        )

    def provenance_frame(self) -> pd.DataFrame:
        """One row per block: start, commit, machine, versions, load, why sampling stopped."""
        return pd.DataFrame([_provenance_row(block) for block in self.blocks])

    def _records(self, ok: bool = False) -> list[tuple[Block, TrialRecord]]:
        pairs = [(block, record) for block in self.blocks for record in block.trials.values()]
        return [(b, r) for b, r in pairs if not ok or (b.complete and r.status == "ok")]


def _usable(block: Block) -> pd.DataFrame:
    names = [name for name, record in block.trials.items() if record.status == "ok"]
    return block.observations[block.observations["trial"].isin(names)]


def samples(block: Block, treatment: str, metric: str, filters: Mapping[str, float]) -> Array:
    """Observations [n] of `metric` of an `ok` trial of `block`; empty if there are none."""
    record = block.trials.get(treatment)
    if record is None or record.status != "ok":
        return np.empty(0)
    table = block.observations
    chosen = (table["trial"] == treatment) & (table["metric"] == metric)
    for column, value in filters.items():
        chosen &= table[column] == value
    return table.loc[chosen, "value"].to_numpy(dtype=float)


def block_pairs(
    blocks: list[Block], numerator: str, denominator: str, metric: str, filters: Mapping[str, float]
) -> list[tuple[Array, Array]]:
    """(numerator, denominator) observations of each complete block that has both."""
    both = (
        (samples(block, numerator, metric, filters), samples(block, denominator, metric, filters))
        for block in blocks
        if block.complete
    )
    return [(top, bottom) for top, bottom in both if top.size and bottom.size]


def _provenance_row(block: Block) -> dict[str, Any]:
    stored = block.header.provenance
    versions, machine = stored.get("versions") or {}, stored.get("fingerprint") or {}
    commit = stored.get("commit")
    return {
        "block": block.block_id,
        "started_utc": block.header.started_utc,
        "commit": f"{commit[:10]}{'+edits' if stored.get('dirty') else ''}" if commit else "none",
        "params_digest": stored.get("params_digest", ""),
        "machine": machine.get("cpu_model") or machine.get("cpu") or machine.get("override") or "",
        "gpus": ", ".join(
            str(gpu.get("name", gpu) if isinstance(gpu, dict) else gpu) for gpu in machine.get("gpus") or []
        ),
        "usable_cores": stored.get("usable_cores"),
        **{name: versions.get(name, "") for name in ("python", "torch", "transformers")},
        "models": ", ".join(sorted({str(r.model.get("label", "")) for r in block.trials.values()} - {""})),
        "stop_reason": block.header.stop_reason or "",
    }
