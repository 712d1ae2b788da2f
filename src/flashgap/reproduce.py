"""Execute the notebooks whose keys have changed, in order, and turn them into HTML.

The one idea: the exit code decides. A notebook is executed into a temporary file that is moved into place
only when its last cell has run; whatever else happens, a failed one lies beside it as `*.failed.ipynb` and
the error names cell, reason and file in one line. papermill runs in a thread, so that this one can show
the progress of trials and pass an interrupt on to the kernel, which then leaves its records in order.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from flashgap import context, keys
from flashgap.study import Study

STOP_S = 30.0  # what an interrupted kernel gets to end its trial before it is killed


class ReproduceError(RuntimeError):
    """A notebook that did not run to its end, in one line."""


class Interrupted(ReproduceError):
    """Stopped by the user; what is finished is kept."""


def reproduce(
    study: Study,
    replay: bool = False,
    names: list[str] | None = None,
    parameters: dict[str, Any] | None = None,
) -> Path:
    """Execute stale notebooks of `study`, measuring what is missing (never in `replay`), and render all.

    Returns the path of the merged page. Raises `ReproduceError`, `StudyError` or `RecordError`.
    """
    if not replay and study.hardware.device == "cuda":
        from flashgap.runner import require_devices

        require_devices(study)
    paths = keys.find_notebooks(names)
    given = {"profile": study.profile, **(parameters or {})}
    for path in paths:
        keys.check_parameters(path, given)
    out = keys.output_dir(study.profile, replay)
    now = context.current_context(study.model, study.checkpoints)
    force = not replay and os.environ.get("REMEASURE") == "1"
    if force:  # one start for all notebooks, or each would measure again what the one before it just did
        os.environ.setdefault("FLASHGAP_SINCE", datetime.now(UTC).isoformat(timespec="seconds"))
    with one_at_a_time(out):
        ran = [path for path in paths if bring_up_to_date(path, study, given, replay, now, force)]
        from flashgap import render

        index = render.render_all(study, out, [path.stem for path in keys.find_notebooks()])
    say(
        f"{len(ran)} of {len(paths)} notebooks run, {len(paths) - len(ran)} unchanged; report: {shown(index)}"
    )
    return index


def bring_up_to_date(
    path: Path, study: Study, parameters: dict[str, Any], replay: bool, now: dict[str, Any], force: bool
) -> bool:
    """Execute the notebook at `path` if its key changed (or `force`); whether it was executed."""
    out = keys.output_dir(study.profile, replay)
    key_file = out / "keys" / f"{path.stem}.json"
    old = keys.read_key(key_file) if (out / path.name).is_file() else None
    before = key_of(path, study, parameters, replay, now)
    reason = "asked to measure again" if force else keys.why_stale(old, before)
    if not reason:
        return False
    say(f"{path.stem}: {reason}; running")
    started = time.monotonic()
    if not replay:
        ready(study)
    execute(path, out / path.name, study, parameters, replay, now)
    # Its own records are part of a notebook's key and are there now; all else is as it was at the start, so
    # that an edit made while it ran makes the page stale.
    key = before | {"records": key_of(path, study, parameters, replay, now)["records"]}
    keys.write_if_changed(key_file, json.dumps(key, indent=1, sort_keys=True) + "\n")
    say(f"{path.stem}: done in {time.monotonic() - started:.0f} s")
    return True


def key_of(
    path: Path, study: Study, parameters: dict[str, Any], replay: bool, now: dict[str, Any]
) -> keys.Key:
    """The key of the notebook at `path` as things are."""
    return keys.notebook_key(path, study, parameters, replay, now)


def ready(study: Study) -> None:
    """Find out before a notebook starts that records cannot be kept or the model cannot be had."""
    from flashgap import models
    from flashgap.records import Store

    Store.local(study.profile).check_writable(next(iter(study.experiments)))
    if study.model.source != "random":
        models.resolve(study.model, progress=say)


def execute(
    path: Path, target: Path, study: Study, parameters: dict[str, Any], replay: bool, now: dict[str, Any]
) -> None:
    """Run the notebook at `path` into `target`; raises `ReproduceError` or `Interrupted`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    failed = target.with_name(f"{target.stem}.failed.ipynb")
    temporary = target.with_name(f".{target.stem}.running.ipynb")
    with (
        tempfile.TemporaryDirectory(prefix="flashgap-") as folder,
        environment(replay, Path(folder) / "progress"),
    ):
        error = run_papermill(path, temporary, parameters, Path(folder) / "progress")
    problem = describe_failure(path, temporary, error)
    if problem:
        if temporary.exists():
            os.replace(temporary, failed)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(
                f"interrupted in notebooks/{path.name}; finished trials are kept, call again to go on"
            )
        raise ReproduceError(problem + (f"; see {shown(failed)}" if failed.exists() else ""))
    mark(temporary, study, replay, now)
    os.replace(temporary, target)
    failed.unlink(missing_ok=True)


@contextmanager
def environment(replay: bool, progress: Path) -> Iterator[None]:
    """What the kernel is told: where progress lines go, and that replay never measures."""
    before = {name: os.environ.get(name) for name in ("FLASHGAP_PROGRESS", "FLASHGAP_REPLAY")}
    os.environ["FLASHGAP_PROGRESS"] = str(progress)
    os.environ["FLASHGAP_REPLAY"] = "1" if replay else ""
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_papermill(
    path: Path, target: Path, parameters: dict[str, Any], progress: Path
) -> BaseException | None:
    """Run papermill in a thread and show the lines of `progress`; what it raised, or None.

    The working directory is the notebook's own, as in JupyterLab and nbval.
    """
    caught: list[BaseException] = []
    ended = (
        threading.Event()
    )  # not Thread.join: an interrupt there makes a living thread count as ended (3.11)
    thread = threading.Thread(
        target=papermill_thread, args=(path, target, parameters, caught, ended), daemon=True
    )
    kill = threading.Timer(STOP_S, stop_kernels, (signal.SIGKILL,))
    kill.daemon = True
    interrupts = 0
    with sigterm_interrupts(), Tail(progress) as tail:
        thread.start()
        while not ended.is_set():
            try:
                ended.wait(0.2)
                tail.show()
            except KeyboardInterrupt:
                interrupts += 1
                stop_kernels(signal.SIGINT if interrupts == 1 else signal.SIGKILL)
                if interrupts == 1:
                    say("interrupting: the trial that runs is ended in order (again: kill it)")
                    kill.start()
    kill.cancel()
    if interrupts:
        return KeyboardInterrupt()
    return caught[0] if caught else None


def papermill_thread(
    path: Path, target: Path, parameters: dict[str, Any], caught: list[BaseException], ended: threading.Event
) -> None:
    """Execute, then set `ended`; the exception, if any, goes into `caught`."""
    try:
        import logging

        import papermill

        logging.getLogger("papermill").setLevel(logging.ERROR)
        papermill.execute_notebook(
            str(path),
            str(target),
            parameters,
            kernel_name="python3",
            progress_bar=False,
            cwd=str(path.parent),
            extra_arguments=["--IPKernelApp.log_level=ERROR"],  # its warnings about transport are noise here
        )
    except BaseException as error:  # noqa: BLE001 - a thread's exception would be lost; the caller reports it
        caught.append(error)
    finally:
        ended.set()


def stop_kernels(number: signal.Signals) -> None:
    """Signal the notebook kernels this process has started."""
    import psutil

    for child in psutil.Process().children():
        try:
            if any("ipykernel" in part for part in child.cmdline()):
                child.send_signal(number)
        except psutil.Error:
            pass  # it is gone already


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """While a notebook runs, being asked to end (SIGTERM, SIGHUP) is Ctrl-C: the trial in progress is ended in order."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class Tail:
    """Shows lines appended to a file: one line that is rewritten on a terminal, all of them in a batch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: TextIO | None = None
        self.tty = sys.stdout.isatty()

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *_: object) -> None:
        self.show()
        if self.file:
            self.file.close()
            if self.tty:
                print("\r\033[K", end="", flush=True)

    def show(self) -> None:
        """Print what has been appended since the last call."""
        if self.file is None and self.path.exists():
            self.file = self.path.open(encoding="utf-8", errors="replace")
        for line in self.file or ():
            text = line.rstrip("\n")
            print(
                f"\r\033[K  {text[:110]}" if self.tty else f"  {text}",
                end="" if self.tty else "\n",
                flush=True,
            )


def describe_failure(path: Path, executed: Path, error: BaseException | None) -> str:
    """One line on why the notebook did not run to its end; empty if it did.

    A dead kernel can leave a file that says "completed", so every code cell must have run.
    """
    name = f"notebooks/{path.name}"
    if error is not None and hasattr(error, "ename"):  # papermill's report of a cell that raised
        what = plain(f"{error.ename}: {getattr(error, 'evalue', '')}")
        return f"{name}: cell {getattr(error, 'cell_index', '?')}: {what}"
    if error is not None:
        return f"{name}: {type(error).__name__}: {plain(str(error))}"
    if not executed.is_file():
        return f"{name}: papermill wrote no notebook"
    code = [
        c
        for c in keys.read_notebook(executed)["cells"]
        if c["cell_type"] == "code" and keys.source(c).strip()
    ]
    skipped = sum(cell.get("execution_count") is None for cell in code)
    return f"{name}: the kernel died: {skipped} of {len(code)} code cells did not run" if skipped else ""


def mark(path: Path, study: Study, replay: bool, now: dict[str, Any]) -> None:
    """Write into the executed notebook what its page says about itself, and drop this machine's folders."""
    notebook = keys.read_notebook(path)
    notebook["metadata"].pop("papermill", None)
    notebook["metadata"]["flashgap"] = {
        "profile": study.profile,
        "replay": replay,
        "random_weights": study.model.source == "random",
        "executed_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_words(now["fingerprint"]),
        "measured_on": measurers(study, replay),
    }
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            scrub_output(output)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def scrub_output(output: dict[str, Any]) -> None:
    """Take this machine's folders out of an output's texts (a library's warning may name one); not out of pictures."""
    data = output.get("data", {})
    for holder, key in ((output, "text"), (data, "text/plain"), (data, "text/html"), (data, "text/markdown")):
        text = holder.get(key)
        if text:
            holder[key] = context.scrub(text if isinstance(text, str) else "".join(text))


def measurers(study: Study, replay: bool) -> list[str]:
    """The machines that measured the records of `study`, in words."""
    headers = sorted(keys.store(study.profile, replay).root.glob("*/[!.]*.json"))
    found = set()
    for path in headers:
        try:
            stored = json.loads(path.read_text())["provenance"].get("fingerprint") or {}
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            continue  # a corrupt record: the notebook has named it
        found.add(machine_words(stored))
    return sorted(found)


def machine_words(fingerprint: dict[str, Any]) -> str:
    """A fingerprint as a person would name the machine."""
    if "override" in fingerprint:
        return str(fingerprint["override"])
    gpus = [str(gpu).split(",")[0] for gpu in fingerprint.get("gpus") or []]
    cpu = fingerprint.get("cpu") or "unknown processor"
    parts = [str(cpu)]
    parts += [f"{fingerprint['cores']} cores"] if fingerprint.get("cores") else []
    parts += [f"{fingerprint['memory_gib']} GiB"] if fingerprint.get("memory_gib") else []
    parts += [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return ", ".join(parts)


@contextmanager
def one_at_a_time(out: Path) -> Iterator[None]:
    """Refuse a second run into the same folder; the lock goes with the process, however it ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("a")
    except OSError as error:
        raise ReproduceError(f"cannot write to {shown(out)} ({error.strerror}); make it writable") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ReproduceError(f"another run writes to {shown(out)}; wait for it to end") from None
        yield


def plain(text: str) -> str:
    """`text` as one short line without colours."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    return lines[0][:500] if lines else "no message"


def shown(path: Path) -> str:
    """`path` for a person: relative to the working directory where it lies inside."""
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd().resolve()) else str(path)


def say(text: str) -> None:
    """One line to the console, at once."""
    print(text, flush=True)
