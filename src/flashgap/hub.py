"""A model by its hub id: the local snapshot, fetched if it is not there.

The one idea: what is here already is used without a network, and what is not is judged by its configuration
before gigabytes are fetched. Download, cache and resume are the hub client's own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashgap.model_files import ModelError, Progress, check_shards, check_space, transfer_message
from flashgap.model_support import check_raw_config, check_supported, read_config

HUB_PATTERNS = ["*.safetensors", "*.json", "tokenizer*", "*.jinja", "*.model", "README.md"]
HUB_IGNORED = ["*/*", "consolidated*"]  # other formats of the same weights


def hub_folder(repo: str, revision: str | None, progress: Progress) -> Path:
    """The local snapshot of a hub model. One already here is used without a network; a new one is checked by
    its configuration before its weights are fetched."""
    import huggingface_hub

    kept = kept_snapshot(repo, revision)
    if kept is not None:
        return kept
    with hub_errors(repo, revision), plain_progress():
        progress(f"{repo}: reading its configuration")
        config = Path(huggingface_hub.hf_hub_download(repo, "config.json", revision=revision))
        check_raw_config(config.parent)
        check_supported(read_config(config.parent))
        return _fetch(repo, revision, HUB_PATTERNS, progress)


def hub_snapshot(repo: str, revision: str | None, progress: Progress) -> Path:
    """The local snapshot of a checkpoint as it is, whatever its format; fetched if it is not here, or not whole."""
    kept = kept_snapshot(repo, revision, gguf=True)
    if kept is not None:
        return kept
    with hub_errors(repo, revision), plain_progress():
        return _fetch(repo, revision, [*HUB_PATTERNS, "*.gguf"], progress)


def _fetch(repo: str, revision: str | None, patterns: list[str], progress: Progress) -> Path:
    """Download the files of `patterns`, if there is room for those that are missing."""
    import huggingface_hub

    wanted: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": patterns,
        "ignore_patterns": HUB_IGNORED,
    }
    plan = huggingface_hub.snapshot_download(repo, dry_run=True, **wanted)
    missing_bytes = sum(file.file_size for file in plan if file.will_download)
    check_space(repo, missing_bytes, Path(huggingface_hub.constants.HF_HUB_CACHE))
    progress(f"{repo}: fetching {missing_bytes / 1e9:.1f} GB (an interrupted download is taken up again)")
    folder = huggingface_hub.snapshot_download(repo, **wanted)
    progress(f"{repo}: ready")
    return Path(folder)


def kept_snapshot(repo: str, revision: str | None, gguf: bool = False) -> Path | None:
    """A complete snapshot from an earlier download, or None; with `gguf` one that has such a file will do."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True))
    except HFValidationError:
        raise ModelError(f"model.id: '{repo}' is not a hub id like 'owner/name'; correct it") from None
    except LocalEntryNotFoundError:
        return None
    try:
        check_shards(folder)
    except ModelError:
        return folder if gguf and any(folder.glob("*.gguf")) else None
    return folder


@contextlib.contextmanager
def hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """What the hub client raises, as one line."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise ModelError(f"{repo}: gated; accept its terms on the hub, set HF_TOKEN, and run again") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{repo}: no such model on the hub, or private; correct model.id or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{repo}: no revision '{revision}'; correct model.revision") from None
    except errors.RemoteEntryNotFoundError:
        raise ModelError(f"{repo}: has no config.json; it is not a transformers model") from None
    except Exception as error:
        # The client's transport errors come from several libraries; their text is what tells them apart.
        if isinstance(error, ModelError):
            raise
        raise ModelError(transfer_message(repo, f"{type(error).__name__}: {error}")) from error


@contextlib.contextmanager
def plain_progress() -> Iterator[None]:
    """No progress bars of the hub client unless a terminal is watched: they flood logs."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
