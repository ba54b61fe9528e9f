"""Is what runs a second time the same as the first time? Recomputed casts and matmuls, and operands used again.

A recomputation that differs from its forward gives gradients of a function that was never evaluated, with a loss that
is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from harness.checks.expectedcasts import gathers_float8, is_recomputed
from harness.checks.occurrences import CastKind, MatmulKind, casts_of, matmuls_of
from harness.checks.ranks import ordered
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case
from harness.spec.gemms import converted_fqns, recomputed_calls
from harness.trace import RankTrace, Run
from harness.trace.operands import CastRecord, MatmulRecord
from harness.verdict import Finding

NAME = "recompute"


class Difference(NamedTuple):
    """Something that is not as it was the first time."""

    order: int  # of execution on its rank
    step: int
    fqn: str
    what: str
    expected: str
    found: str


def check_recompute(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """The first difference of every rank that has one, with how many there are."""
    del witnesses  # a run is compared with itself
    findings = []
    for trace in ordered(run):
        if trace.operands is None:
            continue  # EXEMPT: `scales` reports operands that were not recorded
        differences = sorted((*_casts(case, trace), *_matmuls(trace), *_missing(case, trace)))
        if differences:
            findings.append(_finding(trace.rank, differences))
    return findings


def _finding(rank: int, differences: list[Difference]) -> Finding:
    first = differences[0]
    return Finding(
        check=NAME,
        message=f"{first.what} of {first.fqn} differs from the first time at step {first.step} on rank {rank}; "
        f"{len(differences)} difference(s)",
        step=first.step,
        rank=rank,
        module=first.fqn,
        expected=first.expected,
        found=first.found,
    )


def _casts(case: Case, trace: RankTrace) -> Iterator[Difference]:
    casts = casts_of(trace)
    for (kind, number), cast in casts.items():
        first = casts.get(_first_time(case, kind, number))
        if first is not None and first is not cast:
            yield from _differences(cast.index, kind, f"{cast.role} cast in {cast.phase}", _seen(first), _seen(cast))


def _first_time(case: Case, kind: CastKind, number: int) -> tuple[CastKind, int]:
    """What this cast repeats: a recomputation its forward; a gathered weight the one that the forward found.

    With one scale for the tensor the backward pass casts input and weight again exactly as the forward did.
    """
    if kind.phase == "gathered":
        return kind, 0
    again = kind.phase == "backward" and kind.role != "grad_output" and case.float8.recipe == "tensorwise"
    return (kind._replace(phase="forward") if again or kind.phase == "recompute" else kind), number


def _seen(cast: CastRecord) -> dict[str, object]:
    return {
        "elements": cast.elements,
        "dtype": cast.target_dtype,
        "scale": (cast.scale.minimum, cast.scale.maximum, cast.scale.digest),
        "data": cast.data_digest,
    }


def _matmuls(trace: RankTrace) -> Iterator[Difference]:
    matmuls = matmuls_of(trace)
    for (kind, number), matmul in matmuls.items():
        first = matmuls.get((kind._replace(gemm="forward"), number))
        if kind.gemm == "recompute" and first is not None:
            yield from _differences(matmul.index, kind, "recomputed matmul", _multiplied(first), _multiplied(matmul))


def _multiplied(matmul: MatmulRecord) -> dict[str, object]:
    return {
        "sizes": (matmul.m, matmul.k, matmul.n),
        "dtypes": (matmul.a_dtype, matmul.b_dtype),
        "scales": (matmul.a_scale, matmul.b_scale),
        "data": (matmul.a_digest, matmul.b_digest),
    }


def _differences(
    index: int, kind: CastKind | MatmulKind, what: str, expected: dict[str, object], found: dict[str, object]
) -> Iterator[Difference]:
    for name, value in expected.items():
        if found[name] != value:
            yield Difference(index, kind.step, kind.fqn, f"{name} of the {what}", f"{value}", f"{found[name]}")


def _missing(case: Case, trace: RankTrace) -> Iterator[Difference]:
    """Checkpointing that recomputes nothing has nothing to compare, which must not pass."""
    assert trace.operands is not None
    fqns = [fqn for fqn in converted_fqns(case) if is_recomputed(case, fqn)]
    phase = "gathered" if gathers_float8(case) else "recompute"
    again = {cast.fqn for cast in trace.operands.casts if cast.phase == phase and cast.role == "weight"}
    yield from (
        Difference(0, 1, fqn, "checkpointed forward", "a recomputation", "none") for fqn in fqns if fqn not in again
    )
    count = sum(matmul.gemm == "recompute" for matmul in trace.operands.matmuls)
    if count != recomputed_calls(case) * len(trace.steps):
        expected = recomputed_calls(case) * len(trace.steps)
        yield Difference(0, 1, "the model", "number of recomputed matmuls", f"{expected}", f"{count}")
