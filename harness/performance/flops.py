"""FLOPs of a step: those of one rank by what multiplies, and those of a token as torchtitan counts them.

A multiplication and an addition are 2 FLOPs. Attention counts as if it were not causal, its backward as twice its
forward; the flash kernel computes 5 products in backward where this counts 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from msgspec.structs import replace

from harness.expect.fusion import extra_matmul_calls
from harness.matrix.case import Case, Layout
from harness.matrix.linears import FLOPS_PER_PARAMETER_AND_TOKEN, OUTPUT_FQN, parameter_count
from harness.measured import Multiplied, multiplied_by
from harness.performance.gemms import FLOAT8, Gemm, gemms
from harness.trace.counts import multiplied_words

BLOCKS, OUTPUT, ATTENTION = "linears of blocks", "output layer", "attention"


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of one rank and step: `flops` that training needs, and all that is executed, with repeats and padding."""

    part: str  # BLOCKS, OUTPUT, ATTENTION
    role: str  # "forward", "dgrad", "wgrad"; "backward" of attention
    precision: str  # "float8", or a dtype
    flops: int
    executions: int  # of matmuls, or of the attention of a block
    executed_flops: int


def work(case: Case, *, rank: int = 0, saves_attention: bool = True) -> tuple[Work, ...]:
    """What one rank multiplies in one step, by part, role and precision.

    `saves_attention`: `selective_op` saves the output of attention, which is so for every kernel but the CPU's.
    """
    found: dict[tuple[str, str, str], list[Gemm]] = {}
    for gemm in sorted(gemms(case, rank=rank), key=lambda gemm: gemm.fqn == OUTPUT_FQN):
        found.setdefault((OUTPUT if gemm.fqn == OUTPUT_FQN else BLOCKS, gemm.role, gemm.precision), []).append(gemm)
    linears = (
        Work(
            part=part,
            role=role,
            precision=precision,
            flops=sum(gemm.flops for gemm in of_part),
            executions=sum(gemm.executions for gemm in of_part),
            executed_flops=sum(gemm.executed_flops for gemm in of_part),
        )
        for (part, role, precision), of_part in found.items()
    )
    return (*linears, *_attention(case, saves_attention=saves_attention))


def _attention(case: Case, *, saves_attention: bool) -> Iterator[Work]:
    """Forward multiplies queries by keys and weights by values: 2 x 2 seq^2 head_dim for every head and sequence."""
    train, shape = case.train, case.model.shape
    heads = shape.heads // case.layout.tp
    once = 4 * train.seq_len**2 * shape.head_dim * heads * case.microbatch
    kept = case.checkpointing.mode == "selective_op" and saves_attention
    recomputed = 0 if kept else sum(map(case.checkpointing.wraps, range(shape.layers)))
    needed = shape.layers * train.accumulation
    forwards = needed + (recomputed + shape.layers * train.evaluate) * train.accumulation
    for role, products, executions in (("forward", once, forwards), ("backward", 2 * once, needed)):
        yield Work(
            part=ATTENTION,
            role=role,
            precision=train.dtype,
            flops=products * needed,
            executions=executions,
            executed_flops=products * executions,
        )


def by_precision(works: Iterable[Work]) -> Mapping[str, int]:
    """FLOPs that training needs, by precision."""
    found: Counter[str] = Counter()
    for each in works:
        found[each.precision] += each.flops
    return dict(sorted(found.items()))


def executed(case: Case, *, rank: int, saves_attention: bool = True) -> Mapping[str, Multiplied]:
    """What one rank executes in one step, by part and precision, as `FlopsRecord` counts it."""
    found = [
        ("attention" if each.part == ATTENTION else "matmuls", each.precision, each.executions, each.executed_flops)
        for each in work(case, rank=rank, saves_attention=saves_attention)
    ]
    for precision, scaled in ((FLOAT8, True), (case.train.dtype, False)):
        found.append(("matmuls", precision, extra_matmul_calls(case, scaled=scaled), 0))
    added = multiplied_by(
        (multiplied_words(part=part, precision=precision), calls, flops) for part, precision, calls, flops in found
    )
    return {words: each for words, each in added.items() if each.calls}


def flops_per_token(case: Case) -> int:
    """Of forward and backward, as torchtitan counts: 6 for every parameter but the embedding's, and attention.

    The parameters of norms count too, though nothing multiplies by them: 2e-5 of Llama 3 8B.
    """
    shape = case.model.shape
    parameters = parameter_count(case) - shape.dim * case.model.padded_vocab_size
    attention = 12 * shape.layers * shape.heads * shape.head_dim * case.train.seq_len
    return FLOPS_PER_PARAMETER_AND_TOKEN * parameters + attention


def flops_per_token_by_precision(case: Case) -> Mapping[str, float]:
    """`flops_per_token` by precision: what matmuls in float8 do not do counts in the dtype of the case."""
    alone = replace(case, layout=Layout(), train=replace(case.train, global_batch=1, accumulation=1))
    float8 = by_precision(work(alone)).get(FLOAT8, 0) / case.train.seq_len
    total = flops_per_token(case)
    return {FLOAT8: float8, case.train.dtype: total - float8} if float8 else {case.train.dtype: float(total)}
