"""The command line: what is stale, what runs, and that every bad end is one line and an exit code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from flashgap import context, keys
from flashgap.__main__ import main
from flashgap.plan import describe
from flashgap.study import Study, StudyError

REPOSITORY = Path(__file__).resolve().parents[1]
LOAD = "from flashgap.study import Study\nstudy = Study.load(profile)\nprint(study.profile)"


def write_notebook(
    path: Path, *cells: str, parameters: str | None = 'profile = "auto"', prose: str = "# A page"
) -> None:
    """A notebook with a title, an optional parameters cell and `cells`."""
    made = [v4.new_markdown_cell(prose, id="title")]
    if parameters is not None:
        made.append(v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}, id="parameters"))
    made += [v4.new_code_cell(cell, id=f"c{index}") for index, cell in enumerate(cells)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(v4.new_notebook(cells=made, metadata=kernel), path)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout with the real parameter files and one throwaway notebook; records go elsewhere."""
    (tmp_path / "notebooks").mkdir()
    shutil.copytree(REPOSITORY / "params", tmp_path / "params")
    shutil.copy(REPOSITORY / "constraints.txt", tmp_path)
    write_notebook(tmp_path / "notebooks" / "00_first.ipynb", LOAD)
    for name in (
        "LONG",
        "REMEASURE",
        "FLASHGAP_SINCE",
        "FLASHGAP_REPLAY",
        "FLASHGAP_TRACEBACK",
        "FLASHGAP_PROFILE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLASHGAP_ROOT", str(tmp_path))
    monkeypatch.setenv("FLASHGAP_RESULTS", str(tmp_path / "records"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "src"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reproduce(*options: str) -> int:
    return main(["reproduce", "--profile", "smoke", *options])


def only_error(capsys) -> str:
    """What stderr holds, which must be a single `error:` line."""
    text = capsys.readouterr().err
    assert text.startswith("error: "), text
    assert text.count("\n") == 1, text
    return text


def test_runs_once_and_then_only_what_changed(root, capsys):
    """If this fails, an unchanged study is run again, or a changed page is not."""
    write_notebook(root / "notebooks" / "01_second.ipynb", LOAD, "1 + 1")
    out = root / "figures" / "local" / "smoke"
    assert reproduce() == 0
    first = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert {"00_first.ipynb", "00_first.html", "01_second.html", "index.html"} <= first.keys()

    for path in [*(root / "notebooks").iterdir(), *(root / "params").iterdir()]:
        path.touch()
    capsys.readouterr()
    assert reproduce() == 0
    assert "0 of 2 notebooks run" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == first

    write_notebook(root / "notebooks" / "01_second.ipynb", LOAD, "1 + 1", prose="# Another title")
    assert reproduce() == 0
    text = capsys.readouterr().out
    assert "01_second: its text changed" in text
    assert "1 of 2 notebooks run" in text
    assert (out / "00_first.ipynb").read_bytes() == first["00_first.ipynb"]
    assert "Another title" in (out / "index.html").read_text()


def test_unchanged_run_is_cheap(root):
    """If this fails, `make reproduce` with nothing to do pays seconds of imports."""
    assert reproduce() == 0
    code = (
        "import sys; from flashgap.__main__ import main; main(['reproduce', '--profile', 'smoke']);"
        "print([m for m in ('torch', 'transformers', 'papermill', 'nbconvert', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "0 of 1 notebooks run" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_failed_cell_decides_the_exit_code(root, capsys):
    """If this fails, a broken notebook passes or takes the last good page with it."""
    assert reproduce() == 0
    target = root / "figures" / "local" / "smoke" / "00_first.ipynb"
    good = target.read_bytes()
    write_notebook(root / "notebooks" / "00_first.ipynb", LOAD, "raise ValueError('wrong\\nsecond line')")
    capsys.readouterr()
    assert reproduce() == 1
    line = only_error(capsys)
    assert "00_first.ipynb: cell" in line
    assert "ValueError: wrong" in line
    assert target.with_name("00_first.failed.ipynb").exists()
    assert target.read_bytes() == good
    assert reproduce() == 1, "a failed notebook stays stale"


def test_a_dead_kernel_is_a_failure(root, capsys):
    """If this fails, a kernel that was killed leaves a page that looks complete."""
    write_notebook(root / "notebooks" / "00_first.ipynb", LOAD, "import os\nos._exit(1)", "1 + 1")
    assert reproduce() == 1
    assert "00_first.ipynb" in only_error(capsys)
    assert not (root / "figures" / "local" / "smoke" / "00_first.ipynb").exists()


def test_progress_of_trials_is_shown(root, capsys):
    """If this fails, a person sees nothing for minutes."""
    cell = "import os\nwith open(os.environ['FLASHGAP_PROGRESS'], 'a') as f:\n    f.write('[1/2] noise block 1 ok\\n')"
    write_notebook(root / "notebooks" / "00_first.ipynb", LOAD, cell)
    assert reproduce() == 0
    assert "  [1/2] noise block 1 ok\n" in capsys.readouterr().out


def test_replay_tells_the_kernel_and_writes_elsewhere(root):
    """If this fails, a replay may measure, or overwrite a local run."""
    cell = "import os\nassert os.environ['FLASHGAP_REPLAY'] == '1'"
    write_notebook(root / "notebooks" / "00_first.ipynb", LOAD, cell)
    assert main(["render", "--profile", "smoke", "--replay"]) == 0
    assert "Replayed" in (root / "figures" / "smoke" / "index.html").read_text()
    assert not (root / "figures" / "local").exists()
    assert "FLASHGAP_REPLAY" not in os.environ


def test_interrupt_reaches_the_kernel(root):
    """If this fails, Ctrl-C leaves a kernel running or a traceback on the screen."""
    cell = (
        "import os, time, pathlib\n"
        f"pathlib.Path({str(root / 'pid')!r}).write_text(str(os.getpid()))\n"
        "try:\n    time.sleep(60)\n"
        f"except KeyboardInterrupt:\n    pathlib.Path({str(root / 'tidy')!r}).touch()\n    raise"
    )
    write_notebook(root / "notebooks" / "00_first.ipynb", LOAD, cell)
    command = [sys.executable, "-m", "flashgap", "reproduce", "--profile", "smoke"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pid = wait_for(root / "pid")
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    last = errors.splitlines()[-1]  # ipykernel says before it that it was interrupted
    assert last.startswith("error: interrupted in notebooks/00_first.ipynb; finished trials are kept")
    assert "Traceback" not in errors
    assert (root / "tidy").exists()
    assert not Path(f"/proc/{pid}").exists()


def wait_for(path: Path) -> str:
    """The text of `path` once it has some."""
    for _ in range(600):
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.1)
    raise AssertionError(f"{path} never came")


def test_parameters_are_checked_before_anything_runs(root, capsys):
    """If this fails, papermill runs a notebook with defaults after a mere warning."""
    assert reproduce("--param", "profil=smoke") == 2
    assert "unknown parameter 'profil'; it declares ['profile']" in only_error(capsys)
    assert reproduce("--param", "nonsense") == 2
    only_error(capsys)
    write_notebook(root / "notebooks" / "00_first.ipynb", LOAD, parameters=None)
    assert reproduce() == 2
    assert "0 cells tagged 'parameters'" in only_error(capsys)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ("sampling: {min_blocs: 2}", "min_blocs"),
        ("workload: {repeats: '1e-5'}", "1e-5"),
        ("[", "not valid YAML"),
    ],
)
def test_bad_parameter_files_are_one_line(root, capsys, edit, expected):
    """If this fails, a misspelt key ends in a traceback or is ignored."""
    (root / "params" / "bad.yaml").write_text(f"base: smoke\nexperiments:\n  noise:\n    {edit}\n")
    for command in ("plan", "reproduce", "render", "publish"):
        assert main([command, "--profile", "bad"]) == 2
        line = only_error(capsys)
        assert expected in line
        assert "bad.yaml" in line


def test_unknown_profile_and_notebook(root, capsys):
    """If this fails, a typing error is answered with a traceback."""
    assert main(["plan", "--profile", "cqu"]) == 2
    assert "unknown profile 'cqu'" in only_error(capsys)
    assert reproduce("--notebook", "77") == 2
    assert "00_first" in only_error(capsys)
    assert main(["render", "--profile", "smoke"]) == 2
    assert "nothing to render" in only_error(capsys)


def test_results_that_cannot_be_written(root, capsys, monkeypatch):
    """If this fails, minutes of measurement are lost at the first write."""
    (root / "file").write_text("")
    monkeypatch.setenv("FLASHGAP_RESULTS", str(root / "file"))
    assert reproduce() == 2
    assert "cannot write records" in only_error(capsys)


def test_figures_that_cannot_be_written(root, capsys):
    """If this fails, a folder in the way is a traceback."""
    (root / "figures").write_text("")
    assert reproduce() == 1
    assert "cannot write to figures" in only_error(capsys)


def test_a_fault_of_ours_is_one_line_too(root, capsys, monkeypatch):
    """If this fails, an unforeseen error prints a traceback although nobody asked for one."""
    monkeypatch.setattr(Study, "load", lambda *_: 1 / 0)
    assert main(["plan"]) == 1
    assert "ZeroDivisionError" in only_error(capsys)
    monkeypatch.setenv("FLASHGAP_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["plan"])


def smoke_key(root: Path, path: Path) -> keys.Key:
    study = Study.load("smoke")
    return keys.notebook_key(path, study, {"profile": "smoke"}, False, context.current_context(study.model))


def test_key_depends_on_content_only(root, monkeypatch):
    """If this fails, a page goes stale for nothing or stays when it should not."""
    path = root / "notebooks" / "00_first.ipynb"
    cell = 'from flashgap import runner\nresult = runner.measure(study, "long")'
    write_notebook(path, LOAD, cell)
    before = smoke_key(root, path)

    params = root / "params" / "smoke.yaml"
    params.write_text("# a comment\n" + params.read_text())
    executed = json.loads(path.read_text())
    executed["cells"][-1] |= {"execution_count": 7, "outputs": []}
    path.write_text(json.dumps(executed))
    assert keys.why_stale(before, smoke_key(root, path)) == ""

    monkeypatch.setenv("LONG", "1")
    assert keys.why_stale(before, smoke_key(root, path)) == "LONG changed"
    monkeypatch.delenv("LONG")
    (root / "records" / "smoke" / "long").mkdir(parents=True)
    (root / "records" / "smoke" / "long" / "b.json").write_text("{}")
    assert keys.why_stale(before, smoke_key(root, path)) == "records of 'long' changed"
    (root / "records" / "smoke" / "noise").mkdir()
    (root / "records" / "smoke" / "noise" / "b.json").write_text("{}")
    assert "noise" not in keys.why_stale(before, smoke_key(root, path)), (
        "an experiment the page does not show"
    )
    (root / "constraints.txt").write_text("torch==1.0\n")
    assert "constraints.txt changed" in keys.why_stale(before, smoke_key(root, path))


def test_key_reaches_the_code_that_measures(root):
    """If this fails, an edit to the engine leaves old pages, since trials are started by module name."""
    write_notebook(root / "notebooks" / "00_first.ipynb", "from flashgap import runner")
    trees = keys.code_trees(keys.read_notebook(root / "notebooks" / "00_first.ipynb"))
    modules = keys.reachable_modules(trees)
    assert {"flashgap.runner", "flashgap.worker", "flashgap.engine", "flashgap.study"} <= set(modules)
    assert "flashgap.render" not in keys.reachable_modules(
        keys.code_trees({"cells": [code("import flashgap.cost")]})
    )


def code(text: str) -> dict:
    return {"cell_type": "code", "source": text, "metadata": {}}


def test_notebook_that_is_no_notebook(root):
    """If this fails, a merge conflict in a notebook is a traceback."""
    path = root / "notebooks" / "00_first.ipynb"
    path.write_text("<<<<<<< HEAD")
    with pytest.raises(StudyError, match="not a notebook"):
        keys.read_notebook(path)


def test_plan_names_every_cost(root, monkeypatch):
    """If this fails, a person starts a study without knowing what it takes."""
    study = Study.load("smoke")
    text = describe(study, ["noise", "long"])
    assert "| noise | 0 of 6 | 18 |" in text
    assert "opt-in: only with LONG=1" in text
    assert text.splitlines()[-1].startswith("18 trials, about ")
    for word in ("min", "disk", "memory"):
        assert word in text.splitlines()[-1]
    monkeypatch.setenv("LONG", "1")
    assert describe(study, ["noise", "long"]).splitlines()[-1].startswith("20 trials")


@pytest.mark.parametrize("profile", ["smoke", "cpu", "h200", "a100x8"])
def test_every_profile_can_be_planned(root, profile):
    """If this fails, a parameter file of the project is broken or its cost unknown."""
    study = Study.load(profile)
    assert "trials, about" in describe(study, list(study.experiments))
