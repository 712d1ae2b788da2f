"""Which kernel really ran, by layer type: observed, never assumed.

The one idea: a build that *says* 4-bit may run anything. So one prefill and one decode step are run under
the profiler with a mark around every linear layer and every attention call, and what ran inside the marks
is named. On the CPU the operator's name does not tell the implementation (`aten::mm` may be oneDNN on AMX
tiles or a plain loop), so oneDNN is made to name its own primitives in a second pass.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from flashgap.builds.packed import PackedInt4Linear, PackedInt8Linear, PackedLinear
from flashgap.builds.quantization import DequantizedLinear
from flashgap.treatment import BuildSpec

COPIED = "batched matmul, weight copied for every row"
DENSE, DEQUANTIZED = "dense matmul", "dequantize, then dense matmul"
PACKED = {4: "packed 4-bit matmul", 8: "packed 8-bit matmul"}
FUSED, UNFUSED = "fused attention", "unfused attention"
COMPILED, EAGER = "compiled graph", "eager operators"
MARK = "flashgap::"

MATMULS = ("aten::mm", "aten::addmm", "aten::mkldnn_linear", "aten::addmv", "aten::mv")
BATCHED = "aten::bmm"  # in a linear layer: rows were not folded into one matrix
EXPANDS = ("aten::mul", "aten::mul_")  # of codes to weights by their scales; a dense layer has none
UNPACKS = ("aten::__rshift__", "aten::bitwise_right_shift", "aten::bitwise_and", "aten::__and__")
EIGHT_BIT = "int8pack"
LOW_BIT = (EIGHT_BIT, "int4", "4bit", "marlin", "machete", "awq", "gptq", "dequantize_4bit", "dyn_quant")
ATTENTIONS = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention",
    "attention_math",
)


def expected_kernels(model: nn.Module, build: BuildSpec) -> dict[str, str]:
    """What each linear layer must run by the treatment, by module name.

    Which layers are quantized is said by the treatment, or by the checkpoint's own files.
    """
    spec, expected = build.quantization, {}
    for name, module in _linears(model):
        if build.checkpoint:
            bits = 16 if isinstance(module, nn.Linear) else int(module.bits)  # type: ignore[arg-type]
        else:
            bits = spec.bits_of(name) if spec else 16
        low_bit = PACKED.get(bits, "") if build.execution == "packed" else DEQUANTIZED
        expected[name] = low_bit if bits < 16 else DENSE
    return expected


def _dispatched(module: nn.Module, kernel: str, rows: int) -> str:
    """What a layer that must run `kernel` runs for so many rows, by the threshold that its build keeps."""
    many = getattr(module, "many_rows", None)
    return DEQUANTIZED if many is not None and rows >= many else kernel


def observe(
    model: nn.Module,
    forwards: dict[str, Callable[[], Any]],
    build: BuildSpec,
    implementations: bool = True,
) -> dict[str, dict]:
    """Run each of `forwards` (by phase, e.g. prefill and decode) and name the kernels per layer type.

    Returns {type: {expected, ran, layers, weight_bytes, operators: {phase: [...]}, implementation: ...}}.
    `ran` joins what differed between layers or phases with " | ", so one stray layer is a mismatch.
    """
    seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    names: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    ran: dict[str, set[str]] = defaultdict(set)
    due: dict[str, set[str]] = defaultdict(set, attention={FUSED})
    by_name = expected_kernels(model, build)

    def called(name: str, module: nn.Module, x: Any) -> None:
        due[_type(name)].add(_dispatched(module, by_name[name], x.numel() // x.shape[-1]))

    for phase, forward in forwards.items():
        with _called(model, called):
            calls = _profiled(model, forward)
        for kind, operators, device_kernels in calls:
            seen[kind][phase] |= operators
            names[kind][phase] |= device_kernels
            ran[kind].add(_family(kind, operators | device_kernels))
        if implementations and torch.backends.mkldnn.is_available() and _device(model) == "cpu":
            for kind, primitives in _onednn(model, forward).items():
                names[kind][phase] |= primitives
    return {
        kind: {
            "expected": " | ".join(sorted(expected)),
            "ran": " | ".join(sorted(ran[kind])) or "nothing",
            **_census(model, kind),
            "operators": {phase: sorted(ops) for phase, ops in seen[kind].items()},
            "implementation": {phase: sorted(found) for phase, found in names[kind].items()},
        }
        for kind, expected in due.items()
    }


def observe_compiled(step: Callable[[], Any]) -> dict[str, dict]:
    """The row for a compiled decode step: whether a compiled graph really ran."""
    with _profiler() as profiler:
        step()
    names = {event.name for event in profiler.events()}
    graph = any("CompiledFxGraph" in n or "Torch-Compiled Region" in n for n in names)
    row = {"expected": COMPILED, "ran": COMPILED if graph else EAGER, "layers": 1, "weight_bytes": 0}
    return {"decode_step": {**row, "operators": {"decode": sorted(n for n in names if n in MATMULS)}}}


def spot_check(model: nn.Module) -> dict[str, str]:
    """The family that one layer of each type runs now: milliseconds, so every trial can end with it."""
    samples = {_type(name): module for name, module in _linears(model)}
    found = {}
    with torch.inference_mode(), _profiler() as profiler:
        for kind, module in samples.items():
            with record_function(MARK + kind):
                module(_sample_input(module))
    for kind, operators, kernels in _calls(profiler):
        found[kind] = _family(kind, operators | kernels)
    return found


def mismatches(kernels: dict[str, dict]) -> list[str]:
    """One line for each layer type that ran something else than expected."""
    return [
        f"{kind}: expected {row['expected']}, ran {row['ran']}"
        for kind, row in kernels.items()
        if row["ran"] != row["expected"]
    ]


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | DequantizedLinear | PackedLinear):
            yield name, module


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if module.__class__.__name__.endswith("Attention"):
            yield name, module


def _type(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _census(model: nn.Module, kind: str) -> dict[str, int]:
    """How many layers of this type there are and what their weights weigh at rest."""
    if kind == "attention":
        return {"layers": sum(1 for _ in _attentions(model)), "weight_bytes": 0}
    modules = [module for name, module in _linears(model) if _type(name) == kind]
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    return {"layers": len(modules), "weight_bytes": sum(t.numel() * t.element_size() for t in tensors)}


def _family(kind: str, names: set[str]) -> str:
    """The kind of kernel that a set of operator and device kernel names amounts to."""
    if kind == "attention":
        fused = any(a in n for n in names for a in ATTENTIONS[:-1])
        return FUSED if fused and not any("attention_math" in n for n in names) else UNFUSED
    low_bit = {n for n in names if any(word in n.lower() for word in LOW_BIT)}
    if low_bit:
        return " | ".join(sorted({PACKED[8 if EIGHT_BIT in n else 4] for n in low_bit}))
    if BATCHED in names:
        return COPIED
    if not any(n in MATMULS for n in names):
        return "no matmul"
    return DEQUANTIZED if any(n in (*UNPACKS, *EXPANDS) for n in names) else DENSE


@contextlib.contextmanager
def _called(model: nn.Module, tell: Callable[[str, nn.Module, Any], None]) -> Iterator[None]:
    """Call `tell(name, layer, input)` at every call of a linear layer."""
    handles = [
        module.register_forward_pre_hook(lambda layer, inputs, name=name: tell(name, layer, inputs[0]))
        for name, module in _linears(model)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _marked(model: nn.Module, enter: Callable[[str], Any], leave: Callable[[Any], Any]) -> Iterator[None]:
    """Call `enter(type)` before and `leave(its result)` after every linear layer and attention module."""
    handles = []
    modules = [(_type(n), m) for n, m in _linears(model)] + [("attention", m) for _, m in _attentions(model)]
    for kind, module in modules:
        stack: list[Any] = []

        def before(*_: Any, kind: str = kind, stack: list[Any] = stack) -> None:
            stack.append(enter(kind))

        def after(*_: Any, stack: list[Any] = stack) -> None:
            leave(stack.pop())

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _profiler() -> Any:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, acc_events=True)


def _profiled(model: nn.Module, forward: Callable[[], Any]) -> list[tuple[str, set[str], set[str]]]:
    """Per marked call: its layer type, the operators and the device kernels inside it."""

    def enter(kind: str) -> Any:
        mark = record_function(MARK + kind)
        mark.__enter__()
        return mark

    with _profiler() as profiler, _marked(model, enter, lambda mark: mark.__exit__(None, None, None)):
        forward()
    return _calls(profiler)


def _calls(profiler: Any) -> list[tuple[str, set[str], set[str]]]:
    calls = []
    for event in profiler.events():
        if event.name.startswith(MARK) and event.device_type == torch.autograd.DeviceType.CPU:
            inside = list(_below(event))
            operators = {
                e.name
                for e in inside
                if e.name in (*MATMULS, *UNPACKS, *EXPANDS, BATCHED) or "attention" in e.name
            }
            operators |= {e.name for e in inside if any(word in e.name.lower() for word in LOW_BIT)}
            calls.append(
                (event.name.removeprefix(MARK), operators, {k.name for e in inside for k in e.kernels})
            )
    return calls


def _below(event: Any) -> Iterator[Any]:
    """Everything inside a mark, but not inside the marks it holds (linear layers within attention)."""
    for child in event.cpu_children:
        if not child.name.startswith(MARK):
            yield child
            yield from _below(child)


def _onednn(model: nn.Module, forward: Callable[[], Any]) -> dict[str, set[str]]:
    """oneDNN's own word: per layer type `primitive:implementation types`, read from its verbose output.

    oneDNN writes to file descriptor 1, so that is pointed at a file for the length of the call.
    """
    with tempfile.TemporaryFile() as capture:
        sys.stdout.flush()
        saved = os.dup(1)
        os.dup2(capture.fileno(), 1)
        try:
            with (
                _marked(model, lambda kind: _write(f"{MARK}{kind}\n"), lambda _: _write(f"{MARK}\n")),
                torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON),
            ):
                forward()
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        capture.seek(0)
        return _parse_onednn(capture.read().decode(errors="replace").splitlines())


def _parse_onednn(lines: list[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    kind = ""
    for line in lines:
        if line.startswith(MARK):
            kind = line.removeprefix(MARK)
        elif kind and line.startswith("onednn_verbose") and ",primitive,exec," in line:
            parts = line[line.index(",primitive,exec,") :].split(",")
            primitive, implementation, tensors = parts[4], parts[5], parts[7]
            types = [word.split(":")[1] for word in tensors.split() if word.startswith(("src", "wei", "dst"))]
            found[kind].add(f"{primitive} {implementation} {'x'.join(types)}")
    return found


def _write(text: str) -> object:
    return os.write(1, text.encode())


def _sample_input(module: Any) -> torch.Tensor:
    holders = {DequantizedLinear: "scales", PackedInt4Linear: "scales_and_zeros", PackedInt8Linear: "scales"}
    weight = getattr(module, holders.get(type(module), "weight"))
    return torch.zeros(1, module.in_features, dtype=weight.dtype, device=weight.device)


def _device(model: nn.Module) -> str:
    return next(model.parameters()).device.type
