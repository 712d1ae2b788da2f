"""Where the model comes from: one transformers folder on disk, or a configuration with random weights.

The one idea: whatever the source (the model this project fetches itself, a hub id, a folder), what is
measured is a plain safetensors folder that was checked before anything big was read. torch and transformers
are imported inside functions, so that `cache_dir()` stays cheap.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flashgap.model_files import ModelError, Progress, cache_dir, check_shards, folder_digest, one_line
from flashgap.model_support import (
    check_config,
    check_layers,
    check_raw_config,
    check_supported,
    quiet,
    read_config,
    skeleton,
)
from flashgap.study import project_root
from flashgap.treatment import Checkpoint, ModelSpec

__all__ = [
    "ByteTokenizer",
    "ModelError",
    "ResolvedModel",
    "cache_dir",
    "check_supported",
    "held_out_text",
    "load",
    "resolve",
    "tokenizer",
]

RANDOM_SEED = 20261201  # of random weights; part of their digest
LEGACY_CONFIG_KEYS = {"rope_theta", "partial_rotary_factor", "rope_scaling"}  # folded into rope_parameters


@dataclass(frozen=True)
class ResolvedModel:
    """A model ready to load. `folder` is None for random weights; `digest` is that of the weights."""

    folder: Path | None
    config: Any
    digest: str
    label: str
    random_weights: bool
    requantized: bool
    license: str | None


def resolve(model: ModelSpec, progress: Progress = print) -> ResolvedModel:
    """Fetch if needed, check, and describe `model`; raises `ModelError` with one line."""
    if model.source == "random":
        config = random_config(model)
        digest = random_digest(model)
        label = f"random {config.model_type}, {config.num_hidden_layers} layers x {config.hidden_size}"
        return ResolvedModel(None, config, digest, label, True, False, None)
    folder = locate(model, progress)
    config = read_config(folder)
    check_supported(config)
    return ResolvedModel(
        folder=folder,
        config=config,
        digest=folder_digest(folder),
        label=folder_label(model, folder),
        random_weights=False,
        requantized=model.source == "embedded",
        license=folder_license(model, folder),
    )


def locate(model: ModelSpec, progress: Progress = print) -> Path:
    """The checked folder of a model that has weights, fetched first if it is not here yet."""
    if model.source == "embedded":
        from flashgap import embedded

        folder = embedded.folder(progress)
    elif model.source == "hub":
        from flashgap.hub import hub_folder

        folder = hub_folder(str(model.id), model.revision, progress)
    else:
        folder = project_root() / Path(str(model.id)).expanduser()
        if not folder.is_dir():
            raise ModelError(f"model.id: folder {model.id} does not exist; correct the path")
    check_raw_config(folder)
    check_shards(folder)
    return folder


def checkpoint_folder(checkpoint: Checkpoint, progress: Progress = print) -> Path:
    """The folder of a compressed checkpoint, fetched first if it is a hub id that is not here yet."""
    if checkpoint.source == "hub":
        from flashgap.hub import hub_snapshot

        return hub_snapshot(checkpoint.id, checkpoint.revision, progress)
    folder = project_root() / Path(checkpoint.id).expanduser()
    if not folder.exists():
        raise ModelError(f"builds: checkpoint.id: {checkpoint.id} does not exist; correct the path")
    return folder


def folder_label(model: ModelSpec, folder: Path) -> str:
    """A name for tables, without this machine's paths."""
    if model.source == "embedded":
        return "SmolLM2-135M-Instruct (from Q4_1)"
    return f"{model.id}@{folder.name[:8]}" if model.source == "hub" else folder.resolve().name


def folder_license(model: ModelSpec, folder: Path) -> str | None:
    """The licence stated in the model card's front matter, if there is a card."""
    if model.source == "embedded":
        return "apache-2.0"
    card = folder / "README.md"
    if not card.is_file():
        return None
    front = re.match(r"---\n(.*?)\n---", card.read_text(errors="replace"), re.DOTALL)
    stated = re.search(r"^license:\s*(\S+)", front.group(1), re.MULTILINE) if front else None
    return stated.group(1) if stated else None


def load(model: ModelSpec, device: str) -> Any:
    """The model on `device` in its dtype, in eval mode, without gradients.

    Random weights are drawn on the device in the dtype itself: the same on every run of one device kind,
    not the same on CPU and GPU, whose generators differ.
    """
    import torch

    with torch.no_grad(), quiet():
        loaded = load_random(model, device) if model.source == "random" else load_folder(model, device)
    return loaded.eval().requires_grad_(False)


def load_folder(model: ModelSpec, device: str) -> Any:
    """Weights of a folder, read straight to `device`; tensors missing from the files are an error."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = locate(model)
    config = read_config(folder)
    check_config(config)
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, model.dtype),
            device_map=None if device == "cpu" else {"": device},
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except RuntimeError as error:
        if "mismatch" not in str(error):  # out of memory among others, which is the worker's to tell
            raise
        raise ModelError(
            f"{folder}: weights do not have the shapes config.json says; fetch it again"
        ) from error
    check_layers(loaded)
    # transformers fills a missing tensor with random numbers and only warns.
    absent = sorted(info["missing_keys"])
    if absent:
        raise ModelError(f"{folder}: {len(absent)} tensors missing, first {absent[0]}; fetch it again")
    return loaded


def load_random(model: ModelSpec, device: str) -> Any:
    """Seeded random weights: shapes on the meta device, then memory on `device`, then drawn in place."""
    import torch

    module = skeleton(random_config(model), model.dtype).to_empty(device=device)
    # fork_rng: a trial's own random numbers do not depend on how its model was made.
    with torch.random.fork_rng(devices=[] if device == "cpu" else [torch.device(device).index or 0]):
        torch.manual_seed(RANDOM_SEED)
        module.init_weights()  # also computes the rotary buffers, which to_empty left undefined, and ties
    return module


def random_config(model: ModelSpec) -> Any:
    """The checked configuration of a `random` model; unknown keys are refused, which transformers keeps."""
    from transformers import AutoConfig

    keys = dict(model.config or {})
    kind = str(keys.pop("model_type"))
    try:
        config = AutoConfig.for_model(kind, **keys)
    except Exception as error:  # ValueError or a validation error of its own, by what is wrong
        detail = str(error).split(" Should contain one of")[0]
        raise ModelError(f"model.config: {one_line(detail, 200)}; correct it") from error
    known = {field.name for field in fields(type(config))} | set(config.attribute_map) | LEGACY_CONFIG_KEYS
    unknown = sorted(set(keys) - known)
    if unknown:
        raise ModelError(f"model.config.{unknown[0]}: unknown to '{kind}'; check its spelling or remove it")
    check_supported(config)
    return config


def random_digest(model: ModelSpec) -> str:
    """SHA-256 of configuration, dtype and seed: all that random weights come from."""
    identity = {"config": model.config, "dtype": model.dtype, "seed": RANDOM_SEED}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


class ByteTokenizer:
    """Bytes as token ids (modulo the vocabulary): a stand-in for random models, needs no download."""

    eos_token_id = None
    pad_token_id = None
    chat_template = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; there are no special tokens."""
        return [byte % self.vocab_size for byte in text.encode()]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`; ids that are no byte become U+FFFD."""
        return "".join(
            run.decode(errors="replace") if isinstance(run, bytes) else "\N{REPLACEMENT CHARACTER}"
            for run in byte_runs(ids)
        )


def byte_runs(ids: list[int]) -> Iterator[bytes | None]:
    """Runs of ids that are bytes, and None for each id that is not."""
    run = bytearray()
    for token in map(int, ids):
        if token < 256:
            run.append(token)
            continue
        yield bytes(run)
        run.clear()
        yield None
    yield bytes(run)


def tokenizer(model: ModelSpec) -> Any:
    """The model's own tokenizer, or a `ByteTokenizer` for random weights."""
    if model.source == "random":
        return ByteTokenizer(random_config(model).vocab_size)
    from transformers import AutoTokenizer

    folder = locate(model)
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # several libraries read tokenizers, each with errors of its own
        raise ModelError(
            f"{folder}: no usable tokenizer ({one_line(str(error), 120)}); add tokenizer.json"
        ) from error


def held_out_text() -> tuple[str, str]:
    """Prose that every Python carries (its language reference) and its SHA-256, which differs by version."""
    from pydoc_data import topics

    text = "\n".join(topics.topics[key] for key in sorted(topics.topics))
    return text, hashlib.sha256(text.encode()).hexdigest()
