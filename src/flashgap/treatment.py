"""What is measured: frozen specifications of a model, a build, an engine, a workload and a trial.

The one idea: a trial is *found again by what it is*. Every class here is immutable plain data, and
`TrialSpec.key` is a hash of that data, so a record can be looked up by its specification without a
database and without trusting a file name. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Dtype = Literal["bfloat16", "float16", "float32"]
LINEAR_WAYS = ("dense", "packed", "expanded", "dispatched")  # of `CrossoverWorkload`
WITHOUT_MODEL = ("ceilings", "gemm")  # kinds of workload that look at the machine only
SEARCHING = ("autoawq", "llmcompressor")  # quantizers that look at data


class Frozen(BaseModel):
    """Immutable data that refuses unknown keys and wrong types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSpec(Frozen):
    """Which causal language model, and where its weights come from.

    `embedded` is the model this project fetches from the package registry; `hub` a hub id; `folder` a
    local transformers folder; `random` a transformers configuration with random weights (speed does not
    depend on weight values, quality does: pages of such a model are marked).
    """

    source: Literal["embedded", "hub", "folder", "random"]
    id: str | None = None
    revision: str | None = None
    config: dict[str, str | int | float | bool | list[int] | None] | None = None
    dtype: Dtype = "bfloat16"

    @model_validator(mode="after")
    def _complete(self) -> ModelSpec:
        if self.source in ("hub", "folder") and not self.id:
            raise ValueError(f"source '{self.source}' needs 'id': a hub id or a folder path")
        if self.source == "random" and not (self.config and self.config.get("model_type")):
            raise ValueError("source 'random' needs 'config' with at least 'model_type'")
        if self.source != "random" and self.config:
            raise ValueError(f"'config' is only for source 'random', not '{self.source}'")
        return self


class Calibration(Frozen):
    """Text that a calibrated quantizer sees: `samples` pieces of `length_tokens`, drawn with `seed`.

    `text` is `python_docs` (the language reference that every Python carries) or a path of a text file.
    """

    text: str = "python_docs"
    samples: PositiveInt = 16
    length_tokens: PositiveInt = 512
    seed: int = 20261201


class QuantizationConfig(Frozen):
    """Weight quantization of the linear layers: the published study's five fields and what real use needs.

    `bits` a weight; `scheme` symmetric (zero point in the middle) or asymmetric; `per_channel` one scale for
    each output feature, else one for each `group_size` input features; `quantizer` the library that chooses
    the codes; `disable_search` leaves out its search over scales. `skip` names modules (suffixes) left
    alone, `eight_bits` those that are rounded to 8 bits in a configuration of 4, symmetric with one scale a
    channel, which is what 8-bit kernels take. `tied_embedding` reads the embedding from the 8-bit output head
    where the model ties the two, and does nothing where it does not. `execution`: `dequantize` expands to the model's dtype on every forward pass (no low-bit
    kernel), `packed` multiplies with the codes as they are.
    """

    bits: Literal[4, 8] = 4
    scheme: Literal["symmetric", "asymmetric"] = "asymmetric"
    per_channel: bool = False
    quantizer: Literal["rtn", "autoawq", "llmcompressor", "hqq"] = "rtn"
    disable_search: bool = False
    group_size: PositiveInt | None = 64
    skip: tuple[str, ...] = ("lm_head",)
    eight_bits: tuple[str, ...] = ()
    tied_embedding: bool = False
    calibration: Calibration | None = None
    execution: Literal["dequantize", "packed"] = "dequantize"

    @model_validator(mode="after")
    def _meaningful(self) -> QuantizationConfig:
        if self.searches and self.calibration is None:  # a search wants data: the default text
            object.__setattr__(self, "calibration", Calibration())
        if self.per_channel != (self.group_size is None):
            raise ValueError(
                "per_channel: true is one scale a channel and wants group_size: null, and the other way round"
            )
        if self.quantizer == "autoawq" and (self.bits, self.scheme, self.per_channel) != (
            4,
            "asymmetric",
            False,
        ):
            raise ValueError(
                "quantizer: autoawq packs 4 bits with a zero point for each group, so it wants bits: 4, "
                "scheme: asymmetric, per_channel: false; llmcompressor takes the others"
            )
        if self.quantizer == "hqq" and self.scheme == "symmetric":
            raise ValueError("quantizer: hqq optimises zero points, so scheme: symmetric means nothing to it")
        if self.calibration is not None and self.quantizer in ("rtn", "hqq"):
            raise ValueError(f"quantizer: {self.quantizer} looks at no data; remove calibration")
        channels = self.scheme == "symmetric" and self.per_channel
        if self.execution == "packed" and self.bits == 8 and not channels:
            raise ValueError(
                "execution: packed runs 8 bits with one symmetric scale a channel; set scheme: symmetric, "
                "per_channel: true, group_size: null, or execution: dequantize"
            )
        if self.tied_embedding and (self.execution != "packed" or self.bits_of("lm_head") != 8):
            raise ValueError(
                "tied_embedding: true reads rows of a packed 8-bit output head; want execution: packed and lm_head in "
                "eight_bits, not in skip"
            )
        return self

    def bits_of(self, name: str) -> int:
        """Bits of the linear layer `name`; 16 stands for left alone."""
        if any(name.endswith(suffix) for suffix in self.skip):
            return 16
        return 8 if any(name.endswith(suffix) for suffix in self.eight_bits) else self.bits

    @property
    def searches(self) -> bool:
        """Whether scales are searched for on calibration data."""
        return self.quantizer in SEARCHING and not self.disable_search


class Recovery(Frozen):
    """A short distillation of a pruned model from the whole one: adapters of `rank`, `steps` of `batch` pieces of `text`,
    ended early at `budget_s` seconds, then merged."""

    text: Calibration = Calibration(samples=96, length_tokens=256)
    steps: PositiveInt = 96
    batch: PositiveInt = 4
    rank: PositiveInt = 16
    learning_rate: PositiveFloat = 1e-3
    budget_s: PositiveFloat = 240.0


class PruningConfig(Frozen):
    """Structured pruning to `target`, a share of all parameters, before anything is quantized.

    `method` takes heads with their key head and MLP channels (`width`), or whole blocks (`depth`). A `plan` that is `aligned`
    keeps every layer legal for `kernel` with groups of `group_size` on `tensor_parallel` devices; `naive` ignores that.
    `importance` says what goes first, and looks at `calibration` unless it is magnitude. `recovery` distils from the
    whole model afterwards.
    """

    target: float = Field(gt=0, le=0.5)
    method: Literal["width", "depth"] = "width"
    plan: Literal["aligned", "naive"] = "aligned"
    importance: Literal["activation", "magnitude", "taylor"] = "activation"
    calibration: Calibration | None = None
    kernel: Literal["int4_cpu", "int8_cpu", "int4_tinygemm", "bf16_amx", "bf16_tensor_cores"] = "int4_cpu"
    group_size: PositiveInt | None = 64
    tensor_parallel: PositiveInt = 1
    recovery: Recovery | None = None

    @model_validator(mode="after")
    def _complete(self) -> PruningConfig:
        if self.importance != "magnitude" and self.calibration is None:
            object.__setattr__(self, "calibration", Calibration())
        if self.importance == "magnitude" and self.calibration is not None:
            raise ValueError("importance: magnitude looks at no data; remove calibration")
        return self


class Checkpoint(Frozen):
    """A compressed checkpoint that exists: a folder, or a hub id, in AWQ, GPTQ, compressed-tensors or GGUF."""

    source: Literal["folder", "hub"] = "folder"
    id: str
    revision: str | None = None
    execution: Literal["dequantize", "packed"] = "packed"


class BuildSpec(Frozen):
    """A model made ready to run: pruned, then quantized; without either and without `checkpoint` the Standard build."""

    pruning: PruningConfig | None = None
    quantization: QuantizationConfig | None = None
    checkpoint: Checkpoint | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> BuildSpec:
        if self.quantization and self.checkpoint:
            raise ValueError(
                "quantization and checkpoint exclude each other: a checkpoint is quantized already"
            )
        if self.pruning and self.checkpoint:
            raise ValueError("pruning and checkpoint exclude each other: a checkpoint is taken as it is")
        return self

    @property
    def lossy(self) -> bool:
        """Whether its weights are not Standard's."""
        return any(part is not None for part in (self.pruning, self.quantization, self.checkpoint))

    @property
    def execution(self) -> Literal["dequantize", "packed"] | None:
        """How quantized layers run; None for Standard."""
        origin = self.quantization or self.checkpoint
        return origin.execution if origin else None


class EngineSpec(Frozen):
    """How token batches are run: cache policy and compilation.

    `compile` compiles in the process that runs; `ahead_of_time` loads a graph of the whole pass that was
    compiled once, with frozen weights and autotuned matrix kernels, and saved. `many_rows_copy` lets graphs for
    many rows (a large batch, a prompt) read a 16-bit copy of packed weights, where timing says that it is faster: the
    price is the copy's memory.
    """

    cache: Literal["dynamic", "static"] = "dynamic"
    compile: bool = False
    ahead_of_time: bool = False
    many_rows_copy: bool = False

    @model_validator(mode="after")
    def _static(self) -> EngineSpec:
        if (self.compile or self.ahead_of_time) and self.cache != "static":
            raise ValueError("a compiled pass needs cache: static (a growing cache recompiles at every step)")
        if self.compile and self.ahead_of_time:
            raise ValueError("compile and ahead_of_time exclude each other: choose one")
        if self.many_rows_copy and not self.ahead_of_time:
            raise ValueError(
                "many_rows_copy chooses between compiled graphs, so it wants ahead_of_time: true"
            )
        return self


class Treatment(Frozen):
    """One level for every factor.

    `replica` tells identical treatments of one block apart (A/A). `planted_slowdown` spins for that
    share of every decode step's own time: a known cause that the statistics must find.
    """

    build: BuildSpec = BuildSpec()
    engine: EngineSpec = EngineSpec()
    replica: int = Field(default=0, ge=0)
    planted_slowdown: float = Field(default=0.0, ge=0.0, le=10.0)


class Workload(Frozen):
    """Common to all workloads. `process`: `fork` from a warm import server, or `exec` anew."""

    process: Literal["fork", "exec"] = "fork"


class LatencyWorkload(Workload):
    """Prefill `prompt_tokens`, then decode `generated_tokens`, at each batch size in turn.

    `repeats` measured passes per batch size follow `warmup` discarded ones.
    """

    kind: Literal["latency"]
    batch_sizes: tuple[PositiveInt, ...] = Field(min_length=1)
    prompt_tokens: PositiveInt
    generated_tokens: PositiveInt
    repeats: PositiveInt = 1
    warmup: int = Field(default=1, ge=0)


class PrefillWorkload(Workload):
    """Time to the first token of one prompt, at each length in turn; `repeats` follow `warmup` discarded ones."""

    kind: Literal["prefill"]
    prompt_tokens: tuple[PositiveInt, ...] = Field(min_length=1)
    repeats: PositiveInt = 5
    warmup: int = Field(default=2, ge=0)


class ContextWorkload(Workload):
    """Per-token decode latency at batch 1 with the cache prefilled to each length, `steps` tokens each."""

    kind: Literal["context"]
    context_tokens: tuple[PositiveInt, ...] = Field(min_length=1)
    steps: PositiveInt = 8


class GenerationWorkload(Workload):
    """One true generation at batch 1: every token's latency against its position."""

    kind: Literal["generation"]
    prompt_tokens: PositiveInt
    generated_tokens: PositiveInt


class TaskWorkload(Workload):
    """The study's task: a fixed list of requests drawn once, run to the last token, model warm.

    Prompts are scaled by `prompt_scale`; both lengths are capped to `max_context_tokens`. Requests run
    in arrival order in batches of at most `max_batch`, padded. `replicas` > 1 splits the list over as
    many processes, one device each.
    """

    kind: Literal["task"]
    requests: PositiveInt
    prompt_scale: PositiveFloat = 1.0
    generated_scale: PositiveFloat = 1.0
    max_context_tokens: PositiveInt
    max_batch: PositiveInt
    draw_seed: int
    replicas: PositiveInt = 1


class CapacityWorkload(Workload):
    """Largest batch whose prefill and decode fit `budget_bytes`, found by doubling and bisection.

    The budget is enforced by the operating system (private data of the process) or by the device
    allocator, so running out is a real allocation failure.
    """

    kind: Literal["capacity"]
    process: Literal["fork", "exec"] = "exec"
    budget_bytes: PositiveInt
    prompt_tokens: PositiveInt
    generated_tokens: PositiveInt
    max_batch: PositiveInt = 256


class QualityWorkload(Workload):
    """Loss, KL divergence and top-1 agreement against Standard, for each window of `tokens` held-out tokens.

    The text is another one than quantizers calibrate on (`builds.calibration`).
    """

    kind: Literal["quality"]
    tokens: PositiveInt = 16384
    window_tokens: int = Field(default=512, ge=2)


class CrossoverWorkload(Workload):
    """Seconds of one call of each shape of a build's packed layers, dense, packed, expanded and as dispatched, by `rows`."""

    kind: Literal["crossover"]
    rows: tuple[PositiveInt, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    repeats: PositiveInt = 5


class CeilingsWorkload(Workload):
    """Measured ceilings of the machine: bytes/s by working-set size, FLOP/s by dtype. Needs no model."""

    kind: Literal["ceilings"]
    working_sets_bytes: tuple[PositiveInt, ...] = Field(min_length=1)
    matmul_size: PositiveInt = 2048
    dtypes: tuple[Dtype, ...] = ("bfloat16", "float32")
    repeats: PositiveInt = 7


class GemmWorkload(Workload):
    """Seconds of one matrix product [rows, in] x [out, in]^T, dense and packed at 4 bits, over `shapes` (out, in). Needs no model."""

    kind: Literal["gemm"]
    shapes: tuple[tuple[PositiveInt, PositiveInt], ...] = Field(min_length=1)
    rows: tuple[PositiveInt, ...] = (1, 8, 128)
    group_size: PositiveInt = 64
    dtype: Dtype = "bfloat16"
    repeats: PositiveInt = 7


class ReferenceWorkload(Workload):
    """Our prefill and decode times against `torch.utils.benchmark` on the same calls, interleaved."""

    kind: Literal["reference"]
    prompt_tokens: PositiveInt
    context_tokens: PositiveInt
    generated_tokens: PositiveInt = 16
    repeats: PositiveInt = 20


AnyWorkload = Annotated[
    LatencyWorkload
    | PrefillWorkload
    | ContextWorkload
    | GenerationWorkload
    | TaskWorkload
    | CapacityWorkload
    | QualityWorkload
    | CrossoverWorkload
    | CeilingsWorkload
    | GemmWorkload
    | ReferenceWorkload,
    Field(discriminator="kind"),
]


class Correctness(Frozen):
    """What a build must pass before it is timed.

    Lossy builds: mean KL(Standard || build) in nats, top-1 agreement and perplexity ratio on
    `tokens` of held-out text. Exact changes (engine settings): greedy tokens equal; where they first
    differ the two best logits must lie within `max_tie_margin` of each other.
    """

    tokens: PositiveInt = 512
    max_kl_nats: PositiveFloat = 0.5
    min_top1_agreement: float = Field(default=0.6, ge=0, le=1)
    max_perplexity_ratio: PositiveFloat = 2.0
    max_tie_margin: PositiveFloat = 0.25


class TrialSpec(Frozen):
    """One treatment on one workload in one fresh process: everything that decides what is measured."""

    model: ModelSpec
    treatment: Treatment
    workload: AnyWorkload
    correctness: Correctness = Correctness()
    device: Literal["cpu", "cuda"] = "cpu"
    threads: PositiveInt | None = None
    memory_limit_bytes: PositiveInt | None = None

    @property
    def key(self) -> str:
        """Content key: 16 hex digits of the SHA-256 of the canonical JSON of this specification."""
        return content_key(self)


def content_key(spec: Frozen) -> str:
    """16 hex digits of the SHA-256 of `spec` as canonical JSON (sorted keys), without values left at their default.

    So a setting that is added later, and off by default, leaves earlier records found.
    """
    plain = spec.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
