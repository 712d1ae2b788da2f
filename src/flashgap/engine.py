"""Prefill and decode: run batches of token ids on a build, under a chosen cache policy.

The one idea: *prefill* reads the whole prompt in one forward pass (compute-bound), *decode* then makes
one token per pass and reads every weight for it (bandwidth-bound), so the two are separate calls that can
be timed apart. Decoding is greedy, never stops early, and always makes exactly the tokens asked for.

What goes wrong without notice, and is therefore explicit here: positions are passed by hand (the static
cache keeps its own length as a tensor that it mutates in place); unequal prompts are padded on the left,
with a mask and with positions that start at the first real token; a static cache is kept and reset, since
a compiled step is specialised to the addresses of its tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import LongTensor, Tensor

PAD_TOKEN = 0  # never attended to, so any valid id does


class EngineError(RuntimeError):
    """A batch that cannot be run as asked; the message gives the numbers."""


@dataclass
class State:
    """A batch in flight: its cache and the last token of every row.

    `tokens` and `position_ids` are [B, 1] ([1, 1] where rows share positions); `mask` is
    [B, cache_tokens], 0 on left padding, or None without padding; `logits` [B, V] chose `tokens`.
    """

    cache: Any
    tokens: Tensor
    position_ids: Tensor
    mask: Tensor | None
    length: int
    cache_tokens: int
    logits: Tensor


@dataclass(frozen=True)
class GenerateResult:
    """Tokens per request and the clock: `ttft_s` for the first token, then one `step_s` per decode step."""

    tokens: list[list[int]]
    ttft_s: float
    step_s: list[float]
    finite: bool = True
    padded_tokens: int = 0
    logits_gap: list[list[float]] = field(default_factory=list)

    @property
    def e2e_s(self) -> float:
        """Seconds from handing over the ids to the last token of the longest request."""
        return self.ttft_s + sum(self.step_s)


class Engine:
    """A transformers causal LM with a cache policy, `dynamic` (grows) or `static` (preallocated), and
    optionally a compiled decode step. Compile happens in `warmup`, which must see each shape once."""

    def __init__(
        self,
        model: Any,
        cache: Literal["dynamic", "static"] = "dynamic",
        compile: bool = False,
        device: str | torch.device = "cpu",
    ) -> None:
        if compile and cache != "static":
            raise EngineError("compile needs cache 'static': a growing cache recompiles at every step")
        self.model = model
        self.device = torch.device(device)
        self.static = cache == "static"
        self.compiled = compile
        self._caches: dict[tuple[int, int], Any] = {}
        self._step = _compile_step(model, self.device) if compile else _make_step(model)

    # ------------------------------------------------------------------ building blocks

    @torch.inference_mode()
    def prefill(
        self, ids: LongTensor, attention_mask: Tensor | None, cache_tokens: int
    ) -> tuple[Tensor, State]:
        """Run prompts `ids` [B, S] and return the first greedy tokens [B, 1] with the state to go on from.

        `attention_mask` [B, S] is 0 on left padding, None without padding; `cache_tokens` is how many
        tokens, prompt included, the state can ever hold. Raises `EngineError` on a batch of zero or a
        context that is too long.
        """
        batch, length = self._check(ids, cache_tokens)
        positions = _positions(length, attention_mask, self.device)
        cache = self._cache(batch, cache_tokens)
        out = self.model(
            input_ids=ids,
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=1,
        )
        logits = out.logits[:, -1]
        tokens = logits.argmax(-1, keepdim=True)
        mask = _room(attention_mask, cache_tokens)
        return tokens, State(cache, tokens, positions[:, -1:] + 1, mask, length, cache_tokens, logits)

    @torch.inference_mode()
    def decode_step(self, state: State) -> Tensor:
        """Feed the last tokens of `state` through the model once; return (and keep) the next ones [B, 1]."""
        if state.length >= state.cache_tokens:
            raise EngineError(
                f"the cache holds {state.cache_tokens} tokens and is full; prefill with more cache_tokens"
            )
        mask = state.mask
        if mask is not None and not self.static:
            mask = mask[:, : state.length + 1]
        state.tokens, state.logits = self._step(state.tokens, state.position_ids, mask, state.cache)
        state.position_ids = state.position_ids + 1
        state.length += 1
        return state.tokens

    @torch.inference_mode()
    def extend(self, state: State, ids: LongTensor, chunk_tokens: int = 512) -> None:
        """Append known `ids` [B, S] to the cache of an unpadded `state`, `chunk_tokens` at a time.

        Replaces the state's last tokens: decoding goes on after the last of `ids`.
        """
        if state.mask is not None:
            raise EngineError("a padded batch cannot be extended")
        if state.length + ids.shape[1] > state.cache_tokens:
            raise EngineError(
                f"{state.length} + {ids.shape[1]} tokens do not fit a cache of {state.cache_tokens}"
            )
        for chunk in ids.split(chunk_tokens, dim=1):
            positions = torch.arange(state.length, state.length + chunk.shape[1], device=self.device)[None]
            out = self.model(
                input_ids=chunk, position_ids=positions, past_key_values=state.cache, logits_to_keep=1
            )
            state.length += chunk.shape[1]
            state.logits = out.logits[:, -1]
        state.tokens = state.logits.argmax(-1, keepdim=True)
        state.position_ids = torch.full((1, 1), state.length, device=self.device)

    def warmup(self, batch: int, cache_tokens: int, padded: bool = False) -> None:
        """Allocate and, if asked, compile for this shape, outside every sample. Eager engines: no work."""
        if not self.compiled:
            return
        length = min(4, cache_tokens - 3)
        ids = torch.ones(batch, length, dtype=torch.long, device=self.device)
        mask = torch.ones_like(ids) if padded else None
        _, state = self.prefill(ids, mask, cache_tokens)
        for _ in range(3):
            self.decode_step(state)

    # ------------------------------------------------------------------ whole generations

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        generated_tokens: int | Sequence[int],
        on_step: Callable[[float], None] | None = None,
        on_first_token: Callable[[], None] | None = None,
        on_last_token: Callable[[], None] | None = None,
        gaps: bool = False,
    ) -> GenerateResult:
        """Greedy tokens for each prompt, exactly `generated_tokens` (one number, or one per prompt).

        Unequal prompts are padded on the left; the batch decodes until its longest request is done.
        `on_step(elapsed_s)` runs inside each timed step, after it is complete; `on_first_token()` and
        `on_last_token()` run outside the clock with the cache still held. `gaps` keeps, per request, the margin between the two best logits of each token.
        """
        counts = _counts(prompts, generated_tokens)
        cache_tokens = max(len(p) for p in prompts) + max(counts)
        start_s = self.clock()
        ids, mask = pad(prompts, self.device)
        tokens, state = self.prefill(ids, mask, cache_tokens)
        ttft_s = self.clock() - start_s
        if on_first_token:
            on_first_token()
        columns, margins, step_s = [tokens], [_gap(state.logits)] if gaps else [], []
        for _ in range(max(counts) - 1):
            step_s.append(self.timed_step(state, on_step))
            columns.append(state.tokens)
            if gaps:
                margins.append(_gap(state.logits))
        if on_last_token:
            on_last_token()
        rows = torch.cat(columns, dim=1).tolist()
        return GenerateResult(
            tokens=[row[:n] for row, n in zip(rows, counts, strict=True)],
            ttft_s=ttft_s,
            step_s=step_s,
            finite=bool(torch.isfinite(state.logits).all()),
            padded_tokens=ids.shape[1],
            logits_gap=torch.stack(margins, dim=1).tolist() if gaps else [],
        )

    def release(self) -> None:
        """Drop the static cache that is kept for the next batch, so that its memory is free."""
        if not self.compiled:
            self._caches.clear()

    def clock(self) -> float:
        """Seconds on a monotonic clock, once the device has finished what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def timed_step(self, state: State, on_step: Callable[[float], None] | None = None) -> float:
        """One decode step and its seconds; `on_step(elapsed_s)`, if given, runs inside them."""
        start_s = self.clock()
        self.decode_step(state)
        elapsed_s = self.clock() - start_s
        if on_step is None:
            return elapsed_s
        on_step(elapsed_s)
        return time.perf_counter() - start_s

    # ------------------------------------------------------------------ inside

    def _check(self, ids: Tensor, cache_tokens: int) -> tuple[int, int]:
        if ids.ndim != 2 or ids.shape[0] == 0:
            raise EngineError("a batch of zero requests; give at least one prompt")
        batch, length = ids.shape
        if length == 0:
            raise EngineError("a prompt of zero tokens; give at least one token")
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit and cache_tokens > limit:
            raise EngineError(
                f"prompt of {length} tokens with {cache_tokens - length} to generate needs a context of "
                f"{cache_tokens}, the model has {limit}; shorten the prompt or generate less"
            )
        if length > cache_tokens:
            raise EngineError(f"prompt of {length} tokens does not fit a cache of {cache_tokens}")
        return batch, length

    def _cache(self, batch: int, cache_tokens: int) -> Any:
        from transformers import DynamicCache, StaticCache

        if not self.static:
            return DynamicCache(config=self.model.config)
        key = (batch, cache_tokens)
        if key in self._caches:
            self._caches[key].reset()
            return self._caches[key]
        if not self.compiled:  # an eager step follows any cache: keep only the one in use
            self._caches.clear()
        self._caches[key] = StaticCache(config=self.model.config, max_cache_len=cache_tokens)
        return self._caches[key]


def pad(prompts: Sequence[Sequence[int]], device: torch.device | str) -> tuple[LongTensor, Tensor | None]:
    """Ids [B, S] padded on the left to the longest prompt, and the mask [B, S], None if all are equal."""
    if not prompts:
        raise EngineError("a batch of zero requests; give at least one prompt")
    longest = max(len(p) for p in prompts)
    rows = [[PAD_TOKEN] * (longest - len(p)) + list(p) for p in prompts]
    ids = torch.tensor(rows, dtype=torch.long, device=device)
    if all(len(p) == longest for p in prompts):
        return ids, None  # type: ignore[return-value]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return ids, torch.tensor(mask, dtype=torch.long, device=device)  # type: ignore[return-value]


def _counts(prompts: Sequence[Sequence[int]], generated_tokens: int | Sequence[int]) -> list[int]:
    if not prompts:
        raise EngineError("a batch of zero requests; give at least one prompt")
    counts = (
        [generated_tokens] * len(prompts) if isinstance(generated_tokens, int) else list(generated_tokens)
    )
    if len(counts) != len(prompts):
        raise EngineError(f"{len(prompts)} prompts but {len(counts)} numbers of tokens to generate")
    if min(counts) < 1:
        raise EngineError(f"generated_tokens must be at least 1, got {min(counts)}")
    if min(len(p) for p in prompts) < 1:
        raise EngineError("a prompt of zero tokens; give at least one token")
    return counts


def _positions(length: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """Positions [1, S], or [B, S] counted from each row's first real token."""
    if mask is None:
        return torch.arange(length, device=device)[None]
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _room(mask: Tensor | None, cache_tokens: int) -> Tensor | None:
    """The prompt mask with ones for every token still to come: causality hides those not written yet."""
    if mask is None:
        return None
    return torch.nn.functional.pad(mask, (0, cache_tokens - mask.shape[1]), value=1)


def _gap(logits: Tensor) -> Tensor:
    best = logits.float().topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def _make_step(model: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """One forward pass of one token a row: (tokens [B, 1], ...) -> (next tokens [B, 1], logits [B, V])."""

    def step(tokens: Tensor, position_ids: Tensor, mask: Tensor | None, cache: Any) -> tuple[Tensor, Tensor]:
        out = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            logits_to_keep=1,
        )
        logits = out.logits[:, -1]
        return logits.argmax(-1, keepdim=True), logits

    return step


def _compile_step(model: Any, device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """The same step compiled, one graph a shape; CUDA graphs on a GPU, where launch time dominates."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    on_gpu = device.type == "cuda"
    compiled = torch.compile(
        _make_step(model), dynamic=False, fullgraph=True, mode="reduce-overhead" if on_gpu else None
    )
    if not on_gpu:
        return compiled

    def step(*args: Any) -> tuple[Tensor, Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        tokens, logits = compiled(*args)
        return tokens.clone(), logits.clone()  # the next replay overwrites a graph's outputs

    return step
