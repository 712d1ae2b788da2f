"""Weights of compiled graphs, each kept once by its content.

The one idea: a build's graphs differ in shape, not in weights, yet a compiled graph normally carries its
own copy. Here a tensor is known by the hash of its bytes and layout, written once, and read into memory of
our own when a graph wants it: several graphs in one process share it, and nothing stays mapped.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX = "weights.index"
BLOB = "weights.bin"
ALIGNMENT = 64  # bytes; a vector register, a cache line


def add(at: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Append those of `tensors` that `at` does not hold; name -> content key."""
    index, names = read_index(at), {}
    with (at / BLOB).open("ab") as blob:
        for name, tensor in tensors.items():
            data = _flat(tensor).numpy().tobytes()
            layout = [str(tensor.dtype), list(tensor.shape), list(tensor.stride())]
            digest = hashlib.sha256(json.dumps(layout).encode() + data).hexdigest()[:24]
            names[name] = digest
            if digest not in index:
                blob.write(b"\0" * (-blob.tell() % ALIGNMENT))
                index[digest] = {"at": blob.tell(), "bytes": len(data), "layout": layout}
                blob.write(data)
    if tensors:
        written = at / f".{INDEX}"
        written.write_text(json.dumps(index))
        os.replace(written, at / INDEX)
    return names


def read_index(at: Path) -> dict[str, Any]:
    """Content key -> where its bytes are and how they are laid out; empty if there is no store."""
    try:
        found: dict[str, Any] = json.loads((at / INDEX).read_text())
    except FileNotFoundError:
        return {}
    return found


def _flat(tensor: Tensor) -> Tensor:
    """The bytes that `tensor` spans in its storage, [n] uint8 on the host, without what lies around it."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((span,), (1,)).cpu().contiguous().view(torch.uint8)


class StoredWeights:
    """Reads tensors of a folder on demand and keeps each once. `bytes` counts what is in memory."""

    def __init__(self, at: Path, device: str | torch.device = "cpu") -> None:
        self.at, self.device = at, torch.device(device)
        self.index = read_index(at)
        self._kept: dict[str, Tensor] = {}

    def tensor(self, content: str) -> Tensor:
        """The tensor with this content key, in memory of its own. `OSError` names the file if it is cut short."""
        if content not in self._kept:
            entry = self.index[content]
            dtype, shape, stride = entry["layout"]
            buffer = torch.empty(entry["bytes"], dtype=torch.uint8)
            with (self.at / BLOB).open("rb", buffering=0) as blob:
                blob.seek(entry["at"])
                done = 0
                while done < entry["bytes"]:
                    read = blob.readinto(memoryview(buffer.numpy())[done:])
                    if not read:
                        raise OSError(f"{self.at / BLOB} is cut short; delete the folder and run again")
                    done += read
            typed = buffer.view(getattr(torch, dtype.removeprefix("torch.")))
            self._kept[content] = typed.as_strided(shape, stride).to(self.device)
        return self._kept[content]

    def keep(self, contents: set[str]) -> None:
        """Let go of every tensor that is not one of `contents`."""
        self._kept = {content: tensor for content, tensor in self._kept.items() if content in contents}

    @property
    def bytes(self) -> int:
        """Bytes of the tensors in memory."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())
