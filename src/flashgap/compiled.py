"""Running a compiled build: prefill and decode on graphs that were compiled ahead of time.

The one idea: a trial has no model in memory, only the graphs it runs and the weights they read, each weight
once however many graphs share it. Prompts are prefilled one by one and every row keeps a position of its
own, so unequal prompts compute no padding in decode.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flashgap import artefact, graphs
from flashgap.builds.load import DTYPES, Build, build_digest, pruning_facts, quantizer_facts
from flashgap.engine import Engine, EngineError, State
from flashgap.graphs import Shape
from flashgap.stored_weights import StoredWeights
from flashgap.treatment import TrialSpec

RACE_PASSES = 9


def load(spec: TrialSpec) -> tuple[Build, ArtefactEngine]:
    """The compiled build that `spec` asks for; its graphs are loaded when first used."""
    from transformers import AutoConfig

    at = artefact.folder(build_digest(spec.model, spec.treatment.build), spec)
    try:
        about = json.loads((at / "build.json").read_text())
        config = AutoConfig.from_pretrained(at, local_files_only=True)
    except (OSError, ValueError):
        raise EngineError("the compiled graphs of this build are gone from the cache; run again") from None
    copies = spec.treatment.engine.many_rows_copy
    engine = ArtefactEngine(at, config, DTYPES[spec.model.dtype], spec.device, copies)
    facts, pruning = quantizer_facts(about["digest"]), pruning_facts(spec.model, spec.treatment.build)
    return Build(
        None, about["digest"], about["resident_bytes"], about["parameters"], quantizer=facts, pruning=pruning
    ), engine


class ArtefactEngine(Engine):
    """An `Engine` over compiled graphs. Prompts are prefilled one by one; rows keep positions of their own.

    `model` has the configuration only: no weights are in memory but those of the graphs in use.
    """

    def __init__(
        self, at: Path, config: Any, dtype: torch.dtype, device: str = "cpu", copies: bool = False
    ) -> None:
        self.at, self.dtype = at, dtype
        self.model = SimpleNamespace(config=config)
        self.device = torch.device(device)
        self.static = self.compiled = True
        self.graphs = artefact.available(at, copies)
        self.weights = StoredWeights(at)
        self._loaded: dict[Shape, Any] = {}
        self._kept: dict[Shape, tuple[list[Tensor], list[Tensor]]] = {}

    @torch.inference_mode()
    def prefill(self, ids: Tensor, attention_mask: Tensor | None, cache_tokens: int) -> tuple[Tensor, State]:
        """As `Engine.prefill`; a row's left padding is cut off and its prompt run alone."""
        batch, length = self._check(ids, cache_tokens)
        shape = self._shape("decode", batch, cache_tokens) if cache_tokens > length else None
        cache = self._cache_of(shape) if shape else None
        firsts, logits, counts = [], [], []
        for row in range(batch):
            prompt = ids[row] if attention_mask is None else ids[row][attention_mask[row].bool()]
            count = prompt.shape[0]
            graph = self._shape("prefill", 1, count)
            padded = torch.nn.functional.pad(prompt, (0, graph.tokens - count))[None]
            token, row_logits, keys, values = self._run(
                graph, padded, torch.tensor([count - 1], device=self.device)
            )
            if cache is not None:
                for kept, new in ((cache[0], keys), (cache[1], values)):
                    for layer, tensor in enumerate(new):
                        kept[layer][row, :, :count] = tensor[0, :, :count]
            firsts.append(token)
            logits.append(row_logits)
            counts.append(count)
        positions = torch.tensor(counts, device=self.device)
        tokens = torch.cat(firsts)
        state = State((shape, cache), tokens, positions, None, length, cache_tokens, torch.cat(logits))
        return tokens, state

    @torch.inference_mode()
    def decode_step(self, state: State) -> Tensor:
        """As `Engine.decode_step`."""
        if state.length >= state.cache_tokens:
            raise EngineError(
                f"the cache holds {state.cache_tokens} tokens and is full; prefill with more cache_tokens"
            )
        shape, (keys, values) = state.cache
        state.tokens, state.logits = self._run(shape, state.tokens, state.position_ids, keys, values)
        state.position_ids = state.position_ids + 1
        state.length += 1
        return state.tokens

    def extend(self, state: State, ids: Any, chunk_tokens: int = 512) -> None:
        """Fixed graphs have none for this."""
        raise EngineError(
            "a compiled build cannot extend a cache; measure context with an eager or compiled step"
        )

    def warmup(self, batch: int, cache_tokens: int, padded: bool = False) -> None:
        """Load the decode graph of this shape, touch its weights, and let others go."""
        shape = self._shape("decode", batch, cache_tokens)
        self._keep_only(shape)
        keys, values = self._cache_of(shape)
        tokens = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        with torch.inference_mode():
            for step in range(2):
                self._run(shape, tokens, torch.full((batch,), step, device=self.device), keys, values)

    def release(self) -> None:
        """Drop caches; loaded graphs stay."""
        self._kept.clear()

    def _keep_only(self, shape: Shape) -> None:
        """One decode graph at a time, with the weights that no graph in use reads let go."""
        for other in [s for s in self._loaded if s.phase == "decode" and s != shape]:
            del self._loaded[other]
            self._kept.pop(other, None)
        wanted = (self.graphs[s]["weights"] for s in (*self._loaded, shape))
        self.weights.keep({content for names in wanted for content in names.values()})

    def _cache_of(self, shape: Shape) -> tuple[list[Tensor], list[Tensor]]:
        if shape not in self._kept:
            self._kept = {shape: graphs.empty_cache(self.model.config, shape, self.dtype, str(self.device))}
        return self._kept[shape]

    def _shape(self, phase: str, batch: int, tokens: int) -> Shape:
        found = graphs.smallest(self.graphs, phase, batch, tokens)
        if found is None:
            have = ", ".join(s.name for s in self.graphs if s.phase == phase) or "none"
            raise EngineError(
                f"no compiled {phase} graph for batch {batch} and {tokens} tokens (there are: {have}); "
                "graphs are made for the shapes that params ask for"
            )
        return found

    def _run(self, shape: Shape, *inputs: Any) -> Any:
        if shape not in self._loaded:
            self._loaded[shape] = self._open(shape)
        return self._loaded[shape](*inputs)

    def _open(self, shape: Shape) -> Any:
        facts = self.graphs[shape]
        return open_graph(self.at / facts["file"], facts["weights"], self.weights)


def open_graph(file: Path, names: dict[str, str], weights: StoredWeights) -> Any:
    """The compiled graph in `file`, its weights (name -> content key) read from `weights` unless it carries its own."""
    from torch._inductor.package import load_package

    graph = load_package(str(file), run_single_threaded=True)
    if names:
        tensors = {name: weights.tensor(content) for name, content in names.items()}
        graph.load_constants(tensors, check_full_update=True, user_managed=True)
    return graph


@torch.inference_mode()
def race_missing(at: Path, model: Any, device: str, tell: Callable[[str], None]) -> None:
    """Time every graph on a 16-bit copy against its packed twin, where that was not done: in turn, the least pass of each
    counts, since other work only adds. What was found stays with the copy; a copy that lost is deleted."""
    weights = StoredWeights(at, device)
    for path in sorted(at.glob(f"*{artefact.COPY}.json")):
        facts = json.loads(path.read_text())
        if "race" in facts:
            continue
        shape = Shape(**facts["shape"])
        packed = artefact.available(at)[shape]
        runs = {
            "packed_s": open_graph(at / packed["file"], packed["weights"], weights),
            "copy_s": open_graph(path.with_suffix(".pt2"), facts["weights"], weights),
        }
        inputs = graphs.example(model, shape, device)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(RACE_PASSES):
            for name, run in runs.items():
                synchronize(device)
                start_s = time.perf_counter()
                run(*inputs)
                synchronize(device)
                seconds[name].append(time.perf_counter() - start_s)
        facts["race"] = {name: min(passes) for name, passes in seconds.items()}
        artefact.write(path, facts)
        tell(
            f"{shape.name}: {facts['race']['packed_s'] * 1e3:.1f} ms packed, {facts['race']['copy_s'] * 1e3:.1f} ms on a 16-bit copy"
        )
        if not artefact.copy_wins(facts):
            path.with_suffix(".pt2").unlink()


def synchronize(device: str) -> None:
    """Wait for what was sent to a GPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
