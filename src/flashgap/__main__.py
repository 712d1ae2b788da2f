"""The command line behind `make`: `python -m flashgap plan|reproduce|render|publish|key|failures|lint-notebooks|fetch`.

The one idea: whatever goes wrong, a person gets one line that names the cure and a shell gets an exit code:
0 done, 1 a notebook failed, 2 bad input, 130 interrupted. `FLASHGAP_TRACEBACK=1` shows where it came from.
Imports are inside the commands, so that an unchanged `make reproduce` never loads torch or papermill.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgap.study import Study


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        return int(options.command(options) or 0)
    except KeyboardInterrupt:
        print("\nerror: interrupted; what is finished is kept, call again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # the edge of the program: a line and a code, not a traceback
        if os.environ.get("FLASHGAP_TRACEBACK") == "1":
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        return exit_code(error)


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(prog="flashgap", description="See `make help` for the usual way in.")
    commands = top.add_subparsers(required=True, metavar="command")

    def add(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=function)
        command.add_argument(
            "--profile", default="auto", help="a file in params/, or auto: by the hardware found"
        )
        return command

    add("plan", plan, "trials, minutes, disk and memory before anything runs")
    for name, function, text in (
        ("reproduce", reproduce, "measure what is missing, run stale notebooks, render them"),
        ("render", render, "render what was run; with --replay run the notebooks on committed records"),
        ("key", key, "what each notebook depends on, and why it is stale"),
    ):
        command = add(name, function, text)
        command.add_argument("--replay", action="store_true", help="committed records only; never measures")
        command.add_argument(
            "--notebook", action="append", metavar="NN", help="only notebooks whose name starts so"
        )
        command.add_argument(
            "--param", action="append", default=[], metavar="NAME=VALUE", help="notebook parameter"
        )
    command = add("publish", publish, "make the local records the committed reference, and replay them")
    command.add_argument("--only", nargs="*", default=[], metavar="EXPERIMENT", help="only these experiments")
    add("failures", failures, "name the trials whose latest local record is not ok; fails if there are any")
    add("fetch", fetch, "fetch and check the model of a profile")
    add("lint-notebooks", lint_notebooks, "check that notebooks follow the template")
    return top


def load(options: argparse.Namespace) -> Study:
    """The study asked for; says which profile `auto` found."""
    from flashgap.study import Study

    study = Study.load(options.profile)
    if options.profile == "auto":
        why = (
            "FLASHGAP_PROFILE"
            if os.environ.get("FLASHGAP_PROFILE", "auto") != "auto"
            else "this machine's hardware"
        )
        print(f"profile: {study.profile} ({why}); PROFILE=name chooses another", flush=True)
    return study


def parameters(options: argparse.Namespace) -> dict[str, Any]:
    """`--param name=value` as a mapping; values are read as YAML."""
    import yaml

    from flashgap.study import StudyError

    out = {}
    for text in options.param:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or name == "profile":
            raise StudyError(
                f"--param {text}: write NAME=VALUE with a notebook parameter's name (profile: use --profile)"
            )
        out[name] = yaml.safe_load(value)
    return out


def plan(options: argparse.Namespace) -> None:
    from flashgap import plan as planning
    from flashgap.study import StudyError

    study = load(options)
    print(planning.describe(study, list(study.experiments)))
    for line in planning.refusals(study):
        raise StudyError(line)


def reproduce(options: argparse.Namespace) -> None:
    from flashgap import reproduce as making

    making.reproduce(load(options), options.replay, options.notebook, parameters(options))


def render(options: argparse.Namespace) -> None:
    from flashgap import keys
    from flashgap import render as rendering

    if options.replay:
        return reproduce(options)
    study = load(options)
    order = [path.stem for path in keys.find_notebooks()]
    print(rendering.render_all(study, keys.output_dir(study.profile, False), order))


def key(options: argparse.Namespace) -> None:
    from flashgap import context, keys

    study, given = load(options), parameters(options)
    now = context.current_context(study.model, study.checkpoints)
    for path in keys.find_notebooks(options.notebook):
        new = keys.notebook_key(path, study, {"profile": study.profile, **given}, options.replay, now)
        old = keys.read_key(keys.output_dir(study.profile, options.replay) / "keys" / f"{path.stem}.json")
        print(f"{path.stem}: {keys.why_stale(old, new) or 'unchanged'}\n{json.dumps(new, indent=1)}")


def publish(options: argparse.Namespace) -> None:
    from flashgap import publish as publishing
    from flashgap import reproduce as making

    study = load(options)
    for name in options.only:
        study.experiment(name)  # names those there are, if it is not one
    publishing.publish(study, options.only)
    making.reproduce(study, replay=True)


def failures(options: argparse.Namespace) -> None:
    from flashgap.records import Store
    from flashgap.study import StudyError

    study = load(options)
    store = Store.local(study.profile)
    found = [
        f"{name}: {trial.treatment}: {trial.status}: {trial.error}"
        for name in study.experiments
        for block in store.load_blocks(name)[0][-1:]
        for trial in block.trials.values()
        if trial.status != "ok"
    ]
    if found:
        raise StudyError("; ".join(found))


def fetch(options: argparse.Namespace) -> None:
    from flashgap import models

    study = load(options)
    model = models.resolve(study.model, progress=lambda text: print(text, flush=True))
    print(f"{model.label}: ready{f' in {model.folder}' if model.folder else ''}")


def lint_notebooks(_: argparse.Namespace) -> int:
    from flashgap import keys, notebook_lint

    problems = [problem for path in keys.find_notebooks() for problem in notebook_lint.lint(path)]
    print("\n".join(problems) or "notebooks follow the template")
    return 1 if problems else 0


def one_line(error: Exception) -> str:
    """What went wrong, in one line; our own errors say it themselves."""
    text = " ".join(str(error).split()) or "no message"
    if is_ours(error):
        return text
    if isinstance(error, ImportError):
        return f"{text}; the environment is not complete, call make env"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or text}; repair it and call again"
    return f"{type(error).__name__}: {text} (a fault in flashgap; FLASHGAP_TRACEBACK=1 shows where)"


def is_ours(error: Exception) -> bool:
    """Whether the error is one that this package words for a person."""
    return type(error).__module__.startswith("flashgap.")


def exit_code(error: Exception) -> int:
    """130 interrupted, 1 a notebook failed or a fault in flashgap, 2 bad input."""
    name = type(error).__name__
    if is_ours(error) and name in ("Interrupted", "ReproduceError"):
        return 130 if name == "Interrupted" else 1
    return 2 if is_ours(error) or isinstance(error, OSError | ImportError) else 1


if __name__ == "__main__":
    sys.exit(main())
