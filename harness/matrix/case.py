"""The case: one declarative description of a training run.

Every option is a field of a part of it, with its default, its limits and the declaration of its axis (`axis.py`). Which
combinations make sense is in `rules.py`, how cases are written in files in `casefile.py`, ids are in `caseid.py`.
"""

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from harness.matrix.axis import Changes, Word, axis, flag, number
from harness.matrix.float8 import Float8
from harness.matrix.layout import Layout
from harness.matrix.model import MODEL_PRESETS, CaseStruct, Model, ModelShape, PositiveInt
from harness.matrix.targets import NAME, REFERENCE
from harness.matrix.train import Dtype, Train

__all__ = [  # the parts of a case come from here
    "MODEL_PRESETS",
    "Case",
    "Checkpointing",
    "CheckpointMode",
    "Checks",
    "Dtype",
    "Float8",
    "Layout",
    "Model",
    "ModelShape",
    "Train",
]

CheckpointMode = Literal["none", "full", "selective_op", "selective_layer"]
CompileMode = Literal["none", "graph", "inductor"]
TargetName = Annotated[str, Meta(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", max_length=200)]


class Checkpointing(CaseStruct, frozen=True, kw_only=True):
    """Activation checkpointing. `every`: `selective_layer` wraps every n-th block; other modes keep the default."""

    mode: Annotated[
        CheckpointMode,
        axis(
            "activation checkpointing",
            flag("ac.full", "every block is checkpointed whole", checkpointing="full"),
            flag("ac.op", "every second matmul of a block is recomputed", checkpointing="selective_op"),
            number(
                "ac.layer{checkpoint_every}",
                "ac.layer2",
                "block {0} of every {0} is checkpointed whole",
                checkpointing="selective_layer",
            ),
            name="checkpointing",
            changes=Changes.NOTHING,
            same_bits="recomputation repeats the same arithmetic on the same bits",
            part="checkpointing",
            everyday=True,
        ),
    ] = "none"
    every: Annotated[
        PositiveInt,
        axis(
            "selective_layer: every n-th block is checkpointed",
            name="checkpoint_every",
            changes=Changes.NOTHING,
            part="checkpointing",
            needs=("checkpointing",),
        ),
    ] = 2

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


class Checks(CaseStruct, frozen=True, kw_only=True):
    """Overrides for checks: a wider or tighter loss tolerance (absolute, in nats)."""

    loss_tolerance: Annotated[
        Annotated[float, Meta(gt=0, le=100)] | None,
        axis(
            "allowed distance of the loss from BF16, in nats",
            number("tol.{loss_tolerance}", "tol.0.05", "loss may be {0} nats from BF16"),
            changes=Changes.NOTHING,
            part="checks",
            example=0.05,
            shrinks=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.loss_tolerance is not None and not math.isfinite(self.loss_tolerance):
            raise ValueError(f"loss_tolerance {self.loss_tolerance} is not a finite number")


class Case(CaseStruct, frozen=True, kw_only=True):
    """One training run, fully described: equal cases are the same run.

    `target` is what trains: a name of `targets.py`, or the module of a user's own target.
    """

    target: Annotated[
        TargetName,
        axis(
            "what trains: reference, torchtitan_0_3, or the module of your own target",
            Word(
                template="target.{target}",
                example="target.my_pkg.my_target",
                meaning="trained by {0} instead of the reference Llama",
                pattern=NAME.pattern,
            ),
            changes=Changes.TRAINING,
            part="target",
            everyday=True,
        ),
    ] = REFERENCE
    layout: Layout = Layout()
    float8: Float8 = Float8()
    checkpointing: Checkpointing = Checkpointing()
    compile: Annotated[
        CompileMode,
        axis(
            "graph executes compiled graphs, inductor generates code",
            flag("graph", "compiled blocks, as graphs that are executed", compile="graph"),
            flag("inductor", "compiled blocks, as code that inductor generates", compile="inductor"),
            changes=Changes.NOTHING,
            same_bits="the graph is executed operator by operator, undecomposed",
            part="compile",
            everyday=True,
        ),
    ] = "none"
    model: Model = Model()
    train: Train = Train()
    checks: Checks = Checks()

    def __post_init__(self) -> None:
        if self.compile == "none" and not self.layout.wait_for_embedding:
            layout = msgspec.structs.replace(self.layout, wait_for_embedding=True)
            msgspec.structs.force_setattr(self, "layout", layout)
        if self.layout.pp > 1 and self.uses_fsdp:  # schedules of torch reduce behind the last microbatch
            train = msgspec.structs.replace(self.train, reduce_grads="last_microbatch")
            msgspec.structs.force_setattr(self, "train", train)
        if self.layout.tp == 1 and self.float8.convert_after_tp:
            float8 = msgspec.structs.replace(self.float8, convert_after_tp=False)
            msgspec.structs.force_setattr(self, "float8", float8)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def local_batch(self) -> int:
        """Sequences per data-parallel rank; `rules.py` excludes cases where the batch does not divide."""
        return self.train.global_batch // self.layout.batches

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
        return self.microbatch * self.local_seq_len

    @property
    def local_seq_len(self) -> int:
        """Positions of a sequence per data-parallel rank: all, unless ranks of context parallelism share it."""
        return self.train.seq_len // self.layout.cp

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
