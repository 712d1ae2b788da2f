"""Under what conditions something was measured, and whether they still hold.

The one idea: a record is found by *what* was measured and trusted by *how*. The context of a record is
the machine, the library versions, the environment variables that change speed, and a digest of the
parsed source of every module that took part, so an edit to a comment does not cost a measurement and
an edit to code cannot go unnoticed. No torch here, and no absolute path leaves this module.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from flashgap import hardware
from flashgap.study import Study, project_root
from flashgap.treatment import Checkpoint, ModelSpec

PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "tokenizers",
    "pandas",
    "pyarrow",
    "scipy",
    "pydantic",
    "autoawq",
    "llmcompressor",
    "compressed-tensors",
    "hqq",
)
MATTER = ("python", "torch", "transformers", "numpy", "safetensors")  # another version may change a time
ENVIRONMENT = (
    "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY", "KMP_AFFINITY",
    "KMP_BLOCKTIME", "MKL_NUM_THREADS", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY",
    "MALLOC_ARENA_MAX", "MALLOC_CONF", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_",
    "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "OMP_DYNAMIC", "MKL_DYNAMIC", "LD_PRELOAD", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_LAUNCH_BLOCKING", "TORCH_COMPILE_DISABLE", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip

# Not on the measured path: a specification shows its own change in its key, the rest only organises.
NOT_MEASURED = {
    "flashgap", "flashgap.context", "flashgap.study", "flashgap.treatment", "flashgap.records",
    "flashgap.results", "flashgap.outcomes", "flashgap.survey", "flashgap.processes", "flashgap.progress", "flashgap.lock",
    "flashgap.runner", "flashgap.builds",
}  # fmt: skip


def module_digests(names: Iterable[str]) -> dict[str, str]:
    """Module name -> 16 hex digits of the SHA-256 of its parsed source without docstrings.

    Comments, docstrings and formatting do not change it. A module that is gone has digest `missing`.
    """
    return {name: _module_digest(name) for name in sorted(set(names))}


def _module_digest(name: str) -> str:
    base = Path(__file__).resolve().parent.parent.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            stat = path.stat()
            return _file_digest(path, stat.st_mtime_ns, stat.st_size)
    return "missing"


@lru_cache(maxsize=256)
def _file_digest(path: Path, mtime_ns: int, size: int) -> str:
    return source_digest(path.read_text(encoding="utf-8"))


def source_digest(source: str) -> str:
    """16 hex digits of the SHA-256 of the syntax tree of `source`; of the text if it does not parse."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return hashlib.sha256(source.encode()).hexdigest()[:16]
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:  # type: ignore[arg-type]
            node.body = node.body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def measured_modules() -> list[str]:
    """Names of the flashgap modules loaded in this process that can change a measurement."""
    loaded = (name for name in list(sys.modules) if name == "flashgap" or name.startswith("flashgap."))
    return sorted(name for name in loaded if name not in NOT_MEASURED)


def reachable_modules(name: str) -> list[str]:
    """Flashgap modules that `name` imports, itself included, read from source: for a trial that died
    before it could say what it had loaded."""
    found: set[str] = set()
    queue = [name]
    while queue:
        current = queue.pop()
        path = Path(__file__).resolve().parent.parent.joinpath(*current.split(".")).with_suffix(".py")
        if current in found or not path.is_file():
            continue
        found.add(current)
        queue += _imports(path)
    return sorted(found - NOT_MEASURED)


def _imports(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError:
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.startswith("flashgap.")]


def package_versions() -> dict[str, str]:
    """Package -> installed version, read from metadata without importing; `python` is the full version."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


def environment() -> dict[str, str]:
    """The environment variables that are set and change speed; of a path only the file's name."""
    return {name: os.path.basename(os.environ[name]) for name in ENVIRONMENT if os.environ.get(name)}


def current_context(model: ModelSpec | None = None, checkpoints: Iterable[Checkpoint] = ()) -> dict[str, Any]:
    """What `same_context` compares: machine, versions, environment, usable cores, files of model and checkpoints."""
    return {
        "fingerprint": hardware.fingerprint(),
        "versions": package_versions(),
        "environment": environment(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "model_files": files_digest(model, checkpoints),
    }


def files_digest(model: ModelSpec | None, checkpoints: Iterable[Checkpoint]) -> str | None:
    """Digest of all local folders that weights come from; that of the model alone where there are no others."""
    own = model_files_digest(model) if model else None
    others = [local_digest(checkpoint.id) for checkpoint in checkpoints if checkpoint.source == "folder"]
    return "+".join(map(str, [own, *others])) if others else own


def model_files_digest(model: ModelSpec) -> str | None:
    """Digest of a local model folder's weights and configuration; None for other sources."""
    return local_digest(str(model.id)) if model.source == "folder" else None


def local_digest(path: str) -> str | None:
    """Digest of the weights and configuration in a local folder, or of a GGUF file; None where a file is unreadable
    (loading names it).

    The same from every working directory, and by content: a touched file is the same file. File hashes are
    cached by path, size and time, so asking before every experiment is cheap.
    """
    from flashgap.model_files import ModelError, file_digest, folder_digest

    place = project_root() / Path(path).expanduser()
    files = [place] if place.suffix == ".gguf" else sorted(place.glob("*.gguf"))
    try:
        if files and not (place / "config.json").is_file():
            return hashlib.sha256("\n".join(map(file_digest, files)).encode()).hexdigest()[:16]
        return folder_digest(place)[:16] if place.is_dir() else None
    except (ModelError, OSError):
        return None


def provenance(study: Study) -> dict[str, Any]:
    """Where a block comes from: context, commit, parameters, machine state and UTC start."""
    return {
        **current_context(study.model, study.checkpoints),
        **git_state(),
        "profile": study.profile,
        "params_digest": study.digest[:16],
        "machine_state": hardware.machine_state(),
        "boot": boot_digest(),
        "clock_s": clock_cost_s(),
        "started_utc": utc_now(),
    }


def clock_cost_s() -> float:
    """Seconds one reading of our clock takes: the least of several rounds, about a millisecond in all."""
    rounds = timeit.repeat("clock()", "from time import perf_counter as clock", number=5_000, repeat=5)
    return min(rounds) / 5_000


def utc_now() -> str:
    """Now, in UTC, ISO 8601 to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def boot_digest() -> str:
    """Names this boot of the machine without identifying the machine; `unknown` where there is none."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return "unknown"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def git_state() -> dict[str, Any]:
    """`commit` and whether tracked files differ from it (`dirty`); None where there is no repository."""
    commit = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(project_root()), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def same_context(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Why `stored` (with its `modules`: name -> digest) is not the context `now`; empty if it is."""
    reasons = _differences("machine", stored.get("fingerprint") or {}, now["fingerprint"])
    reasons += _differences("", _matter(stored.get("versions") or {}), _matter(now["versions"]))
    reasons += _differences("environment", stored.get("environment") or {}, now["environment"])
    for key in ("usable_cores", "model_files"):
        reasons += _differences("", {key: stored.get(key)}, {key: now.get(key)})
    modules = stored.get("modules") or {}
    present = module_digests(modules)
    return reasons + [f"{name} was edited" for name in sorted(modules) if modules[name] != present[name]]


def _matter(versions: dict[str, str]) -> dict[str, str]:
    out = {name: versions.get(name, "absent") for name in MATTER}
    out["python"] = ".".join(out["python"].split(".")[:2])
    return out


def _differences(label: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    keys = sorted(key for key in old.keys() | new.keys() if _plain(old.get(key)) != _plain(new.get(key)))
    return [f"{label} {key}: {old.get(key)} -> {new.get(key)}".strip() for key in keys]


def _plain(value: Any) -> Any:
    """`value` as JSON would give it back: tuples are lists."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def scrub(text: str) -> str:
    """`text` without this machine's folders, so that it may be committed."""
    known = {
        str(project_root()): ".",
        tempfile.gettempdir(): "<tmp>",
        sys.prefix: "<env>",
        str(Path.home()): "~",
    }
    for folder in sorted(known, key=len, reverse=True):
        if len(folder) > 1:
            text = text.replace(folder, known[folder])
    return text
