"""The model of a run as the harness found it once the target was built, whatever the target is.

Recorded by `worker/discovery.py`. Names are FQNs without what checkpointing wrappers and compilation add.
"""

from __future__ import annotations

from harness.trace.record import Record


class Linear(Record, frozen=True, kw_only=True):
    """One `nn.Linear`, converted or not. Sizes are those of the whole linear."""

    fqn: str
    in_features: int
    out_features: int
    converted: bool  # it is a Float8Linear
    tied: bool = False  # a module that is no linear has the same weight, as an embedding may have


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
    """Linears in the order of registration, parameters in that of `named_parameters`, checkpointed and compiled FQNs.

    `calls`: how often the forward of a linear ran in a step at most, by FQN, in eager runs; `recomputed`: and again in
    backward.
    """

    linears: tuple[Linear, ...]
    parameters: tuple[Parameter, ...]
    checkpointed: tuple[str, ...]
    compiled: tuple[str, ...]
    calls: dict[str, int]
    recomputed: dict[str, int]
    buffers: tuple[Buffer, ...] = ()
