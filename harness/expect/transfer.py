"""What a rank sends at once: a kind of collective, the units of FSDP2, and the collectives of experts.

A *unit* is what FSDP2 gathers and reduces at once: the embedding, every block, and the final norm with the output
layer; tied ends are one. Experts are sent tokens by the ranks that chose them, and send results and gradients back.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial

import msgspec

from harness.matrix.case import Case
from harness.matrix.layout import DP_AXES, coordinates, group_name, peers
from harness.matrix.linears import (
    EMBEDDING,
    EXPERTS,
    OUTPUT_FQN,
    ROUTER,
    block_linears,
    blocks_of,
    ends_are_one,
    expert_layers_of,
    holds,
    is_converted,
    local_features,
    shard_sizes,
)
from harness.matrix.recipes import ITEM_BYTES
from harness.trace.counts import ExpertCall, collective_words


class Transfer(msgspec.Struct, frozen=True):
    """`times` collectives with an input of `elements` each on one rank; `purpose` says what is sent and why."""

    axis: str
    kind: str
    dtype: str
    elements: int
    purpose: str
    op: str = ""
    times: int = 1
    least: int | None = None  # a compiled run may send from this many up to twice `times`

    @property
    def words(self) -> str:
        return collective_words(axis=self.axis, kind=self.kind, op=self.op, dtype=self.dtype)

    @property
    def payload_bytes(self) -> int:
        return self.times * self.elements * ITEM_BYTES[self.dtype]


def forward_passes(case: Case) -> int:
    """Forward passes of one step: its evaluation, and the one that is trained."""
    return 1 + case.train.evaluate


def repeated(terms: Iterable[Transfer], times: int) -> Iterator[Transfer]:
    for term in terms:
        least = None if term.least is None else term.least * times
        yield msgspec.structs.replace(term, times=term.times * times, least=least)


def residual_tokens(case: Case) -> int:
    """Return the tokens that a rank holds between blocks."""
    shares = case.layout.tp if case.layout.sequence_parallel else 1
    return case.microbatch * -(-case.local_seq_len // shares)


# Units of FSDP2


class Weight(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter as a TP rank holds it. FSDP2 shards `rows`; `gathered_in_float8`: cast before the all-gather."""

    fqn: str
    rows: int
    columns: int = 1
    gathered_in_float8: bool = False

    def shard_elements(self, ranks: int) -> int:
        """Return the elements of a shard: rows are sharded as by torch.chunk, and padded to the largest shard."""
        return -(-self.rows // ranks) * self.columns


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """What FSDP2 gathers and reduces at once."""

    name: str
    weights: tuple[Weight, ...]
    axis: str  # of the ranks that share it
    gathers: int  # of a step: in every forward, and once more in backward where the weights are freed after forward
    freed: bool  # after forward


@lru_cache(maxsize=256)  # every kind of collective asks
def fsdp_units(case: Case, rank: int) -> tuple[Unit, ...]:
    freed = case.layout.reshard_after_forward != "never"
    blocks = [
        Unit(name=name, weights=tuple(weights), axis=axis, gathers=_gathers_of_unit(case, freed=freed), freed=freed)
        for layer in blocks_of(case, rank)
        for name, weights, axis in _block_units(case, layer)
    ]
    first, last = _units_of_ends(case, coordinates(case.layout, rank)["tp"])
    return tuple(unit for unit in (*first, *blocks, last) if holds(case, rank, unit.weights[0].fqn))


def _units_of_ends(case: Case, tp_rank: int) -> tuple[Sequence[Unit], Unit]:
    """Return the FSDP units around the blocks: the embedding, and the last norm with the output layer; one if tied.

    Backward starts with the last unit, so by default its weights stay gathered. After an evaluation too; but FSDP2
    takes what ran before the first unit for what backward needs next, and gathers it at the end. Tied ends are that
    first unit: what an evaluation gathered is there for training.
    """
    dim, resharding = case.model.shape.dim, case.layout.reshard_after_forward
    vocab = shard_sizes(case.model.padded_vocab_size, case.layout.tp)[tp_rank]
    freed, freed_last = resharding != "never", resharding == "always"
    unit = partial(Unit, axis="dp_shard")
    embedding, norm = Weight(fqn=EMBEDDING, rows=vocab, columns=dim), Weight(fqn="norm", rows=dim)
    if ends_are_one(case):
        name, gathers = f"{EMBEDDING}, norm, output", _gathers_of_unit(case, freed=freed_last)
        kept = 0 if freed_last else case.train.accumulation * case.train.evaluate
        return [], unit(name=name, weights=(embedding, norm), gathers=gathers - kept, freed=freed_last)
    output = Weight(fqn=OUTPUT_FQN, rows=vocab, columns=dim, gathered_in_float8=_cast_by_fsdp(case, OUTPUT_FQN))
    first = unit(name=EMBEDDING, weights=(embedding,), gathers=_gathers_of_unit(case, freed=freed), freed=freed)
    gathers = _gathers_of_unit(case, freed=freed_last)
    return [first], unit(name="norm, output", weights=(norm, output), gathers=gathers, freed=freed_last)


def _gathers_of_unit(case: Case, *, freed: bool) -> int:
    """Of a step. The stages of a pipeline keep what backward gathers: every forward frees it, if any does.

    What no forward frees is gathered once for the evaluation, and once for training.
    """
    if case.layout.pp > 1:
        return case.train.accumulation * forward_passes(case) * freed + (1 if freed else forward_passes(case))
    return case.train.accumulation * (forward_passes(case) + freed)


def _block_units(case: Case, layer: int) -> Iterator[tuple[str, Iterable[Weight], str]]:
    """Yield the units of a block: its experts are one of their own, which the ranks that have the same ones share."""
    yield f"layers.{layer}", _block_weights(case, layer), "dp_shard"
    if case.model.has_experts(layer):
        model, local = case.model, case.model.experts // case.layout.ep
        sizes = {"w1": (model.expert_dim, model.shape.dim), "w2": (model.shape.dim, model.expert_dim)}
        fqn = f"layers.{layer}.{EXPERTS}"
        weights = [
            Weight(fqn=f"{fqn}.{name}", rows=rows, columns=local * columns)
            for name, (rows, columns) in (sizes | {"w3": sizes["w1"]}).items()
        ]
        yield fqn, weights, group_name(case.layout, "efsdp")


def _block_weights(case: Case, layer: int) -> Iterator[Weight]:
    for norm in ("attention_norm", "ffn_norm"):
        yield Weight(fqn=f"layers.{layer}.{norm}", rows=case.model.shape.dim)
    if case.model.has_experts(layer):
        yield Weight(fqn=f"layers.{layer}.{ROUTER}", rows=case.model.experts, columns=case.model.shape.dim)
    for name in block_linears(case.model, layer):
        inputs, outputs = local_features(case, name)
        fqn = f"layers.{layer}.{name}"
        yield Weight(fqn=fqn, rows=outputs, columns=inputs, gathered_in_float8=_cast_by_fsdp(case, fqn))
        if case.model.bias:  # sharded over TP like the outputs
            yield Weight(fqn=f"{fqn}.bias", rows=outputs)


def _cast_by_fsdp(case: Case, fqn: str) -> bool:
    return case.float8.fp8_all_gather and is_converted(case, fqn)


def ranks_of_unit(case: Case, unit: Unit) -> int:
    """Return how many ranks FSDP2 shards the weights of a unit over."""
    return len(peers(case.layout, 0, (unit.axis,)))


# Collectives of experts

_COUNTS = "numbers of tokens of experts"


def dispatched(case: Case, rank: int) -> Iterator[Transfer]:
    """What a rank sends to the ranks that hold the experts of its tokens: rows, how many, and gradients of results.

    What it sends back depends on how many came (`sent_back`).
    """
    model, layers = case.model, expert_layers_of(case, rank)
    again = sum(case.checkpointing.wraps(layer) for layer in layers)
    ep, calls = group_name(case.layout, "ep"), len(layers) * forward_passes(case) + again
    rows = sent_rows(case) * model.shape.dim
    yield Transfer(ep, "all_to_all", "int64", model.experts, _COUNTS, times=calls)
    yield Transfer(ep, "all_to_all", case.train.dtype, rows, "tokens of experts", times=calls)
    yield Transfer(ep, "all_to_all", case.train.dtype, rows, "gradients of results of experts", times=len(layers))


def sent_back(case: Case, calls: Iterable[ExpertCall]) -> Iterator[Transfer]:
    """What a rank sends back in these calls of its experts: results, and the gradients of tokens that it trained on."""
    ep = group_name(case.layout, "ep")
    if case.layout.ep == 1:
        return
    for call in calls:
        rows = sum(call.local_counts) * case.model.shape.dim
        times = 2 if call.phase == "forward" else 1
        yield Transfer(ep, "all_to_all", case.train.dtype, rows, "results of experts", times=times)


def sent_rows(case: Case) -> int:
    """Rows that a rank sends in the forward of a block. Its experts get as many where tokens are spread evenly."""
    return residual_tokens(case) * case.model.top_k


def sent_back_if_balanced(case: Case, rank: int) -> Iterator[Transfer]:
    """Yield what a rank sends back in a step where tokens are spread evenly."""
    sent = [term for term in dispatched(case, rank) if term.purpose != _COUNTS]
    if case.layout.ep > 1:
        for term in repeated(sent, case.train.accumulation):
            yield msgspec.structs.replace(term, purpose="results of experts, if tokens are spread evenly")


def tokens_of_experts(case: Case, rank: int) -> Iterator[Transfer]:
    """Yield the tokens of every expert in this step, of all ranks of its stage, by which the choice is balanced."""
    for axis in (*DP_AXES, "tp"):
        times = len(expert_layers_of(case, rank))
        yield Transfer(axis, "all_reduce", "float32", case.model.experts, "tokens of experts", op="sum", times=times)
