"""The training of a case: batch, steps, updates and dtypes."""

import functools
import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from harness.matrix.axis import Changes, axis, flag, number
from harness.matrix.model import CaseStruct, PositiveInt

Dtype = Literal["float64", "float32", "bfloat16"]
ParameterDtype = Literal["float32", "bfloat16"]
ReduceDtype = Literal["float32", "bfloat16"]
ReduceGrads = Literal["every_microbatch", "last_microbatch"]
IgnoredTokens = Literal["none", "unequal", "half"]
Resume = Literal["none", "same", "resharded"]
Optimizer = Literal["adamw", "sgd"]


class Update(NamedTuple):
    states: int  # tensors as large as the parameter that are kept between steps
    reads: int  # operators that read the gradient: each reduces one that is Partial


UPDATES: Mapping[Optimizer, Update] = {
    "adamw": Update(states=2, reads=3),  # the first moment reads the gradient once, the second twice
    "sgd": Update(states=1, reads=1),  # the sum of gradient and weight decay goes into the momentum
}

_axis = functools.partial(axis, part="training", changes=Changes.TRAINING)


class Train(CaseStruct, frozen=True, kw_only=True):
    """Batch, sequence length, steps and optimizer: AdamW or SGD at a constant learning rate.

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
    `optimizer`: an update of AdamW is equally large whatever the scale of its gradients, so losses and parameters hide
    a wrong one. One of `sgd` is proportional to it: torch's SGD, with momentum and with weight decay that is added to
    the gradient. `lr` is the learning rate of either; SGD needs about a hundred times AdamW's, so cases set it.
    `resume`: in the middle of the run the state is saved and loaded into a target that is built anew, which trains the
    other steps; with `resharded` through another layout of the same ranks (`resumed.py`).
    """

    global_batch: Annotated[
        PositiveInt,
        _axis(
            "sequences per step, over all ranks",
            number("gb{global_batch}", "gb8", "{0} sequences per step, over all ranks"),
            smallest=1,
        ),
    ] = 8
    seq_len: Annotated[
        PositiveInt,
        _axis(
            "tokens of a sequence",
            number("sl{seq_len}", "sl32", "sequences of {0} tokens"),
            smallest=16,
        ),
    ] = 32
    steps: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)],
        _axis(
            "optimizer steps",
            number("s{steps}", "s5", "{0} steps"),
            smallest=1,
            everyday=True,
        ),
    ] = 5
    accumulation: Annotated[
        PositiveInt,
        _axis(
            "microbatches per optimizer step",
            number("accum{accumulation}", "accum2", "{0} microbatches per rank and optimizer step"),
            changes=Changes.SUMS,
            exported=False,
        ),
    ] = 1
    reduce_grads: Annotated[
        ReduceGrads,
        _axis(
            "microbatches after which FSDP2 reduces gradients",
            flag(
                "reduce.last", "gradients are reduced after the last microbatch alone", reduce_grads="last_microbatch"
            ),
            changes=Changes.SUMS,
            exported=False,
        ),
    ] = "every_microbatch"
    max_norm: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        _axis(
            "clip gradients to this global norm; without it there is no clipping",
            number("clip{max_norm}", "clip0.5", "gradients are clipped to a global norm of {0}"),
            example=1.0,
            exported=False,
        ),
    ] = None
    evaluate: Annotated[
        bool,
        _axis(
            "evaluate the batch of every step first, without gradients and in evaluation mode",
            flag("eval", "the batch of every step is evaluated before it is trained on", evaluate=True),
            changes=Changes.NOTHING,
            same_bits="an evaluation changes nothing that training reads",
            exported=False,
        ),
    ] = False
    ignored_tokens: Annotated[
        IgnoredTokens,
        _axis(
            "labels that the loss ignores: a different number per rank, or half the batch",
            flag("ignore.unequal", "every sequence has fewer labels than the one before", ignored_tokens="unequal"),
            flag("ignore.half", "the second half of the batch has no labels", ignored_tokens="half"),
            exported=False,
        ),
    ] = "none"
    resume: Annotated[
        Resume,
        _axis(
            "save the state mid-run and load it into a new target; resharded: through another layout",
            flag("resume", "state is saved in the middle of the run, and resumed by a new target", resume="same"),
            flag("resume.resharded", "resumed through another layout, which loads and saves state", resume="resharded"),
            changes=Changes.NOTHING,
            same_bits="a state that is saved and loaded has the same bits",
            exported=False,
        ),
    ] = "none"
    optimizer: Annotated[
        Optimizer,
        _axis(
            "what updates parameters: sgd in proportion to the gradient, with lr = 0.1 for instance",
            flag("sgd", "SGD with momentum updates the parameters, instead of AdamW", optimizer="sgd"),
            exported=False,
            noise="_{}",
        ),
    ] = "adamw"
    lr: Annotated[
        Annotated[float, Meta(gt=0, le=10)],
        _axis(
            "learning rate of the optimizer",
            number("lr{lr}", "lr0.001", "learning rate {0}"),
            shrinks=False,
            noise="_lr{:g}",
        ),
    ] = 1e-3
    seed: Annotated[
        Annotated[int, Meta(ge=0, lt=2**32)],
        _axis("seed of weights and data", number("seed{seed}", "seed0", "seed {0}"), shrinks=False),
    ] = 0
    parameter_dtype: Annotated[
        ParameterDtype,
        _axis(
            "dtype of the parameters that the optimizer updates, where activations are bfloat16",
            flag("param.b16", "parameters are updated in bfloat16", parameter_dtype="bfloat16"),
            exported=False,
            noise="_param_{}",
        ),
    ] = "float32"
    reduce_dtype: Annotated[
        ReduceDtype,
        _axis(
            "dtype in which FSDP2 sums gradients over ranks",
            flag("reduce.b16", "gradients are summed over ranks in bfloat16", reduce_dtype="bfloat16"),
            changes=Changes.SUMS,
            exported=False,
        ),
    ] = "float32"
    dtype: Annotated[
        Dtype,
        _axis(
            "dtype of parameters and activations; float64 for sharp comparisons",
            flag("f64", "float64, for sharp comparisons", dtype="float64"),
            flag("f32", "float32", dtype="float32"),
            flag("b16", "bfloat16, with float32 master weights but for param.b16", dtype="bfloat16"),
            changes=Changes.ROUNDING,
            part="dtype",
            reference="bfloat16",
            simplest="float32",
            everyday=True,
        ),
    ] = "float32"

    @property
    def tokens(self) -> int:
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
    def update(self) -> Update:
        """What the optimizer keeps and reads of every parameter."""
        return UPDATES[self.optimizer]

    @property
    def resumed_after(self) -> int | None:
        """The step after which the state is saved and loaded; None where the run is not resumed."""
        return None if self.resume == "none" else self.steps // 2

    def __post_init__(self) -> None:
        if not math.isfinite(self.lr):
            raise ValueError(f"lr {self.lr} is not a finite number")
