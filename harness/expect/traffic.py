"""The expected collectives of a case: arithmetic for the reference Llama under torch 2.13 and torchao 0.18.

Every term has a purpose, which findings quote. Compiled blocks send the same collectives except for reductions by max:
a compiler merges equal casts and recomputes cheap ones, so their number is known only within limits (`Transfer.least`).
The pipelined operators of async TP send reduce-scatters as all-to-all.

`tokens` are those of one rank; `residual_tokens` are the share of them that a TP rank holds between blocks.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

from harness.expect.compiled import fusion_candidates
from harness.expect.transfer import (
    Transfer,
    dispatched,
    forward_passes,
    fsdp_units,
    ranks_of_unit,
    repeated,
    residual_tokens,
    sent_back_if_balanced,
    tokens_of_experts,
)
from harness.expect.upstream import GRADIENTS_IN_REDUCE_DTYPE, NONE, STAGES_VOTE_TOGETHER, Changes
from harness.matrix.case import Case
from harness.matrix.layout import DP_AXES, EXPERT_AXES, SHARD_AXES, coordinates, group_name
from harness.matrix.linears import (
    EMBEDDING,
    OUTPUT_FQN,
    ROWWISE,
    block_linears,
    blocks_of,
    connections,
    expert_layers_of,
    holds,
    is_checkpointed,
    is_converted,
    linear_features,
    local_features,
    neighbors,
    shard_size,
)
from harness.matrix.recipes import ITEM_BYTES, Operand


@lru_cache(maxsize=256)  # checks ask for every rank and step
def expected_transfers(case: Case, *, step: int, rank: int, changes: Changes = NONE) -> tuple[Transfer, ...]:
    """Return all collectives of `rank` in `step` (1-based) but `votes`, with these upstream changes.

    Every later step equals step 2.
    """
    of_microbatch = (
        *_activations(case, rank),
        *_keys_and_values(case, rank),
        *_between_stages(case, rank),
        *_tensor_parallel_amax(case, rank),
        *dispatched(case, rank),
        *_loss(case, rank),
    )
    reduced = (*_reductions(case, rank), *_norm_gradients(case, rank, changes))
    terms = (
        *_gathers_of_weights(case, rank),
        *_weight_amax(case, rank, step),
        *repeated(of_microbatch, case.train.accumulation),
        *repeated(reduced, case.reductions if case.uses_fsdp else 1),
        *_whole_matrices(case, rank),
        *_precompute(case, rank),
        *tokens_of_experts(case, rank),
        *_gradients_of_ends(case, rank),
        *_global_norm(case, rank),
        *_token_count(case),
    )
    used = _axes_of_several_ranks(case)
    return tuple(term for term in terms if term.times and term.axis in used)


def transfers_if_balanced(case: Case, *, step: int, rank: int, changes: Changes = NONE) -> tuple[Transfer, ...]:
    """Return the same with `votes`, and what experts send back where tokens are spread evenly."""
    sent = expected_transfers(case, step=step, rank=rank, changes=changes)
    return (*sent, *votes(case, rank, step, changes), *sent_back_if_balanced(case, rank))


def _axes_of_several_ranks(case: Case) -> frozenset[str]:
    degrees = case.layout.expert_mesh | case.layout.sequence_mesh | case.layout.mesh
    of_experts = (group_name(case.layout, axis) for axis in EXPERT_AXES if degrees[axis] > 1)
    return frozenset((*(axis for axis, degree in degrees.items() if degree > 1), *of_experts))


# Data parallel: FSDP2 and HSDP


def _gathers_of_weights(case: Case, rank: int) -> Iterator[Transfer]:
    """Weights are gathered a unit at a time: as uint8 where its parameters have different dtypes.

    FSDP2 concatenates all parameters of a unit (`_get_all_gather_input_metadatas`). Norms are never float8, so a unit
    with float8 weights always has mixed dtypes.
    """
    for unit in fsdp_units(case, rank):
        ranks = ranks_of_unit(case, unit)
        narrow = sum(weight.shard_elements(ranks) for weight in unit.weights if weight.gathered_in_float8)
        wide = sum(weight.shard_elements(ranks) for weight in unit.weights if not weight.gathered_in_float8)
        dtype, elements = "uint8", narrow + wide * ITEM_BYTES[case.train.dtype]
        if not narrow:
            dtype, elements = case.train.dtype, wide
        yield Transfer(unit.axis, "all_gather", dtype, elements, f"weights of {unit.name}", times=unit.gathers)


def _reductions(case: Case, rank: int) -> Iterator[Transfer]:
    """Gradients are reduce-scattered a unit at a time; HSDP then sums the shards over replicas.

    Gradients are summed (`set_gradient_divide_factor(1)`) in the reduce dtype.
    """
    for unit in fsdp_units(case, rank):
        ranks = ranks_of_unit(case, unit)
        shard = sum(weight.shard_elements(ranks) for weight in unit.weights)
        for axis in ("dp_replicate", unit.axis):
            kind, count = ("all_reduce", shard) if axis == "dp_replicate" else ("reduce_scatter", shard * ranks)
            yield Transfer(axis, kind, case.reduce_dtype, count, f"gradients of {unit.name}", op="sum")


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


def converted_weight_shards(case: Case, rank: int) -> int:
    """Return the elements of converted weights that `rank` sends in all-gathers of one step."""
    return sum(
        unit.gathers * weight.shard_elements(case.layout.dp_shard)
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


# Tensor parallel: activations


def _activations(case: Case, rank: int) -> Iterator[Transfer]:
    """Yield activations between TP ranks in forward, once more where checkpointing recomputes, and their gradients.

    A block has two inputs (attention, feed-forward) and two outputs (wo, w2). With sequence parallelism an input is an
    all-gather in forward and a reduce-scatter in backward, an output the reverse. Without it an input is an all-reduce
    in backward only, an output an all-reduce in forward only. The embedding is one more output, the output layer one
    more input. All of that in forward is sent in evaluation too.
    """
    blocks, forwards, dtype = blocks_of(case, rank), forward_passes(case), case.train.dtype
    checkpointed = sum(map(case.checkpointing.wraps, blocks))
    inputs, outputs = (2 * len(blocks) + holds(case, rank, name) for name in (OUTPUT_FQN, EMBEDDING))
    gradients = partial(_sum_of_partials, case, inputs, "input gradients of blocks, output layer")
    if case.layout.sequence_parallel:
        yield from _gathers(case, rank, checkpointed)
        # w2 ends the block: recomputing may stop before its reduce-scatter. selective_op saves what that gives.
        again = 0 if case.checkpointing.mode == "selective_op" else checkpointed
        fused, elements = _all_to_alls(case), case.tokens_per_rank * case.model.shape.dim
        times = outputs * forwards + again - fused
        yield _sum_of_partials(case, times, "outputs of wo, w2, embedding", "reduce_scatter")
        purpose = "outputs of wo, w2, scattered by the fused operator"
        yield Transfer("tp", "all_to_all", dtype, elements, purpose, times=fused)
        yield gradients("reduce_scatter")
    else:
        times = outputs * forwards + checkpointed
        yield _sum_of_partials(case, times, "outputs of wo, w2, embedding", "all_reduce")
        yield gradients("all_reduce")
    if not case.layout.loss_parallel and holds(case, rank, OUTPUT_FQN):
        vocab = -(-case.model.padded_vocab_size // case.layout.tp)
        yield Transfer("tp", "all_gather", dtype, case.tokens_per_rank * vocab, "logits", times=forwards)


def _all_to_alls(case: Case) -> int:
    """Return the reduce-scatters that the pipelined operators of async TP send as all-to-all and sum afterwards."""
    if case.layout.symm_mem == "fallback":
        return 0
    return sum(candidate.fuses and candidate.collective == "reduce_scatter" for candidate in fusion_candidates(case))


def _between_stages(case: Case, rank: int) -> Iterator[Transfer]:
    """Yield every microbatch is sent from stage to stage, and its gradient back: this rank's part of the sequence."""
    elements, (behind, before) = residual_tokens(case) * case.model.shape.dim, neighbors(case, rank)
    times = behind * forward_passes(case)
    yield Transfer("pp", "send", case.train.dtype, elements, "outputs of stages", times=times)
    yield Transfer("pp", "send", case.train.dtype, elements, "input gradients of stages", times=before)


def _gradients_of_ends(case: Case, rank: int) -> Iterator[Transfer]:
    """Yield the first and the last stage send one another the gradient of their copy of tied weights."""
    if not case.model.tied or not (holds(case, rank, EMBEDDING) or holds(case, rank, OUTPUT_FQN)):
        return
    at = coordinates(case.layout, rank)
    rows = shard_size(case.model.padded_vocab_size, case.layout.tp, at["tp"])
    elements = shard_size(rows, case.layout.dp_shard, at["dp_shard"]) * case.model.shape.dim
    yield Transfer("pp", "send", case.parameter_dtype, elements, "gradients of tied ends")


def _keys_and_values(case: Case, rank: int) -> Iterator[Transfer]:
    """Context parallelism: every block gathers keys and values, and sums their gradients over the ranks that use them.

    Recomputation gathers them again: `selective_op` saves no all-gather.
    """
    if case.layout.cp == 1:
        return
    blocks, axis = blocks_of(case, rank), group_name(case.layout, "cp")
    elements = 2 * case.tokens_per_rank * local_features(case, "attention.wk")[1]
    forwards = len(blocks) * forward_passes(case) + sum(map(case.checkpointing.wraps, blocks))
    yield Transfer(axis, "all_gather", case.train.dtype, elements, "keys and values of attention", times=forwards)
    gathered = elements * case.layout.cp
    purpose = "gradients of keys and values"
    yield Transfer(axis, "reduce_scatter", case.train.dtype, gathered, purpose, op="sum", times=len(blocks))


def votes(case: Case, rank: int, step: int, changes: Changes = NONE) -> Iterator[Transfer]:
    """Stages that are new ask one another whether all know the shapes that are sent; again behind an evaluation."""
    is_new = step in (1, (case.train.resumed_after or 0) + 1)
    if case.layout.pp == 1 or not (is_new or case.train.evaluate):
        return
    if STAGES_VOTE_TOGETHER in changes:
        yield Transfer("pp", "all_reduce", "int32", 1, "votes of stages", op="min", times=forward_passes(case))
        sends, rounds = connections(case, rank)
        if is_new:
            yield Transfer("pp", "all_reduce", "int32", 1, "neighbors that connect", op="sum", times=rounds)
        if is_new and sends:
            yield Transfer("pp", "send", "int32", 1, "neighbors that connect", times=sends)
    else:
        times = sum(neighbors(case, rank)) * forward_passes(case)
        yield Transfer("pp", "send", "int32", 1, "votes of stages", times=times)


def _gathers(case: Case, rank: int, checkpointed: int) -> Iterator[Transfer]:
    """Sequence-parallel all-gathers. Float8 TP styles gather the inputs and output gradients of blocks in float8."""
    dtype, forwards = case.train.dtype, forward_passes(case)
    layers, embeds, heads = len(blocks_of(case, rank)), holds(case, rank, EMBEDDING), holds(case, rank, OUTPUT_FQN)
    narrow = ("float8_e4m3fn", "float8_e5m2") if case.float8.tp_styles == "float8" else (dtype, dtype)
    for purpose, sent_dtype, times in (
        ("inputs of blocks", narrow[0], 2 * (layers * forwards + checkpointed)),
        ("input of the output layer", dtype, forwards * heads),
        ("output gradients of wo, w2", narrow[1], 2 * layers),
        ("output gradient of the embedding", dtype, int(embeds)),
    ):
        elements = residual_tokens(case) * case.model.shape.dim
        yield Transfer("tp", "all_gather", sent_dtype, elements, purpose, times=times)


def _sum_of_partials(case: Case, times: int, purpose: str, kind: str) -> Transfer:
    elements = case.tokens_per_rank * case.model.shape.dim
    return Transfer("tp", kind, case.train.dtype, elements, purpose, op="sum", times=times)


# Tensor parallel: scales


def _tensor_parallel_amax(case: Case, rank: int) -> Iterator[Transfer]:
    """Yield the cast of a DTensor reduces its amax over TP where the scaled dim is sharded.

    torchao computes the amax in the dtype of the tensor and casts it to float64 before `clamp` makes DTensor reduce it.
    """
    for layer in blocks_of(case, rank):
        for name in block_linears(case.model, layer):
            fqn = f"layers.{layer}.{name}"
            if is_converted(case, fqn):
                forwards = forward_passes(case) + is_checkpointed(case, fqn)
                yield from _amax_of_linear(case, fqn, name, forwards)
        if case.float8.tp_styles == "float8" and case.layout.sequence_parallel:
            # PrepareFloat8ModuleInput casts the sharded input before it gathers it, for attention and feed-forward
            times = 2 * (forward_passes(case) + case.checkpointing.wraps(layer))
            yield _amax(1, times, f"inputs of layers.{layer}", least=2)
    if is_converted(case, OUTPUT_FQN) and holds(case, rank, OUTPUT_FQN):
        yield from _amax_of_linear(case, OUTPUT_FQN, OUTPUT_FQN, forwards=forward_passes(case))


def _amax_of_linear(case: Case, fqn: str, name: str, forwards: int) -> Iterator[Transfer]:
    """`forwards`: how often the forward casts are executed, evaluation and recomputation included.

    A scalar for every cast of a sharded tensor with one scale: all weights, inputs of wo and w2, output gradients of
    the others. A vector for every cast with a scale for each row whose contraction dim is sharded: forward of wo, w2,
    dgrad of all others; wgrad contracts over tokens, all of which are on every TP rank. Float8 TP styles cast input and
    grad_output of a block's linear once, outside it.
    """
    tokens, (inputs, outputs) = case.tokens_per_rank, linear_features(case, name)
    styled = case.float8.tp_styles == "float8" and name != OUTPUT_FQN
    gathered, rowwise = case.float8.fp8_all_gather, name in ROWWISE
    # Its tensor, whether that is sharded, amaxes where each row has a scale (0: not reduced), how often it is cast.
    sites: tuple[tuple[Operand, str, bool, int, int], ...] = (
        ("w", "weight", True, outputs * rowwise, forwards * (not gathered)),
        ("w_gi", "weight", True, inputs * (not rowwise), int(not gathered)),
        ("i", "input", rowwise, tokens * rowwise, forwards),
        ("i_gw", "input", rowwise, 0, int(not styled)),
        ("go", "grad_output", not rowwise, tokens * (not rowwise), 1),
        ("go_gw", "grad_output", not rowwise, 0, int(not styled)),
    )
    casts: Counter[tuple[str, int]] = Counter()  # by tensor and size of the amax
    for operand, tensor, sharded, rows, times in sites:
        casts[tensor, {"ten": int(sharded), "axs": rows, "blk": 0, "dis": 0}[case.float8.traits.scaling[operand]]] += (
            times
        )
    for (tensor, elements), times in casts.items():
        if elements and times:
            yield _amax(elements, times, f"{tensor} of {fqn}")
    if rowwise and styled and case.layout.sequence_parallel:
        yield _amax(1, 1, f"grad_output of {fqn}, before it is gathered")


def _amax(elements: int, times: int, operand: str, *, least: int = 1) -> Transfer:
    return Transfer("tp", "all_reduce", "float64", elements, f"amax of {operand}", op="max", times=times, least=least)


# Loss and partial gradients


def _loss(case: Case, rank: int) -> Iterator[Transfer]:
    """Loss parallel: log-softmax and loss over the sharded vocabulary reduce three numbers per token, no logits."""
    if case.layout.loss_parallel and holds(case, rank, OUTPUT_FQN):
        for op, times, purpose in (
            ("max", 1, "largest logit of every token"),
            ("sum", 2, "normalizer and loss of every token"),
        ):
            sums, tokens = times * forward_passes(case), case.tokens_per_rank
            yield Transfer("tp", "all_reduce", case.wide_dtype, tokens, purpose, op=op, times=sums)


def _token_count(case: Case) -> Iterator[Transfer]:
    """Yield the all-reduce of the label count if a case ignores some."""
    if case.train.ignored_tokens != "none":
        for axis in DP_AXES:
            yield Transfer(axis, "all_reduce", "int64", 1, "number of labels", op="sum", times=forward_passes(case))


def _norm_gradients(case: Case, rank: int, changes: Changes) -> Iterator[Transfer]:
    """Sequence parallelism: the gradients of norms and of routers are Partial over TP ranks.

    FSDP2 redistributes it in backward, in the dtype of the gradient: the reduce dtype where it keeps the sum of several
    microbatches (`FSDPParam.to_accumulated_grad_if_needed`). Without FSDP2 it stays Partial until the optimizer, where
    every operator that reads it reduces it. So does a norm of all gradients before.
    """
    reads = 1 if case.uses_fsdp else case.train.update.reads + (case.train.max_norm is not None)
    times = (2 * len(blocks_of(case, rank)) + holds(case, rank, OUTPUT_FQN)) * reads
    in_reduce_dtype = GRADIENTS_IN_REDUCE_DTYPE in changes or case.reductions < case.train.accumulation
    dtype = case.reduce_dtype if case.uses_fsdp and in_reduce_dtype else case.train.dtype
    if case.layout.sequence_parallel:
        dim = case.model.shape.dim
        yield Transfer("tp", "all_reduce", dtype, dim, "gradients of norms", op="sum", times=times)
        routers, size = len(expert_layers_of(case, rank)) * reads, case.model.experts * dim
        yield Transfer("tp", "all_reduce", dtype, size, "gradients of routers", op="sum", times=routers)


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
    experts = 3 * routers
    ends = embeds if case.model.tied else embeds + heads
    norms, others = 2 * len(blocks) + heads + routers, linears * (1 + case.model.bias) + ends
    send = partial(Transfer, kind="all_reduce", dtype=case.parameter_dtype, purpose="norms of gradients", op="sum")
    yield send("pp", elements=1)
    if case.layout.ep > 1:
        yield from _norm_beside_experts(case, send, norms + others, experts)
        return
    together = case.layout.tp == 1 or case.layout.sequence_parallel
    for axis in SHARD_AXES:
        apart = [norms, others + experts] if axis in DP_AXES else [others + experts]
        for count in [norms + others + experts] if together else apart:
            yield send(axis, elements=count)


def _norm_beside_experts(case: Case, send: Callable[..., Transfer], dense: int, experts: int) -> Iterator[Transfer]:
    """Experts are on a mesh of their own, over the same ranks. DTensor sums over two axes at once that a mesh joins.

    That is `dp_shard` for experts where TP is not used, and `ep` for the others where all ranks share the experts.
    """
    of_experts = [group_name(case.layout, axis) for axis in EXPERT_AXES]
    for axis in ["dp_shard"] if case.layout.tp == 1 else of_experts:
        yield send(axis, elements=experts)
    whole = case.layout.tp > 1 and case.layout.expert_mesh["efsdp"] == 1
    for axis in [group_name(case.layout, "ep")] if whole else SHARD_AXES:
        yield send(axis, elements=dense)
