"""What an executed notebook depends on, so that only stale ones run again.

The one idea: a key is the *content* of everything that could change the page, kept in named parts, so that
a touched file changes nothing and a stale page can say why. It is compared here and not by make: make
knows times of files, not contents, and the records a notebook leaves behind are part of its own key.
Nothing here imports torch, papermill or a notebook library; an unchanged `make reproduce` is this module.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from flashgap import context
from flashgap.records import Store
from flashgap.study import Study, StudyError, project_root

Key = dict[str, dict[str, str]]
PACKAGE = Path(__file__).resolve().parent


def notebooks_dir() -> Path:
    """Where the notebooks are: `notebooks/` of the checkout."""
    return project_root() / "notebooks"


def output_dir(profile: str, replay: bool) -> Path:
    """Where executed notebooks, pictures and HTML go: `figures/<profile>` in replay, else `figures/local/<profile>`."""
    figures = project_root() / "figures"
    return figures / profile if replay else figures / "local" / profile


def store(profile: str, replay: bool) -> Store:
    """The records that the notebooks show."""
    return Store.reference(profile) if replay else Store.local(profile)


def find_notebooks(names: list[str] | None = None) -> list[Path]:
    """The notebooks in order, or those whose name starts with one of `names`; `StudyError` if there is none."""
    paths = sorted(notebooks_dir().glob("[0-9]*.ipynb"))
    wanted = [path for path in paths if not names or any(path.name.startswith(name) for name in names)]
    if not wanted:
        raise StudyError(
            f"notebooks: no notebook called {names or 'NN_name.ipynb'}; there are {[p.stem for p in paths]}"
        )
    return wanted


def read_notebook(path: Path) -> dict[str, Any]:
    """A notebook as plain JSON data; `StudyError` in one line if it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data["cells"], list):
            raise TypeError("'cells' is not a list")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StudyError(f"{path}: not a notebook ({error}); restore it with git") from None
    return data


def source(cell: dict[str, Any]) -> str:
    """The text of a cell, which nbformat keeps as one string or a list of lines."""
    text = cell.get("source", "")
    return text if isinstance(text, str) else "".join(text)


def parse_code(cell: dict[str, Any]) -> ast.Module:
    """The syntax tree of a code cell; lines for IPython (`%`, `!`) are left out, and text that is no Python is empty."""
    lines = [line for line in source(cell).splitlines() if not line.lstrip().startswith(("%", "!"))]
    try:
        return ast.parse("\n".join(lines))
    except SyntaxError:
        return ast.parse("")


def code_trees(notebook: dict[str, Any]) -> list[ast.Module]:
    """The syntax trees of the code cells."""
    return [parse_code(cell) for cell in notebook["cells"] if cell.get("cell_type") == "code"]


def declared_parameters(path: Path) -> set[str]:
    """Names assigned in the one cell tagged `parameters`; `StudyError` if there is not exactly one.

    papermill only warns about both: it runs a notebook without such a cell with its defaults.
    """
    tagged = [
        c for c in read_notebook(path)["cells"] if "parameters" in c.get("metadata", {}).get("tags", [])
    ]
    if len(tagged) != 1:
        raise StudyError(
            f"notebooks/{path.name}: has {len(tagged)} cells tagged 'parameters', needs exactly one"
        )
    targets = [t for node in parse_code(tagged[0]).body if isinstance(node, ast.Assign) for t in node.targets]
    annotated = [node.target for node in parse_code(tagged[0]).body if isinstance(node, ast.AnnAssign)]
    return {target.id for target in [*targets, *annotated] if isinstance(target, ast.Name)}


def check_parameters(path: Path, parameters: dict[str, Any]) -> None:
    """Refuse parameters that the notebook does not declare; `StudyError` names them."""
    known = declared_parameters(path)
    unknown = sorted(set(parameters) - known)
    if unknown:
        raise StudyError(
            f"notebooks/{path.name}: unknown parameter {unknown[0]!r}; it declares {sorted(known)}"
        )


def referenced_modules(tree: ast.AST) -> set[str]:
    """Names of flashgap modules that a syntax tree imports or names in a string.

    Strings count because a trial's process is started by name ("flashgap.worker").
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"\bflashgap(?:\.\w+)+", node.value))
    return {name for name in names if name.split(".")[0] == "flashgap"}


def module_path(name: str) -> Path | None:
    """The source file of a flashgap module, or None if `name` is not a module."""
    base = PACKAGE.parent.joinpath(*name.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


def reachable_modules(trees: list[ast.Module]) -> list[str]:
    """Flashgap modules reachable by import from `trees`, directly or through another."""
    found: set[str] = set()
    queue = sorted(set().union(*map(referenced_modules, trees)) if trees else set())
    while queue:
        name = queue.pop()
        path = module_path(name)
        if path is None or name in found:
            continue
        found.add(name)
        try:
            queue += referenced_modules(ast.parse(path.read_text(encoding="utf-8")))
        except SyntaxError as error:
            raise StudyError(f"{path}: line {error.lineno}: is not valid Python ({error.msg})") from None
    return sorted(found)


def used_experiments(trees: list[ast.Module], study: Study) -> list[str]:
    """Experiments of `study` whose records a notebook shows: those it names in a string.

    All of them if it walks over `study.experiments` or imports the claims, whose data name the experiments.
    """
    imported = {name for tree in trees for name in referenced_modules(tree)}
    nodes = [node for tree in trees for node in ast.walk(tree)]
    if "flashgap.claims" in imported or any(
        isinstance(n, ast.Attribute) and n.attr == "experiments" for n in nodes
    ):
        return list(study.experiments)
    texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return [name for name in study.experiments if name in texts]


def digest(data: Any) -> str:
    """16 hex digits of the SHA-256 of `data` as canonical JSON."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def records_digest(folder: Path) -> str:
    """Content of the headers in `folder` and the column files beside them (their names hold their hashes)."""
    if not folder.is_dir():
        return "none"
    headers = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("[!.]*.json")}
    columns = {p.name: str(p.stat().st_size) for p in folder.glob("[!.]*.parquet")}
    return digest([headers, columns]) if headers else "none"


def text_digest(notebook: dict[str, Any]) -> str:
    """All cells as written: kind, tags and source; outputs and execution counts do not count."""
    cells = [
        (c.get("cell_type"), c.get("metadata", {}).get("tags", []), source(c)) for c in notebook["cells"]
    ]
    return digest(cells)


def pinned_versions() -> str:
    """Digest of constraints.txt without its comments."""
    path = project_root() / "constraints.txt"
    lines = path.read_text().splitlines() if path.is_file() else []
    return digest([line.strip() for line in lines if line.strip() and not line.startswith("#")])


def claims_digest() -> str:
    """Digest of the data of params/claims.yaml."""
    path = project_root() / "params" / "claims.yaml"
    try:
        return digest(yaml.safe_load(path.read_text())) if path.is_file() else "none"
    except yaml.YAMLError:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]  # the notebook says what is wrong with it


def notebook_key(
    path: Path, study: Study, parameters: dict[str, Any], replay: bool, now: dict[str, Any]
) -> Key:
    """Everything the executed notebook at `path` depends on, in named parts; `now` is `context.current_context()`."""
    notebook = read_notebook(path)
    trees = code_trees(notebook)
    modules = reachable_modules(trees)
    experiments = used_experiments(trees, study)
    opt_in = any(study.experiments[name].opt_in for name in experiments)
    return {
        "notebook": {"text": text_digest(notebook)},
        "params": {
            f"params/{study.profile}.yaml": study.digest[:16],
            "params/claims.yaml": claims_digest() if "flashgap.claims" in modules else "none",
            "parameters": digest(parameters),
            "LONG": os.environ.get("LONG", "") if opt_in else "",
        },
        "modules": context.module_digests(modules),
        "versions": {"constraints.txt": pinned_versions(), **now["versions"]},
        "machine": {
            name: digest(now[name]) for name in ("fingerprint", "environment", "usable_cores", "model_files")
        },
        "records": shown_records(study, experiments, replay),
    }


def shown_records(study: Study, experiments: list[str], replay: bool) -> dict[str, str]:
    """Digests of the records a notebook shows. A local page shows committed records beside its own, and those of
    an opt-in experiment that was not run here, so they count too."""
    local, reference = store(study.profile, replay), store(study.profile, True)
    digests = {name: records_digest(local.folder(name)) for name in experiments}
    beside = [] if replay else experiments
    return digests | {f"{name} (reference)": records_digest(reference.folder(name)) for name in beside}


def why_stale(old: Key | None, new: Key) -> str:
    """Why `new` is not `old`, in a few words; empty if it is."""
    if old is None:
        return "not run yet"
    changed = [
        (part, name)
        for part in new
        for name in sorted(new[part].keys() | old.get(part, {}).keys())
        if new[part].get(name) != old.get(part, {}).get(name)
    ]
    words = {
        "notebook": "its text changed",
        "records": "records of '{}' changed",
        "machine": "this machine's {} changed",
    }
    reasons = [words.get(part, "{} changed").format(name) for part, name in changed]
    return "; ".join(reasons[:3]) + (f" and {len(reasons) - 3} more" if len(reasons) > 3 else "")


def read_key(path: Path) -> Key | None:
    """The key kept at `path`, or None if there is none that can be read."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and all(isinstance(part, dict) for part in data.values()) else None


def write_if_changed(path: Path, text: str) -> bool:
    """Write `text` by an atomic rename, only if `path` does not hold it already; whether it was written."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return True
