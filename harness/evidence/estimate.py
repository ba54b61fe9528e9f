"""The estimate: what a case will need of a CPU, before it starts. What was measured is `costs.py`'s.

Costs were fitted to the tiny model. What a larger one adds is a rough estimate: its blocks cost what those of the tiny
one cost, and its matmuls take the time that the virtual device needs for them.
"""

from __future__ import annotations

import msgspec

from harness.evidence.costs import Costs
from harness.expect.saved_memory import expected_saved
from harness.matrix.case import Case, Checkpointing, Layout, Model
from harness.matrix.layout import SHARD_AXES, ranks_of
from harness.matrix.linears import FLOPS_PER_PARAMETER_AND_TOKEN, gemms, parameter_count
from harness.matrix.numerics import replayed_steps
from harness.matrix.recipes import ITEM_BYTES
from harness.matrix.rules import expected_refusal

FLOPS_PER_CPU_S = 6e9  # of the virtual device, which multiplies in float64: measured with models of 15 to 30 million
RANK_BYTES = 250e6  # of a process of its own: what torch and a warmed-up rank keep besides tensors
# What a replay needs is a gradient and an update of every parameter in float32, of every step; copies of it are in the
# process that reads or writes it, and over all processes (measured with 30 million parameters, 2 steps).
_RECORDED_BYTES, _COPIES_IN_PROCESS, _COPIES = 8, 5, 12
_WITNESS_SHARE = 2.0  # of a larger model: a solo run and a replay, each on one rank, take what the case takes


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of a case and of its witnesses; bytes of the largest process, and of all at the same time.

    `rough`: the model is larger than the one that costs were fitted to.
    """

    case_cpu_s: float
    witness_cpu_s: float
    process_bytes: float
    all_bytes: float
    rough: bool


def estimate(case: Case, costs: Costs) -> Estimate:
    """What a case will need. A kept witness takes no time."""
    price = costs.price(case)
    witness_s = sum(price.shared_s.values())
    more_s = _larger_s(case, costs)
    refused = expected_refusal(case) is not None
    recorded = _RECORDED_BYTES * parameter_count(case) * (0 if refused else replayed_steps(case))
    rank, witness = _rank_bytes(case), _rank_bytes(_on_one_rank(case))
    return Estimate(
        case_cpu_s=price.own_s + more_s,
        witness_cpu_s=0.0 if refused else witness_s + _WITNESS_SHARE * more_s,
        process_bytes=max(rank, witness) + _COPIES_IN_PROCESS * recorded,
        all_bytes=max(rank * case.world_size, witness) + _COPIES * recorded,
        rough=more_s > 0,
    )


def _larger_s(case: Case, costs: Costs) -> float:
    """CPU seconds that a model takes above the tiny one with the same vocabulary; 0 for a smaller one."""
    tiny_model = Model(vocab_size=case.model.vocab_size, pad_vocab_to_multiple_of=case.model.pad_vocab_to_multiple_of)
    if parameter_count(case) <= parameter_count(tiny := Case(model=tiny_model)) or expected_refusal(case) is not None:
        return 0.0
    tokens = case.train.tokens * case.train.steps
    flops = FLOPS_PER_PARAMETER_AND_TOKEN * (parameter_count(case) - parameter_count(tiny)) * tokens
    more_layers = case.model.shape.layers / tiny.model.shape.layers - 1
    started_s = costs.case.get("rank", 0.0) * case.world_size
    return flops / FLOPS_PER_CPU_S + max(0.0, more_layers * (costs.case_s(case) - started_s))


def _on_one_rank(case: Case) -> Case:
    """The case as its witness runs it: one data-parallel rank after the other, each with the whole model."""
    train = msgspec.structs.replace(case.train, global_batch=case.local_batch)
    return msgspec.structs.replace(case, layout=Layout(), checkpointing=Checkpointing(), train=train)


def _rank_bytes(case: Case) -> float:
    share = parameter_count(case) / ranks_of(case.layout.mesh, SHARD_AXES)
    tensors = 2 + case.train.update.states  # parameter, gradient, and what the optimizer keeps
    state = share * tensors * ITEM_BYTES[case.parameter_dtype]
    saved = sum(expected_saved(msgspec.structs.replace(case, compile="none"), step=1, rank=0).values())
    operands = max((8 * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n) for gemm in gemms(case)), default=0)
    return RANK_BYTES + state + 2 * saved + operands
