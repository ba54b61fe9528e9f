"""The matmuls of one rank in one step: every linear and the attention, in the shapes that tensor parallelism leaves.

Of the reference Llama, eager. A compiled step computes the same products; the pipelined operators of async TP multiply
a product in TP parts, which have the same FLOPs together.
"""

from __future__ import annotations

import functools

from harness.expect.matmuls import is_multiplied_again
from harness.matrix import linears
from harness.matrix.case import Case
from harness.matrix.linears import OUTPUT_FQN, is_converted, linear_fqns, linear_name, local_features
from harness.matrix.recipes import MatmulRole

FLOAT8 = "float8"  # a precision; the others are dtypes
ALIGNMENT = 16  # of n and k, by `torch._scaled_mm`


class Gemm(linears.Gemm, frozen=True, kw_only=True):
    """One matmul [m, k] x [k, n] of a linear, as one rank executes it in one step.

    `precision`: "float8", or the dtype of both operands. `executed_k`: k as `pad_inner_dim` pads it. `count`: how often
    training needs it. `repeats`: how often it is executed besides, because checkpointing recomputes it or a step is
    evaluated.
    """

    precision: str
    executed_k: int
    count: int
    repeats: int = 0

    @property
    def aligned(self) -> bool:
        """True when `torch._scaled_mm` takes it without padding, whether it is converted or not; m may be anything."""
        return self.n % ALIGNMENT == 0 and self.k % ALIGNMENT == 0

    @property
    def flops(self) -> int:
        """Of what training needs, without padding and repeats: 2 m n k each."""
        return 2 * self.m * self.n * self.k * self.count

    @property
    def executions(self) -> int:
        """How often it is executed."""
        return self.count + self.repeats

    @property
    def executed_flops(self) -> int:
        """Of every execution, with what pads it."""
        return 2 * self.m * self.n * self.executed_k * self.executions


def is_refused(case: Case, gemm: Gemm) -> bool:
    """True when it is multiplied in float8 and `torch._scaled_mm` refuses its sizes."""
    return gemm.precision == FLOAT8 and linears.is_misaligned(case, gemm)


@functools.lru_cache(maxsize=64)
def gemms(case: Case, *, rank: int = 0) -> tuple[Gemm, ...]:
    """The matmuls of linears: all forwards in order of execution, then dgrad and wgrad from the last linear."""
    of_linears = [_gemms_of(case, fqn, rank) for fqn in linear_fqns(case)]
    forward = [each[0] for each in of_linears]
    return (*forward, *(gemm for each in reversed(of_linears) for gemm in each[1:]))


def _gemms_of(case: Case, fqn: str, rank: int) -> list[Gemm]:
    """Forward, dgrad and wgrad of one linear."""
    tokens, (inputs, outputs) = case.tokens_per_rank, local_features(case, linear_name(fqn), rank)
    sizes: dict[MatmulRole, tuple[int, int, int]] = {
        "forward": (tokens, outputs, inputs),
        "dgrad": (tokens, inputs, outputs),
        "wgrad": (outputs, inputs, tokens),
    }
    converted, padded = is_converted(case, fqn), case.float8.pad_inner_dim
    return [
        Gemm(
            fqn=fqn,
            role=role,
            m=m,
            n=n,
            k=k,
            precision=FLOAT8 if (float8 := converted and case.float8.traits.multiplies(role)) else case.train.dtype,
            executed_k=-(-k // ALIGNMENT) * ALIGNMENT if float8 and padded else k,
            count=case.train.accumulation,
            repeats=_repeats(case, fqn) if role == "forward" else 0,
        )
        for role, (m, n, k) in sizes.items()
    ]


def _repeats(case: Case, fqn: str) -> int:
    """How often a step repeats the forward of a linear."""
    again = int(case.train.evaluate)
    if fqn != OUTPUT_FQN:
        _, layer, name = fqn.split(".", 2)
        again += is_multiplied_again(case, int(layer), name)
    return case.train.accumulation * again
