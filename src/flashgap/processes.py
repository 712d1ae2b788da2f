"""Fresh processes for trials: start, watch, end.

The one idea: the parent never trusts a child to come back. It waits for an outcome, an exit or a
deadline, whichever is first, then kills the child's whole process group. Cheap trials fork from a
server that has imported third-party libraries only (forking after an OpenMP region hangs the child,
and a preloaded flashgap would run stale code in an open notebook); `exec` trials start from nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from flashgap import child
from flashgap.context import environment, package_versions, scrub
from flashgap.treatment import ModelSpec

QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore",
}
PRELOAD = (
    "numpy",
    "psutil",
    "pydantic",
    "yaml",
    "torch",
    "safetensors.torch",
    "transformers",
    "transformers.cache_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)
SERVER_START_TIMEOUT_S = 180.0
SERVER_LOG = "server.log"
EXIT_GRACE_S = 10.0
LOG_TAIL_BYTES = 20_000


@dataclass(frozen=True)
class Ended:
    """How a child ended. `outcome` is what it sent, or a dict with `status` and `error` made for it."""

    outcome: dict[str, Any]
    wall_s: float


@dataclass
class _Running:
    process: BaseProcess
    conn: Connection
    log: Path
    outcome: dict[str, Any] | None = None


def preload_for(model: ModelSpec) -> tuple[str, ...]:
    """Third-party modules a fork server imports ahead for `model`; names that do not exist are ignored."""
    kind = _model_type(model)
    return (*PRELOAD, f"transformers.models.{kind}.modeling_{kind}") if kind else PRELOAD


def _model_type(model: ModelSpec) -> str | None:
    if model.config:
        return str(model.config.get("model_type"))
    try:
        return str(json.loads((Path(str(model.id)).expanduser() / "config.json").read_text())["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def run_children(
    worker: str,
    arguments: Sequence[tuple[Any, ...]],
    *,
    start: str,
    preload: tuple[str, ...],
    log: Path,
    timeout_s: float,
    memory_limit_bytes: int | None = None,
    devices: Sequence[str] | None = None,
    barrier_position: int | None = None,
) -> list[Ended]:
    """Run `worker` (`module:function`) once per tuple of `arguments`, all at once, and return their ends.

    `start` is `fork` or `exec`. The worker gets the first argument, a connection for its outcome, and
    the rest; `log` (numbered if several) is appended as the last. `devices[i]` becomes the i-th child's
    `CUDA_VISIBLE_DEVICES`. With `barrier_position` that argument becomes a barrier of all children. If
    one child fails the others are killed, since they would wait for it. Never raises for what a child
    does; an exception of the parent, `KeyboardInterrupt` above all, kills them before it goes on.
    """
    began_s = time.perf_counter()
    running: list[_Running] = []
    try:
        with _quiet_environment(), _hidden_main():
            context = _context(start, preload, log.with_name(SERVER_LOG))
            barrier = context.Barrier(len(arguments)) if barrier_position is not None else None
            for index, given in enumerate(arguments):
                values = list(given)
                if barrier_position is not None:
                    values[barrier_position] = barrier
                path = log if len(arguments) == 1 else log.with_name(f"{log.stem}-{index}{log.suffix}")
                variables = dict(os.environ)
                if devices is not None:
                    variables["CUDA_VISIBLE_DEVICES"] = devices[index]
                order = child.Order(worker, (*values, str(path)), variables, memory_limit_bytes)
                _start(context, order, path, running)
        _collect(running, began_s + timeout_s, timeout_s)
    except (OSError, EOFError) as error:  # the system has no process left for us, or the fork server died
        for one in running:
            _end(one)
        stop_fork_server()
        words = f"{child.one_line(error)}{_last_words(log.with_name(SERVER_LOG))}"
        failed = {"status": "failed", "error": f"could not start a process: {words}"}
        return [Ended(failed, time.perf_counter() - began_s) for _ in arguments]
    finally:
        for one in running:
            _end(one)
    wall_s = time.perf_counter() - began_s
    return [Ended(one.outcome or {"status": "failed", "error": "no outcome"}, wall_s) for one in running]


def _start(context: Any, order: child.Order, log: Path, running: list[_Running]) -> None:
    log.unlink(missing_ok=True)
    receive, send = context.Pipe(duplex=False)
    process = context.Process(
        target=child.enter, args=(order, send, str(log)), name="flashgap-trial", daemon=True
    )
    running.append(_Running(process, receive, log))  # before the start: an interrupt may come right after it
    process.start()
    send.close()  # so that the death of the child is the end of the pipe


def _collect(running: list[_Running], deadline_s: float, timeout_s: float) -> None:
    """Wait until every child has an outcome; one failure decides for all."""
    while waiting := [one for one in running if one.outcome is None]:
        ready = wait([one.conn for one in waiting], max(0.0, deadline_s - time.perf_counter()))
        for one in waiting:
            if one.conn in ready:
                one.outcome = _receive(one)
            elif not ready:
                one.outcome = {"status": "timeout", "error": f"no outcome within {timeout_s:g} s; killed"}
        bad = [one for one in running if one.outcome and one.outcome.get("status") != "ok"]
        if bad:
            reason = f"a replica beside it ended with status {bad[0].outcome.get('status')}"  # type: ignore[union-attr]
            for one in running:
                one.outcome = one.outcome or {"status": "interrupted", "error": reason}


def _receive(one: _Running) -> dict[str, Any]:
    try:
        outcome = one.conn.recv()
    except EOFError:
        return _crash(one)
    except Exception as error:  # noqa: BLE001 - an outcome that does not unpickle is a fault of the worker, not of the study
        return {"status": "failed", "error": f"sent an unreadable outcome: {child.one_line(error)}"}
    if isinstance(outcome, dict) and isinstance(outcome.get("status"), str):
        return outcome
    return {"status": "failed", "error": f"sent something that is not an outcome: {type(outcome).__name__}"}


def _crash(one: _Running) -> dict[str, Any]:
    """The outcome of a child that ended without one, from its exit code and the end of its log."""
    one.process.join(EXIT_GRACE_S)
    code, tail, last = one.process.exitcode, log_tail(one.log), _last_words(one.log)
    if child.means_out_of_memory(tail):
        return {"status": "out_of_memory", "error": f"ended without an outcome{last}"}
    if code is not None and code < 0:
        hint = " (by hand, or by the kernel for want of memory)" if code == -signal.SIGKILL else ""
        return {"status": "killed", "error": f"killed by {_signal_name(-code)}{hint}{last}"}
    return {"status": "failed", "error": f"exit code {code} without an outcome{last}"}


def _last_words(log: Path) -> str:
    lines = log_tail(log).strip().splitlines()
    return f"; last words: {scrub(lines[-1])[:200]}" if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def log_tail(log: Path) -> str:
    """The last 20 kB of `log`, empty if there is none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _end(one: _Running) -> None:
    """Let a finished child leave, kill any other, and what either started."""
    finished = one.outcome is not None and one.outcome.get("status") not in ("timeout", "interrupted")
    if finished and one.process.pid is not None:
        one.process.join(EXIT_GRACE_S)
    if one.process.pid is None:  # it was never started
        one.conn.close()
        return
    with suppress(ProcessLookupError, PermissionError):  # the whole group has left
        os.killpg(one.process.pid, signal.SIGKILL)
    if one.process.is_alive():  # it has not become a group leader yet
        one.process.kill()
    one.process.join(EXIT_GRACE_S)
    one.conn.close()


def _context(start: str, preload: tuple[str, ...], server_log: Path) -> Any:
    if start == "exec":
        return multiprocessing.get_context("spawn")
    _ready_fork_server(preload, server_log)
    return multiprocessing.get_context("forkserver")


_server: dict[str, Any] = {"signature": None}


def _ready_fork_server(preload: tuple[str, ...], log: Path) -> None:
    """Start the server, or start it anew when what it imported or inherited is out of date."""
    signature = (preload, environment(), package_versions())
    if _server["signature"] == signature:
        return
    stop_fork_server()
    forkserver.set_forkserver_preload(list(preload))
    with _output_to(log):  # libraries chatter while they are imported
        forkserver.ensure_running()
    _server["signature"] = signature


def stop_fork_server() -> None:
    """Stop the fork server if one runs; the next `fork` trial starts another."""
    _server["signature"] = None
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    try:
        server._stop()  # not public, but the standard library's own tests stop it so
    except (OSError, ChildProcessError):
        server._forkserver_pid = server._forkserver_address = server._forkserver_alive_fd = None


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Processes started meanwhile inherit `log` as their stdout and stderr."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(number, os.dup(number)) for number in (1, 2)]
    try:
        for number, _ in saved:
            os.dup2(target, number)
        yield
    finally:
        for number, copy in saved:
            os.dup2(copy, number)
            os.close(copy)
        os.close(target)


def warm_fork_server(preload: tuple[str, ...], folder: Path) -> None:
    """Wait until the fork server has finished its imports, so that no trial pays for them."""
    with _quiet_environment(), _hidden_main():
        signature = _server["signature"]
        _ready_fork_server(preload, folder / SERVER_LOG)
    if _server["signature"] != signature:
        run_children(
            "flashgap.child:nothing",
            [("",)],
            start="fork",
            preload=preload,
            log=folder / "warm.log",
            timeout_s=SERVER_START_TIMEOUT_S,
        )


@contextmanager
def _quiet_environment() -> Iterator[None]:
    """Children (and the fork server) inherit `QUIET`; this process keeps its own environment."""
    before = {name: os.environ.get(name) for name in QUIET}
    os.environ.update(QUIET)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Hide `__main__` while a process starts: the standard library would run the user's script or
    notebook again in the child to find pickled objects there, and none of ours lives there."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
