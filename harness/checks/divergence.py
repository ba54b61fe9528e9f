"""Where does a run first do something else than its solo witness? Operands in execution order, step, rank and module.

The witness is one rank with the same recipe that replays the data-parallel shards one after the other: its n-th replay
is the n-th data-parallel rank. It explains a failed parity; it is no verdict of its own.

What must be equal, and how closely:

- Where nothing is added up in another order than on one rank, and in float64, where sums differ too little to move a
  float8 rounding, every operand that a rank holds whole is the same bits: scales and float8 data, at every step.
- In float64 scales and amaxes of what is spread over TP ranks agree within one rounding to float32.
- In lower precision sums over TP ranks, and gradients over HSDP replicas, are rounded differently, and single elements
  land on the other side of a float8 rounding: scales and amaxes agree within TOLERANCES.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from harness.checks.mesh import coordinates, neighbours, scale_axes, scaled_dim
from harness.checks.occurrences import ROLES, CastKind, MatmulKind, casts_of, matmuls_of
from harness.checks.ranks import ordered
from harness.spec.case import Case
from harness.trace import RankTrace, Run
from harness.trace.operands import CastRecord, MatmulRecord, ScaleSummary
from harness.verdict import Finding, Verdict

NAME = "divergence"

# Relative distance of a scale or an amax. Measured over TP, FSDP2 x TP and HSDP x TP: weights 8e-5, and one rounding to
# bfloat16 (2**-7) where they are cast from it; inputs 1e-3 and gradients 4e-2 at the first step in float32; otherwise
# 9e-2 and 1e-1.
TOLERANCES = {"weight": 1e-2, "input": 0.2, "grad_output": 0.3}
FIRST_STEP_TOLERANCES = {"weight": 0.0, "input": 1e-2, "grad_output": 0.1}
ROUNDING = 1e-6  # of a scale to float32 on either side
# Mean base-2 exponent of the scales of rows: how much of all rows moved by a power of two.
EXPONENT_TOLERANCE = 0.25


class Divergence(NamedTuple):
    """One number that is not the witness's."""

    order: int  # of execution on its rank
    rank: int
    step: int
    fqn: str
    operand: str
    expected: str
    found: str


def first_divergence(case: Case, run: Run, witness: Run) -> Finding | None:
    """The first operand, in execution order and then by rank, that is not the solo witness's; None if all are."""
    if not (run.complete and witness.complete):
        return None
    comparison = _Comparison(case, run, witness.traces[0])
    found = [first for trace in ordered(run) if (first := next(comparison.of(trace), None)) is not None]
    if not found:
        return None
    first = min(found)
    return Finding(
        check=NAME,
        message=f"the first operand that is not the solo witness's: {first.operand} of {first.fqn} "
        f"at step {first.step} on rank {first.rank}",
        verdict=Verdict.NUMERIC,
        step=first.step,
        rank=first.rank,
        module=first.fqn,
        expected=first.expected,
        found=first.found,
    )


class _Comparison:
    """A run beside its witness, both by kind and number."""

    def __init__(self, case: Case, run: Run, witness: RankTrace) -> None:
        self._case = case
        self._own_scales = case.float8.fp8_all_gather and case.layout.dp > 1 and case.layout.tp > 1
        self._sharp = case.train.dtype == "float64" and not self._own_scales
        self._casts = {trace.rank: casts_of(trace) for trace in run.traces}
        self._witness_casts, self._witness_matmuls = casts_of(witness), matmuls_of(witness)
        # casts may be fewer on a rank than in a replay: float8 styles cast an output gradient once for both matmuls
        self._witness_counts: Counter[CastKind | MatmulKind] = Counter(kind for kind, _ in self._witness_casts)
        self._witness_counts.update(kind for kind, _ in self._witness_matmuls)

    def of(self, trace: RankTrace) -> Iterator[Divergence]:
        """Every divergence of one rank, in execution order."""
        casts, matmuls = self._casts[trace.rank], matmuls_of(trace)
        where = coordinates(self._case.layout, trace.rank)
        replay = where["dp_replicate"] * self._case.layout.dp_shard + where["dp_shard"]
        steps: list[tuple[int, Iterator[Divergence]]] = [
            (cast.index, self._cast(trace.rank, kind, number, self._replayed(kind, number, replay)))
            for (kind, number), cast in casts.items()
        ]
        steps += [
            (matmul.index, self._matmul(trace.rank, kind, matmul, self._replayed(kind, number, replay)))
            for (kind, number), matmul in matmuls.items()
        ]
        mine = {kind for kind, _ in matmuls}
        steps += [
            (matmul.index, self._lacking(trace.rank, kind, matmul))
            for (kind, number), matmul in self._witness_matmuls.items()
            if number == 0 and kind not in mine
        ]
        for _, divergences in sorted(steps, key=lambda step: step[0]):
            yield from divergences

    def _replayed(self, kind: CastKind | MatmulKind, number: int, replay: int) -> int:
        """The number that the witness has for what a data-parallel rank counts as `number`."""
        return replay * (self._witness_counts[kind] // self._case.layout.dp) + number

    def _lacking(self, rank: int, kind: MatmulKind, expected: MatmulRecord) -> Iterator[Divergence]:
        found = "none: was the linear converted?"
        yield self._divergence(rank, expected.index, kind, f"matmul {kind.gemm}", "a scaled matmul", found)

    def _cast(self, rank: int, kind: CastKind, number: int, at: int) -> Iterator[Divergence]:
        found, expected = self._casts[rank][kind, number], self._witness_casts.get((kind, at))
        if kind.phase == "all_gather" or self._has_own_scale(found):
            return
        if expected is None:
            if self._case.float8.tp_styles == "plain":
                yield self._divergence(rank, found.index, kind, f"{kind.role} in {kind.phase}", "a cast", "none")
            return
        pieces = self._pieces(rank, (kind, number))
        for name, right, wrong in self._differences(found, expected, pieces):
            operand = f"{name} of {kind.role} in {kind.phase}"
            yield self._divergence(rank, found.index, kind, operand, right, wrong)

    def _exact(self, step: int) -> bool:
        """One rank adds up in the order of this layout, so that every bit is the same."""
        return self._case.layout.tp == 1 and (self._case.layout.dp_replicate == 1 or step == 1)

    def _same_data(self, cast: CastRecord) -> bool:
        """The float8 data are those of the witness, and all of them are on every rank."""
        whole = cast.phase != "gathered" and all(placement == "Replicate()" for placement in cast.placements)
        return whole and (self._exact(cast.step) or self._sharp)

    def _has_own_scale(self, cast: CastRecord) -> bool:
        """EXEMPT: torchao scales gathered weights per TP rank (see `mesh.scale_axes`), which one rank cannot show."""
        return cast.phase == "gathered" and self._case.layout.tp > 1 and "tp" not in scale_axes(self._case, cast)

    def _tolerance(self, role: str, step: int) -> float:
        if self._exact(step):
            return 0.0
        if self._sharp:
            return ROUNDING
        first = step == 1 and self._case.train.dtype == "float32" and not self._own_scales
        return (FIRST_STEP_TOLERANCES if first else TOLERANCES)[role]

    def _differences(
        self, found: CastRecord, expected: CastRecord, pieces: list[CastRecord]
    ) -> Iterator[tuple[str, str, str]]:
        """(number, expected, found) of what one cast has not in common with the witness's."""
        tolerance = self._tolerance(found.role, found.step)
        if found.phase != "gathered":
            amax = max(piece.amax for piece in pieces)
            if not _close(amax, expected.amax, tolerance):
                yield "amax", f"{expected.amax!r} ± {tolerance:g} of it", f"{amax!r}"
        if scaled_dim(found) is None and not _close(found.scale.maximum, expected.scale.maximum, tolerance):
            yield "scale", f"{_named(expected.scale)} ± {tolerance:g} of it", _named(found.scale)
        if scaled_dim(found) is not None:
            yield from _exponents(found, expected, pieces, EXPONENT_TOLERANCE if tolerance > ROUNDING else 0.0)
        if self._same_data(found) and found.data_digest != expected.data_digest:
            yield "float8 data", expected.data_digest, found.data_digest

    def _pieces(self, rank: int, key: tuple[CastKind, int]) -> list[CastRecord]:
        """The cast on every TP rank that holds a part of the tensor; on this rank alone where each holds it whole."""
        whole = all(placement == "Replicate()" for placement in self._casts[rank][key].placements)
        others = (rank,) if whole else neighbours(self._case.layout, rank, ("tp",))
        return [self._casts[other][key] for other in others if key in self._casts.get(other, {})]

    def _matmul(self, rank: int, kind: MatmulKind, found: MatmulRecord, at: int) -> Iterator[Divergence]:
        expected = self._witness_matmuls.get((kind, at))
        if expected is None:
            yield self._divergence(rank, found.index, kind, f"matmul {kind.gemm}", "no such matmul", "a matmul")
            return
        for side, role in zip("ab", ROLES[kind.gemm], strict=True):
            difference = self._operand(side, role, found, expected)
            if difference:
                yield self._divergence(rank, found.index, kind, f"{role} of matmul {kind.gemm}", *difference)

    def _operand(self, side: str, role: str, found: MatmulRecord, expected: MatmulRecord) -> tuple[str, str] | None:
        """(expected, found) of one operand of a matmul when it is not the witness's."""
        right, wrong = (
            (one.a_scale, one.a_digest) if side == "a" else (one.b_scale, one.b_digest) for one in (expected, found)
        )
        if self._exact(found.step):
            return None if right == wrong else (f"{_named(right[0])} x {right[1]}", f"{_named(wrong[0])} x {wrong[1]}")
        if (role == "weight" and self._own_scales) or self._case.float8.recipe != "tensorwise":
            return None  # EXEMPT: see `_has_own_scale`; rows are compared where they are cast
        tolerance = self._tolerance(role, found.step)
        if _close(wrong[0].maximum, right[0].maximum, tolerance):
            return None
        return f"scale {_named(right[0])} ± {tolerance:g} of it", f"scale {_named(wrong[0])}"

    def _divergence(
        self, rank: int, index: int, kind: CastKind | MatmulKind, operand: str, expected: str, found: str
    ) -> Divergence:
        return Divergence(index, rank, kind.step, kind.fqn, operand, expected, found)


def _exponents(
    found: CastRecord, expected: CastRecord, pieces: list[CastRecord], tolerance: float
) -> Iterator[tuple[str, str, str]]:
    """Scales of rows, by their mean exponent over all rows: of this rank, or of all ranks where rows are spread."""
    spread = found.placements[-1:] not in ((f"Shard({scaled_dim(found)})",), ("Replicate()",), ())
    mine = _mean_exponent([piece.scale for piece in pieces] if spread else [found.scale])
    right = _mean_exponent([expected.scale])
    if not abs(mine - right) <= max(tolerance, 1e-9):  # sums of whole numbers
        yield "mean exponent of the scales", f"{right:.4f} ± {tolerance:g}", f"{mine:.4f}"


def _mean_exponent(scales: list[ScaleSummary]) -> float:
    return sum(scale.log2_total for scale in scales) / sum(_count(scale) for scale in scales)


def _count(scale: ScaleSummary) -> int:
    count = 1
    for size in scale.shape:
        count *= size
    return count


def _close(found: float, expected: float, tolerance: float) -> bool:
    return found == expected or abs(found - expected) <= tolerance * abs(expected)


def _named(scale: ScaleSummary) -> str:
    if scale.minimum == scale.maximum:
        return f"{scale.minimum!r}"
    return f"{scale.minimum!r} to {scale.maximum!r}, sum {scale.total!r}"
