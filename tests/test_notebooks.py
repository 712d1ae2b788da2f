"""The notebooks follow the template, and the linter that says so catches each way not to."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from flashgap import findings, keys, notebook
from flashgap.results import Result
from flashgap.stats import Estimate

GOOD_CELLS = [
    ("markdown", "# 09 Title\n\n**Question.** Why?\n\n**What we expect, and why.** This."),
    ("code", 'profile = "auto"\nrepeats = 3', "parameters"),
    (
        "code",
        "from flashgap import figures, runner\nfrom flashgap.study import Study\n\nstudy = Study.load(profile)",
    ),
    ("markdown", "## Measure or load"),
    ("code", 'result = runner.measure(study, "latency")'),
    ("markdown", "## Checks"),
    ("code", "print(1 + 1)", "nbval-check-output"),
    ("markdown", "## Figure"),
    ("code", 'figures.save(figures.latency(result), "09_latency", study)'),
    ("markdown", "## Findings"),
    ("code", "result.stop_reason"),
    ("markdown", "## Provenance"),
    ("code", "result.provenance_frame()"),
]


def cell(kind: str, source: str, *tags: str) -> dict[str, Any]:
    made: dict[str, Any] = {
        "cell_type": kind,
        "source": source,
        "metadata": {"tags": list(tags)} if tags else {},
    }
    if kind == "code":
        compared = "nbval-check-output" in tags
        made["execution_count"] = 1 if compared else None
        made["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "2\n"}] if compared else []
    return made


def good() -> dict[str, Any]:
    cells = [cell(*parts) | {"id": f"c{i}"} for i, parts in enumerate(GOOD_CELLS)]
    return {
        "cells": cells,
        "metadata": {"kernelspec": {"name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def lint(tmp_path: Path, data: dict[str, Any]) -> list[str]:
    path = tmp_path / "09_title.ipynb"
    path.write_text(json.dumps(data))
    return notebook.lint(path)


def test_a_good_notebook_passes(tmp_path: Path) -> None:
    assert lint(tmp_path, good()) == []


@pytest.mark.parametrize("path", keys.find_notebooks(), ids=lambda path: path.stem)
def test_the_projects_notebooks_pass(path: Path) -> None:
    assert notebook.lint(path) == []


def put(index: int, **changes: Any) -> Any:
    return lambda nb: nb["cells"][index].update(changes)


def code(source: str) -> Any:
    """The cell under Findings replaced."""
    return put(10, source=source)


BROKEN = {
    "two parameters cells": (
        lambda nb: nb["cells"][2]["metadata"].update(tags=["parameters"]),
        "2 cells are tagged",
    ),
    "no parameters cell": (lambda nb: nb["cells"][1].update(metadata={}), "0 cells are tagged"),
    "fixed profile": (put(1, source='profile = "cpu"'), 'must be profile = "auto"'),
    "computed parameter": (
        put(1, source='profile = "auto"\nn = len("abc")'),
        "line 2 is not 'name = literal'",
    ),
    "import among parameters": (put(1, source='import os\nprofile = "auto"'), "line 1 is not"),
    "stray output": (
        put(4, outputs=[{"output_type": "stream", "name": "stdout", "text": "x"}]),
        "keeps an output; clear it",
    ),
    "stray execution count": (put(4, execution_count=7), "keeps an output; clear it"),
    "compared without output": (put(6, outputs=[]), "keeps no output"),
    "compared without count": (put(6, execution_count=None), "without execution_count"),
    "nothing compared": (
        put(6, metadata={}, outputs=[], execution_count=None),
        "nbval would compare nothing",
    ),
    "class": (code("class A:\n    pass"), "defines class A"),
    "function": (code("def f(x):\n    return x"), "defines function f"),
    "clock": (code("from time import perf_counter\nstart = perf_counter()"), "reads a clock"),
    "time.time": (code("start = time.time()"), "reads a clock"),
    "timing magic": (code("%timeit 1 + 1"), "is not plain Python"),
    "bare except": (code("try:\n    pass\nexcept:\n    pass"), "catches everything"),
    "broad except": (code("try:\n    pass\nexcept (ValueError, Exception):\n    pass"), "catches everything"),
    "absolute path": (code('data = load("/data/results")'), "has a path in it"),
    "relative path": (code('data = load("../results/local")'), "has a path in it"),
    "folder path": (code('data = load("figures/cpu")'), "has a path in it"),
    "file name": (code('data = load("table.csv")'), "has a path in it"),
    "open": (code("open(name)"), "opens or names a file"),
    "widgets": (code("import ipywidgets"), "widgets"),
    "long cell": (code("\n".join(f"x{i} = {i}" for i in range(20))), "has 20 lines"),
    "another kernel": (lambda nb: nb["metadata"]["kernelspec"].update(name="conda-env-x"), "kernelspec"),
    "old format": (lambda nb: nb.update(nbformat_minor=2), "nbformat"),
    "repeated id": (put(4, id="c1"), "used twice"),
    "no id": (lambda nb: nb["cells"][4].pop("id"), "has no id"),
    "no question": (put(0, source="# 09 Title\n\nWe expect nothing."), "says no 'Question'"),
    "no number in the title": (put(0, source="# Title"), "starts with '# NN"),
    "no findings": (put(9, source="## Conclusion"), "no heading '## Findings'"),
    "findings before checks": (
        lambda nb: (put(5, source="## Findings")(nb), put(9, source="## Checks")(nb)),
        "out of order",
    ),
    "no study": (put(2, source="import numpy"), "Study.load(profile)"),
    "measures nothing": (put(4, source="result = 1"), "no runner.measure"),
    "no figure": (put(8, source="result"), "no figures.save"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_fault_is_named_with_file_and_cell(name: str, tmp_path: Path) -> None:
    """papermill and nbval let these pass in silence, or with a warning nobody sees."""
    breaks, message = BROKEN[name]
    data = copy.deepcopy(good())
    breaks(data)
    problems = lint(tmp_path, data)
    assert any(message in problem for problem in problems), problems
    assert all(problem.startswith("notebooks/09_title.ipynb: ") for problem in problems)


def test_units_and_sentences_are_not_taken_for_paths(tmp_path: Path) -> None:
    data = good()
    code('label = "GB/s"; text = "Flash / Standard, and/or more."; join = "/"')(data)
    assert lint(tmp_path, data) == []


def test_a_file_that_is_no_notebook_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "09_title.ipynb"
    path.write_text("{")
    assert len(notebook.lint(path)) == 1


def estimate(value: float, low: float, high: float) -> Estimate:
    return Estimate(value, low, high, 0.95, 5, 100, "test")


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (estimate(3.05, 3.0, 3.13), "3.0 times as long"),
        (estimate(1.12, 1.1, 1.14), "12 % slower"),
        (estimate(0.8, 0.78, 0.82), "20 % faster"),
        (estimate(1.01, 0.98, 1.04), "not shown to differ"),
        (estimate(2.0, -np.inf, np.inf), "no interval"),
    ],
)
def test_a_ratio_in_words_says_what_is_shown_and_no_more(ratio: Estimate, words: str) -> None:
    assert words in notebook.compare(ratio)


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (1234.5, "1,234"), (2.0, "2.00"), (0.0, "0")]
)
def test_numbers_keep_their_digits(value: float, text: str) -> None:
    assert notebook.number(value) == text


def test_a_table_shows_one_interval_column_and_escapes_text() -> None:
    table = pd.DataFrame({"name": ["a<b"], "value": [2.09], "low": [2.03], "high": [np.inf]})
    shown = notebook.show(table).data
    assert "2.09 [no interval]" in shown
    assert "a&lt;b" in shown
    assert "<script" not in shown


def test_the_worst_machine_state_is_reported() -> None:
    """A warning must not vanish because the last block happened to start in a quiet minute."""
    worst = notebook.worst_state(
        [{"busy_percent": 40.0, "free_memory_gib": 3.0}, {"busy_percent": 1.0, "free_memory_gib": 9.0}]
    )
    assert worst == {"busy_percent": 40.0, "free_memory_gib": 3.0}


def test_findings_and_banner_survive_having_no_records() -> None:
    from flashgap.study import Study

    empty = {
        name: Result(name, [], stop_reason="opt-in", source="none")
        for name in ("task", "latency", "context", "long", "memory")
    }
    assert findings.baseline(empty)
    assert "No records of" in notebook.banner(Study.load("smoke"), empty).data


def test_the_cost_of_the_clock_comes_from_the_records() -> None:
    """If this fails, a page shows a number that no record holds, or one that changes with every replay."""
    from test_figures import noise_result

    result = noise_result(5)
    assert "do not hold" in findings.observer(result)[0]
    for block in result.blocks:
        block.header.provenance["clock_s"] = 50e-9
    assert "50 ns a reading (median of 5 blocks)" in findings.observer(result)[0]


def test_a_build_with_two_speeds_is_said_to_have_them() -> None:
    """A median between two modes describes neither; seen when a build allocates at each step."""
    from test_figures import context_result, made

    def sample(rng: np.random.Generator, name: str) -> list[dict[str, float]]:
        return [
            {
                "metric": "itl_s",
                "value": 0.1 if i % 2 and name == "flash" else 0.04,
                "context_tokens": 128,
                "iteration": i,
            }
            for i in range(12)
        ]

    lines = findings.baseline({"context": made("context", ["standard", "flash"], 5, sample)})
    assert [line for line in lines if "no one speed" in line and line.startswith("Flash")]
    assert not [line for line in findings.baseline({"context": context_result()}) if "no one speed" in line]
