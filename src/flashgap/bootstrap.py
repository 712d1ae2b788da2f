"""Build `./.venv` from nothing, or do nothing in a few milliseconds when it is there already.

The one idea: a stamp, written last, holds a hash of everything the environment was built from. No stamp,
or another hash, means build or repair. Runs under the system's `python3` with the standard library only
and without new syntax, so that an old Python is told that it is too old instead of failing on a line.

conda, mamba or micromamba, where there is one, provides the interpreter; pip installs in either case, so
that there is one list of dependencies and one list of versions.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

OLDEST = (3, 11)
CONDA_PYTHON = "3.11"  # the version the constraints were tested with
NEEDED_GIB = 5.0
ENV_PARTS = {"bin", "conda-meta", "etc", "include", "lib", "lib64", "pyvenv.cfg", "share", "ssl", "man",
             "compiler_compat", "x86_64-conda-linux-gnu", "aarch64-conda-linux-gnu", "install.log", "stamp.json", ".gitignore"}  # fmt: skip

# What pip or conda print, and what it means for the person who waits. First match wins.
CAUSES = (
    (r"No space left on device|Errno 28|Disk quota exceeded",
     "the disk is full; free about {needed:.0f} GB at {env} (or where TMPDIR and the pip cache are) and call again"),
    (r"Read-only file system|Permission denied|Errno 13|Errno 30",
     "cannot write to {env}; make the folder writable, or clone the project where it is"),
    (r"Temporary failure in name resolution|Name or service not known|Failed to establish a new connection"
     r"|NewConnectionError|Network is unreachable|Connection refused|Max retries exceeded|ProxyError"
     r"|ConnectTimeout|ReadTimeout|timed out|NameResolutionError|CondaHTTPError|Could not resolve host"
     r"|Connection broken|after connection broken",
     "no network: the package index cannot be reached; connect (or set PIP_INDEX_URL to an index you can reach)"
     " and call again"),
    (r"MemoryError|Cannot allocate memory|Killed", "out of memory while installing; close programs and call again"),
)  # fmt: skip


class SetupError(Exception):
    """Why there is no environment, in one line."""


def main():
    # type: () -> int
    root = Path(__file__).resolve().parents[2]
    try:
        ensure(root)
    except SetupError as error:
        sys.stderr.write("error: {}\n".format(error))
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nerror: interrupted; call again to finish the environment\n")
        return 130
    except OSError as error:
        cause = explain(str(error), root / ".venv")
        sys.stderr.write("error: {}\n".format(cause or error))
        return 1
    return 0


def ensure(root):
    # type: (Path) -> None
    """Leave a complete `root/.venv`; raises `SetupError` with one line."""
    if is_current(root):
        return
    with open(str(root / "pyproject.toml")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two calls at once: the second waits, then finds it done
        if not is_current(root):
            build(root)


def is_current(root):
    # type: (Path) -> bool
    """Whether the stamp matches and the interpreter is there (a dangling link counts as gone)."""
    env = root / ".venv"
    try:
        stamp = json.loads((env / "stamp.json").read_text())
    except (OSError, ValueError):
        return False
    return stamp == {"inputs": inputs_digest(root)} and (env / "bin" / "python").exists()


def inputs_digest(root):
    # type: (Path) -> str
    """Hash of what an environment is made from; its place counts, since environments cannot be moved."""
    digest = hashlib.sha256(str(root).encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def build(root):
    # type: (Path) -> None
    env = root / ".venv"
    started = time.time()
    check_disk(env)
    if (env / "stamp.json").exists():
        (env / "stamp.json").unlink()
    if usable(env / "bin" / "python"):
        say("environment: bringing ./.venv up to date")
        drop_half_installed(env)
    else:
        clear(env)
        create(env)
    install(root, env)
    (env / "stamp.json").write_text(json.dumps({"inputs": inputs_digest(root)}))
    say("environment: ready in {:.0f} s".format(time.time() - started))


def check_disk(env):
    # type: (Path) -> None
    free_gib = shutil.disk_usage(str(env.parent)).free / 2**30
    present = env.exists()  # a repair needs less, pip says so if even that does not fit
    if free_gib < NEEDED_GIB and not present:
        raise SetupError(
            "the disk is full: the environment needs {:.0f} GB, {} has {:.1f} GB free; free some and call again"
            .format(NEEDED_GIB, env.parent, free_gib)
        )  # fmt: skip


def clear(env):
    # type: (Path) -> None
    """Remove what an interrupted call left; a folder that is not an environment is not ours to remove."""
    if not env.exists() and not env.is_symlink():
        return
    strangers = [p.name for p in env.iterdir() if p.name not in ENV_PARTS] if env.is_dir() else [env.name]
    if strangers:
        raise SetupError(
            "{} is not an environment (it holds {}); move it away and call again".format(env, strangers[0])
        )
    shutil.rmtree(str(env))


def create(env):
    # type: (Path) -> None
    """An empty environment with pip, from conda if there is one, else from a Python that is new enough."""
    conda = next((c for c in ("mamba", "conda", "micromamba") if shutil.which(c)), None)
    env.parent.mkdir(parents=True, exist_ok=True)
    if conda:
        say("environment: Python {} from {} into ./.venv".format(CONDA_PYTHON, conda))
        command = [conda, "create", "--yes", "--prefix", str(env), "--channel", "conda-forge",
                   "python=" + CONDA_PYTHON, "pip"]  # fmt: skip
        log = env.parent / ".venv-conda.log"
        code = run_quietly(command, log)
        text = log.read_text(errors="replace")
        log.unlink()
        if code == 0 and usable(env / "bin" / "python"):
            return
        if env.exists():
            shutil.rmtree(str(env))
        say("environment: {} failed ({}); using venv".format(conda, explain(text, env) or last_line(text)))
    python = find_python()
    say("environment: venv of {} into ./.venv".format(python))
    result = subprocess.run(
        [python, "-m", "venv", str(env)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if result.returncode != 0:
        text = result.stdout.decode(errors="replace")
        raise SetupError("venv failed: {}".format(explain(text, env) or last_line(text)))


def find_python():
    # type: () -> str
    """The first Python that is new enough and can make environments; `SetupError` says what was found."""
    seen = []
    names = [
        os.environ.get("PYTHON"),
        "python3.11",
        "python3.12",
        "python3.13",
        sys.executable,
        "python3",
        "python3.14",
    ]
    for name in names:
        path = shutil.which(name) if name else None
        version = version_of(path) if path else []
        if path is None or not version:
            continue
        if tuple(version[:2]) < OLDEST:
            seen.append("{} is {}.{}".format(path, *version))
        elif not version[2]:
            seen.append(
                "{} has no venv module (Debian, Ubuntu: install python{}.{}-venv)".format(path, *version)
            )
        else:
            return path
    found = "; ".join(sorted(set(seen))) or "none found"
    raise SetupError(
        "needs Python {}.{} or newer with venv, or conda ({}); install one, or name it: make env PYTHON=/path/to/python"
        .format(OLDEST[0], OLDEST[1], found)
    )  # fmt: skip


def version_of(python):
    # type: (str) -> list
    """(major, minor, can make a venv) of an interpreter, or nothing when it does not run (pyenv shims may not)."""
    code = (
        "import sys, importlib.util as u;"
        "print(sys.version_info[0], sys.version_info[1], int(all(u.find_spec(m) for m in ('venv', 'ensurepip'))))"
    )
    try:
        out = subprocess.run(
            [python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30
        )
        parts = [int(part) for part in out.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return parts if len(parts) == 3 else []


def usable(python):
    # type: (Path) -> bool
    """Whether the environment's interpreter runs, is new enough and has pip."""
    if not python.exists():
        return False
    code = "import sys, pip; sys.exit(sys.version_info[:2] < {!r})".format(OLDEST)
    try:
        done = subprocess.run(
            [str(python), "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def drop_half_installed(env):
    # type: (Path) -> None
    """pip writes INSTALLER when all files are there, but trusts a package without it: those cut off must go."""
    for info in env.glob("lib/python3*/site-packages/*.dist-info"):
        if not (info / "INSTALLER").exists():
            shutil.rmtree(str(info))


def install(root, env):
    # type: (Path, Path) -> None
    """One pip call, one resolution; the checkout itself is installed in place."""
    log = env / "install.log"
    command = [str(env / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input",
               "--progress-bar", "off", "-c", str(root / "constraints.txt"), "-e", str(root) + "[dev]"]  # fmt: skip
    code = run_quietly(command, log, cwd=root)
    if code != 0:
        text = log.read_text(errors="replace")
        cause = explain(text, env) or last_line(text)
        raise SetupError("{} (all of pip's output: {})".format(cause, log))


def run_quietly(command, log, cwd=None):
    # type: (list, Path, object) -> int
    """Run with the output in `log` and one line of progress here: rewritten on a terminal, few in a batch."""
    env = dict(os.environ)
    env.setdefault("PIP_RETRIES", "2")
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.pop("PYTHONPATH", None)
    tty = sys.stderr.isatty()
    steps = 0
    with open(str(log), "w") as sink:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env,
                                 cwd=str(cwd) if cwd else None, universal_newlines=True, errors="replace")  # fmt: skip
        assert child.stdout
        try:
            for line in child.stdout:
                sink.write(line)
                steps += line.startswith("Collecting")
                if tty or line.startswith("Installing collected"):
                    progress(line, steps, tty)
        except BaseException:
            child.terminate()
            child.wait()
            raise
        finally:
            if tty:
                sys.stderr.write("\r\033[K")
    return child.wait()


def progress(line, steps, tty):
    # type: (str, int, bool) -> None
    text = line.strip().split(" (")[0][:60]
    if line.startswith("Installing collected"):
        count = line.count(",") + 1
        text = "installing {}".format(
            "{} packages, the slow part".format(count) if count > 1 else "the project"
        )
    elif line.startswith("Collecting"):
        text = "collecting {} ({})".format(line.split()[1], steps)
    sys.stderr.write("\r\033[Kenvironment: {}".format(text) if tty else "environment: {}\n".format(text))
    sys.stderr.flush()


def explain(text, env):
    # type: (str, Path) -> str
    """The cause that `text` speaks of, as one line with its cure, or an empty string."""
    for pattern, cause in CAUSES:
        if re.search(pattern, text):
            return cause.format(env=env, needed=NEEDED_GIB)
    return ""


def last_line(text):
    # type: (str) -> str
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or [
        line for line in lines if "error" in line.lower()
    ]
    chosen = (errors or lines or ["no output"])[-1]
    return re.sub(r"^ERROR:\s*", "", chosen)


def say(text):
    # type: (str) -> None
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
