"""What is alive besides what the model, the optimizer, the data and autograd explain, under torch 2.13.

At the end of a step: nothing. Between forward and backward: the logits, which a name still holds, the states of the
random number generator that checkpointing restores before it computes again, and the weights that FSDP2 does not free
after forward. And scalars of the loss. The terms hold for the CPU. A compiled block keeps no state of the generator:
its graph draws no number.
"""

import functools
from collections.abc import Iterator

import msgspec

from harness.expect.units import Unit, fsdp_units, ranks_of_unit
from harness.matrix.case import Case
from harness.matrix.linears import OUTPUT_FQN, ends_are_one, is_converted, shard_sizes
from harness.matrix.recipes import ITEM_BYTES
from harness.trace.counts import Moment

RNG_STATE_BYTES = 5056  # of the CPU generator


class LiveStorage(msgspec.Struct, frozen=True, kw_only=True):
    """A storage that must be alive; `purpose` says what it is."""

    dtype: str
    nbytes: int
    purpose: str


def expected_scalars(case: Case, *, moment: Moment, step: int = 1) -> int:
    """Storages of one element: the loss; before backward also its sum over tokens, which loss parallel reduces.

    After a step that clips gradients also their norm, and after one with an evaluation the scale of the output layer,
    which FSDP2 casts and gathers once more than it is read.
    """
    if moment == "step":
        return 1 + (case.train.max_norm is not None) + _keeps_unread_scale(case, step)
    return 2 + (case.layout.tp > 1 and case.layout.loss_parallel)


def _keeps_unread_scale(case: Case, step: int) -> bool:
    """A precomputed scale belongs to the parameter; step 1 has none."""
    computed = case.gathers_float8 and not (case.float8.precompute_scale and step > 1)
    return case.train.evaluate and computed and is_converted(case, OUTPUT_FQN)


@functools.lru_cache(maxsize=256)  # checks ask for every rank and step
def expected_live(case: Case, *, rank: int, moment: Moment) -> tuple[LiveStorage, ...]:
    """The storages that are alive on `rank` at this moment of every step."""
    if moment == "step":
        return tuple(_counts_of_tokens(case))
    return (
        *_counts_of_tokens(case),
        _logits(case, rank),
        *_generator_states(case),
        *(_gathered(case, rank) if case.uses_fsdp else ()),
    )


def _counts_of_tokens(case: Case) -> Iterator[LiveStorage]:
    """Each mixture keeps its token counts of the last forward, which the model adds up after all blocks."""
    for layer in case.model.expert_layers:
        purpose = f"the counts of tokens of layers.{layer}.moe"
        yield LiveStorage(dtype="int64", nbytes=case.model.experts * ITEM_BYTES["int64"], purpose=purpose)


def _logits(case: Case, rank: int) -> LiveStorage:
    dtype = case.train.dtype
    vocab, tp = case.model.padded_vocab_size, case.layout.tp
    if tp > 1 and case.layout.loss_parallel:
        vocab = shard_sizes(vocab, tp)[rank % tp]
    nbytes = case.tokens_per_rank * vocab * ITEM_BYTES[dtype]
    return LiveStorage(dtype=dtype, nbytes=nbytes, purpose="the logits")


def gradients(case: Case, rank: int) -> Iterator[LiveStorage]:
    """All gradients. FSDP2 reduces those of a unit into one storage, padded as shards; otherwise each has its own."""
    for unit in fsdp_units(case, rank):
        for fqns, elements in _gradient_storages(case, unit):
            nbytes = elements * ITEM_BYTES[case.parameter_dtype]
            yield LiveStorage(dtype=case.parameter_dtype, nbytes=nbytes, purpose=f"the gradient of {fqns}")


def _gradient_storages(case: Case, unit: Unit) -> list[tuple[str, int]]:
    if case.uses_fsdp:
        return [(unit.name, sum(weight.shard_elements(ranks_of_unit(case, unit)) for weight in unit.weights))]
    # TP ranks all compute the gradient of the whole embedding, and use their rows of it
    rows = {} if ends_are_one(case) else {"tok_embeddings": case.model.padded_vocab_size}
    return [(weight.fqn, rows.get(weight.fqn, weight.rows) * weight.columns) for weight in unit.weights]


def _generator_states(case: Case) -> Iterator[LiveStorage]:
    for layer in range(case.model.shape.layers):
        if case.checkpointing.wraps(layer) and case.compile == "none":
            state = f"the generator state of checkpointed layers.{layer}"
            yield LiveStorage(dtype="uint8", nbytes=RNG_STATE_BYTES, purpose=state)


def _gathered(case: Case, rank: int) -> Iterator[LiveStorage]:
    """Weights of units that FSDP2 does not free after forward. It gathers padded shards, all of the same size."""
    for unit in fsdp_units(case, rank):
        ranks = ranks_of_unit(case, unit)
        for weight in () if unit.freed else unit.weights:
            dtype = "float8_e4m3fn" if weight.gathered_in_float8 else case.train.dtype
            elements = weight.shard_elements(ranks) * ranks
            purpose = f"the gathered weight of {weight.fqn}"
            yield LiveStorage(dtype=dtype, nbytes=elements * ITEM_BYTES[dtype], purpose=purpose)
