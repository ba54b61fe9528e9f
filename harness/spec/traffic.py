"""The collectives that a case must send: pure arithmetic of the reference Llama under torch 2.13 and torchao 0.18.

Every term says what it is for and why it is there, so that a difference can be explained in words. Compiled blocks
send the same but for maxima: a compiler merges equal casts and recomputes what is cheap to it, so of these only a lower
and an upper limit are known (`Transfer.least`). Async TP's pipelined scatters travel as all-to-all.

Words: a *unit* is what FSDP2 gathers at once: the embedding, every block, and the final norm with the output layer.
`tokens` are those of one rank; `residual` is the share of them that a TP rank holds between blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from harness.spec.case import Case, Value
from harness.spec.fusion import joints
from harness.spec.gemms import (
    BLOCK_LINEARS,
    OUTPUT_FQN,
    ROWWISE,
    is_checkpointed,
    is_converted,
    linear_features,
    shard_sizes,
)

ITEM_BYTES = {"float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8}
_AXES = ("dp_replicate", "dp_shard", "tp")  # outermost first


class Transfer(Value, frozen=True, kw_only=True):
    """`times` collectives of `elements` each, as one rank puts them in; `purpose` says what is sent and why."""

    axis: str
    kind: str
    op: str = ""
    dtype: str
    elements: int
    times: int = 1
    least: int | None = None  # a compiled run may send fewer than `times`, down to this, and up to twice as many
    purpose: str

    @property
    def payload_bytes(self) -> int:
        """Bytes that one rank puts into all of them."""
        return self.times * self.elements * ITEM_BYTES[self.dtype]


def expected_transfers(case: Case, *, step: int, rank: int) -> tuple[Transfer, ...]:
    """Everything that `rank` must send in `step` (1-based). All later steps equal step 2."""
    terms = (
        *_fsdp(case, rank),
        *_weight_amax(case, step),
        *_precompute(case),
        *_activations(case),
        *_tensor_parallel_amax(case),
        *_loss(case),
        *_norm_gradients(case),
    )
    return tuple(term for term in terms if term.times and axis_size(case, term.axis) > 1)


def axis_size(case: Case, axis: str) -> int:
    """Ranks along one axis of the mesh."""
    size: int = getattr(case.layout, axis)
    return size


def axis_of_group(case: Case, rank: int, ranks: tuple[int, ...]) -> str:
    """The name of the axis, or "+"-joined axes, along which `ranks` are the peers of `rank`.

    "world" for all ranks of a mesh of several axes, "self" for a group of one, "ranks 0,3" for what is no axis at all.
    """
    axes = [axis for axis in _AXES if axis_size(case, axis) > 1]
    if len(ranks) == 1:
        return "self"
    for count in range(1, len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            if ranks == _peers(case, rank, chosen):
                return "world" if 1 < count == len(axes) else "+".join(chosen)
    return f"ranks {','.join(map(str, ranks))}"


def _peers(case: Case, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    """The ranks that differ from `rank` along `axes` only."""
    mine = _coordinate(case, rank)
    return tuple(
        other
        for other in range(case.world_size)
        if all(at == mine[axis] or axis in axes for axis, at in _coordinate(case, other).items())
    )


def _coordinate(case: Case, rank: int) -> dict[str, int]:
    place = {}
    for axis in reversed(_AXES):  # the last axis varies fastest
        rank, place[axis] = divmod(rank, axis_size(case, axis))
    return place


# Data parallel: FSDP2 and HSDP


class Weight(Value, frozen=True, kw_only=True):
    """One parameter as a TP rank holds it: `rows` are what FSDP2 splits, `gathered_in_float8`: cast before."""

    fqn: str
    rows: int
    columns: int = 1
    gathered_in_float8: bool = False


class Unit(Value, frozen=True, kw_only=True):
    """What FSDP2 gathers and reduces at once."""

    name: str
    weights: tuple[Weight, ...]
    gathers: int  # forward, and once more in backward where the weights were freed after forward


def fsdp_units(case: Case, rank: int) -> tuple[Unit, ...]:
    """The units in the order of the forward pass."""
    shape = case.model.shape
    vocab = shard_sizes(case.model.padded_vocab_size, case.layout.tp)[rank % case.layout.tp]
    blocks = [
        Unit(name=f"layers.{layer}", weights=tuple(_block_weights(case, layer)), gathers=2)
        for layer in range(shape.layers)
    ]
    output = Weight(fqn=OUTPUT_FQN, rows=vocab, columns=shape.dim, gathered_in_float8=_cast_by_fsdp(case, OUTPUT_FQN))
    embedding = Weight(fqn="tok_embeddings", rows=vocab, columns=shape.dim)
    return (
        Unit(name="tok_embeddings", weights=(embedding,), gathers=2),
        *blocks,
        # reshard_after_forward=False: backward starts with this unit, so its weights stay
        Unit(name="norm, output", weights=(Weight(fqn="norm", rows=shape.dim), output), gathers=1),
    )


def _block_weights(case: Case, layer: int) -> Iterator[Weight]:
    for norm in ("attention_norm", "ffn_norm"):
        yield Weight(fqn=f"layers.{layer}.{norm}", rows=case.model.shape.dim)
    for name in BLOCK_LINEARS:
        inputs, outputs = local_features(case, name)
        fqn = f"layers.{layer}.{name}"
        yield Weight(fqn=fqn, rows=outputs, columns=inputs, gathered_in_float8=_cast_by_fsdp(case, fqn))


def local_features(case: Case, name: str) -> tuple[int, int]:
    """Input and output features of a block's linear, or of the output layer, as the first TP rank holds them."""
    inputs, outputs = linear_features(case, name)
    tp = case.layout.tp
    return (-(-inputs // tp), outputs) if name in ROWWISE else (inputs, -(-outputs // tp))


def _cast_by_fsdp(case: Case, fqn: str) -> bool:
    return case.float8.fp8_all_gather and is_converted(case, fqn)


def _fsdp(case: Case, rank: int) -> Iterator[Transfer]:
    """Weights are gathered and gradients reduce-scattered, a unit at a time; HSDP then sums the shards over replicas.

    Every parameter is split into rows as torch.chunk does it, and padded to the largest shard. Gradients travel in the
    reduce dtype, which is that of the masters, summed: `set_gradient_divide_factor(1)`.
    """
    ranks = case.layout.dp_shard
    for unit in fsdp_units(case, rank):
        shard = sum(-(-weight.rows // ranks) * weight.columns for weight in unit.weights)
        dtype, elements = _gathered(case, unit)
        yield Transfer(
            axis="dp_shard",
            kind="all_gather",
            dtype=dtype,
            elements=elements,
            times=unit.gathers,
            purpose=f"weights of {unit.name}",
        )
        for axis, kind, count in (("dp_shard", "reduce_scatter", shard * ranks), ("dp_replicate", "all_reduce", shard)):
            yield Transfer(
                axis=axis,
                kind=kind,
                op="sum",
                dtype=wide_dtype(case),
                elements=count,
                purpose=f"gradients of {unit.name}",
            )


def _gathered(case: Case, unit: Unit) -> tuple[str, int]:
    """Dtype and elements of a unit's all-gather input: bytes as soon as its parameters have different dtypes.

    FSDP2 concatenates all parameters of a unit (`_get_all_gather_input_metadatas`); norms are never float8, so that a
    unit with float8 weights is always mixed.
    """
    ranks, wide, narrow = case.layout.dp_shard, 0, 0
    for weight in unit.weights:
        elements = -(-weight.rows // ranks) * weight.columns
        narrow += elements if weight.gathered_in_float8 else 0
        wide += 0 if weight.gathered_in_float8 else elements
    if not narrow:
        return case.train.dtype, wide
    return "uint8", narrow + wide * ITEM_BYTES[case.train.dtype]


def converted_weight_shards(case: Case, rank: int) -> int:
    """Elements of converted weights that `rank` puts into all-gathers of one step."""
    ranks = case.layout.dp_shard
    return sum(
        unit.gathers * -(-weight.rows // ranks) * weight.columns
        for unit in fsdp_units(case, rank)
        for weight in unit.weights
        if weight.gathered_in_float8
    )


def _weight_amax(case: Case, step: int) -> Iterator[Transfer]:
    """float8 all-gather: every cast before a gather needs the amax of all shards, unless scales were precomputed.

    They are precomputed after an update, so step 1 has none yet. The group is that of the gather alone: under TP,
    torchao scales every TP rank's part of a weight by itself until the first precompute.
    """
    if case.float8.precompute_scale and step > 1:
        return
    for unit in fsdp_units(case, 0):
        yield Transfer(
            axis="dp_shard",
            kind="all_reduce",
            op="max",
            dtype=wide_dtype(case),
            elements=1,
            times=unit.gathers * sum(weight.gathered_in_float8 for weight in unit.weights),
            purpose=f"amax of the float8 weights of {unit.name}",
        )


def _precompute(case: Case) -> Iterator[Transfer]:
    """`precompute_float8_dynamic_scale_for_fsdp`: one vector of all amax, along every axis that splits a weight."""
    if case.float8.precompute_scale:
        weights = sum(weight.gathered_in_float8 for unit in fsdp_units(case, 0) for weight in unit.weights)
        for axis in ("dp_shard", "tp"):
            yield Transfer(
                axis=axis,
                kind="all_reduce",
                op="max",
                dtype=wide_dtype(case),
                elements=weights,
                purpose="precomputed amax of all float8 weights",
            )


# Tensor parallel: activations


def _activations(case: Case) -> Iterator[Transfer]:
    """Activations between TP ranks: in forward, once more where checkpointing recomputes, and their gradients.

    A block has two pairs: into attention and into feed-forward, out of wo and out of w2. With sequence parallelism the
    way in is an all-gather whose backward is a reduce-scatter, the way out the reverse. Without it the way in costs
    nothing forward and an all-reduce backward, the way out an all-reduce forward and nothing backward. The embedding is
    one more way out, the output layer one more way in.
    """
    layers = case.model.shape.layers
    checkpointed = sum(is_checkpointed(case, layer) for layer in range(layers))
    dtype = case.train.dtype
    if case.layout.sequence_parallel:
        yield from _gathers(case, layers, checkpointed)
        # w2 ends the block: recomputing stops before its reduce-scatter. selective_op keeps results of reduce-scatters.
        again = 0 if case.checkpointing.mode == "selective_op" else checkpointed
        fused = _all_to_alls(case)
        times = 2 * layers + 1 + again - fused
        yield _sum_of_partials(case, "reduce_scatter", times, dtype, "outputs of wo, w2, embedding")
        yield Transfer(
            axis="tp",
            kind="all_to_all",
            dtype=dtype,
            elements=case.tokens_per_rank * case.model.shape.dim,
            times=fused,
            purpose="outputs of wo, w2, scattered by the fused operator",
        )
        yield _sum_of_partials(case, "reduce_scatter", 2 * layers + 1, dtype, "input gradients of blocks, output layer")
    else:
        yield _sum_of_partials(case, "all_reduce", 2 * layers + 1 + checkpointed, dtype, "outputs of wo, w2, embedding")
        yield _sum_of_partials(case, "all_reduce", 2 * layers + 1, dtype, "input gradients of blocks, output layer")
    if not case.layout.loss_parallel:
        vocab = -(-case.model.padded_vocab_size // case.layout.tp)
        yield Transfer(
            axis="tp", kind="all_gather", dtype=dtype, elements=case.tokens_per_rank * vocab, purpose="logits"
        )


def _all_to_alls(case: Case) -> int:
    """Reduce-scatters that the pipelined operators of async TP send as the pieces they sum up."""
    if case.layout.symm_mem == "fallback":
        return 0
    return sum(joint.fuses and joint.collective == "reduce_scatter" for joint in joints(case))


def _gathers(case: Case, layers: int, checkpointed: int) -> Iterator[Transfer]:
    """Sequence-parallel all-gathers. Float8 styles gather in float8 what enters and leaves a block's linears."""
    styled = case.float8.tp_styles == "float8"
    dtype = case.train.dtype
    for purpose, block_dtype, times, outside in (
        ("inputs of blocks", "float8_e4m3fn", 2 * (layers + checkpointed), "input of the output layer"),
        ("output gradients of wo, w2", "float8_e5m2", 2 * layers, "output gradient of the embedding"),
    ):
        for what, travels, count in ((purpose, block_dtype if styled else dtype, times), (outside, dtype, 1)):
            yield Transfer(
                axis="tp",
                kind="all_gather",
                dtype=travels,
                elements=residual_tokens(case) * case.model.shape.dim,
                times=count,
                purpose=what,
            )


def _sum_of_partials(case: Case, kind: str, times: int, dtype: str, purpose: str) -> Transfer:
    elements = case.tokens_per_rank * case.model.shape.dim
    return Transfer(axis="tp", kind=kind, op="sum", dtype=dtype, elements=elements, times=times, purpose=purpose)


def residual_tokens(case: Case) -> int:
    """Tokens that a rank holds between blocks."""
    shares = case.layout.tp if case.layout.sequence_parallel else 1
    return case.local_batch * -(-case.train.seq_len // shares)


# Tensor parallel: scales


def _tensor_parallel_amax(case: Case) -> Iterator[Transfer]:
    """A cast of a DTensor reduces its amax over TP where the reduced dim is sharded.

    torchao computes the amax in the dtype of the tensor and casts it to float64 before `clamp` makes DTensor reduce it.
    """
    for layer in range(case.model.shape.layers):
        for name in BLOCK_LINEARS:
            fqn = f"layers.{layer}.{name}"
            if is_converted(case, fqn):
                forwards = 1 + is_checkpointed(case, layer)
                yield from _amax_of_linear(case, fqn, name, forwards)
        if case.float8.tp_styles == "float8" and case.layout.sequence_parallel:
            # PrepareFloat8ModuleInput casts the sharded input before it gathers it, for attention and feed-forward
            times = 2 * (1 + is_checkpointed(case, layer))
            yield _amax(1, times, f"inputs of layers.{layer}", least=2)
    if is_converted(case, OUTPUT_FQN):
        yield from _amax_of_linear(case, OUTPUT_FQN, OUTPUT_FQN, forwards=1)


def _amax_of_linear(case: Case, fqn: str, name: str, forwards: int) -> Iterator[Transfer]:
    """`forwards`: how often the forward casts happen, recomputing included (the last one of a block is w2's)."""
    if case.float8.recipe == "tensorwise":
        yield from _tensorwise_amax(case, fqn, name, forwards)
    else:
        yield from _axiswise_amax(case, fqn, name, forwards)


def _tensorwise_amax(case: Case, fqn: str, name: str, forwards: int) -> Iterator[Transfer]:
    """One scalar per cast of a sharded tensor.

    torchao 0.18 keeps the high-precision operands and casts them again in backward: the weight for dgrad, the input
    for wgrad, grad_output for both. Float8 styles cast input and grad_output of a block's linear once, outside of it.
    """
    styled = case.float8.tp_styles == "float8" and name != OUTPUT_FQN
    if not case.float8.fp8_all_gather:
        yield _amax(1, forwards + 1, f"weight of {fqn}")
    if name in ROWWISE:  # the input is sharded, grad_output is whole by the time the linear casts it
        yield _amax(1, forwards + (0 if styled else 1), f"input of {fqn}")
        if styled and case.layout.sequence_parallel:
            yield _amax(1, 1, f"grad_output of {fqn}, before it is gathered")
    else:
        yield _amax(1, 1 if styled else 2, f"grad_output of {fqn}")


def _axiswise_amax(case: Case, fqn: str, name: str, forwards: int) -> Iterator[Transfer]:
    """One vector per cast whose contraction dim is sharded: forward of wo and w2, dgrad of all others.

    wgrad contracts over tokens, which every TP rank has all of. `rowwise_with_gw_hp` scales the weight tensorwise in
    dgrad, which is a scalar for every linear, because every weight is sharded.
    """
    tokens = case.tokens_per_rank
    inputs, outputs = linear_features(case, name)
    weight_in_dgrad = inputs if case.float8.recipe == "rowwise" else 1
    if name in ROWWISE:
        yield _amax(tokens, forwards, f"input of {fqn}")
        yield _amax(outputs, forwards, f"weight of {fqn}")
    else:
        yield _amax(tokens, 1, f"grad_output of {fqn}")
    if name not in ROWWISE or weight_in_dgrad == 1:
        yield _amax(weight_in_dgrad, 1, f"weight of {fqn} in dgrad")


def _amax(elements: int, times: int, operand: str, *, least: int = 1) -> Transfer:
    return Transfer(
        axis="tp",
        kind="all_reduce",
        op="max",
        dtype="float64",
        elements=elements,
        times=times,
        least=least,
        purpose=f"amax of {operand}",
    )


# Loss and gradients that are partial


def _loss(case: Case) -> Iterator[Transfer]:
    """Loss parallel: log-softmax and loss over a sharded vocabulary reduce three numbers per token, never logits."""
    if case.layout.loss_parallel:
        for op, times, purpose in (
            ("max", 1, "largest logit of every token"),
            ("sum", 2, "normalizer and loss of every token"),
        ):
            yield Transfer(
                axis="tp",
                kind="all_reduce",
                op=op,
                dtype=wide_dtype(case),
                elements=case.tokens_per_rank,
                times=times,
                purpose=purpose,
            )


def _norm_gradients(case: Case) -> Iterator[Transfer]:
    """Sequence parallelism: a norm's gradient is a partial sum over TP ranks.

    FSDP2 redistributes it in backward, in the dtype of the gradient. Without FSDP2 it stays partial until AdamW, which
    reduces it in each of the three operators that read it: the first moment once, the second moment twice.
    """
    if case.layout.sequence_parallel:
        fsdp = case.layout.dp > 1 or case.train.dtype == "bfloat16"
        yield Transfer(
            axis="tp",
            kind="all_reduce",
            op="sum",
            dtype=case.train.dtype,
            elements=case.model.shape.dim,
            times=(2 * case.model.shape.layers + 1) * (1 if fsdp else 3),
            purpose="gradients of norms",
        )


def wide_dtype(case: Case) -> str:
    """Dtype of masters, of gradients on the wire, of the loss and inside of norms: at least float32."""
    return "float32" if case.train.dtype == "bfloat16" else case.train.dtype
