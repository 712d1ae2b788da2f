"""One timing at a time on the whole machine.

The one idea: the kernel owns the lock (`flock`), so it is free the moment its holder dies, however it
dies; the file's text only tells who holds it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.1


def lock_path() -> Path:
    """The lock of this machine: every user and every checkout means the same file. `FLASHGAP_LOCK` moves it."""
    return Path(os.environ.get("FLASHGAP_LOCK") or Path(tempfile.gettempdir()) / "flashgap-measuring.lock")


@contextmanager
def machine_lock(purpose: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the machine for `purpose`; while another holds it, `say` who, once, and wait."""
    path = lock_path()
    descriptor, writable = _open(path)
    try:
        _acquire(descriptor, path, say)
        if writable:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()}, measuring {purpose}".encode(), 0)
        yield
    finally:
        os.close(descriptor)  # releases it


def _open(path: Path) -> tuple[int, bool]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # another user's file: a read-only descriptor locks just as well
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
    return descriptor, True


def _acquire(descriptor: int, path: Path, say: Callable[[str], None]) -> None:
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not told:
                say(f"another measurement holds this machine ({_holder(path)}); waiting for it")
                told = True
            time.sleep(POLL_S)


def _holder(path: Path) -> str:
    try:
        return path.read_text().strip() or "unknown"
    except OSError:
        return "unknown"
