"""The case: one declarative description of a training run.

Defines every option with its default and validates single values. Which combinations make sense is in `rules.py`, how
cases are written in files in `casefile.py`, ids are in `caseid.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from harness.matrix.recipes import TRAITS, Recipe, RecipeTraits
from harness.matrix.targets import REFERENCE

CheckpointMode = Literal["none", "full", "selective_op", "selective_layer"]
SymmMem = Literal["pipelined", "fallback"]
CompileMode = Literal["none", "graph", "inductor"]
Dtype = Literal["float64", "float32", "bfloat16"]
ParameterDtype = Literal["float32", "bfloat16"]
ReduceDtype = Literal["float32", "bfloat16"]
Resharding = Literal["default", "always", "never"]
ReduceGrads = Literal["every_microbatch", "last_microbatch"]
IgnoredTokens = Literal["none", "unequal", "half"]
Resume = Literal["none", "same", "resharded"]
Preset = Literal["tiny", "debug", "llama3-8b-layer"]

PositiveInt = Annotated[int, Meta(ge=1)]
Degree = Annotated[int, Meta(ge=1, le=4096)]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9_.]+$")]
CastName = Annotated[str, Meta(pattern=r"^((i|i_gw|w|w_gi|go|go_gw):(ten|axs|dis)|go:(e4m3|e5m2))$")]
TargetName = Annotated[str, Meta(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", max_length=200)]


class CaseStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of a case and of its parts: immutable, keyword-only, unknown keys rejected."""


class ModelShape(CaseStruct, frozen=True, kw_only=True):
    """The sizes of a Llama: `dim` and `ffn_dim` in features, the others are counts."""

    dim: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    ffn_dim: PositiveInt

    @property
    def head_dim(self) -> int:
        """Features per attention head."""
        return self.dim // self.heads


# `debug` is torchtitan 0.2.2's llama3 debugmodel (dim 256, 6 layers, 16 heads); `llama3-8b-layer` is one block of
# Llama 3 8B. Both ffn sizes follow their SwiGLU rule (multiple_of 256, ffn_dim_multiplier 1.3 for 8B).
MODEL_PRESETS: dict[str, ModelShape] = {
    "tiny": ModelShape(dim=128, layers=2, heads=8, kv_heads=8, ffn_dim=256),
    "debug": ModelShape(dim=256, layers=6, heads=16, kv_heads=16, ffn_dim=768),
    "llama3-8b-layer": ModelShape(dim=4096, layers=1, heads=32, kv_heads=8, ffn_dim=14336),
}


class Model(CaseStruct, frozen=True, kw_only=True):
    """Which model is trained: a preset, every size of which can be overridden, and the vocabulary size.

    `pad_vocab_to_multiple_of` adds rows to the embedding and to the output layer. Their logits are masked in the loss:
    the result is that of the unpadded vocabulary, the shapes are those that a GPU accepts.

    With `bias` every linear of a block has one, colwise and rowwise ones; the output layer has none.
    """

    preset: Preset = "tiny"
    vocab_size: PositiveInt = 2048
    pad_vocab_to_multiple_of: PositiveInt = 1
    dim: PositiveInt | None = None
    layers: PositiveInt | None = None
    heads: PositiveInt | None = None
    kv_heads: PositiveInt | None = None
    ffn_dim: PositiveInt | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        base = MODEL_PRESETS[self.preset]
        for name in ModelShape.__struct_fields__:
            if getattr(self, name) == getattr(base, name):
                msgspec.structs.force_setattr(self, name, None)  # one spelling per model, so that ids are canonical
        shape = self.shape
        if shape.dim % shape.heads or shape.head_dim % 2:
            raise ValueError(f"dim {shape.dim} does not split into {shape.heads} heads of an even size")
        if shape.heads % shape.kv_heads:
            raise ValueError(f"{shape.heads} heads is not a multiple of {shape.kv_heads} kv_heads")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the output layer."""
        multiple = self.pad_vocab_to_multiple_of
        return -(-self.vocab_size // multiple) * multiple

    @property
    def shape(self) -> ModelShape:
        """The sizes of the preset with the overrides applied."""
        return _shape(self)


@functools.lru_cache(maxsize=1024)
def _shape(model: Model) -> ModelShape:
    base = MODEL_PRESETS[model.preset]
    return ModelShape(**{name: getattr(model, name) or getattr(base, name) for name in ModelShape.__struct_fields__})


class Layout(CaseStruct, frozen=True, kw_only=True):
    """How the run is parallelized. Degrees are sizes of mesh axes; the world size is their product.

    `dp_replicate` > 1 with `dp_shard` > 1 is HSDP. `sequence_parallel` and `loss_parallel` are options of TP: at
    `tp` = 1 they have no meaning and keep their defaults.

    `symm_mem` selects the implementation of async TP's fused operators on a CPU: torch's `pipelined` one, chunk by
    chunk, or its unfused reference `fallback`. With `wait_for_embedding` a compiled block gets the finished output of
    the embedding; without it the block gets an AsyncCollectiveTensor, as in torchtitan.

    `reshard_after_forward` is FSDP2's: after forward it frees the weights that it gathered and gathers them again in
    backward, `always` or `never`. With `default` it keeps those of the last unit, with which backward begins.
    """

    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    tp: Degree = 1
    async_tp: bool = False
    symm_mem: SymmMem = "pipelined"
    wait_for_embedding: bool = True
    sequence_parallel: bool = True
    loss_parallel: bool = True
    reshard_after_forward: Resharding = "default"

    def __post_init__(self) -> None:
        if self.tp == 1:
            for name in ("sequence_parallel", "loss_parallel", "wait_for_embedding"):
                msgspec.structs.force_setattr(self, name, True)
        if not self.async_tp:
            msgspec.structs.force_setattr(self, "symm_mem", "pipelined")

    @property
    def dp(self) -> int:
        """Data-parallel degree: the number of different slices of the batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp


class Float8(CaseStruct, frozen=True, kw_only=True):
    """How linears are converted. `bf16` converts none and ignores every other field, which then keeps its default.

    `output_layer`: convert the output layer too. `tp_styles`: `float8` uses torchao's Float8ColwiseParallel,
    Float8RowwiseParallel and PrepareFloat8ModuleInput (all-gather in float8); `plain` uses torch's own styles.
    `filter_fqns`: linears whose FQN contains one of these strings are not converted, as in torchtitan.

    `casts` differ from the recipe. Operands of matmuls have torchao's names (`cast_configs` in logs): `i`, `w` and `go`
    are input, weight and grad_output, `i_gw`, `w_gi` and `go_gw` those of grad_weight and grad_input. Each is `ten`,
    with one scale, `axs`, with one for every row, or `dis`: not cast. `go:e4m3`, `go:e5m2`: dtype of grad_output.
    """

    recipe: Recipe = "bf16"
    fp8_all_gather: bool = False
    precompute_scale: bool = False
    pad_inner_dim: bool = False
    output_layer: bool = False
    tp_styles: Literal["plain", "float8"] = "plain"
    filter_fqns: tuple[Name, ...] = ()
    casts: tuple[CastName, ...] = ()

    def __post_init__(self) -> None:
        if self.recipe == "bf16":
            for name, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
                msgspec.structs.force_setattr(self, name, default)
        msgspec.structs.force_setattr(self, "filter_fqns", tuple(sorted(set(self.filter_fqns))))
        msgspec.structs.force_setattr(self, "casts", self._own_casts())

    def _own_casts(self) -> tuple[str, ...]:
        """The casts that differ from those of the recipe, one spelling for each choice of them."""
        settings = {(cast.partition(":")[0], cast.endswith(("e4m3", "e5m2"))) for cast in set(self.casts)}
        if len(settings) < len(set(self.casts)):
            raise ValueError(f"casts {', '.join(sorted(self.casts))} set an operand twice")
        own = TRAITS[self.recipe]
        return tuple(sorted(cast for cast in set(self.casts) if own.with_casts((cast,)) != own))

    @property
    def enabled(self) -> bool:
        """True when the recipe converts linears."""
        return self.traits.converts

    @property
    def traits(self) -> RecipeTraits:
        """What the recipe does, with the casts of the case."""
        return TRAITS[self.recipe].with_casts(self.casts) if self.casts else TRAITS[self.recipe]


class Checkpointing(CaseStruct, frozen=True, kw_only=True):
    """Activation checkpointing. `every`: `selective_layer` wraps every n-th block; other modes keep the default."""

    mode: CheckpointMode = "none"
    every: PositiveInt = 2

    def __post_init__(self) -> None:
        if self.mode != "selective_layer":
            msgspec.structs.force_setattr(self, "every", 2)

    def wraps(self, layer: int) -> bool:
        """True when block `layer` (from 0) is checkpointed: part of its forward runs again in backward.

        torchtitan 0.2.2 counts blocks from 1: with `every` = 2 it wraps layers.1, layers.3, ...
        """
        if self.mode == "selective_layer":
            return (layer + 1) % self.every == 0
        return self.mode != "none"


class Train(CaseStruct, frozen=True, kw_only=True):
    """Batch, sequence length, steps and optimizer: AdamW at a constant learning rate.

    `dtype` is the compute dtype of activations and parameters. `bfloat16` is what users run: FSDP2 mixed precision with
    float32 master weights. `float64` exists on the virtual device only, for sharp comparisons: FP8 rounding is then the
    only rounding that matters, and two layouts agree to about 1e-15 at every step. In `float32` their difference of
    1e-7 changes the rounding of some FP8 value within a step or two, and gradients are then 2 % apart.

    `parameter_dtype` of `bfloat16` runs is that of the weights that the optimizer updates: `bfloat16` means that there
    are no float32 master weights, and that gradients and the states of the optimizer are bfloat16 too.
    `reduce_dtype` is that of FSDP2's mixed precision: `bfloat16` rounds the gradients of every rank, and their sum.
    `accumulation` is the number of microbatches that a data-parallel rank splits its sequences into, for one update.
    `reduce_grads` says after which of them FSDP2 reduces gradients; before the last it may accumulate them unreduced.
    `max_norm` is the global norm that gradients are clipped to before an update; None: they are not clipped.
    `evaluate`: every step begins with an evaluation of its batch, without gradients and in evaluation mode.
    `ignored_tokens`: labels that the loss leaves out. `unequal`: every sequence has fewer labels than the one before,
    so every data-parallel rank has fewer. `half`: the second half of the batch has none, so some ranks have none.
    `resume`: in the middle of the run the state is saved and loaded into a target that is built anew, which trains the
    other steps; with `resharded` through another layout of the same ranks (`resumed.py`).
    """

    steps: Annotated[int, Meta(ge=1, le=100_000)] = 5
    global_batch: PositiveInt = 8
    seq_len: PositiveInt = 32
    dtype: Dtype = "float32"
    parameter_dtype: ParameterDtype = "float32"
    reduce_dtype: ReduceDtype = "float32"
    accumulation: PositiveInt = 1
    reduce_grads: ReduceGrads = "every_microbatch"
    max_norm: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    evaluate: bool = False
    ignored_tokens: IgnoredTokens = "none"
    resume: Resume = "none"
    lr: Annotated[float, Meta(gt=0, le=10)] = 1e-3
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0

    @property
    def tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.global_batch * self.seq_len

    @property
    def valid_tokens(self) -> int:
        """Tokens of one step, over all ranks, that the loss is a mean over."""
        return self.tokens - sum(map(self.ignored_labels, range(self.global_batch)))

    def ignored_labels(self, sequence: int) -> int:
        """How many labels at the end of a sequence of the global batch the loss leaves out."""
        if self.ignored_tokens == "half":
            return self.seq_len if 2 * sequence >= self.global_batch else 0
        return self.seq_len * sequence // self.global_batch if self.ignored_tokens == "unequal" else 0

    @property
    def resumed_after(self) -> int | None:
        """The step after which the state is saved and loaded; None where the run is not resumed."""
        return None if self.resume == "none" else self.steps // 2

    def __post_init__(self) -> None:
        if not math.isfinite(self.lr):
            raise ValueError(f"lr {self.lr} is not a finite number")


class Checks(CaseStruct, frozen=True, kw_only=True):
    """Overrides for checks: a wider or tighter loss tolerance (absolute, in nats)."""

    loss_tolerance: Annotated[float, Meta(gt=0, le=100)] | None = None

    def __post_init__(self) -> None:
        if self.loss_tolerance is not None and not math.isfinite(self.loss_tolerance):
            raise ValueError(f"loss_tolerance {self.loss_tolerance} is not a finite number")


class Case(CaseStruct, frozen=True, kw_only=True):
    """One training run, fully described: equal cases are the same run.

    `target` is what trains: a name of `targets.py`, or the module of a user's own target.
    """

    target: TargetName = REFERENCE
    model: Model = Model()
    layout: Layout = Layout()
    float8: Float8 = Float8()
    checkpointing: Checkpointing = Checkpointing()
    compile: CompileMode = "none"
    train: Train = Train()
    checks: Checks = Checks()

    def __post_init__(self) -> None:
        if self.compile == "none" and not self.layout.wait_for_embedding:
            layout = msgspec.structs.replace(self.layout, wait_for_embedding=True)
            msgspec.structs.force_setattr(self, "layout", layout)

    @property
    def world_size(self) -> int:
        """Number of ranks the case needs."""
        return self.layout.world_size

    @property
    def local_batch(self) -> int:
        """Sequences per data-parallel rank; `rules.py` excludes cases where the batch does not divide."""
        return self.train.global_batch // self.layout.dp

    @property
    def microbatch(self) -> int:
        """Sequences of a forward of one data-parallel rank."""
        return self.local_batch // self.train.accumulation

    @property
    def reductions(self) -> int:
        """How often FSDP2 reduces the gradients of a step."""
        return self.train.accumulation if self.train.reduce_grads == "every_microbatch" else 1

    @property
    def tokens_per_rank(self) -> int:
        """Tokens per linear and rank in a forward: the contraction size of its wgrad matmul."""
        return self.microbatch * self.train.seq_len

    @property
    def uses_fsdp(self) -> bool:
        """True when FSDP2 is applied: to shard, or on one data-parallel rank only for its mixed precision."""
        return self.layout.dp > 1 or self.train.dtype == "bfloat16"

    @property
    def gathers_float8(self) -> bool:
        """True when FSDP2 gathers the weights of converted linears in float8."""
        return self.float8.fp8_all_gather and self.uses_fsdp

    @property
    def reduce_dtype(self) -> str:
        """Dtype in which FSDP2 sums gradients over ranks: at least float32, or bfloat16."""
        return "bfloat16" if self.train.reduce_dtype == "bfloat16" else self.wide_dtype

    @property
    def wide_dtype(self) -> str:
        """Dtype of the loss and inside of norms: at least float32."""
        return "float32" if self.train.dtype == "bfloat16" else self.train.dtype

    @property
    def parameter_dtype(self) -> str:
        """Dtype of the weights that the optimizer updates, of their gradients, and of its states."""
        return "bfloat16" if self.train.parameter_dtype == "bfloat16" else self.wide_dtype
