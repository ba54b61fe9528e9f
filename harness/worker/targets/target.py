"""The interface of a target: what the harness trains, and what a target learns about the run.

A target is a module with `build(case, world) -> Target`, and optionally `preload()`, which is called once before ranks
are forked: it may import and warm up, and must leave neither threads nor a process group. Weights and tokens come from
the harness, the same in every layout. Everything else is found out by probes at the seams of torch and torchao.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import nn

from harness.matrix.dims.dimension import Played

# A loss is the mean over the tokens of the global batch, in nats, before the update. A gradient norm is the global L2
# norm before clipping, None if the target computes none.
StepResult = tuple[torch.Tensor | float, torch.Tensor | float | None]

IGNORED = -100  # the label of a token that the loss leaves out: what cross entropy ignores by default


class World(NamedTuple):
    """What a target gets on a rank. The process group is initialized; ranks are numbered with `tp` varying fastest.

    The single-rank reference of a layout (single-rank reference) is built like any other run, with every degree of
    `case.layout` at 1. It gets the microbatches of all data-parallel ranks in every step and accumulates gradients.
    """

    device: torch.device
    fsdp: bool  # apply FSDP2, on a mesh of one rank too: mixed precision and float8 all-gather are FSDP2's
    dp_rank: int  # which part of the global batch this rank trains on
    microbatches: int  # how many `step` gets: `accumulation`, for the reference times the slices of the batch
    local_batch: int  # sequences of a microbatch
    plays: Played = Played()  # of that reference: the ranks that it repeats


class Target(Protocol):
    """A model that is built: in the dtype of the case, converted, distributed, wrapped, compiled."""

    model: nn.Module

    def step(self, microbatches: Sequence[torch.Tensor]) -> StepResult:
        """One optimizer step over `microbatches`, each int64 [local_batch, seq_len + 1]: inputs and shifted labels.

        Returns the loss of the global batch, the same on every rank, and the gradient norm.

        Of cases with `ignored_tokens` alone `step`, and `evaluate` too, get a second argument: the labels of every
        microbatch, int64 [local_batch, seq_len], `IGNORED` where a token has none. A rank may have no label at all. The
        loss is then the mean over the labels of the global batch that are not ignored.

        Of cases with `packing` they get these labels and a third argument: the position of every token in its document,
        int64 [local_batch, seq_len], 0 where one begins. A token must see its own document alone. So that documents can
        be compared with each of them alone, such a target has `evaluate`: then microbatches are [1, length + 1].
        """


class Evaluates(Target, Protocol):
    """A target that trains cases with `evaluate` or `packing`."""

    def evaluate(self, microbatches: Sequence[torch.Tensor]) -> torch.Tensor | float:
        """The loss that `step` would return of `microbatches`, in evaluation mode, without gradients or an update."""


class Resumes(Target, Protocol):
    """A target that trains cases with `resume`."""

    def save(self, folder: Path) -> None:
        """Write all that training goes on from into a folder that all ranks share and that does not exist yet."""

    def load(self, folder: Path) -> None:
        """Read it, as a target that has not trained. What is derived from weights, such as scales, is made again.

        It may have been saved by another layout of as many ranks.
        """
