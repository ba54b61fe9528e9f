"""What is alive besides what the model, the optimizer, the data and autograd explain, under torch 2.13.

At the end of a step: nothing. Between forward and backward: the logits, the states of the random number generator that
checkpointing restores before it computes again, and the weights that FSDP2 does not free after forward. And scalars of
the loss. The terms hold for the CPU. A compiled block keeps no state of the generator: its graph draws no number.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from harness.expect.traffic import fsdp_units
from harness.expect.versions import CURRENT
from harness.matrix.case import Case
from harness.matrix.linears import shard_sizes
from harness.matrix.recipes import ITEM_BYTES
from harness.trace.traffic import Moment

VERIFIED = CURRENT

RNG_STATE_BYTES = 5056  # of the CPU generator


class LiveStorage(msgspec.Struct, frozen=True, kw_only=True):
    """A storage that must be alive; `purpose` says what it is."""

    dtype: str
    nbytes: int
    purpose: str


def expected_scalars(case: Case, *, moment: Moment) -> int:
    """Storages of one element: the loss; before backward also its sum over tokens, which loss parallel reduces."""
    if moment == "step":
        return 1
    return 3 if case.layout.tp > 1 and case.layout.loss_parallel else 2


def expected_live(case: Case, *, rank: int) -> tuple[LiveStorage, ...]:
    """The storages that are alive on `rank` between the forward and the backward of every step."""
    dtype = case.train.dtype
    vocab, tp = case.model.padded_vocab_size, case.layout.tp
    if tp > 1 and case.layout.loss_parallel:
        vocab = shard_sizes(vocab, tp)[rank % tp]
    logits = case.tokens_per_rank * vocab * ITEM_BYTES[dtype]
    return (
        LiveStorage(dtype=dtype, nbytes=logits, purpose="the logits"),
        *_generator_states(case),
        *(_gathered(case, rank) if case.uses_fsdp else ()),
    )


def _generator_states(case: Case) -> Iterator[LiveStorage]:
    for layer in range(case.model.shape.layers):
        if case.checkpointing.wraps(layer) and case.compile == "none":
            state = f"the generator state of checkpointed layers.{layer}"
            yield LiveStorage(dtype="uint8", nbytes=RNG_STATE_BYTES, purpose=state)


def _gathered(case: Case, rank: int) -> Iterator[LiveStorage]:
    """Weights of units that FSDP2 gathers once a step. It gathers padded shards, all of the same size."""
    ranks = case.layout.dp_shard
    for unit in fsdp_units(case, rank):
        for weight in unit.weights if unit.gathers == 1 else ():
            dtype = "float8_e4m3fn" if weight.gathered_in_float8 else case.train.dtype
            elements = -(-weight.rows // ranks) * ranks * weight.columns
            purpose = f"the gathered weight of {weight.fqn}"
            yield LiveStorage(dtype=dtype, nbytes=elements * ITEM_BYTES[dtype], purpose=purpose)
