"""A compiled build: each graph compiled once by AOTInductor, kept as a file, and loaded in a blink.

The one idea: inductor's best CPU code wants frozen weights and autotuned matrix kernels, takes more than a
minute a shape to make, and is not cached by inductor; so it is made once, outside every trial, and what is
measured is the loading and the running of a file. Which kernel autotuning chose for each matrix and number
of rows, with the times it chose by, is kept beside the file: that is the build's dispatch table.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from flashgap import context, graphs, hardware, models, stored_weights, tuning
from flashgap.builds.load import Build, resident_bytes
from flashgap.builds.packed import PackedLinear, expanded
from flashgap.graphs import GraphError, Shape
from flashgap.kernels import DENSE, PACKED
from flashgap.treatment import TrialSpec

FORMAT = 1
COPY = "_copy"  # ends the name of a graph on a 16-bit copy of packed weights
FEW_ROWS = 4  # up to here a pass is bound by reading weights, so packed ones win
WORTH = 0.97  # of the packed graph's time: a copy that saves less is not worth its memory
SETTINGS: dict[str, dict[str, Any]] = {
    "cpu": {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN", "freezing": True},
    "cuda": {"max_autotune": True, "max_autotune_gemm_backends": "TRITON,ATEN", "freezing": True},
}
LOW_BIT_CALLS = {"int4pack": 4, "int4mm": 4, "weight_int8pack": 8}  # in a name -> bits
LOW_BIT_WEIGHTS = {"qscale_and_zeros": 4, "int8_t* W": 8}  # in a generated kernel's signature -> bits
CODE = (
    "flashgap.graphs",
    "flashgap.artefact",
    "flashgap.stored_weights",
    "flashgap.tuning",
    "flashgap.builds.packed",
)


# ---------------------------------------------------------------------- where artefacts are


def folder(digest: str, spec: TrialSpec) -> Path:
    """`<cache>/artefacts/<key>` for a build's `digest`: another processor, torch or code is another artefact."""
    versions = context.package_versions()
    data = {
        "build": digest,
        "dtype": spec.model.dtype,
        "device": spec.device,
        "threads": spec.threads or torch.get_num_threads(),
        "versions": {name: versions[name] for name in ("torch", "transformers")},
        "processor": [torch.backends.cpu.get_cpu_capability(), hardware.fingerprint()],
        "settings": SETTINGS[spec.device],
        "code": context.module_digests(CODE),
        "format": FORMAT,
    }
    key = hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return models.cache_dir() / "artefacts" / key


def available(at: Path, copies: bool = False) -> dict[Shape, dict[str, Any]]:
    """The graphs compiled into `at`, by shape, with what is known of each: its `file`, `choices`, `kernels`, the content
    keys of its `weights`, compile seconds and size. With `copies`, a graph on a 16-bit copy stands for the packed one where
    it was timed to be faster (`flashgap.compiled.race_missing`)."""
    found: dict[Shape, dict[str, Any]] = {}
    for path in sorted(at.glob("*.json")):  # a shape before its copy
        file = path.with_suffix(".pt2")
        if not file.is_file():
            continue
        facts = json.loads(path.read_text())
        if not path.stem.endswith(COPY) or (copies and copy_wins(facts)):
            found[Shape(**facts["shape"])] = {**facts, "file": file.name}
    return found


def races(at: Path) -> dict[Shape, dict[str, float]]:
    """Seconds of a pass of each shape that has a copy: `packed_s` and `copy_s`."""
    facts = (json.loads(path.read_text()) for path in sorted(at.glob(f"*{COPY}.json")))
    return {Shape(**f["shape"]): f["race"] for f in facts if "race" in f}


def copy_wins(facts: dict[str, Any]) -> bool:
    """Whether a copy was shown to be worth its memory."""
    race: dict[str, float] = facts.get("race") or {"copy_s": 1, "packed_s": 0}
    return race["copy_s"] < WORTH * race["packed_s"]


# ---------------------------------------------------------------------- making them


def compile_missing(
    build: Build, at: Path, shapes: Iterable[Shape], device: str, tell: Any = print, copies: bool = False
) -> None:
    """Compile the `shapes` that `at` lacks, one after the other; each is there whole or not at all.

    With `copies`, those for more than `FEW_ROWS` rows on a 16-bit copy of the weights as well, if any are packed.
    """
    asked, there = list(dict.fromkeys(shapes)), available(at)
    packed = any(isinstance(module, PackedLinear) for module in build.model.modules())
    jobs = [(shape, False) for shape in asked if shape not in there]
    jobs += [(s, True) for s in asked if copies and packed and s.rows > FEW_ROWS and not _copied(at, s)]
    if jobs and device == "cpu":
        check_compiler()
    at.mkdir(parents=True, exist_ok=True)
    usual = build.model.config._attn_implementation
    eager_ways = {m: m.many_rows for m in build.model.modules() if isinstance(m, PackedLinear)}
    graphs.prepare(build.model)
    for layer in eager_ways:
        layer.many_rows = None  # in a graph, autotuning chooses
    try:
        for number, (shape, copy) in enumerate(jobs, 1):
            start_s, what = time.perf_counter(), f"{shape.name}{' on a 16-bit copy' if copy else ''}"
            tell(f"compiling {what} ({number} of {len(jobs)}), a minute or two; kept for later runs")
            with expanded(build.model) if copy else nullcontext():
                _compile(build.model, at, shape, device, tell, COPY if copy else "")
            tell(f"compiled {what} in {time.perf_counter() - start_s:.0f} s")
    finally:
        build.model.set_attn_implementation(usual)
        for layer, rows in eager_ways.items():
            layer.many_rows = rows
    about = {"resident_bytes": build.resident_bytes, "parameters": build.parameters, "digest": build.digest}
    build.model.config.save_pretrained(at)
    (at / "build.json").write_text(json.dumps(about))


def _copied(at: Path, shape: Shape) -> bool:
    """Whether the copy of `shape` is there, or was, and lost."""
    try:
        facts = json.loads((at / f"{shape.name}{COPY}.json").read_text())
    except FileNotFoundError:
        return False
    lost = "race" in facts and not copy_wins(facts)
    return lost or (at / f"{shape.name}{COPY}.pt2").is_file()


def check_compiler() -> None:
    """`GraphError` names the cure where inductor has no C++ compiler to work with."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise GraphError(
            "no C++ compiler: a compiled build is made with g++; install it (on Debian the package g++), name another one in CXX, or "
            "leave treatments with ahead_of_time: true out of the experiment"
        ) from None


def _compile(model: Any, at: Path, shape: Shape, device: str, tell: Any, suffix: str) -> None:
    from torch._inductor import config

    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=at))
    start_s = time.perf_counter()
    try:
        with torch.no_grad(), config.patch(SETTINGS[device]), tuning.patient(tell) as choices:
            target = partial / f"{shape.name}{suffix}.pt2"
            # 16-bit layers may be packed by oneDNN, in a layout that cannot be kept outside the graph.
            dense = any(isinstance(module, torch.nn.Linear) for module in model.modules())
            weights = _package(model, shape, device, target, shared=not dense)
        made = {
            "shape": {"phase": shape.phase, "batch": shape.batch, "tokens": shape.tokens},
            "choices": choices,
            "kernels": kernels(target),
            "weights": stored_weights.add(at, weights),
            "compile_s": time.perf_counter() - start_s,
            "bytes": target.stat().st_size,
        }
        os.replace(target, at / target.name)
        write(at / f"{shape.name}{suffix}.json", made)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write(path: Path, facts: dict[str, Any]) -> None:
    """`facts` as JSON at `path`, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(facts, indent=1))
    os.replace(partial, path)


def _package(model: Any, shape: Shape, device: str, target: Path, shared: bool) -> dict[str, torch.Tensor]:
    """Compile into `target`. `shared` leaves the weights out and returns them by name; else none are returned."""
    import torch._inductor
    from torch._inductor.package import package_aoti
    from torch.export.pt2_archive._package_weights import Weights

    where = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.package_constants_on_disk_format": "pickle_weights",
    }
    inputs = graphs.example(model, shape, device)
    exported = torch.export.export(graphs.module(model, shape), inputs, strict=False)
    files = torch._inductor.aot_compile(
        exported.module(check_guards=False),
        inputs,
        options={"aot_inductor.package": True, **(where if shared else {})},
    )
    package_aoti(str(target), [f for f in files if not isinstance(f, Weights)])
    return {name: t[0].detach() for f in files if isinstance(f, Weights) for name, t in f.items()}


def kernels(package: Path) -> dict[str, int]:
    """How often the graph calls each matrix or attention kernel, read from the code that was compiled.

    A graph has no branches, so what it calls is what runs: library calls by their name, generated matrix
    kernels by what they multiply (packed 4-bit or dense) and the instructions of their inner loop.
    """
    with zipfile.ZipFile(package) as archive:
        sources = {
            n: archive.read(n).decode(errors="replace") for n in archive.namelist() if n.endswith(".cpp")
        }
    wrapper = "".join(text for name, text in sources.items() if "wrapper" in name)
    code = "".join(text for name, text in sources.items() if "wrapper" not in name)
    return count_calls(wrapper, code)


def count_calls(wrapper: str, code: str) -> dict[str, int]:
    """Kernels of `kernels` in the source of a graph (`wrapper`) and of its generated kernels (`code`)."""
    found: Counter[str] = Counter()
    for call in re.findall(r"aoti_torch_(?:cpu|cuda)_(\w*(?:mm|attention|linear)\w*)\(", wrapper):
        bits = next((bits for word, bits in LOW_BIT_CALLS.items() if word in call), None)
        found[(f"packed {bits}-bit: " if bits else "") + call.lstrip("_")] += 1
    for name in sorted(set(re.findall(r"\b(cpp_\w+?)_micro_gemm\b", code))):
        head = re.search(rf"void\s+{name}\(([^)]*)\)", code)
        signature = head.group(1) if head else ""
        bits = next((bits for word, bits in LOW_BIT_WEIGHTS.items() if word in signature), None)
        unit = "AMX" if f"{name}_micro_gemm_amx_kernel" in code else "AVX-512"
        calls = len(re.findall(rf"(?<!void )(?<!void  )\b{name}\(", wrapper))
        found[f"{f'packed {bits}-bit' if bits else 'dense'}: generated, {unit}"] += calls
    return dict(sorted(found.items()))


def kernel_rows(
    at: Path, model: Any, shapes: Iterable[Shape], copies: bool = False
) -> dict[str, dict[str, Any]]:
    """For each graph what its linear layers must run and what its code calls, as `kernels.observe` says it.

    Every quantized layer must be one packed call, and nothing else may be: a layer that fell back shows. A graph on a 16-bit
    copy must have none. `race` has the seconds by which the two were told apart.
    """
    packed = Counter(module.bits for module in model.modules() if isinstance(module, PackedLinear))
    bytes_held = resident_bytes(model)
    graphs_there, timed, rows = available(at, copies), races(at) if copies else {}, {}
    for shape in shapes:
        facts = graphs_there[shape]
        found = facts["kernels"]
        ran = Counter(
            {
                bits: sum(n for name, n in found.items() if name.startswith(f"packed {bits}-bit"))
                for bits in PACKED
            }
        )
        copied = facts["file"].endswith(f"{COPY}.pt2")
        rows[shape.name] = {
            "expected": DENSE if copied else _calls(packed),
            "ran": _calls(ran),
            "layers": packed.total(),
            "weight_bytes": bytes_held,
            "operators": {shape.phase: [f"{name} x {count}" for name, count in found.items()]},
            "implementation": {shape.phase: sorted({c["chosen"] for c in facts["choices"]})},
            **({"race": timed[shape]} if shape in timed else {}),
        }
    return rows


def _calls(by_bits: Counter[int]) -> str:
    """Packed calls by bits, in words."""
    return " + ".join(f"{PACKED[bits]} x {n}" for bits, n in sorted(by_bits.items()) if n) or DENSE
