"""Do the notebooks follow the template? One line for each thing that does not, naming file, cell and cure.

The one idea: a notebook is read by people and run by machines that only warn (papermill about parameters,
nbval about missing outputs), so what they forgive is refused here. Reads JSON and syntax trees; runs nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from flashgap import keys
from flashgap.study import StudyError

Cell = dict[str, Any]

COMPARED = "nbval-check-output"
CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "process_time", "timeit", "time_ns"}
WIDGETS = {"ipywidgets", "tqdm.notebook", "tqdm.auto", "tqdm.autonotebook"}
FOLDERS = "figures|notebooks|params|results|src|tests"
FILE = r"[\w./~-]*\w\.(?:json|ya?ml|png|svg|csv|parquet|html|ipynb|py|txt|md|safetensors|log)"
PATH = re.compile(rf"(?:~|\.{{1,2}})?/[\w.-]+.*|(?:{FOLDERS})/.*|[A-Za-z]:\\.*|{FILE}")
MAX_LINES, MAX_MEDIAN_LINES = 12, 4
SECTIONS = ("Measure", "Checks", "Findings", "Provenance")


def lint(path: Path) -> list[str]:
    """Everything in the notebook at `path` that breaks the template; empty if nothing does."""
    try:
        notebook = keys.read_notebook(path)
    except StudyError as error:
        return [str(error)]
    checks = (_format, _identifiers, _parameters, _outputs, _code, _sizes, _order)
    return [f"notebooks/{path.name}: {problem}" for check in checks for problem in check(notebook)]


def _code_cells(notebook: Cell) -> Iterator[tuple[int, Cell]]:
    return (
        (i, c)
        for i, c in enumerate(notebook["cells"])
        if c.get("cell_type") == "code" and keys.source(c).strip()
    )


def _tags(cell: Cell) -> list[str]:
    return list(cell.get("metadata", {}).get("tags", []))


def _tree(cell: Cell) -> ast.Module | None:
    try:
        return ast.parse(keys.source(cell))
    except SyntaxError:
        return None


def _format(notebook: Cell) -> Iterator[str]:
    if (notebook.get("nbformat"), notebook.get("nbformat_minor", 0) >= 5) != (4, True):
        yield "nbformat: must be 4.5 or later, which gives cells their ids; save it with a current JupyterLab"
    kernel = notebook.get("metadata", {}).get("kernelspec", {}).get("name")
    if kernel != "python3":
        yield f"kernelspec: is {kernel!r}, must be 'python3', so that any machine can run it"


def _identifiers(notebook: Cell) -> Iterator[str]:
    seen: set[str] = set()
    for index, cell in enumerate(notebook["cells"]):
        identifier = cell.get("id")
        if not identifier:
            yield f"cell {index}: has no id; save it with a current JupyterLab"
        elif identifier in seen:
            yield f"cell {index}: id '{identifier}' is used twice; give it another"
        seen.add(identifier)


def _parameters(notebook: Cell) -> Iterator[str]:
    """Exactly one tagged cell, only literals in it, and the profile left open."""
    tagged = [(i, c) for i, c in enumerate(notebook["cells"]) if "parameters" in _tags(c)]
    if len(tagged) != 1:
        yield f"{len(tagged)} cells are tagged 'parameters', needs exactly one"
        return
    index, cell = tagged[0]
    values: dict[str, Any] = {}
    for statement in tree.body if (tree := _tree(cell)) else []:
        named = isinstance(statement, ast.Assign) and all(isinstance(t, ast.Name) for t in statement.targets)
        try:
            value = ast.literal_eval(statement.value) if named else None  # type: ignore[attr-defined]
        except ValueError:
            named = False
        if not named:
            yield f"cell {index}: line {statement.lineno} is not 'name = literal'; move it to the next cell"
            continue
        values |= {target.id: value for target in statement.targets}  # type: ignore[attr-defined]
    if values.get("profile") != "auto":
        yield f'cell {index}: profile is {values.get("profile")!r}, must be profile = "auto"'


def _outputs(notebook: Cell) -> Iterator[str]:
    """Outputs only where nbval compares them, and there with an execution count."""
    compared = 0
    for index, cell in _code_cells(notebook):
        if COMPARED in _tags(cell):
            compared += 1
            if not cell.get("outputs"):
                yield f"cell {index}: is tagged {COMPARED} but keeps no output; run it and save"
            if cell.get("execution_count") is None:
                yield f"cell {index}: keeps an output without execution_count, which nbval rejects; run it and save"
        elif cell.get("outputs") or cell.get("execution_count") is not None:
            yield f"cell {index}: keeps an output; clear it, or tag it {COMPARED} if it is the same everywhere"
    if not compared:
        yield f"no cell is tagged {COMPARED}: nbval would compare nothing"


def _code(notebook: Cell) -> Iterator[str]:
    for index, cell in _code_cells(notebook):
        tree = _tree(cell)
        if tree is None:
            yield f"cell {index}: is not plain Python (a syntax error, or a % or ! command); rewrite it"
            continue
        found = (problem for node in ast.walk(tree) if (problem := _refused(node)))
        yield from (f"cell {index}: {problem}" for problem in dict.fromkeys(found))


def _refused(node: ast.AST) -> str | None:
    """What is wrong with one syntax node, if anything."""
    if isinstance(node, ast.ClassDef):
        return f"defines class {node.name}; move it to src"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"defines function {node.name}; move it to src"
    if isinstance(node, ast.ExceptHandler) and _broad(node.type):
        return "catches everything; name the error"
    if isinstance(node, ast.Import) and {alias.name for alias in node.names} & (WIDGETS | {"time", "timeit"}):
        return f"imports {node.names[0].name}: timing belongs to the runner, widgets break hosted viewers"
    if isinstance(node, ast.ImportFrom) and node.module in WIDGETS | {"time", "timeit"}:
        return f"imports {node.module}: timing belongs to the runner, widgets break hosted viewers"
    if isinstance(node, ast.Attribute) and (node.attr in CLOCKS or ast.unparse(node) == "time.time"):
        return f"reads a clock ({node.attr}); measure with the runner"
    if isinstance(node, ast.Name) and node.id in CLOCKS:
        return f"reads a clock ({node.id}); measure with the runner"
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and PATH.fullmatch(node.value.strip()):
        return f"has a path in it ({node.value!r}); ask a function of src for it"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("open", "Path", "pathlib.Path"):
        return "opens or names a file; ask a function of src for it"
    return None


def _broad(caught: ast.expr | None) -> bool:
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(name is None or ast.unparse(name) in ("Exception", "BaseException") for name in names)


def _sizes(notebook: Cell) -> Iterator[str]:
    lines = {i: len([x for x in keys.source(c).splitlines() if x.strip()]) for i, c in _code_cells(notebook)}
    for index, count in lines.items():
        if count > MAX_LINES:
            yield f"cell {index}: has {count} lines, at most {MAX_LINES}; split it or move it to src"
    if lines and median(lines.values()) > MAX_MEDIAN_LINES:
        yield f"half of the code cells have more than {MAX_MEDIAN_LINES} lines; one idea a cell"


def _order(notebook: Cell) -> Iterator[str]:
    """Title, parameters, study, measure or load, checks, figure, findings, provenance."""
    cells = notebook["cells"]
    first = keys.source(cells[0]) if cells and cells[0].get("cell_type") == "markdown" else ""
    if not re.match(r"# \d\d ", first):
        yield "cell 0: must be Markdown that starts with '# NN Title'"
    for word in ("**Question", "expect"):
        if word not in first:
            yield f"cell 0: says no '{word.strip('*')}'; a notebook opens with its question and what we expect, and why"
    code = list(_code_cells(notebook))
    if code and "parameters" not in _tags(code[0][1]):
        yield "the first code cell must be the one tagged 'parameters'"
    if len(code) < 2 or "Study.load(profile)" not in keys.source(code[1][1]):
        yield "the second code cell must import and call Study.load(profile)"
    at = [_section(cells, word) for word in SECTIONS]
    missing = [word for word, index in zip(SECTIONS, at) if index is None]
    if missing:
        yield f"no heading '## {missing[0]}'; the template has {', '.join(SECTIONS)}"
        return
    known = [index for index in at if index is not None]
    if known != sorted(known):
        yield f"headings are out of order; the template has {', '.join(SECTIONS)}"
    if not any("runner.measure(" in keys.source(c) for c in cells[known[0] : known[1]]):
        yield "no runner.measure(...) under '## Measure'"
    if not any("figures.save(" in keys.source(c) for c in cells[known[1] : known[2]]):
        yield "no figures.save(...) between '## Checks' and '## Findings'"


def _section(cells: list[Cell], word: str) -> int | None:
    """Where the heading that starts with `word` is."""
    for index, cell in enumerate(cells):
        if cell.get("cell_type") == "markdown" and re.search(rf"^## {word}", keys.source(cell), re.MULTILINE):
            return index
    return None
