"""What the harness found out about a target: its model, what that was called with, changed settings, loaded state.

Recorded by `worker/probes/discovery.py` and `worker/training/train.py`. Names are FQNs
without what checkpointing wrappers and compilation add. Sequences are numbered in the global batch of their step.
"""

from collections.abc import Mapping

from harness.trace.record import Record


class Linear(Record, frozen=True, kw_only=True):
    """One `nn.Linear`, converted or not. Sizes are those of the whole linear."""

    fqn: str
    in_features: int
    out_features: int
    converted: bool  # it is a Float8Linear
    tied: bool = False  # a module that is no linear has the same weight, as an embedding may have
    own_forward: bool = False  # it is a Float8Linear of the target, which may keep casts of its weight


class Parameter(Record, frozen=True, kw_only=True):
    """One parameter: the logical shape, and what this rank holds of it."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str  # of what is stored, such as "float32" for the master weights of mixed precision
    local_elements: int
    axes: tuple[str, ...]  # mesh axes that it is distributed over, sharded or replicated
    trained: bool  # requires_grad
    offset: tuple[int, ...] = ()  # of what this rank holds
    built: str = ""  # digest of what the target had put there before the harness wrote its own weights, where asked for
    updated: bool = True  # training changed it


class Buffer(Record, frozen=True, kw_only=True):
    """One buffer, as the target built it: the harness writes parameters only."""

    fqn: str
    shape: tuple[int, ...]  # of what this rank holds
    dtype: str
    digest: str


class ModelRecord(Record, frozen=True, kw_only=True):
    """Linears in registration order, parameters in the order of `named_parameters`, checkpointed and compiled FQNs.

    `calls`: how often the forward of a linear ran in a step at most, by FQN, in eager runs; `recomputed`: and again in
    backward. `constants`: of those that modules of torch declare what is no size, as text, by "norm.eps".
    """

    linears: tuple[Linear, ...]
    parameters: tuple[Parameter, ...]
    checkpointed: tuple[str, ...]
    compiled: tuple[str, ...]
    calls: dict[str, int]
    recomputed: dict[str, int]
    buffers: tuple[Buffer, ...] = ()
    constants: Mapping[str, str] = {}


class StepInputs(Record, frozen=True, kw_only=True):
    step: int
    inputs: tuple[int, ...]  # the sequences whose tokens it got, in the order of calls
    labels: tuple[int, ...]  # the sequences whose tokens it got shifted by one: they are what it must predict
    covered: float  # share of the neighbouring tokens that are meant for this rank, among all that the model got
    shapes: tuple[tuple[int, ...], ...]  # of the integer tensors


class StateChange(Record, frozen=True, kw_only=True):
    """A setting of torch, which belongs to the whole process, that the target left changed."""

    name: str  # "default dtype"
    phase: str  # after which it was found: "import", "build", "step 1"
    before: str
    after: str


# A value for every parameter, all that an optimizer keeps of it, and its options: "norm.weight", "norm.weight exp_avg",
# "norm.weight lr". It is dtype, shape and digest of the whole tensor, whatever its layout, or the value itself.
State = dict[str, str]


class Resumed(Record, frozen=True, kw_only=True):
    """The state that was saved, and the one of every target that loaded it; the last of these trains on.

    `wrong`: for each of them what this rank itself holds of it and was not saved so.
    """

    after_step: int
    saved: State
    loaded: tuple[State, ...]
    wrong: tuple[tuple[str, ...], ...] = ()
