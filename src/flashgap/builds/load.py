"""From a model and a build specification to a model in memory, ready to run.

The one idea: a build's memory is part of what is measured, so a quantized build is *prepared once* in
another process and saved, then loaded straight into its small form. The dense weights it came from are
never in the memory of the process that is measured (random-weight models are the exception: they have no
files, are quantized in process, and their peak says so: `Build.in_process`).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flashgap import models
from flashgap.builds.quantization import BuildError, DequantizedLinear, quantize_in_place
from flashgap.treatment import BuildSpec, ModelSpec, Quantization

FORMAT = 1  # of the saved files; a change makes every prepared build stale
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Build:
    """A model ready to run. `resident_bytes` are its parameters and buffers, shared storage once;
    `parameters` counts weights as the model means them, a 4-bit one as one."""

    model: Any
    digest: str
    resident_bytes: int
    parameters: int
    in_process: bool = False


def load_build(model: ModelSpec, build: BuildSpec, device: str) -> Build:
    """Load `build` of `model` on `device`, eval mode; prepares it first where it must."""
    spec = build.quantization
    if spec is None:
        return _finish(models.load(model, device), build_digest(model, build))
    if model.source == "random":
        dense = models.load(model, device)
        return _finish(quantize_in_place(dense, spec), build_digest(model, build), in_process=True)
    folder = prepare_build(model, build)
    return _finish(load_prepared(folder, model, spec, device), folder.name)


def build_digest(model: ModelSpec, build: BuildSpec) -> str:
    """16 hex digits that identify the weights in memory: the source weights' digest and the build."""
    source = models.resolve(model, progress=_silent).digest
    if build.quantization is None:
        return source[:16]
    text = json.dumps([source, build.model_dump(mode="json"), model.dtype, FORMAT], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prepare_build(model: ModelSpec, build: BuildSpec, device: str = "cpu") -> Path:
    """Quantize and save once; return the folder `<cache>/builds/<digest>`. Safe against two processes."""
    from filelock import FileLock

    spec = build.quantization
    if spec is None:
        raise BuildError("the Standard build needs no preparation")
    root = models.cache_dir() / "builds"
    folder = root / build_digest(model, build)
    if (folder / "model.safetensors").is_file():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(str(folder) + ".lock"):
        if not (folder / "model.safetensors").is_file():
            _save(quantize_in_place(models.load(model, device), spec), folder)
    return folder


def load_prepared(folder: Path, model: ModelSpec, spec: Quantization, device: str) -> nn.Module:
    """A skeleton without weights takes the saved tensors as they are: dense weights are never allocated."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=DTYPES[model.dtype]
        )
        quantize_in_place(skeleton, spec, skeleton=True)
    result = skeleton.load_state_dict(
        load_file(folder / "model.safetensors", device=device), strict=False, assign=True
    )
    skeleton.tie_weights()
    here = dict([*skeleton.named_parameters(), *skeleton.named_buffers()])
    absent = [name for name in result.missing_keys if name in here and here[name].is_meta]
    if absent or result.unexpected_keys:
        wrong = [*absent, *result.unexpected_keys][:3]
        raise BuildError(f"{folder}: tensors {wrong} do not match the model; delete the folder and run again")
    _restore_buffers(skeleton, device)
    return skeleton


def resident_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; tied tensors count once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model)}
    return sum(storages.values())


def parameter_count(model: nn.Module) -> int:
    """Weights of the model: tied ones once, a 4-bit weight as one, scales and zeros as none."""
    dense = sum(p.numel() for p in model.parameters())
    return dense + sum(
        m.in_features * m.out_features for m in model.modules() if isinstance(m, DequantizedLinear)
    )


def _finish(model: nn.Module, digest: str, in_process: bool = False) -> Build:
    model.eval()
    _unfreeze(model)
    _touch(model)
    return Build(model, digest, resident_bytes(model), parameter_count(model), in_process)


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


def _save(model: Any, folder: Path) -> None:
    """Write beside `folder`, then rename: a build is there whole or not at all."""
    from safetensors.torch import save_file

    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        state = {k: v.contiguous() for k, v in _untied(model).items()}
        save_file(state, partial / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(partial)
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
