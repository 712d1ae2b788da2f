"""From a model and a build specification to a model in memory, ready to run.

The one idea: a build's memory is part of what is measured, so a quantized build is *prepared once* in
another process and saved, then loaded straight into its small form. The dense weights it came from are
never in the memory of the process that is measured (random-weight models are the exception: they have no
files, are quantized in process, and their peak says so: `Build.in_process`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flashgap import model_support, models
from flashgap.builds import dispatch, pruning, quantizers
from flashgap.builds.calibration import calibration_text
from flashgap.builds.packed import HeadEmbedding, PackedLinear
from flashgap.builds.quantization import (
    DequantizedLinear,
    quantize_in_place,
    quantized_layers,
    replace,
    skeleton,
)
from flashgap.builds.weights import BuildError, GroupedWeight
from flashgap.model_files import file_digest
from flashgap.progress import note
from flashgap.treatment import BuildSpec, ModelSpec, PruningConfig

FORMAT = 5  # of the saved files; a change makes every prepared build stale
ALIGNMENT = 64  # bytes; a vector register, a cache line
PRUNED_FORMAT = 1  # of a pruned folder
PRUNED_FACTS = "pruned.json"  # in it: what `pruning.pruned_model` says
QUANTIZED_FORMAT = 2  # of what a quantizer found
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Build:
    """A model ready to run. `resident_bytes` are its parameters and buffers, shared storage once;
    `parameters` counts weights as the model means them, a 4-bit one as one. `quantizer` is what is known of
    how the codes were found: seconds, SHA-256 of the calibration text, and `rounding` (see `GroupedWeight`), the
    mean over layers of 4 bits; `pruning` what `pruning.pruned_model` says."""

    model: Any
    digest: str
    resident_bytes: int
    parameters: int
    in_process: bool = False
    quantizer: dict[str, Any] = field(default_factory=dict)
    pruning: dict[str, Any] = field(default_factory=dict)


def load_build(model: ModelSpec, build: BuildSpec, device: str) -> Build:
    """Load `build` of `model` on `device`, eval mode; prepares it first where it must."""
    if build.pruning and model.source != "random":
        folder = pruned_folder(model, build.pruning, device)
        made = load_build(_folder_model(folder, model), unpruned(build), device)
        return dataclasses.replace(made, pruning=json.loads((folder / PRUNED_FACTS).read_text()))
    if not build.lossy:
        return _finish(models.load(model, device), build_digest(model, build))
    if model.source == "random" and not build.checkpoint:
        dense, pruning = _pruned_random(model, build, device)
        made_here = _make(model, build, device, dense)[0] if build.quantization else dense
        found = _finish(made_here, build_digest(model, build), in_process=True)
        return dataclasses.replace(found, pruning=pruning)
    folder = prepare_build(model, build)
    return _finish(load_prepared(folder, model, device), folder.name, quantizer=quantizer_facts(folder.name))


def quantizer_facts(digest: str) -> dict[str, Any]:
    """`Build.quantizer` of a prepared build; empty for one that was made in process or read from a checkpoint."""
    try:
        facts = json.loads((models.cache_dir() / "builds" / digest / "build.json").read_text())
    except FileNotFoundError:
        return {}
    found: dict[str, Any] = facts["quantizer"]
    return found


def pruning_facts(model: ModelSpec, build: BuildSpec) -> dict[str, Any]:
    """`Build.pruning` of a build whose pruned folder is there or can be made; empty without pruning."""
    if not build.pruning or model.source == "random":
        return {}
    found: dict[str, Any] = json.loads((pruned_folder(model, build.pruning) / PRUNED_FACTS).read_text())
    return found


def build_digest(model: ModelSpec, build: BuildSpec) -> str:
    """16 hex digits that identify the weights in memory: the source weights' digest and the build.

    A build that is pruned is made first, where it is not yet: its weights are the source of what follows.
    """
    if build.pruning and model.source != "random":
        return build_digest(_folder_model(pruned_folder(model, build.pruning), model), unpruned(build))
    if build.checkpoint:
        from flashgap.builds.formats import checkpoint_digest

        source = checkpoint_digest(models.checkpoint_folder(build.checkpoint))
    else:
        source = models.resolve(model, progress=_silent).digest
    if not build.lossy:
        return source[:16]
    # What its layers are laid out for is part of it: the same codes are packed differently elsewhere.
    layout = torch.backends.cpu.get_cpu_capability() if build.execution == "packed" else ""
    asked = build.model_dump(mode="json", exclude_defaults=True)
    facts = [source, asked, _quantizer(build), model.dtype, FORMAT, layout]
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prepare_build(model: ModelSpec, build: BuildSpec, device: str = "cpu") -> Path:
    """Make the build once and save it; return the folder `<cache>/builds/<digest>`. Safe against two processes."""
    from filelock import FileLock

    if not build.lossy:
        raise BuildError("the Standard build needs no preparation")
    root = models.cache_dir() / "builds"
    folder = root / build_digest(model, build)
    if (folder / "model.safetensors").is_file():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(str(folder) + ".lock"):
        if not (folder / "model.safetensors").is_file():
            start_s = time.perf_counter()
            made, quantizer = _make(model, build, device)
            facts = {"made_s": time.perf_counter() - start_s, "quantizer": quantizer}
            facts["many_rows"] = dispatch.thresholds(made) if build.execution == "packed" else {}
            _save(made, folder, facts)
    return folder


def unpruned(build: BuildSpec) -> BuildSpec:
    """What is left to do to a model that is pruned already."""
    return build.model_copy(update={"pruning": None})


def _folder_model(folder: Path, model: ModelSpec) -> ModelSpec:
    return ModelSpec(source="folder", id=str(folder), dtype=model.dtype)


def pruned_folder(model: ModelSpec, spec: PruningConfig, device: str = "cpu") -> Path:
    """The pruned model as a plain transformers folder, `<cache>/pruned/<digest>`; made once."""
    from filelock import FileLock

    from flashgap.builds import formats

    source = models.resolve(model, progress=_silent).digest
    settings = spec.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps([source, settings, model.dtype, PRUNED_FORMAT], sort_keys=True)
    folder = models.cache_dir() / "pruned" / hashlib.sha256(text.encode()).hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(folder) + ".lock"):
        if not (folder / PRUNED_FACTS).is_file():
            note(f"pruning {spec.target:.0%} by {spec.method}, {spec.importance}; kept for later")
            made, facts = pruning.pruned_model(models.load(model, device), models.tokenizer(model), spec)
            with whole_folder(folder) as partial:
                made.save_pretrained(partial)
                for pattern in formats.TOKENIZER_FILES:
                    for file in models.locate(model, _silent).glob(pattern):
                        if file.name != "generation_config.json":  # the model has written its own
                            shutil.copy(file, partial)
                (partial / PRUNED_FACTS).write_text(json.dumps(facts, indent=1))
    return folder


def _pruned_random(model: ModelSpec, build: BuildSpec, device: str) -> tuple[nn.Module, dict[str, Any]]:
    """Random weights, pruned if `build` says so, and what is known of that."""
    dense = models.load(model, device)
    if not build.pruning:
        return dense, {}
    return pruning.pruned_model(dense, models.tokenizer(model), build.pruning)


def _make(
    model: ModelSpec, build: BuildSpec, device: str, dense: Any = None
) -> tuple[nn.Module, dict[str, Any]]:
    """The build in memory, made from its checkpoint or by its quantizer (of `dense`, or of `model`), and `Build.quantizer`."""
    from flashgap.builds import formats

    dtype = DTYPES[model.dtype]
    spec = build.quantization
    if spec and (spec.quantizer, spec.execution, spec.bits) == ("rtn", "dequantize", 4):
        return quantize_in_place(dense or models.load(model, device), spec), {}
    if spec and (
        model.source == "random" or spec.quantizer == "hqq"
    ):  # its free zero points fit no common format
        dense = dense or models.load(model, device)
        tokenizer = models.tokenizer(model) if spec.searches else None
        found = quantizers.quantize_model(dense, tokenizer, spec, note)
        made = replace(dense, found, spec.execution, dtype)
        return _tied(made, spec.tied_embedding and _ties(model)), {"rounding": _rounding(found)}
    origin = build.checkpoint
    folder = models.checkpoint_folder(origin) if origin else quantized_folder(model, build, device)
    read = formats.read_checkpoint(folder)
    assert build.execution is not None
    made = replace(_dense(read, model, folder), read.weights, build.execution, dtype)
    facts = {} if spec is None else json.loads((folder / "quantized.json").read_text())
    known = {key: facts[key] for key in ("quantize_s", "calibration_sha256", "rounding") if facts.get(key)}
    return _tied(made, spec is not None and spec.tied_embedding and _ties(model)), known


def _rounding(weights: dict[str, GroupedWeight]) -> float | None:
    """Mean of `GroupedWeight.rounding` over the layers of 4 bits."""
    known = [w.rounding for w in weights.values() if w.bits == 4 and w.rounding is not None]
    return sum(known) / len(known) if known else None


def _ties(model: ModelSpec) -> bool:
    """Whether the model, as it is published, has one weight for its embedding and its output head."""
    random = model.source == "random"
    config = (
        models.random_config(model) if random else model_support.read_config(models.locate(model, _silent))
    )
    return bool(config.get_text_config().tie_word_embeddings)


def _tied(model: nn.Module, tied: bool) -> nn.Module:
    """`model`; its embedding gives way to one that reads the packed output head, if `tied`."""
    if tied:
        model.set_input_embeddings(HeadEmbedding(model.get_output_embeddings()))  # type: ignore[operator]
    return model


def _dense(read: Any, model: ModelSpec, folder: Path) -> nn.Module:
    """The model of a checkpoint; its quantized layers have shapes only."""
    dtype = DTYPES[model.dtype]
    empty = model_support.skeleton(read.config, model.dtype)
    state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in read.dense.items()}
    if "lm_head" in read.weights:
        empty.config.tie_word_embeddings = False
    replaced = {f"{name}.weight" for name in read.weights}
    return fill(
        empty,
        state,
        "cpu",
        f"{folder}: tensors {{}} do not match its configuration; fetch it again",
        replaced,
    )


def fill(
    empty: Any, state: dict[str, torch.Tensor], device: str, mismatch: str, replaced: Collection[str] = ()
) -> nn.Module:
    """The skeleton `empty` with the tensors of `state` as they are; those of `replaced` may be absent.

    Raises `BuildError` with `mismatch`, the first names in its braces, if others are, or if some are too many.
    """
    result = empty.load_state_dict(state, strict=False, assign=True)
    empty.tie_weights()
    here = dict([*empty.named_parameters(), *empty.named_buffers()])
    absent = [n for n in result.missing_keys if n in here and here[n].is_meta and n not in replaced]
    if absent or result.unexpected_keys:
        raise BuildError(mismatch.format([*absent, *result.unexpected_keys][:3]))
    _restore_buffers(empty, device)
    return empty


def _quantizer(build: BuildSpec) -> str:
    """The library that chooses codes, and its version; ours have the version of the format."""
    name = build.quantization.quantizer if build.quantization else "rtn"
    return name if name == "rtn" else f"{name} {metadata.version(name)}"


def quantized_folder(model: ModelSpec, build: BuildSpec, device: str = "cpu") -> Path:
    """What a quantizer found, as a compressed-tensors folder that others load: `<cache>/quantized/<digest>`.

    Made once, whatever executes it: a search takes minutes, reading it seconds.
    """
    from filelock import FileLock

    from flashgap.builds import formats

    spec = build.quantization
    assert spec is not None
    source = models.resolve(model, progress=_silent).digest
    settings = spec.model_dump(mode="json", exclude={"execution", "tied_embedding"})
    text = json.dumps([source, settings, _quantizer(build), model.dtype, QUANTIZED_FORMAT], sort_keys=True)
    folder = models.cache_dir() / "quantized" / hashlib.sha256(text.encode()).hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(folder) + ".lock"):
        if not (folder / "quantized.json").is_file():
            note(
                f"quantizing with {spec.quantizer}"
                + (", a search of minutes; kept for later" if spec.searches else "")
            )
            start_s = time.perf_counter()
            dense = models.load(model, device)
            tokenizer = models.tokenizer(model) if spec.searches else None
            weights = quantizers.quantize_model(dense, tokenizer, spec, note)
            made = {
                "settings": settings,
                "quantize_s": time.perf_counter() - start_s,
                "rounding": _rounding(weights),
                "calibration_sha256": calibration_text(spec.calibration.text)[1]
                if spec.calibration
                else None,
            }
            with whole_folder(folder) as partial:
                formats.write_compressed_tensors(partial, dense, weights, models.locate(model, _silent))
                (partial / "quantized.json").write_text(json.dumps(made, indent=1))
            note(f"quantized in {made['quantize_s']:.0f} s")
    return folder


def load_prepared(folder: Path, model: ModelSpec, device: str) -> nn.Module:
    """A skeleton without weights takes the saved tensors as they are: dense weights are never allocated."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    facts = json.loads((folder / "build.json").read_text())
    empty = model_support.skeleton(AutoConfig.from_pretrained(folder), model.dtype)
    skeleton(empty, {name: tuple(kept) for name, kept in facts["layers"].items()}, facts["execution"])
    dispatch.apply(empty, facts["many_rows"])
    embedding = empty.get_input_embeddings()
    dropped = {
        f"{name}.weight" for name, m in empty.named_modules() if m is embedding and facts["tied_embedding"]
    }
    state = {n: aligned(t) for n, t in load_file(folder / "model.safetensors", device=device).items()}
    mismatch = f"{folder}: tensors {{}} do not match the model; delete the folder and run again"
    return _tied(fill(empty, state, device, mismatch, dropped), facts["tied_embedding"])


def resident_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; tied tensors count once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model)}
    return sum(storages.values())


def parameter_count(model: nn.Module) -> int:
    """Weights of the model: tied ones once, a 4-bit weight as one, scales and zeros as none."""
    dense = sum(p.numel() for p in model.parameters())
    return dense + sum(
        m.in_features * m.out_features
        for m in model.modules()
        if isinstance(m, DequantizedLinear | PackedLinear)
    )


def _finish(model: nn.Module, digest: str, in_process: bool = False, quantizer: Any = None) -> Build:
    model.eval()
    _unfreeze(model)
    _touch(model)
    return Build(model, digest, resident_bytes(model), parameter_count(model), in_process, quantizer or {})


def _unfreeze(model: nn.Module) -> None:
    """Leave weights as `from_pretrained` does, requiring gradients, although none is ever computed.

    `aten::linear` folds a batch of rows that are not contiguous, such as the last position of every
    prompt, into one matmul only if the weight requires a gradient. Frozen, it copies the weight once a
    row: the output layer of a 135M model then takes 4 s instead of 13 ms at batch 16 (torch 2.13).
    """
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())


def _touch(model: nn.Module) -> None:
    """Read one byte of each page of weights on the host.

    safetensors maps files into memory, and a mapped page is loaded when first read: that would put the
    disk into the first token's time, and leave the weights out of the memory of "weights loaded".
    """
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in _tensors(model) if t.device.type == "cpu"
    }
    for storage in storages.values():
        torch.empty(0, dtype=torch.uint8).set_(storage)[:: mmap.PAGESIZE].sum()


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _save(model: Any, folder: Path, facts: dict[str, Any]) -> None:
    """Write the build's tensors, configuration and facts into `folder`."""
    with whole_folder(folder) as partial:
        state = {k: v.contiguous() for k, v in _untied(model).items()}
        _save_aligned(state, partial / "model.safetensors")
        model.config.save_pretrained(partial)
        layers = quantized_layers(model)
        execution = "packed" if any(isinstance(m, PackedLinear) for m in model.modules()) else "dequantize"
        digest = file_digest(partial / "model.safetensors")
        tied = isinstance(model.get_input_embeddings(), HeadEmbedding)
        facts |= {"layers": layers, "execution": execution, "sha256": digest, "tied_embedding": tied}
        (partial / "build.json").write_text(json.dumps(facts, indent=1))


def _save_aligned(state: dict[str, torch.Tensor], path: Path) -> None:
    """safetensors aligns its data to 8 bytes, kernels want their weights at `ALIGNMENT`: its header is padded."""
    from safetensors.torch import save_file

    save_file(state, path, metadata={"format": "pt", "padding": ""})
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    if start % ALIGNMENT:
        save_file(state, path, metadata={"format": "pt", "padding": " " * (-start % ALIGNMENT)})


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy if it does not start at a multiple of `ALIGNMENT`: the 8-bit kernel crashes then."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, beside `folder` and renamed to it at the end: a build is there whole or not at all."""
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        yield partial
        os.chmod(partial, 0o755)
        os.replace(partial, folder)
    except OSError as error:
        raise BuildError(f"{folder}: the prepared build cannot be saved: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _untied(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state without second names of the same storage; `tie_weights` restores them at load."""
    seen: set[int] = set()
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            state[name] = tensor
            seen.add(tensor.data_ptr())
    return state


def _restore_buffers(model: Any, device: str) -> None:
    """Buffers that no file holds (rotary frequencies) are computed by the model's own initialiser."""
    for module in model.modules():
        missing = [n for n, b in module.named_buffers(recurse=False) if b.is_meta]
        for name in missing:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        if missing:
            model._init_weights(module)


def _silent(*_: object, **__: object) -> None:
    pass
