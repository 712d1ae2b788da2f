"""What was measured, on disk and as tables.

The one idea: the *block* is the document. A block is a JSON header (specifications, status and
provenance of every trial) and a compressed column file of every raw observation, whose name holds its
own hash. The column file is written first and the header last, each by an atomic rename, so at any
instant a folder holds finished trials only; whatever cannot be read is named and left alone.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flashgap.study import project_root

SCHEMA_VERSION = 1
NOT_APPLICABLE = -1
CONTENTS = "contents.json"  # in the root of a reference store: what was published
INTEGER_COLUMNS = ("batch", "context_tokens", "request", "iteration", "replica")
COLUMNS = ("trial", "metric", "value", *INTEGER_COLUMNS)

Status = Literal[
    "ok", "failed", "out_of_memory", "nan", "timeout", "killed", "incorrect", "kernel_mismatch", "interrupted"
]


class RecordError(RuntimeError):
    """Records that cannot be written, in one line with file and cure."""


class Stored(BaseModel):
    """Data of a header; unknown keys mean another schema."""

    model_config = ConfigDict(extra="forbid")


class TrialRecord(Stored):
    """One trial: its specification, its end, and everything about it that is not a raw observation.

    `memory` is phase -> counter -> bytes. `timings_s` holds the child's own phases and, as the parent
    saw them, `total` and `overhead` (total less load, check and measurement). `modules` are source
    digests of the code on the measured path, `facts` further scalars of the workload.
    """

    key: str
    treatment: str
    spec: dict[str, Any]
    status: Status
    error: str | None = None
    started_utc: str = ""
    kernels: dict[str, dict[str, Any]] = Field(default_factory=dict)
    correctness: dict[str, Any] = Field(default_factory=dict)
    memory: dict[str, dict[str, int]] = Field(default_factory=dict)
    timings_s: dict[str, float] = Field(default_factory=dict)
    build: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any] = Field(default_factory=dict)
    modules: dict[str, str] = Field(default_factory=dict)
    facts: dict[str, Any] = Field(default_factory=dict)


class ColumnFile(Stored):
    """The file of raw observations that belongs to a header."""

    file: str
    sha256: str
    rows: int


class Header(Stored):
    """The JSON document of a block. `series` names all blocks of the finished experiment it belongs to,
    so that a deleted one is missed by name; `stop_reason` says why sampling ended there."""

    schema_version: Literal[1] = 1
    experiment: str
    block_id: str
    keys: dict[str, str]
    order: list[str]
    complete: bool = False
    started_utc: str
    updated_utc: str
    provenance: dict[str, Any]
    trials: list[TrialRecord] = Field(default_factory=list)
    stop_reason: str | None = None
    series: list[str] = Field(default_factory=list)
    observations: ColumnFile | None = None


@dataclass
class Block:
    """Every treatment of an experiment once. `trials` maps treatment name to its record."""

    header: Header
    folder: Path
    renamed: dict[str, str] = field(default_factory=dict)  # stored treatment name -> name asked for
    frame: pd.DataFrame | None = None

    @property
    def block_id(self) -> str:
        return self.header.block_id

    @property
    def complete(self) -> bool:
        return self.header.complete

    @property
    def trials(self) -> dict[str, TrialRecord]:
        return {record.treatment: record for record in self.header.trials}

    @property
    def observations(self) -> pd.DataFrame:
        """Raw observations with columns `COLUMNS`, read when first asked for; -1 is not applicable."""
        if self.frame is None:
            stored = self.header.observations
            table = pd.read_parquet(self.folder / stored.file) if stored else empty_frame()
            if self.renamed:
                table = table[table["trial"].isin(list(self.renamed))]
                table = table.assign(trial=table["trial"].map(self.renamed))
            self.frame = table.reset_index(drop=True)
        return self.frame

    @property
    def context(self) -> dict[str, Any]:
        """What `context.same_context` compares: provenance and the modules of all trials."""
        modules = {name: digest for record in self.header.trials for name, digest in record.modules.items()}
        return {**self.header.provenance, "modules": modules}

    @property
    def measured_s(self) -> float:
        """Wall time its trials took, seconds."""
        return sum(record.timings_s.get("total", 0.0) for record in self.header.trials)

    def lacks(self, keys: Mapping[str, str]) -> list[str]:
        """The names in `keys` (treatment -> specification key) that have no trial here."""
        held = {record.key for record in self.header.trials}
        return [name for name, key in keys.items() if key not in held]

    def view(self, keys: Mapping[str, str]) -> Block:
        """This block with only the trials that `keys` asks for, under the names it uses."""
        names = {key: name for name, key in keys.items()}
        records = [record for record in self.header.trials if record.key in names]
        renamed = {record.treatment: names[record.key] for record in records}
        shown = [record.model_copy(update={"treatment": renamed[record.treatment]}) for record in records]
        header = self.header.model_copy(
            update={
                "trials": shown,
                "keys": dict(keys),
                "order": [renamed[name] for name in self.header.order if name in renamed],
            }
        )
        return Block(header, self.folder, renamed)

    def add(self, record: TrialRecord, frame: pd.DataFrame, now_utc: str) -> None:
        """Put in `record`, in place of an earlier one of the same treatment, and its observations."""
        kept = self.observations[self.observations["trial"] != record.treatment]
        new = typed_frame(frame.assign(trial=record.treatment))
        self.frame = pd.concat([kept, new], ignore_index=True)
        trials = [*(r for r in self.header.trials if r.treatment != record.treatment), record]
        finished = {r.treatment for r in trials if r.status != "interrupted"}
        self.header = self.header.model_copy(
            update={"trials": trials, "updated_utc": now_utc, "complete": finished >= set(self.header.order)}
        )

    def files(self) -> list[Path]:
        """The header and the column file."""
        names = [f"{self.block_id}.json"] + (
            [self.header.observations.file] if self.header.observations else []
        )
        return [self.folder / name for name in names]


@dataclass(frozen=True)
class Store:
    """A folder of records of one profile: `<root>/<experiment>/<block>.json` and its column file."""

    root: Path
    kind: Literal["local", "reference"]

    @classmethod
    def local(cls, profile: str) -> Store:
        """Where runs go; ignored by git. `FLASHGAP_RESULTS` moves it."""
        root = os.environ.get("FLASHGAP_RESULTS")
        return cls((Path(root) if root else project_root() / "results" / "local") / profile, "local")

    @classmethod
    def reference(cls, profile: str) -> Store:
        """The committed records that reports are replayed from."""
        return cls(project_root() / "results" / "reference" / profile, "reference")

    def folder(self, experiment: str) -> Path:
        return self.root / experiment

    def check_writable(self, experiment: str) -> None:
        """Raise `RecordError` before time is spent on a measurement that could not be kept."""
        probe = self.folder(experiment) / f".probe-{os.getpid()}"
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(probe, b"flashgap" * 1024)
            probe.unlink()
        except OSError as error:
            raise write_error(self.folder(experiment), error) from None

    def save(self, block: Block) -> None:
        """Write `block`: the new column file, then the header, then drop older column files.

        Raises `RecordError`; what was stored before is then still there and whole.
        """
        folder = self.folder(block.header.experiment)
        data = to_parquet(block.observations)
        digest = hashlib.sha256(data).hexdigest()
        stored = ColumnFile(
            file=f"{block.block_id}-{digest[:8]}.parquet", sha256=digest, rows=len(block.observations)
        )
        header = block.header.model_copy(update={"observations": stored})
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / stored.file, data)
            write_atomic(folder / f"{block.block_id}.json", to_json(header))
            for old in folder.glob(f"{block.block_id}-*.parquet"):
                if old.name != stored.file:
                    old.unlink(missing_ok=True)
        except OSError as error:
            raise write_error(folder, error) from None
        block.header = header

    def load_blocks(self, experiment: str) -> tuple[list[Block], list[str]]:
        """All readable blocks, oldest first, and one line for each file that is not readable."""
        blocks, problems = [], []
        for path in sorted(self.folder(experiment).glob("[!.]*.json")):
            try:
                blocks.append(read_block(path))
            except RecordError as error:
                problems.append(str(error))
        return blocks, problems

    def close_series(self, experiment: str, block_ids: Sequence[str], reason: str) -> None:
        """Write into each of these blocks which blocks belong together and why sampling stopped."""
        for block_id in block_ids:
            path = self.folder(experiment) / f"{block_id}.json"
            header = read_header(path)
            if header.series != list(block_ids) or header.stop_reason != reason:
                update = {"series": list(block_ids), "stop_reason": reason}
                try:
                    write_atomic(path, to_json(header.model_copy(update=update)))
                except OSError as error:
                    raise write_error(path.parent, error) from None

    def contents(self) -> dict[str, dict[str, str]]:
        """Experiment -> id of each block that was published -> SHA-256 of its header, so that a deleted one is missed even
        if it was the only one, and an edited one is seen; empty if nothing was published. `RecordError` if the
        list is unreadable."""
        path = self.root / CONTENTS
        try:
            return dict(json.loads(path.read_text())) if path.is_file() else {}
        except (OSError, ValueError) as error:
            raise RecordError(
                f"{shown(path)}: unreadable list of records ({error}); restore it from git"
            ) from None

    def header_digest(self, experiment: str, block_id: str) -> str:
        """SHA-256 of a block's header as it lies in the store."""
        return hashlib.sha256((self.folder(experiment) / f"{block_id}.json").read_bytes()).hexdigest()

    def write_contents(self, published: Mapping[str, Iterable[str]]) -> None:
        """Replace the list that `contents` reads by the blocks `published`, by experiment, with their digests now."""
        try:
            contents = {
                experiment: {block_id: self.header_digest(experiment, block_id) for block_id in block_ids}
                for experiment, block_ids in published.items()
            }
            write_atomic(
                self.root / CONTENTS, json.dumps(contents, indent=1, sort_keys=True).encode() + b"\n"
            )
        except OSError as error:
            raise write_error(self.root, error) from None

    def replace(self, experiment: str, blocks: Iterable[Block]) -> list[Path]:
        """Make this store's records of `experiment` exactly `blocks`, copied byte for byte; used to publish."""
        folder = self.folder(experiment)
        sources = [path for block in blocks for path in block.files()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in sources:
                write_atomic(folder / path.name, path.read_bytes())
            wanted = {path.name for path in sources}
            for path in [*folder.glob("*.json"), *folder.glob("*.parquet")]:
                if path.name not in wanted:
                    path.unlink()
        except OSError as error:
            raise write_error(folder, error) from None
        return [folder / path.name for path in sources]


def read_header(path: Path) -> Header:
    """The header at `path`; `RecordError` in one line if it is corrupt or of another schema."""
    cure = "it is skipped; move it away to silence this"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(
            f"{shown(path)}: not readable as JSON ({str(error).splitlines()[0]}); {cure}"
        ) from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise RecordError(
            f"{shown(path)}: schema_version is {version}, this version reads {SCHEMA_VERSION}; {cure}"
        )
    try:
        header = Header.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise RecordError(f"{shown(path)}: {key}: {first['msg']}; {cure}") from None
    if header.block_id != path.stem:
        raise RecordError(f"{shown(path)}: block_id: is '{header.block_id}', not the file's name; {cure}")
    return header


def read_block(path: Path) -> Block:
    """The block whose header is at `path`, its column file checked against the stored hash."""
    header = read_header(path)
    if header.observations is not None:
        columns = path.parent / header.observations.file
        try:
            digest = hashlib.sha256(columns.read_bytes()).hexdigest()
        except OSError:
            raise RecordError(
                f"{shown(columns)}: missing, named by {path.name}; the block is skipped"
            ) from None
        if digest != header.observations.sha256:
            raise RecordError(
                f"{shown(columns)}: its content is not what {path.name} says; the block is skipped"
            )
    return Block(header, path.parent)


def to_json(header: Header) -> bytes:
    """`header` as JSON text that any reader accepts: numbers that are not finite become text."""
    return (json.dumps(plain(header.model_dump(mode="python")), indent=1, allow_nan=False) + "\n").encode()


def plain(value: Any) -> Any:
    """`value` as plain JSON data."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | np.ndarray):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def empty_frame() -> pd.DataFrame:
    """No observations, with the columns of `COLUMNS`."""
    return typed_frame(pd.DataFrame({name: [] for name in COLUMNS}))


def typed_frame(columns: Mapping[str, Any] | pd.DataFrame) -> pd.DataFrame:
    """`columns` as observations: text, float64 and int32, absent integer columns filled with -1.

    Raises `RecordError` if a column is unknown, a needed one is missing, or a value has the wrong type.
    """
    try:
        table = pd.DataFrame(columns)
    except ValueError as error:
        raise RecordError(f"observations: {error}") from None
    unknown = [name for name in table.columns if name not in COLUMNS]
    missing = [name for name in ("metric", "value") if name not in table.columns]
    if unknown or missing:
        raise RecordError(f"observations: unknown columns {unknown}, missing columns {missing}")
    table = table.reindex(columns=list(COLUMNS))
    try:
        integers = {name: table[name].fillna(NOT_APPLICABLE).astype("int32") for name in INTEGER_COLUMNS}
        return table.assign(value=table["value"].astype("float64"), **integers).astype(
            {"trial": str, "metric": str}
        )
    except (TypeError, ValueError) as error:
        raise RecordError(f"observations: {error}") from None


def to_parquet(frame: pd.DataFrame) -> bytes:
    """`frame` as a zstd-compressed parquet file."""
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False, compression="zstd")
    return buffer.getvalue()


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a power cut, meets the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_error(folder: Path, error: OSError) -> RecordError:
    """One line for a write that failed: where, why, cure."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        why = "the disk is full; free some space"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        why = "the folder is read-only; make it writable or set FLASHGAP_RESULTS to another one"
    else:
        why = f"{error.strerror or error}; repair it or set FLASHGAP_RESULTS to another folder"
    return RecordError(
        f"cannot write records to {shown(folder)}: {why}, then run again (finished trials are kept)"
    )


def shown(path: Path) -> str:
    """`path` for a person: relative to the checkout where it lies inside."""
    try:
        return str(path.resolve().relative_to(project_root().resolve()))
    except ValueError:
        return str(path)
