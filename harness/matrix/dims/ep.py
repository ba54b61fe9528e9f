"""Expert parallelism: ranks hold the experts of a block between them, and send tokens to those that hold theirs.

One rank holds all experts, and computes the weight gradients of each for all data-parallel ranks that share it at once.
"""

from collections.abc import Iterable, Iterator

from harness.matrix.case import Case
from harness.matrix.dims.dimension import Dimension, Transfer
from harness.matrix.dims.pp import expert_layers_of
from harness.matrix.layout import DP_AXES, SHARD_AXES, group_name, ranks_of
from harness.trace.counts import ExpertCall

COUNTS = "numbers of tokens of experts"


def dispatched(case: Case, rank: int) -> Iterator[Transfer]:
    """What a rank sends to the ranks that hold the experts of its tokens: rows, how many, and gradients of results.

    What it sends back depends on how many came (`sent_back`).
    """
    model, layers = case.model, expert_layers_of(case, rank)
    again = sum(case.checkpointing.wraps(layer) for layer in layers)
    ep, calls = group_name(case.layout, "ep"), len(layers) * case.forward_passes + again
    rows = case.sent_rows * model.shape.dim
    yield Transfer(ep, "all_to_all", "int64", model.experts, COUNTS, times=calls)
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


def tokens_of_experts(case: Case, rank: int) -> Iterator[Transfer]:
    """Yield the tokens of every expert in this step, of all ranks of its stage, by which the choice is balanced."""
    for axis in (*DP_AXES, "tp"):
        times = len(expert_layers_of(case, rank))
        yield Transfer(axis, "all_reduce", "float32", case.model.experts, "tokens of experts", op="sum", times=times)


EP = Dimension(
    name="ep",
    of_microbatch=lambda of: dispatched(of.case, of.rank),
    of_step=lambda of: tokens_of_experts(of.case, of.rank),
    excluded={
        "ep_divides_ranks": (
            ("dp_shard", "tp", "ep", "experts"),
            lambda case: (
                case.model.experts
                and (case.layout.ep % case.layout.tp or ranks_of(case.layout.mesh, SHARD_AXES) % case.layout.ep)
            ),
        ),
        "ep_divides_experts": (("experts", "ep"), lambda case: case.model.experts % case.layout.ep),
    },
    alone=lambda case: {"ep": case.layout.dp_in_ep},
    played=lambda case: {"sharing_experts": case.layout.dp_in_ep},
)
