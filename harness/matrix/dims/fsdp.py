"""FSDP2: ranks with different sequences shard every parameter. With HSDP the replicas of a shard add up its gradients.

A *unit* is what FSDP2 gathers and reduces at once: the embedding, every block, and the final norm with the output
layer; tied ends are one. Experts are a unit of their own.

One rank computes for one after another, accumulates their gradients as each would, and sums them in rank order: over
shards, then over replicas. That split changes a number only where both sums are rounded.
"""

from collections.abc import Iterator
from functools import lru_cache, partial

import msgspec

from harness.matrix.case import Case
from harness.matrix.dims.dimension import Dimension, Transfer
from harness.matrix.dims.pp import blocks_of, ends_are_one, holds
from harness.matrix.layout import DP_AXES, SHARD_AXES, group_name
from harness.matrix.linears import EMBEDDING, EXPERTS, OUTPUT_FQN, ROUTER, block_linears, is_converted, local_features
from harness.matrix.recipes import ITEM_BYTES


class Weight(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter as a TP rank holds it. FSDP2 shards `rows`; `gathered_in_float8`: cast before the all-gather."""

    fqn: str
    rows: int
    columns: int = 1
    gathered_in_float8: bool = False


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """What FSDP2 gathers and reduces at once."""

    name: str
    weights: tuple[Weight, ...]
    axis: str  # of the ranks that share it
    ranks: int
    gathers: int  # of a step: in every forward, and once more in backward where the weights are freed after forward
    freed: bool  # after forward

    def shard_of(self, weight: Weight) -> int:
        """Return the elements of a shard: rows are sharded as by torch.chunk, and padded to the largest shard."""
        return -(-weight.rows // self.ranks) * weight.columns

    @property
    def shard_elements(self) -> int:
        return sum(map(self.shard_of, self.weights))


@lru_cache(maxsize=256)  # every kind of collective asks
def fsdp_units(case: Case, rank: int) -> tuple[Unit, ...]:
    """Return the units of a rank in order.

    Backward starts with the last unit, so by default its weights stay gathered. After an evaluation too; but FSDP2
    takes what ran before the first unit for what backward needs next, and gathers it at the end. Tied ends are that
    first unit: what an evaluation gathered is there for training.
    """
    layout, (embedding, norm, output) = case.layout, _weights_of_ends(case, rank)
    freed, freed_last = layout.reshard_after_forward != "never", layout.reshard_after_forward == "always"
    freed = freed and layout.replicas != "replicate"  # which shards nothing
    often, often_last = (_gathers_of_unit(case, freed=asked) for asked in (freed, freed_last))
    unit = partial(Unit, axis="dp_shard", ranks=layout.dp_shard, gathers=often, freed=freed)
    if ends_are_one(case):
        kept = 0 if freed_last else case.train.accumulation * case.train.evaluate
        first, name, ends, often_last = [], f"{EMBEDDING}, norm, output", (embedding, norm), often_last - kept
    else:
        first, name, ends = [unit(name=EMBEDDING, weights=(embedding,))], "norm, output", (norm, output)
    units = [*first, unit(name=name, weights=ends, gathers=often_last, freed=freed_last)]
    for layer in blocks_of(case, rank):
        units.insert(-1, unit(name=f"layers.{layer}", weights=tuple(_block_weights(case, layer))))
        if case.model.has_experts(layer):  # are shared by the ranks that have the same ones
            ranks, weights = layout.degrees["efsdp"], tuple(_expert_weights(case, f"layers.{layer}.{EXPERTS}"))
            of_experts = unit(name=f"layers.{layer}.{EXPERTS}", weights=weights, ranks=ranks)
            units.insert(-1, msgspec.structs.replace(of_experts, axis=group_name(layout, "efsdp")))
    return tuple(one for one in units if holds(case, rank, one.weights[0].fqn))


def _weights_of_ends(case: Case, rank: int) -> tuple[Weight, Weight, Weight]:
    dim, vocab = local_features(case, OUTPUT_FQN, rank)
    output = Weight(fqn=OUTPUT_FQN, rows=vocab, columns=dim, gathered_in_float8=_cast_by_fsdp(case, OUTPUT_FQN))
    return Weight(fqn=EMBEDDING, rows=vocab, columns=dim), Weight(fqn="norm", rows=dim), output


def _gathers_of_unit(case: Case, *, freed: bool) -> int:
    """Of a step. The stages of a pipeline keep what backward gathers: every forward frees it, if any does.

    What no forward frees is gathered once for the evaluation, and once for training.
    """
    if case.layout.pp > 1:
        return case.train.accumulation * case.forward_passes * freed + (1 if freed else case.forward_passes)
    return case.train.accumulation * (case.forward_passes + freed)


def _expert_weights(case: Case, fqn: str) -> Iterator[Weight]:
    model, local = case.model, case.local_experts
    for name in ("w1", "w2", "w3"):
        rows, columns = (model.shape.dim, model.expert_dim) if name == "w2" else (model.expert_dim, model.shape.dim)
        yield Weight(fqn=f"{fqn}.{name}", rows=rows, columns=local * columns)


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


def _gathers_of_weights(case: Case, rank: int) -> Iterator[Transfer]:
    """Weights are gathered a unit at a time: as uint8 where its parameters have different dtypes.

    FSDP2 concatenates all parameters of a unit (`_get_all_gather_input_metadatas`). Norms are never float8, so a unit
    with float8 weights always has mixed dtypes.
    """
    for unit in fsdp_units(case, rank):
        narrow = sum(unit.shard_of(weight) for weight in unit.weights if weight.gathered_in_float8)
        wide = unit.shard_elements - narrow
        dtype, elements = "uint8", narrow + wide * ITEM_BYTES[case.train.dtype]
        if not narrow:
            dtype, elements = case.train.dtype, wide
        yield Transfer(unit.axis, "all_gather", dtype, elements, f"weights of {unit.name}", times=unit.gathers)


def _reductions(case: Case, rank: int) -> Iterator[Transfer]:
    """Gradients are reduce-scattered a unit at a time; HSDP then sums the shards over replicas.

    Gradients are summed (`set_gradient_divide_factor(1)`) in the reduce dtype.
    """
    for unit in fsdp_units(case, rank) if case.uses_fsdp else ():
        shard, send = unit.shard_elements, partial(Transfer, dtype=case.reduce_dtype, op="sum")
        purpose = f"gradients of {unit.name}"
        yield send("dp_replicate", "all_reduce", elements=shard, purpose=purpose)
        yield send(unit.axis, "reduce_scatter", elements=shard * unit.ranks, purpose=purpose)


def converted_weight_shards(case: Case, rank: int) -> int:
    """Return the elements of converted weights that `rank` sends in all-gathers of one step."""
    return sum(
        unit.gathers * unit.shard_of(weight)
        for unit in fsdp_units(case, rank)
        for weight in unit.weights
        if weight.gathered_in_float8
    )


def _weight_amax(case: Case, rank: int, step: int) -> Iterator[Transfer]:
    """Float8 all-gather: a cast before a gather needs the amax of all shards, along every axis that shards a weight.

    Not where scales were precomputed. They are precomputed after an update, so step 1 has none yet.
    """
    if case.float8.precompute_scale and step > 1:
        return
    for unit in fsdp_units(case, rank):
        casts = unit.gathers * sum(weight.gathered_in_float8 for weight in unit.weights)
        yield from _amax_of_shards(case, elements=1, times=casts, purpose=f"amax of the float8 weights of {unit.name}")


def _precompute(case: Case, rank: int) -> Iterator[Transfer]:
    """`precompute_float8_dynamic_scale_for_fsdp`: one vector of all amaxes, along every axis that shards a weight."""
    count = sum(weight.gathered_in_float8 for unit in fsdp_units(case, rank) for weight in unit.weights)
    if case.float8.precompute_scale and count:
        yield from _amax_of_shards(case, elements=count, times=1, purpose="precomputed amax of all float8 weights")


def _amax_of_shards(case: Case, *, elements: int, times: int, purpose: str) -> Iterator[Transfer]:
    for axis in SHARD_AXES:
        yield Transfer(axis, "all_reduce", case.parameter_dtype, elements, purpose, op="max", times=times)


def _token_count(case: Case) -> Iterator[Transfer]:
    """Yield the all-reduce of the label count if a case ignores some."""
    if case.train.counts_labels:
        for axis in DP_AXES:
            yield Transfer(axis, "all_reduce", "int64", 1, "number of labels", op="sum", times=case.forward_passes)


_BATCH_AXES = ("global_batch", *DP_AXES, "cp")


def _alone(case: Case) -> dict[str, object]:
    if case.train.reduce_dtype == "bfloat16":
        return {name: case.layout.mesh[name] for name in DP_AXES}
    return {"dp_shard": case.layout.dp}


FSDP = Dimension(
    name="fsdp",
    of_reduction=lambda of: _reductions(of.case, of.rank),
    of_step=lambda of: (
        *_gathers_of_weights(of.case, of.rank),
        *_weight_amax(of.case, of.rank, of.step),
        *_precompute(of.case, of.rank),
        *_token_count(of.case),
    ),
    excluded={
        "batch_divides_dp": (_BATCH_AXES, lambda case: case.train.global_batch % case.layout.batches),
        "accumulation_divides_batch": (
            (*_BATCH_AXES, "accumulation"),
            lambda case: case.train.global_batch % (case.layout.batches * case.train.accumulation),
        ),
    },
    alone=_alone,
    played=lambda case: {"ranks": case.layout.dp, "shards": case.layout.dp_shard},
)
