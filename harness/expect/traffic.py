"""The expected collectives of a case: arithmetic for the reference Llama under torch 2.13 and torchao 0.18.

The sum of what dimensions send. Every term has a purpose, which findings quote. Compiled blocks send the same
collectives except for reductions by max: a compiler merges equal casts and recomputes cheap ones, so their number is
known only within limits (`Transfer.least`). The pipelined operators of async TP send reduce-scatters as all-to-all.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial

from harness.matrix.case import Case
from harness.matrix.dims import DIMENSIONS
from harness.matrix.dims.dimension import Sender, Transfer, repeated
from harness.matrix.dims.ep import sent_back
from harness.matrix.dims.pp import blocks_of, expert_layers_of, holds
from harness.matrix.layout import EXPERT_AXES, SHARD_AXES, coordinates, group_name
from harness.matrix.linears import (
    EMBEDDING,
    OUTPUT_FQN,
    ROWWISE,
    block_linears,
    linear_features,
    local_features,
    shard_size,
)
from harness.matrix.upstream import NONE, Changes
from harness.trace.counts import ExpertCall


@lru_cache(maxsize=256)  # checks ask for every rank and step
def expected_transfers(case: Case, *, step: int, rank: int, changes: Changes = NONE) -> tuple[Transfer, ...]:
    """Return the collectives of `rank` in `step` (1-based) but those `of_age`, with these upstream changes.

    Every later step equals step 2.
    """
    of, used = Sender(case, rank, step, changes), _axes_of_several_ranks(case)
    terms = (
        *(term for one in DIMENSIONS for term in repeated(one.of_microbatch(of), case.train.accumulation)),
        *(term for one in DIMENSIONS for term in repeated(one.of_reduction(of), case.reductions)),
        *(term for one in DIMENSIONS for term in one.of_step(of)),
        *_whole_matrices(case, rank),
        *_global_norm(case, rank),
    )
    return tuple(term for term in terms if term.times and term.axis in used)


def sent(case: Case, rank: int, step: int, changes: Changes, calls: Iterable[ExpertCall]) -> tuple[Transfer, ...]:
    """Return all collectives of `rank` in `step`. `calls`: of its experts, which decide what returns."""
    transfers = expected_transfers(case, step=min(step, 2), rank=rank, changes=changes)
    return (*transfers, *of_age(Sender(case, rank, step, changes)), *sent_back(case, calls))


def of_age(of: Sender) -> Iterator[Transfer]:
    """Yield what a rank sends besides, because of how many steps its target has trained."""
    return (term for one in DIMENSIONS for term in one.of_age(of))


def _axes_of_several_ranks(case: Case) -> frozenset[str]:
    several = [axis for axis, degree in case.layout.degrees.items() if degree > 1]
    return frozenset((*several, *(group_name(case.layout, axis) for axis in EXPERT_AXES if axis in several)))


def _whole_matrices(case: Case, rank: int) -> Iterator[Transfer]:
    """Muon orthogonalizes whole matrices: gradient and momentum of each are gathered along every axis that shards it.

    DTensor gathers columns before rows, and rows that TP has sharded before FSDP2 along `dp_shard` first.
    """
    if case.train.optimizer != "muon":
        return
    shards, at = case.layout.dp_shard, coordinates(case.layout, rank)["dp_shard"]
    for layer in blocks_of(case, rank):
        for name in block_linears(case.model, layer):
            inputs, outputs = local_features(case, name)
            rows = shard_size(outputs, shards, at) if name in ROWWISE else outputs
            of_shard = -(-outputs // shards) * linear_features(case, name)[0]
            purpose = f"gradient and momentum of layers.{layer}.{name}"
            for axis, elements in (("dp_shard", of_shard), ("tp", rows * inputs)):
                yield Transfer(axis, "all_gather", case.parameter_dtype, elements, purpose, times=2)


def _global_norm(case: Case, rank: int) -> Iterator[Transfer]:
    """Yield the norm of every gradient, summed over the axes that shard it; gradients on one mesh are sent together.

    Then one number of every stage of a pipeline.

    Without sequence parallelism norms are not distributed over TP ranks.
    """
    if case.train.max_norm is None:
        return
    blocks, embeds, heads = blocks_of(case, rank), holds(case, rank, EMBEDDING), holds(case, rank, OUTPUT_FQN)
    linears = sum(len(block_linears(case.model, layer)) for layer in blocks)
    routers = len(expert_layers_of(case, rank))
    ends = embeds if case.model.tied else embeds + heads
    norms, others = 2 * len(blocks) + heads + routers, linears * (1 + case.model.bias) + ends
    experts_too = norms + others + 3 * routers
    send = partial(Transfer, kind="all_reduce", dtype=case.parameter_dtype, purpose="norms of gradients", op="sum")
    yield send("pp", elements=1)
    if case.layout.ep > 1:
        counts = [(norms + others, _joined(case, SHARD_AXES)), (3 * routers, _joined(case, EXPERT_AXES))]
    elif case.layout.tp == 1 or case.layout.shares_of_sequence > 1:
        counts = [(experts_too, SHARD_AXES)]
    else:
        counts = [(norms, ("dp_shard",)), (experts_too - norms, SHARD_AXES)]
    for count, axes in counts:
        for axis in axes:
            yield send(axis, elements=count)


def _joined(case: Case, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the groups over which gradients on these axes are summed, beside experts on a mesh of their own.

    DTensor sums over two axes at once that a mesh joins. That is `dp_shard` for experts where TP is not used, and `ep`
    for the others where all ranks share the experts.
    """
    if case.layout.tp == 1 and axes == EXPERT_AXES:
        return ("dp_shard",)
    whole = case.layout.tp > 1 and case.layout.degrees["efsdp"] == 1 and axes == SHARD_AXES
    return tuple(group_name(case.layout, axis) for axis in (("ep",) if whole else axes))
