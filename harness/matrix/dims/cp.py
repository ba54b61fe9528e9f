"""Context parallelism: ranks share the positions of every sequence, and gather keys and values for attention.

One rank gets the pieces of all ranks that share a sequence. Its modules with weights compute one after the other.
"""

from collections.abc import Iterator

from harness.matrix.case import Case
from harness.matrix.dims.dimension import Dimension, Transfer
from harness.matrix.dims.pp import blocks_of
from harness.matrix.layout import group_name, pieces_of_rank, positions_of_ranks
from harness.matrix.linears import local_features


def _keys_and_values(case: Case, rank: int) -> Iterator[Transfer]:
    """Context parallelism: every block gathers keys and values, and sums their gradients over the ranks that use them.

    Recomputation gathers them again: `selective_op` saves no all-gather.
    """
    if case.layout.cp == 1:
        return
    blocks, axis = blocks_of(case, rank), group_name(case.layout, "cp")
    elements = 2 * case.tokens_per_rank * local_features(case, "attention.wk")[1]
    forwards = len(blocks) * case.forward_passes + sum(map(case.checkpointing.wraps, blocks))
    yield Transfer(axis, "all_gather", case.train.dtype, elements, "keys and values of attention", times=forwards)
    gathered = elements * case.layout.cp
    purpose = "gradients of keys and values"
    yield Transfer(axis, "reduce_scatter", case.train.dtype, gathered, purpose, op="sum", times=len(blocks))


def _of_other_positions(case: Case) -> dict[str, int]:
    """Return keys and values of the other ranks, and the causal mask of attention.

    A block indexes the RoPE cache by the positions of the rank: its own copy. In bfloat16 it has one anyway.
    """
    if case.layout.cp == 1:
        return {}
    mine, whole, key = case.local_seq_len, case.train.seq_len, local_features(case, "attention.wk")[1]
    own_cache = 0 if case.train.dtype == "bfloat16" else mine * case.model.shape.head_dim
    return {case.train.dtype: 2 * case.microbatch * (whole - mine) * key + mine * whole + own_cache}


CP = Dimension(
    name="cp",
    saved_by_block=_of_other_positions,
    of_microbatch=lambda of: _keys_and_values(of.case, of.rank),
    excluded={
        "cp_divides_shards": (("dp_shard", "cp"), lambda case: case.layout.dp_shard % case.layout.cp),
        "sequence_divides_cp": (
            ("seq_len", "cp", "sequence_order"),
            lambda case: case.layout.cp > 1 and case.train.seq_len % (case.layout.cp * pieces_of_rank(case.layout)),
        ),
    },
    played=lambda case: {"positions": positions_of_ranks(case.layout, case.train.seq_len)},
    alone=lambda case: {"cp": case.layout.cp, "sequence_order": case.layout.sequence_order},
)
