"""The case: one declarative description of a training run, with its training: batch, steps, updates and dtypes.

Every option is a field of a part of it, with its default, its limits and the declaration of its axis (`axis.py`). Which
combinations make sense is in `rules.py`, how cases are written in files in `casefile.py`, ids are in `caseid.py`.
"""

import functools
import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from harness.matrix.axis import Changes, Word, axis, flag, number
from harness.matrix.layout import Layout
from harness.matrix.model import MODEL_PRESETS, CaseStruct, Model, ModelShape, PositiveInt
from harness.matrix.recipes import Float8
from harness.registry import REFERENCE, TARGET_NAME

Dtype = Literal["float64", "float32", "bfloat16"]
Resume = Literal["none", "same", "resharded"]
Optimizer = Literal["adamw", "sgd", "muon"]


class Update(NamedTuple):
    states: int  # tensors as large as the parameter that are kept between steps
    of_linears: int  # the same, for weights of linears in blocks
    reads: int  # operators that read the gradient: each reduces one that is Partial


UPDATES: Mapping[Optimizer, Update] = {
    "adamw": Update(states=2, of_linears=2, reads=3),  # the first moment reads the gradient once, the second twice
    "sgd": Update(states=1, of_linears=1, reads=1),  # the sum of gradient and weight decay goes into the momentum
    "muon": Update(states=2, of_linears=1, reads=3),  # AdamW updates all whose gradients may be Partial
}

FEWEST_POSITIONS = 8  # of a packed sequence, which has at least two documents

_of_training = functools.partial(axis, part="training", changes=Changes.TRAINING)


class Train(CaseStruct, frozen=True, kw_only=True):
    """Batch, sequence length, steps and optimizer, at a constant learning rate.

    `dtype` is the compute dtype of activations and parameters. `bfloat16` is what users run: FSDP2 mixed precision with
    float32 master weights. `float64` exists on the virtual device only, for sharp comparisons: FP8 rounding is then the
    only rounding that matters, and two layouts agree to about 1e-15 at every step. In `float32` their difference of
    1e-7 changes the rounding of some FP8 value within a step or two, and gradients are then 2 % apart.

    `parameter_dtype` of `bfloat16` runs is the dtype of the weights that the optimizer updates: `bfloat16` means that
    there are no float32 master weights, and that gradients and the states of the optimizer are bfloat16 too.
    `reduce_dtype` is FSDP2's, of its mixed precision: `bfloat16` rounds the gradients of every rank, and their sum.
    `accumulation` is the number of microbatches that a data-parallel rank splits its sequences into, for one update.
    `reduce_grads` says after which of them FSDP2 reduces gradients; before the last it may accumulate them unreduced.
    `max_norm` is the global norm that gradients are clipped to before an update; None: they are not clipped.
    `evaluate`: every step begins with an evaluation of its batch, without gradients and in evaluation mode.
    `ignored_tokens`: labels that the loss leaves out. `unequal`: every sequence has fewer labels than the one before,
    so every data-parallel rank has fewer. `half`: the second half of the batch has none, so some ranks have none.
    `packing`: several documents share a sequence. Their lengths are multiples of nothing, and others in every step. A
    token attends to its own document alone, and positions begin again with each. `padded`: the last one is padding, so
    sequences, microbatches and ranks have unequally many tokens.
    `optimizer`: an update of AdamW is equally large whatever the scale of its gradients, so losses and parameters hide
    a wrong one. One of `sgd` is proportional to it: torch's SGD, with momentum and with weight decay that is added to
    the gradient. `lr` is the learning rate of either; SGD needs about a hundred times AdamW's, so cases set it. `muon`
    orthogonalizes the momentum of a weight as a whole, which is gathered for it; a shard alone, or two weights as one,
    have another update. Linears of blocks have it, with AdamW's learning rate, all else has AdamW.
    `resume`: in the middle of the run the state is saved and loaded into a target that is built anew, which trains the
    other steps; with `resharded` through another layout of the same ranks (`caseid.py`).
    """

    global_batch: PositiveInt = _of_training(
        "sequences per step, over all ranks",
        number("gb{global_batch}", "gb8", "{0} sequences per step, over all ranks"),
        unset=8,
    )
    seq_len: PositiveInt = _of_training(
        "tokens of a sequence", number("sl{seq_len}", "sl32", "sequences of {0} tokens"), unset=32
    )
    steps: Annotated[int, Meta(ge=1, le=100_000)] = _of_training(
        "optimizer steps", number("s{steps}", "s5", "{0} steps"), everyday=True, unset=5
    )
    accumulation: PositiveInt = _of_training(
        "microbatches per optimizer step",
        number("accum{accumulation}", "accum2", "{0} microbatches per rank and optimizer step"),
        changes=Changes.SUMS,
        unset=1,
    )
    reduce_grads: Literal["every_microbatch", "last_microbatch"] = _of_training(
        "after which microbatches FSDP2 reduces gradients",
        flag("reduce.last", "gradients are reduced after the last microbatch alone", reduce_grads="last_microbatch"),
        changes=Changes.SUMS,
        unset="every_microbatch",
    )
    max_norm: Annotated[float, Meta(gt=0, le=1e6)] | None = _of_training(
        "max global gradient norm; unset: no clipping",
        number("clip{max_norm}", "clip0.5", "gradients are clipped to a global norm of {0}"),
        example=1.0,
    )
    evaluate: bool = _of_training(
        "evaluate the batch of every step first, without gradients and in evaluation mode",
        flag("eval", "the batch of every step is evaluated before it is trained on", evaluate=True),
        changes=Changes.NOTHING,
        same_bits="an evaluation changes nothing that training reads",
        unset=False,
    )
    ignored_tokens: Literal["none", "unequal", "half"] = _of_training(
        "ignored labels (-100): a different number per rank, or half the batch",
        flag("ignore.unequal", "every sequence has fewer labels than the one before", ignored_tokens="unequal"),
        flag("ignore.half", "the second half of the batch has no labels", ignored_tokens="half"),
        unset="none",
    )
    packing: Literal["none", "documents", "padded"] = _of_training(
        "several documents in a sequence, which do not attend to each other; padded: and padding behind them",
        flag("packed", "sequences are packed with documents that do not attend to each other", packing="documents"),
        flag("packed.padded", "sequences are packed with documents, and padded behind them", packing="padded"),
        unset="none",
    )
    resume: Resume = _of_training(
        "save the state mid-run and load it into a new target; resharded: through another layout",
        flag("resume", "state is saved in the middle of the run, and resumed by a new target", resume="same"),
        flag("resume.resharded", "resumed through another layout, which loads and saves state", resume="resharded"),
        changes=Changes.NOTHING,
        same_bits="a state that is saved and loaded has the same bits",
        unset="none",
    )
    optimizer: Optimizer = _of_training(
        "optimizer; sgd shows the scale of gradients, for example with lr = 0.1; muon needs whole matrices",
        flag("sgd", "SGD with momentum updates the parameters, instead of AdamW", optimizer="sgd"),
        flag("muon", "Muon updates the weights of blocks' linears, AdamW the others", optimizer="muon"),
        noise="_{}",
        unset="adamw",
    )
    lr: Annotated[float, Meta(gt=0, le=10)] = _of_training(
        "learning rate of the optimizer", number("lr{lr}", "lr0.001", "learning rate {0}"), noise="_lr{:g}", unset=1e-3
    )
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = _of_training(
        "seed of weights and data", number("seed{seed}", "seed0", "seed {0}"), unset=0
    )
    parameter_dtype: Literal["float32", "bfloat16"] = _of_training(
        "dtype of the parameters that the optimizer updates, where activations are bfloat16",
        flag("param.b16", "parameters are updated in bfloat16", parameter_dtype="bfloat16"),
        noise="_param_{}",
        unset="float32",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = _of_training(
        "dtype in which FSDP2 sums gradients over ranks",
        flag("reduce.b16", "gradients are summed over ranks in bfloat16", reduce_dtype="bfloat16"),
        changes=Changes.SUMS,
        unset="float32",
    )
    dtype: Dtype = _of_training(
        "dtype of parameters and activations; float64 for sharp comparisons",
        flag("f64", "float64, for sharp comparisons", dtype="float64"),
        flag("f32", "float32", dtype="float32"),
        flag("b16", "bfloat16, with float32 master weights but for param.b16", dtype="bfloat16"),
        changes=Changes.ROUNDING,
        part="dtype",
        reference="bfloat16",
        everyday=True,
        unset="float32",
    )

    @property
    def tokens(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def valid_tokens(self) -> int:
        """Return the number of tokens of all ranks over which the loss of a step is a mean: of the first one."""
        return sum(map(self.labels_of, range(self.global_batch)))

    @property
    def counts_labels(self) -> bool:
        """Return True if some tokens have no label, so that ranks must add up how many have one."""
        return self.ignored_tokens != "none" or self.packing != "none"

    def labels_of(self, sequence: int, step: int = 1) -> int:
        """Return how many labels of a sequence the loss has in a step: the next token of each in its document."""
        if self.packing == "none":
            return self.seq_len - self.ignored_labels(sequence)
        padded = self.packing == "padded"
        lengths = self.documents(sequence, step)[: -1 if padded else None]
        return sum(lengths) - len(lengths) + (not padded)  # the last one goes on behind the sequence

    def documents(self, sequence: int, step: int) -> tuple[int, ...]:
        """Return the lengths of the documents of a packed sequence; the last one is padding where there is some.

        All but the last are odd, so multiples of no alignment.
        """
        import hashlib  # takes longer than a list of cases

        name, left = f"{self.seed}/documents/{step}/{sequence}", self.seq_len
        lengths = list[int]()
        for draw in hashlib.shake_128(name.encode()).digest(self.seq_len):
            length = 3 + 2 * (draw % (self.seq_len // 4))
            if length >= left:
                break
            lengths.append(length)
            left -= length
        return (*lengths, left)

    def ignored_labels(self, sequence: int) -> int:
        """Return how many labels at the end of a sequence of the global batch the loss leaves out."""
        if self.ignored_tokens == "half":
            return self.seq_len if 2 * sequence >= self.global_batch else 0
        return self.seq_len * sequence // self.global_batch if self.ignored_tokens == "unequal" else 0

    @property
    def update(self) -> Update:
        """Return what the optimizer keeps and reads of every parameter."""
        return UPDATES[self.optimizer]

    @property
    def resumed_after(self) -> int | None:
        """Return the step after which the state is saved and loaded; None if the run is not resumed."""
        return None if self.resume == "none" else self.steps // 2

    def age(self, step: int) -> int:
        """Return the number of a step since its target was built."""
        return step - self.resumed_after if self.resumed_after and step > self.resumed_after else step

    def __post_init__(self) -> None:
        if not math.isfinite(self.lr):
            raise ValueError(f"lr {self.lr} is not a finite number")


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


class Checkpointing(CaseStruct, frozen=True, kw_only=True):
    """Activation checkpointing. `every`: `selective_layer` wraps every n-th block; other modes keep the default."""

    mode: CheckpointMode = axis(
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
        unset="none",
    )
    every: PositiveInt = axis(
        "selective_layer: every n-th block is checkpointed",
        name="checkpoint_every",
        changes=Changes.NOTHING,
        part="checkpointing",
        needs=("checkpointing",),
        unset=2,
    )

    def __post_init__(self) -> None:
        if self.mode != "selective_layer":
            msgspec.structs.force_setattr(self, "every", 2)

    def wraps(self, layer: int) -> bool:
        """Return True if block `layer` (from 0) is checkpointed: part of its forward runs again in backward.

        torchtitan 0.2.2 counts blocks from 1: with `every` = 2 it wraps layers.1, layers.3, ...
        """
        if self.mode == "selective_layer":
            return (layer + 1) % self.every == 0
        return self.mode != "none"


class Checks(CaseStruct, frozen=True, kw_only=True):
    """Overrides for checks: a wider or tighter loss tolerance (absolute, in nats)."""

    loss_tolerance: Annotated[float, Meta(gt=0, le=100)] | None = axis(
        "loss tolerance against BF16, in nats",
        number("tol.{loss_tolerance}", "tol.0.05", "loss may be {0} nats from BF16"),
        changes=Changes.NOTHING,
        part="checks",
        example=0.05,
    )

    def __post_init__(self) -> None:
        if self.loss_tolerance is not None and not math.isfinite(self.loss_tolerance):
            raise ValueError(f"loss_tolerance {self.loss_tolerance} is not a finite number")


class Case(CaseStruct, frozen=True, kw_only=True):
    """One training run, fully described: equal cases are the same run.

    `target` is what trains: a name in `registry.py`, or the module of a user's own target.
    """

    target: Annotated[str, Meta(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", max_length=200)] = axis(
        "target: reference, torchtitan, or your own module",
        Word(
            template="target.{target}",
            example="target.my_pkg.my_target",
            meaning="trained by {0} instead of the reference Llama",
            pattern=TARGET_NAME.pattern,
        ),
        changes=Changes.TRAINING,
        part="target",
        everyday=True,
        unset=REFERENCE,
    )
    layout: Layout = Layout()
    float8: Float8 = Float8()
    checkpointing: Checkpointing = Checkpointing()
    compile: Literal["none", "graph", "inductor"] = axis(
        "graph executes compiled graphs, inductor generates code",
        flag("graph", "compiled blocks, as graphs that are executed", compile="graph"),
        flag("inductor", "compiled blocks, as code that inductor generates", compile="inductor"),
        changes=Changes.NOTHING,
        same_bits="the graph is executed operator by operator, undecomposed",
        part="compile",
        everyday=True,
        unset="none",
    )
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
        """Return the sequences per data-parallel rank; `rules.py` excludes cases where the batch does not divide."""
        return self.train.global_batch // self.layout.batches

    @property
    def microbatch(self) -> int:
        """Return the sequences of a forward of one data-parallel rank."""
        return self.local_batch // self.train.accumulation

    @property
    def reductions(self) -> int:
        """Return how often the gradients of a step are reduced; FSDP2 alone does it more than once."""
        return self.train.accumulation if self.uses_fsdp and self.train.reduce_grads == "every_microbatch" else 1

    @property
    def tokens_per_rank(self) -> int:
        """Return the tokens per linear and rank in a forward: the contraction size of its wgrad matmul."""
        return self.microbatch * self.local_seq_len

    @property
    def local_seq_len(self) -> int:
        """Positions of a sequence per data-parallel rank: all, unless ranks of context parallelism share it."""
        return self.train.seq_len // self.layout.cp

    @property
    def residual_tokens(self) -> int:
        """Return the tokens that a rank holds between blocks."""
        return self.microbatch * -(-self.local_seq_len // self.layout.shares_of_sequence)

    @property
    def sent_rows(self) -> int:
        """Rows that a rank sends to experts in the forward of a block, and gets if tokens are spread evenly."""
        return self.residual_tokens * self.model.top_k

    @property
    def local_experts(self) -> int:
        """Return how many experts of a block a rank holds."""
        return self.model.experts // self.layout.ep

    @property
    def forward_passes(self) -> int:
        """Forward passes of one step: its evaluation, and the one that is trained."""
        return 1 + self.train.evaluate

    @property
    def uses_fsdp(self) -> bool:
        """Return True if FSDP2 is applied: to shard, or on one data-parallel rank only for its mixed precision."""
        return not self.layout.is_ddp and (self.layout.dp > 1 or self.train.dtype == "bfloat16")

    @property
    def gathers_float8(self) -> bool:
        """Return True if FSDP2 gathers the weights of converted linears in float8."""
        return self.float8.fp8_all_gather and self.uses_fsdp

    @property
    def reduce_dtype(self) -> str:
        """Return the dtype in which FSDP2 sums gradients over ranks: at least float32, or bfloat16."""
        return "bfloat16" if self.train.reduce_dtype == "bfloat16" else self.wide_dtype

    @property
    def wide_dtype(self) -> str:
        """Return the dtype of the loss and inside norms: at least float32."""
        return "float32" if self.train.dtype == "bfloat16" else self.train.dtype

    @property
    def parameter_dtype(self) -> str:
        """Return the dtype of the weights that the optimizer updates, of their gradients, and of its states."""
        return "bfloat16" if self.train.parameter_dtype == "bfloat16" else self.wide_dtype
