"""A model folder on disk: is everything there, and which weights are they?

The one idea: a folder is judged from its small files (configuration, shard index, headers) before a single
weight is read, and known by a hash of its contents. Nothing here imports torch or transformers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Progress = Callable[[str], None]

UNPREPARED = "run it once with a network connection, then it works without one"
NO_SPACE = re.compile(r"no space left|errno 28|os error 28|disk quota", re.IGNORECASE)
NO_NETWORK = re.compile(
    r"name resolution|connection|network is unreachable|max retries|timed out|timeout|proxyerror|ssl|getaddrinfo|offline",
    re.IGNORECASE,
)


class ModelError(RuntimeError):
    """A model that cannot be had or cannot be measured; the message is one line with the cure."""


def cache_dir() -> Path:
    """Where fetched and converted models are kept: `FLASHGAP_CACHE`, else `~/.cache/flashgap`."""
    root = os.environ.get("FLASHGAP_CACHE")
    return Path(root).expanduser() if root else Path.home() / ".cache" / "flashgap"


def raw_config(folder: Path) -> dict[str, Any]:
    """`config.json` as plain data; read before transformers, which would ask to run remote code."""
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path}: missing; a model folder is what save_pretrained writes") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); fetch the model again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: is not a JSON object; fetch the model again")
    return data


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights, in index order; `ModelError` if there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index}: not a shard index ({error!r}); fetch the model again") from None
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    raise ModelError(
        f"{folder}: no model.safetensors and no index of shards; save the model with save_pretrained"
    )


def check_shards(folder: Path) -> None:
    """Every weight file is there and as long as its own header says; the first that is not is named."""
    files = weight_files(folder)
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{folder}: shard {missing[0]}{more} of {len(files)} missing; fetch the model again")
    for path in files:
        if not is_whole(path):
            raise ModelError(f"{path}: cut short or not safetensors; fetch this file again")


def is_whole(path: Path) -> bool:
    """Whether a safetensors file's size is what its header says (8 bytes of length, JSON, then data)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return False
        (header_bytes,) = struct.unpack("<Q", prefix)
        if 8 + header_bytes > size:
            return False
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return size == 8 + header_bytes + max(ends, default=0)


def folder_digest(folder: Path) -> str:
    """SHA-256 of the weights and of the configuration; file hashes are kept by path, size and time.

    The configuration counts without the version of transformers that wrote it.
    """
    config = {
        k: v for k, v in raw_config(folder).items() if k not in ("transformers_version", "_name_or_path")
    }
    parts = [json.dumps(config, sort_keys=True)]
    parts += [f"{path.name} {file_digest(path)}" for path in weight_files(folder)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, from the cache if path, size and modification time are unchanged."""
    stat = path.stat()
    identity = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    kept = cache_dir() / "digests" / hashlib.sha256(identity.encode()).hexdigest()
    with contextlib.suppress(OSError):
        text = kept.read_text()
        if len(text) == 64:
            return text
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, not truth
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(digest)
        part.replace(kept)
    return digest


def check_space(what: str, needed_bytes: int, target: Path) -> None:
    """Raise if the disk of `target` (or of its nearest existing parent) has not `needed_bytes` free."""
    while not target.exists():
        target = target.parent
    free_bytes = shutil.disk_usage(target).free
    if free_bytes < needed_bytes:
        raise ModelError(
            f"{what}: disk full, needs {needed_bytes / 1e9:.1f} GB and {target} has {free_bytes / 1e9:.1f} GB free; "
            "free some space or point FLASHGAP_CACHE (HF_HOME for a hub model) elsewhere"
        )


def transfer_message(what: str, text: str) -> str:
    """One line for a failed download or write, from the text of the error."""
    if NO_SPACE.search(text):
        return (
            f"{what}: disk full; free some space or point FLASHGAP_CACHE (HF_HOME for a hub model) elsewhere"
        )
    if NO_NETWORK.search(text) or "LocalEntryNotFound" in text:
        return f"{what}: could not be fetched, no network; {UNPREPARED}"
    return f"{what}: could not be fetched: {one_line(text)}"


def one_line(text: str, limit: int = 300) -> str:
    """The last line of `text` that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else "no message")[:limit]
