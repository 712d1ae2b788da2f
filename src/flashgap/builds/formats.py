"""Compressed checkpoints as others write and read them: AutoAWQ, GPTQ, compressed-tensors, GGUF.

The one idea: a file's codes are taken as they are. Each format is a packing of the same three things (codes,
scales, zero points), so reading is unpacking, never quantizing again, and what was read can be asked for bit
for bit. GGUF is the exception: transformers, whose model this becomes, expands it to 16 bits when it loads,
so that is what runs, and the kernel check says so. Layouts: AutoAWQ's GEMM packing, GPTQ's (first version
stores the zero point less one), and `compressed_tensors.compressors.pack_quantized`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashgap.builds.weights import BuildError, GroupedWeight
from flashgap.model_files import file_digest, folder_digest, raw_config, weight_files

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of an int32, lowest nibble first
PLAIN_ORDER = tuple(range(8))
FORMATS = ("awq", "gptq", "compressed-tensors", "gguf")
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class Read:
    """A checkpoint in memory: `weights` of quantized layers by module name, `dense` tensors by parameter name."""

    format: str
    weights: dict[str, GroupedWeight]
    dense: dict[str, Tensor]
    config: Any


def sniff(folder: Path) -> str | None:
    """The format that `folder` declares, one of `FORMATS`, or None. Reads `config.json` only."""
    if folder.suffix == ".gguf" or (not (folder / "config.json").is_file() and any(folder.glob("*.gguf"))):
        return "gguf"
    method = _declared(folder).get("quant_method")
    return str(method) if method in FORMATS else None


def checkpoint_digest(folder: Path) -> str:
    """SHA-256 of the checkpoint's configuration and weights; file hashes are kept by path, size and time."""
    return file_digest(_gguf(folder)) if sniff(folder) == "gguf" else folder_digest(folder)


def read_checkpoint(folder: Path) -> Read:
    """Read a compressed checkpoint; `BuildError` names the file, the tensor and the cure."""
    found = sniff(folder)
    if found is None:
        method = _declared(folder).get("quant_method", "no quantization_config")
        raise BuildError(
            f"{folder}: {method}: not a compressed checkpoint that is known here ({', '.join(FORMATS)}); give one, or "
            "make the build from the original with builds.NAME.quantization"
        )
    if found == "gguf":
        return _read_gguf(folder)
    from transformers import AutoConfig

    settings = _declared(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    del config.quantization_config
    layers: dict[str, dict[str, Tensor]] = {}
    dense: dict[str, Tensor] = {}
    suffixes = {
        "awq": ("qweight", "qzeros", "scales"),
        "gptq": ("qweight", "qzeros", "scales", "g_idx"),
        "compressed-tensors": (
            "weight_packed",
            "weight_scale",
            "weight_zero_point",
            "weight_shape",
            "weight_g_idx",
        ),
    }[found]
    for name, tensor in _tensors(folder):
        module, _, kind = name.rpartition(".")
        if kind in suffixes:
            layers.setdefault(module, {})[kind] = tensor
        else:
            dense[name] = tensor
    unpack = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors}[found]
    weights = {}
    for module, parts in layers.items():
        try:
            weights[module] = unpack(parts, settings)
        except KeyError as error:
            raise BuildError(
                f"{folder}: {module}: tensor {error} is missing; fetch the checkpoint again"
            ) from None
        except (ValueError, RuntimeError) as error:
            raise BuildError(f"{folder}: {module}: {str(error).splitlines()[0]}") from None
    if not weights:
        raise BuildError(f"{folder}: config.json says {found}, but no tensor is packed so; fetch it again")
    return Read(found, weights, dense, config)


# ---------------------------------------------------------------------- reading


def _declared(folder: Path) -> dict[str, Any]:
    config = raw_config(folder)
    return config.get("quantization_config") or config.get("compression_config") or {}


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BuildError(f"{path}: damaged ({error}); fetch it again") from None


def unpack_columns(packed: Tensor, order: tuple[int, ...], bits: int = 4) -> Tensor:
    """int32 [R, C] -> codes uint8 [R, C * 32 / bits]; field i of an integer is column `order[i]`."""
    fields = 32 // bits
    shifts = torch.arange(fields, dtype=torch.int32) * bits
    wide = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    columns = torch.empty_like(wide)
    columns[..., list(order[:fields])] = wide
    return columns.reshape(packed.shape[0], -1).to(torch.uint8)


def pack_columns(codes: Tensor, order: tuple[int, ...], bits: int = 4) -> Tensor:
    """The inverse of `unpack_columns`."""
    fields = 32 // bits
    wide = codes.reshape(codes.shape[0], -1, fields)[..., list(order[:fields])].long()
    packed = (wide << (torch.arange(fields) * bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _awq(parts: dict[str, Tensor], settings: dict[str, Any]) -> GroupedWeight:
    bits, version = settings.get("bits", 4), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise ValueError(f"AWQ of {bits} bits, version {version}; only 4 bits in the GEMM layout are read")
    codes = unpack_columns(parts["qweight"], AWQ_ORDER).T.contiguous()
    zeros = unpack_columns(parts["qzeros"], AWQ_ORDER).T.contiguous()
    return _checked(GroupedWeight(codes, parts["scales"].T.contiguous(), zeros, 4))


def _gptq(parts: dict[str, Tensor], settings: dict[str, Any]) -> GroupedWeight:
    bits = settings.get("bits", 4)
    if bits not in (4, 8):
        raise ValueError(f"GPTQ of {bits} bits; 4 and 8 are read")
    order = PLAIN_ORDER[: 32 // bits]
    codes = unpack_columns(parts["qweight"].T.contiguous(), order, bits)
    zeros = unpack_columns(parts["qzeros"], order, bits).T.contiguous()
    if settings.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = zeros + 1
    scales = parts["scales"].T.contiguous()
    group = codes.shape[1] // scales.shape[1]
    order_of_groups = parts.get("g_idx")
    if order_of_groups is not None and not torch.equal(
        order_of_groups.long(), torch.arange(codes.shape[1]) // group
    ):
        raise ValueError(
            "activation order (desc_act) scatters its groups; no kernel here takes that, use desc_act: false"
        )
    return _checked(GroupedWeight(codes, scales, zeros, bits))


def _compressed_tensors(parts: dict[str, Tensor], settings: dict[str, Any]) -> GroupedWeight:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    if "weight_g_idx" in parts:
        raise ValueError("activation order scatters its groups; no kernel here takes that")
    rows, columns = (int(n) for n in parts["weight_shape"])
    scales = parts["weight_scale"].reshape(rows, -1)
    bits = parts["weight_packed"].shape[1] * 32 // columns
    if bits not in (4, 8):
        raise ValueError(f"{bits} bits a weight; 4 and 8 are read")
    middle = 2 ** (bits - 1)
    signed = unpack_from_int32(parts["weight_packed"], bits, torch.Size((rows, columns)))
    codes = (signed.int() + middle).to(torch.uint8)
    if "weight_zero_point" in parts:
        kept = unpack_from_int32(
            parts["weight_zero_point"], bits, torch.Size((rows, scales.shape[1])), packed_dim=0
        )
        zeros = (kept.int() + middle).to(torch.uint8)
    else:
        zeros = torch.full(scales.shape, middle, dtype=torch.uint8)
    return _checked(GroupedWeight(codes, scales, zeros, bits))


def _checked(weight: GroupedWeight) -> GroupedWeight:
    rows, columns = weight.shape
    groups = weight.scales.shape[1]
    if weight.scales.shape != weight.zeros.shape or weight.scales.shape[0] != rows or columns % groups:
        raise ValueError(
            f"codes {tuple(weight.codes.shape)}, scales {tuple(weight.scales.shape)} and zeros "
            f"{tuple(weight.zeros.shape)} do not fit together; fetch the checkpoint again"
        )
    if not torch.isfinite(weight.scales).all():
        raise ValueError("a scale is NaN or infinite; fetch the checkpoint again")
    return weight


def _gguf(folder: Path) -> Path:
    files = [folder] if folder.suffix == ".gguf" else sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise BuildError(f"{folder}: {len(files)} GGUF files; name one of them")
    return files[0]


def _read_gguf(folder: Path) -> Read:
    from transformers import AutoModelForCausalLM, GgufConfig

    path = _gguf(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    except (OSError, ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        raise BuildError(f"{path}: cannot be read: {str(error).splitlines()[0][:200]}") from None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    dense = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return Read("gguf", {}, dense, model.config)


# ---------------------------------------------------------------------- writing


def write_compressed_tensors(
    folder: Path, model: Any, weights: dict[str, GroupedWeight], source: Path | None = None
) -> None:
    """A folder that transformers and vLLM load: `weights` packed, all other tensors of `model` as they are.

    Integer zero points; layers may differ in bits and group size. Tokenizer files come from `source`.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    packed: dict[str, Tensor] = {}
    groups: dict[tuple[int, int | None, bool], list[str]] = {}
    for name, weight in weights.items():
        if weight.zeros.is_floating_point():
            raise BuildError(
                f"{name}: free zero points fit no compressed-tensors layout; use another quantizer"
            )
        group_size = None if weight.group_size == weight.shape[1] else weight.group_size
        groups.setdefault((weight.bits, group_size, weight.symmetric), []).append(name)
        middle = 2 ** (weight.bits - 1)
        signed = (weight.codes.int() - middle).to(torch.int8)
        packed[f"{name}.weight_packed"] = pack_to_int32(signed, weight.bits).contiguous()
        packed[f"{name}.weight_scale"] = weight.scales.to(model.dtype).contiguous()
        packed[f"{name}.weight_shape"] = torch.tensor(weight.shape)
        if not weight.symmetric:
            zeros = (weight.zeros.int() - middle).to(torch.int8)
            packed[f"{name}.weight_zero_point"] = pack_to_int32(zeros, weight.bits, packed_dim=0).contiguous()
    schemes = {
        f"group_{number}": {
            "targets": ["Linear"] if len(groups) == 1 else names,
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": symmetric,
                "strategy": "channel" if group_size is None else "group",
                "group_size": group_size,
            },
        }
        for number, ((bits, group_size, symmetric), names) in enumerate(groups.items())
    }
    ignored = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n not in weights]
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": schemes,
        "ignore": ignored,
    }
    _write(folder, model, weights, packed, settings, source)


def write_awq(
    folder: Path, model: Any, weights: dict[str, GroupedWeight], source: Path | None = None
) -> None:
    """A folder in AutoAWQ's GEMM layout. 4 bits, one group size, integer zero points, features in eights."""
    groups = {weight.group_size for weight in weights.values()}
    packed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.bits != 4 or weight.zeros.is_floating_point() or weight.shape[0] % 8 or len(groups) != 1:
            raise BuildError(
                f"{name}: AutoAWQ's layout wants 4 bits, one group size, integer zero points and output features in "
                f"eights; here are {weight.bits} bits, groups {sorted(groups)}, {weight.shape[0]} features"
            )
        packed[f"{name}.qweight"] = pack_columns(weight.codes.T, AWQ_ORDER)
        packed[f"{name}.qzeros"] = pack_columns(weight.zeros.T, AWQ_ORDER)
        packed[f"{name}.scales"] = weight.scales.T.to(model.dtype).contiguous()
    left = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n not in weights]
    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": groups.pop(),
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": left or None,
    }
    _write(folder, model, weights, packed, settings, source)


def _write(
    folder: Path,
    model: Any,
    weights: dict[str, GroupedWeight],
    packed: dict[str, Tensor],
    settings: dict[str, Any],
    source: Path | None,
) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    replaced = {f"{name}.weight" for name in weights}
    state, seen = dict(packed), set()
    for name, tensor in model.state_dict().items():
        if name in replaced or name in state or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        state[name] = tensor.contiguous()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": settings}, indent=2))
    for pattern in TOKENIZER_FILES if source else ():
        for file in source.glob(pattern):  # type: ignore[union-attr]
            shutil.copy(file, folder)
