"""Tensor parallelism: ranks share every matmul, between blocks the sequence, and at the end the logits.

Async TP fuses the collectives between the blocks' matmuls that torch 2.13's pass can fuse. A block gathers its input
for attention and for feed-forward and reduce-scatters the outputs of `wo` and `w2`; backward gathers the gradients of
these two outputs and reduce-scatters the sums of input gradients. Verified with torch 2.13 for every recipe,
checkpointing mode and local batch, TP 2 to 8.

One rank multiplies whole matrices: with DTensor every scale is that of the logical tensor. Only where the modules of a
run are replayed it multiplies in the parts of ranks, and adds them up in their order (`worker/one_rank/module_ranks`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from harness.matrix import linears
from harness.matrix.case import Case
from harness.matrix.dims.dimension import MODEL_AXES, VOCABULARY_AXES, Dimension, Transfer
from harness.matrix.dims.pp import blocks_of, expert_layers_of, holds
from harness.matrix.recipes import ROW, TENSOR, Block, Operand
from harness.matrix.upstream import GRADIENTS_IN_REDUCE_DTYPE, Changes
from harness.trace.graphs import Collective, Phase


def _activations(case: Case, rank: int) -> Iterator[Transfer]:
    """Yield activations between TP ranks in forward, once more where checkpointing recomputes, and their gradients.

    A block has two inputs (attention, feed-forward) and two outputs (wo, w2). With sequence parallelism an input is an
    all-gather in forward and a reduce-scatter in backward, an output the reverse. Without it an input is an all-reduce
    in backward only, an output an all-reduce in forward only. The embedding is one more output, the output layer one
    more input. All of that in forward is sent in evaluation too.
    """
    blocks, forwards, dtype = blocks_of(case, rank), case.forward_passes, case.train.dtype
    checkpointed = sum(map(case.checkpointing.wraps, blocks))
    inputs, outputs = (2 * len(blocks) + holds(case, rank, name) for name in (linears.OUTPUT_FQN, linears.EMBEDDING))
    kind = "reduce_scatter" if case.layout.sequence_parallel else "all_reduce"
    yield _sum_of_partials(case, inputs, "input gradients of blocks, output layer", kind)
    if case.layout.sequence_parallel:
        yield from _gathers(case, rank, checkpointed)
        # w2 ends the block: recomputing may stop before its reduce-scatter. selective_op saves what that gives.
        again = 0 if case.checkpointing.mode == "selective_op" else checkpointed
        fused, elements = _all_to_alls(case), case.tokens_per_rank * case.model.shape.dim
        times = outputs * forwards + again - fused
        purpose = "outputs of wo, w2, scattered by the fused operator"
        yield Transfer("tp", "all_to_all", dtype, elements, purpose, times=fused)
    else:
        times = outputs * forwards + checkpointed
    yield _sum_of_partials(case, times, "outputs of wo, w2, embedding", kind)
    if not case.layout.loss_parallel and holds(case, rank, linears.OUTPUT_FQN):
        vocab = -(-case.model.padded_vocab_size // case.layout.tp)
        yield Transfer("tp", "all_gather", dtype, case.tokens_per_rank * vocab, "logits", times=forwards)


def _all_to_alls(case: Case) -> int:
    """Return the reduce-scatters that the pipelined operators of async TP send as all-to-all and sum afterwards."""
    if case.layout.symm_mem == "fallback":
        return 0
    return sum(candidate.fuses and candidate.collective == "reduce_scatter" for candidate in fusion_candidates(case))


def _gathers(case: Case, rank: int, checkpointed: int) -> Iterator[Transfer]:
    """Sequence-parallel all-gathers. Float8 TP styles gather the inputs and output gradients of blocks in float8."""
    dtype, forwards = case.train.dtype, case.forward_passes
    layers, embeds, heads = (
        len(blocks_of(case, rank)),
        holds(case, rank, linears.EMBEDDING),
        holds(case, rank, linears.OUTPUT_FQN),
    )
    narrow = ("float8_e4m3fn", "float8_e5m2") if case.float8.tp_styles == "float8" else (dtype, dtype)
    for purpose, sent_dtype, times in (
        ("inputs of blocks", narrow[0], 2 * (layers * forwards + checkpointed)),
        ("input of the output layer", dtype, forwards * heads),
        ("output gradients of wo, w2", narrow[1], 2 * layers),
        ("output gradient of the embedding", dtype, int(embeds)),
    ):
        elements = case.residual_tokens * case.model.shape.dim
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
        for name in linears.block_linears(case.model, layer):
            fqn = f"layers.{layer}.{name}"
            if linears.is_converted(case, fqn):
                forwards = case.forward_passes + linears.is_checkpointed(case, fqn)
                yield from _amax_of_linear(case, fqn, name, forwards)
        if case.float8.tp_styles == "float8" and case.layout.sequence_parallel:
            # PrepareFloat8ModuleInput casts the sharded input before it gathers it, for attention and feed-forward
            times = 2 * (case.forward_passes + case.checkpointing.wraps(layer))
            yield _amax(1, times, f"inputs of layers.{layer}", least=2)
    if linears.is_converted(case, linears.OUTPUT_FQN) and holds(case, rank, linears.OUTPUT_FQN):
        yield from _amax_of_linear(case, linears.OUTPUT_FQN, linears.OUTPUT_FQN, forwards=case.forward_passes)


def _amax_of_linear(case: Case, fqn: str, name: str, forwards: int) -> Iterator[Transfer]:
    """`forwards`: how often the forward casts are executed, evaluation and recomputation included.

    A scalar for every cast of a sharded tensor with one scale: all weights, inputs of wo and w2, output gradients of
    the others. A vector for every cast with a scale for each row whose contraction dim is sharded: forward of wo, w2,
    dgrad of all others; wgrad contracts over tokens, all of which are on every TP rank. Float8 TP styles cast input and
    grad_output of a block's linear once, outside it.
    """
    tokens, (inputs, outputs) = case.tokens_per_rank, linears.linear_features(case, name)
    styled = case.float8.tp_styles == "float8" and name != linears.OUTPUT_FQN
    gathered, rowwise = case.float8.fp8_all_gather, name in linears.ROWWISE
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
        elements: dict[Block | None, int] = {TENSOR: int(sharded), ROW: rows}
        casts[tensor, elements.get(case.float8.traits.block_of(operand), 0)] += times
    for (tensor, size), times in casts.items():
        if size and times:
            yield _amax(size, times, f"{tensor} of {fqn}")
    if rowwise and styled and case.layout.sequence_parallel:
        yield _amax(1, 1, f"grad_output of {fqn}, before it is gathered")


def _amax(elements: int, times: int, operand: str, *, least: int = 1) -> Transfer:
    return Transfer("tp", "all_reduce", "float64", elements, f"amax of {operand}", op="max", times=times, least=least)


def _loss(case: Case, rank: int) -> Iterator[Transfer]:
    """Loss parallel: log-softmax and loss over the sharded vocabulary reduce three numbers per token, no logits."""
    if case.layout.loss_parallel and holds(case, rank, linears.OUTPUT_FQN):
        for op, times, purpose in (
            ("max", 1, "largest logit of every token"),
            ("sum", 2, "normalizer and loss of every token"),
        ):
            sums, tokens = times * case.forward_passes, case.tokens_per_rank
            yield Transfer("tp", "all_reduce", case.wide_dtype, tokens, purpose, op=op, times=sums)


def _norm_gradients(case: Case, rank: int, changes: Changes) -> Iterator[Transfer]:
    """Sequence parallelism: the gradients of norms and of routers are Partial over TP ranks.

    FSDP2 redistributes it in backward, in the dtype of the gradient: the reduce dtype where it keeps the sum of several
    microbatches (`FSDPParam.to_accumulated_grad_if_needed`). Without FSDP2 it stays Partial until the optimizer, where
    every operator that reads it reduces it. So does a norm of all gradients before.
    """
    reads = 1 if case.uses_fsdp else case.train.update.reads + (case.train.max_norm is not None)
    times = (2 * len(blocks_of(case, rank)) + holds(case, rank, linears.OUTPUT_FQN)) * reads
    in_reduce_dtype = GRADIENTS_IN_REDUCE_DTYPE in changes or case.reductions < case.train.accumulation
    dtype = case.reduce_dtype if case.uses_fsdp and in_reduce_dtype else case.train.dtype
    if case.layout.sequence_parallel:
        dim = case.model.shape.dim
        yield Transfer("tp", "all_reduce", dtype, dim, "gradients of norms", op="sum", times=times)
        routers, size = len(expert_layers_of(case, rank)) * reads, case.model.experts * dim
        yield Transfer("tp", "all_reduce", dtype, size, "gradients of routers", op="sum", times=routers)


# The linears that read the input of attention and of feed-forward, and those that write their outputs.
_READ_INPUT = (("attention.wq", "attention.wk", "attention.wv"), ("feed_forward.w1", "feed_forward.w3"))
_WRITE_OUTPUT = ("attention.wo", "feed_forward.w2")


class FusionCandidate(NamedTuple):
    """A collective next to `matmuls` matmuls of one block. `fuses`: torch's pass fuses them into one operator."""

    phase: Phase
    collective: Collective
    purpose: str
    matmuls: int
    scaled: bool
    fuses: bool


def fusion_candidates(case: Case) -> tuple[FusionCandidate, ...]:
    """Return every collective of one step that async TP could fuse, block by block; none without async TP."""
    if not case.layout.async_tp:
        return ()
    return tuple(candidate for layer in range(case.model.shape.layers) for candidate in _block(case, layer))


def extra_matmul_calls(case: Case, *, scaled: bool) -> int:
    """Additional matmuls of one rank, `scaled` or not: pipelined operators split each fused one into TP chunks."""
    if case.layout.symm_mem == "fallback":
        return 0
    split = (candidate for candidate in fusion_candidates(case) if candidate.fuses and candidate.scaled == scaled)
    return sum(candidate.matmuls for candidate in split) * (case.layout.tp - 1)


def _block(case: Case, layer: int) -> Iterator[FusionCandidate]:
    scaled = {name: linears.is_converted(case, f"layers.{layer}.{name}") for name in linears.BLOCK_LINEARS}
    recomputed, bias = case.checkpointing.wraps(layer), case.model.bias

    def candidate(
        phase: Phase, collective: Collective, purpose: str, names: Sequence[str], fuses: bool
    ) -> FusionCandidate:
        return FusionCandidate(phase, collective, purpose, len(names), all(scaled[name] for name in names), fuses)

    for names in _READ_INPUT:
        wide = [name for name in names if not scaled[name]]  # they read what is gathered, and the others a cast of it
        fuses, readers = _gather_fuses(case, not wide, bias=bias), wide or names
        yield candidate("forward", "all_gather", f"input of {_names(names)}", readers, fuses)
        if recomputed:
            again = [name for name in readers if linears.is_recomputed(case, layer, name)] or readers
            yield candidate("backward", "all_gather", f"recomputed input of {_names(names)}", again, fuses)
    for name in _WRITE_OUTPUT:
        fuses = _gather_fuses(case, scaled[name], bias=False)
        yield candidate("forward", "reduce_scatter", f"output of {name}", (name,), _scatter_fuses(case, scaled[name]))
        yield candidate("backward", "all_gather", f"output gradient of {name}", (name,), fuses)
    if recomputed and case.checkpointing.mode != "selective_op":  # selective_op saves the scattered output
        name = "attention.wo"
        purpose, fuses = f"recomputed output of {name}", _scatter_fuses(case, scaled[name])
        yield candidate("backward", "reduce_scatter", purpose, (name,), fuses)
    for names in _READ_INPUT:  # the sum of several matmuls cannot be fused with one of them
        yield candidate("backward", "reduce_scatter", f"input gradient of {_names(names)}", names, fuses=False)


def _gather_fuses(case: Case, scaled: bool, *, bias: bool) -> bool:
    """Return where the matmuls read the gathered tensor itself: in high precision, or in float8 cast before the gather.

    In high precision a matmul with a `bias` is `aten.addmm`, which the pass does not know. With one sequence per rank
    the gathered tensor is assembled in a way that the pass does not recognize.
    """
    reads_gathered = case.float8.tp_styles == "float8" if scaled else not bias
    return reads_gathered and case.local_batch > 1


def _scatter_fuses(case: Case, scaled: bool) -> bool:
    """Unless something follows the matmul: a bias, or a cast where axiswise scaling writes bfloat16 for float32.

    In float64, which no GPU has, the virtual device writes what the activations are.
    """
    cast = scaled and case.float8.traits.writes_bfloat16 and case.train.dtype == "float32"
    return not cast and not case.model.bias


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(name.rsplit(".", 1)[-1] for name in names)


TP = Dimension(
    name="tp",
    of_microbatch=lambda of: (
        *_activations(of.case, of.rank),
        *_tensor_parallel_amax(of.case, of.rank),
        *_loss(of.case, of.rank),
    ),
    of_reduction=lambda of: _norm_gradients(of.case, of.rank, of.changes),
    played=lambda case: {"products": case.layout.tp},
    excluded={
        "heads_divide_tp": (
            (*MODEL_AXES, "tp"),
            lambda case: case.model.shape.heads % case.layout.tp or case.model.shape.kv_heads % case.layout.tp,
        ),
        "ffn_divides_tp": ((*MODEL_AXES, "tp"), lambda case: case.model.shape.ffn_dim % case.layout.tp),
        "vocab_fills_tp": (
            ("target", *VOCABULARY_AXES, "tp"),
            lambda case: 0 in linears.shard_sizes(case.model.padded_vocab_size, case.layout.tp),
        ),
        "sequence_divides_tp": (
            ("target", "seq_len", "cp", "tp", "sequence_parallel"),
            lambda case: case.local_seq_len % case.layout.shares_of_sequence,
        ),
    },
)
