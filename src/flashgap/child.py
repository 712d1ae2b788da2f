"""Entry of every measuring process: limits first, then the worker.

The one idea: whatever happens in here, the parent learns it. The process leads its own group (so that
it and anything it starts can be killed together), dies when its parent dies, cannot take more memory
than it was given, writes its chatter to a log, and turns any exception into an outcome. This module
imports nothing heavy, since it runs before the worker's own imports are timed.
"""

from __future__ import annotations

import importlib
import io
import os
import resource
import signal
import sys
import threading
import traceback
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

OUT_OF_MEMORY_WORDS = (
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "std::bad_alloc",
    "memoryerror",
)


class Order(NamedTuple):
    """What a child is told: `worker` as `module:function`, its arguments, and its limits."""

    worker: str
    arguments: tuple[Any, ...]
    environment: dict[str, str]
    memory_limit_bytes: int | None


def enter(order: Order, conn: Connection, log_path: str) -> None:
    """Run `order` and leave at once, without the slow tear-down of a tensor library.

    The worker sends its outcome through `conn`, the second of its arguments. When it raises instead,
    the outcome sent is `out_of_memory` or `failed` with the last line of the traceback.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    threading.Thread(target=die_with_parent, name="die-with-parent", daemon=True).start()
    os.environ.clear()  # a fork server's environment is as old as the server
    os.environ.update(order.environment)
    redirect(log_path)
    if order.memory_limit_bytes is not None:
        limit_memory(order.memory_limit_bytes)
    code = 0
    try:
        module, function = order.worker.split(":")
        first, *rest = order.arguments
        getattr(importlib.import_module(module), function)(first, conn, *rest)
    except BaseException as error:  # noqa: BLE001 - the last line of defence: a fault becomes a record, never a silence
        code = 1
        traceback.print_exc()
        tell(conn, {"status": status_of(error), "error": one_line(error)})
    sys.stdout.flush()
    sys.stderr.flush()
    conn.close()
    os._exit(code)


def die_with_parent() -> None:
    """Kill this process group as soon as the parent is gone; an orphan would spoil the next timing."""
    parent = parent_process()
    if parent is None:
        return
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def redirect(log_path: str) -> None:
    """Send stdout and stderr, C libraries included, to `log_path`."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(log, number)
    os.close(log)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "replace", line_buffering=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", "replace", line_buffering=True)


def limit_memory(limit_bytes: int) -> None:
    """Cap the private writable memory of this process (`RLIMIT_DATA`, Linux 4.7 and later)."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))


def status_of(error: BaseException) -> str:
    """`out_of_memory` for an allocation failure of Python or torch, else `failed`."""
    return "out_of_memory" if isinstance(error, MemoryError) or means_out_of_memory(str(error)) else "failed"


def means_out_of_memory(text: str) -> bool:
    """Whether `text` (a message or the end of a log) tells of an allocation failure."""
    lowered = text.lower()
    return any(words in lowered for words in OUT_OF_MEMORY_WORDS)


def one_line(error: BaseException) -> str:
    """`Type: first line of the message`."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def tell(conn: Connection, outcome: dict[str, Any]) -> None:
    """Send `outcome` if anyone still listens."""
    try:
        conn.send(outcome)
    except OSError:
        traceback.print_exc()


def nothing(_: str, conn: Connection, log_path: str) -> None:
    """A worker that only answers: used to wait until the fork server has finished its imports."""
    conn.send({"status": "ok"})
