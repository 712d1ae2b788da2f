"""The three files that make the environment agree, and the bootstrap says what is wrong in one line."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[1]
USER_NAMED = {"jupyterlab", "papermill", "torch", "transformers", "autoawq", "matplotlib", "seaborn", "nbval"}
# Pinned by torch itself, differently for each of its variants.
LEFT_TO_TORCH = ("triton", "nvidia-", "cuda-")


def load_bootstrap():
    """bootstrap.py as a module, from its file, as the system's python3 runs it."""
    spec = importlib.util.spec_from_file_location(
        "bootstrap", REPOSITORY / "src" / "flashgap" / "bootstrap.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bootstrap = load_bootstrap()


def project() -> dict:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    """constraints.txt as canonical name -> version."""
    lines = [line.strip() for line in (REPOSITORY / "constraints.txt").read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs)
    return {canonicalize_name(name): version for name, version in pairs}


def required() -> list[Requirement]:
    extras = project()["optional-dependencies"]
    return [Requirement(text) for text in [*project()["dependencies"], *extras["dev"]]]


# ---------------------------------------------------------------------- the three files


def test_the_packages_the_user_named_are_in():
    """If this fails, the environment lacks a package that was asked for by name."""
    assert {Requirement(text).name for text in project()["dependencies"]} >= USER_NAMED


def test_dependencies_stand_once():
    """If this fails, the same package is listed twice or versions are kept in two places."""
    names = [canonicalize_name(requirement.name) for requirement in required()]
    assert len(names) == len(set(names))
    assert [str(requirement.specifier) for requirement in required()] == [""] * len(names)


def test_every_dependency_is_pinned():
    """If this fails, something is installed in a version nobody tested."""
    assert {canonicalize_name(requirement.name) for requirement in required()} <= pins().keys()


def test_pins_are_complete_and_without_strangers():
    """If this fails, a dependency of a dependency floats, or a pin is left over."""
    queue, seen = required(), set()
    while queue:
        requirement = queue.pop()
        key = (canonicalize_name(requirement.name), *sorted(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            further = importlib.metadata.requires(requirement.name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # not in this environment (another platform, or the caller's own one)
        for text in further:
            inner = Requirement(text)
            extras = ("", *requirement.extras)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                queue.append(inner)
    reached = {name for name, *_ in seen if not name.startswith(LEFT_TO_TORCH)}
    assert reached <= pins().keys()
    if sys.version_info[:2] == (3, 11) and sys.platform == "linux":  # markers differ elsewhere
        assert reached == pins().keys()


def test_pins_have_no_local_variant():
    """If this fails, `torch==x+cpu` cannot be installed where only the CUDA variant is offered."""
    assert not [version for version in pins().values() if "+" in version]
    assert not [name for name in pins() if name.startswith(LEFT_TO_TORCH)]


def test_conda_front_door_uses_the_other_two():
    """If this fails, conda users get another environment than pip users."""
    data = yaml.safe_load((REPOSITORY / "environment.yml").read_text())
    python, pip, pip_section = data["dependencies"]
    assert python == f"python={bootstrap.CONDA_PYTHON}"
    assert pip == "pip"
    assert pip_section == {"pip": ["-c constraints.txt", "-e .[dev]"]}
    assert project()["requires-python"] == ">=" + ".".join(map(str, bootstrap.OLDEST))


# ---------------------------------------------------------------------- the bootstrap


@pytest.fixture
def checkout(tmp_path):
    """A checkout with what the bootstrap reads."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    (tmp_path / "src" / "flashgap").mkdir(parents=True)
    shutil.copy(REPOSITORY / "src" / "flashgap" / "bootstrap.py", tmp_path / "src" / "flashgap")
    return tmp_path


def call(checkout: Path, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(checkout / "src" / "flashgap" / "bootstrap.py")]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


def fake(folder: Path, name: str, script: str) -> Path:
    """An executable shell script `name` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def fake_environment(checkout: Path, pip: str) -> Path:
    """A `.venv` whose interpreter accepts every question and runs `pip` for every `-m pip`."""
    return fake(checkout / ".venv" / "bin", "python", f'[ "$1" = -m ] || exit 0\n{pip}')


def error_of(done: subprocess.CompletedProcess) -> str:
    """The one `error:` line of a failed call, which must be the last and the only one."""
    lines = done.stderr.splitlines()
    assert done.returncode != 0
    assert [line.startswith("error: ") for line in lines].count(True) == 1
    assert lines[-1].startswith("error: ")
    assert "Traceback" not in done.stderr
    return lines[-1]


def test_second_call_does_nothing(checkout):
    """If this fails, every `make` pays for pip."""
    fake_environment(checkout, f"echo called >> {checkout}/calls; echo Successfully installed")
    assert call(checkout).returncode == 0
    second = call(checkout)
    assert second.returncode == 0
    assert second.stderr == second.stdout == ""
    assert (checkout / "calls").read_text() == "called\n"


def test_changed_pins_and_interrupted_builds_are_taken_up(checkout):
    """If this fails, an environment stays as it was although its definition changed, or stays half built."""
    fake_environment(checkout, f"echo called >> {checkout}/calls")
    assert call(checkout).returncode == 0
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert call(checkout).returncode == 0
    (checkout / ".venv" / "stamp.json").unlink()
    cut_off = checkout / ".venv" / "lib" / "python3.11" / "site-packages" / "torch-1.dist-info"
    cut_off.mkdir(parents=True)
    assert call(checkout).returncode == 0
    assert (checkout / "calls").read_text() == "called\n" * 3
    assert not cut_off.exists(), "pip would believe that torch is whole"


@pytest.mark.parametrize(
    ("pip_says", "expected"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "disk is full",
        ),
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError(...)'\n"
            "ERROR: Could not find a version that satisfies the requirement torch",
            "no network",
        ),
        ("ERROR: Could not find a version that satisfies the requirement torch==9", "torch==9"),
        ("ERROR: [Errno 13] Permission denied: 'x'", "make the folder writable"),
    ],
)
def test_pip_failures_are_one_line(checkout, pip_says, expected):
    """If this fails, a person gets pages of pip output, or a failed install counts as done."""
    fake_environment(checkout, f"cat <<'END'\n{pip_says}\nEND\nexit 1")
    assert expected in error_of(call(checkout))
    assert not (checkout / ".venv" / "stamp.json").exists()


def test_old_python_is_named(checkout, tmp_path):
    """If this fails, a machine with an old Python gets a syntax error or a silent nothing."""
    path = tmp_path / "path"
    for name in ("python3", "python3.11"):
        fake(path, name, "echo 3 9 1")
    done = run_with_only(path, checkout, "import sys; sys.executable = ''")
    assert "needs Python 3.11 or newer" in error_of(done)
    assert "is 3.9" in error_of(done)


def test_missing_venv_module_is_named(checkout, tmp_path):
    """If this fails, Debian users see ensurepip's traceback."""
    path = tmp_path / "path"
    fake(path, "python3.12", "echo 3 12 0")
    done = run_with_only(path, checkout, "import sys; sys.executable = ''")
    assert "install python3.12-venv" in error_of(done)


def run_with_only(path: Path, checkout: Path, prelude: str) -> subprocess.CompletedProcess:
    """The bootstrap with only the programs in `path`."""
    script = checkout / "src" / "flashgap" / "bootstrap.py"
    code = f"{prelude}; import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": str(path)}, timeout=60
    )


def test_conda_that_fails_is_said_and_venv_used(checkout, tmp_path):
    """If this fails, a conda without a network blocks a machine whose Python would do."""
    path = tmp_path / "path"
    fake(path, "conda", "echo CondaHTTPError: HTTP 000 CONNECTION FAILED; exit 1")
    fake(path, "python3.11", "[ \"$1\" = -m ] && { echo 'venv: nothing works'; exit 1; }; echo 3 11 1")
    done = run_with_only(f"{path}:/usr/bin:/bin", checkout, "pass")
    assert "conda failed (no network" in done.stderr
    assert "nothing works" in error_of(done)


def test_disk_is_looked_at_first(checkout, monkeypatch):
    """If this fails, half an hour of download ends on a full disk."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 2**30))
    with pytest.raises(bootstrap.SetupError, match=r"disk is full: the environment needs 5 GB"):
        bootstrap.ensure(checkout)


def test_a_stranger_is_not_removed(checkout):
    """If this fails, the bootstrap deletes a folder that it did not make."""
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "thesis.doc").write_text("mine")
    assert "thesis.doc" in error_of(call(checkout))
    assert (checkout / ".venv" / "thesis.doc").exists()


def test_bootstrap_has_no_new_syntax():
    """If this fails, an old Python reports a syntax error instead of its age."""
    import ast

    tree = ast.parse((REPOSITORY / "src" / "flashgap" / "bootstrap.py").read_text(), feature_version=(3, 6))
    modules = {n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names}
    assert modules <= sys.stdlib_module_names


def test_license_is_the_whole_text():
    """If this fails, the licence is a stub."""
    text = (REPOSITORY / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
