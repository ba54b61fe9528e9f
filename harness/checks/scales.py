"""Is every tensor cast to float8 with the right scale? Form, range, agreement of ranks, and what the matmuls use.

A scale belongs to a logical tensor: the ranks that hold one tensor must share it, with the largest magnitude that any
of them has, and those that hold different tensors must not.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from harness.checks.expectedcasts import LARGEST, CastForm, CastSite, expected_casts, input_site
from harness.checks.mesh import DP_AXES, neighbours, replica_axes, scale_axes, scaled_dim
from harness.checks.occurrences import ROLES, CastKind, casts_of
from harness.checks.ranks import ordered, rank_names
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case
from harness.trace import RankTrace, Run
from harness.trace.graphs import GraphCast
from harness.trace.operands import CastRecord, MatmulRecord, ScaleSummary
from harness.verdict import Finding

NAME = "scales"

EPS = 1e-12  # torchao takes this for an amax below it

Casts = dict[int, dict[tuple[CastKind, int], CastRecord]]  # of every rank


class Violation(NamedTuple):
    """A rule broken by one cast or matmul of one rank."""

    rule: str
    order: int  # of execution on its rank
    rank: int
    step: int
    module: str
    expected: str
    found: str


def check_scales(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """One finding for every rule that is broken: the first place, and on how many casts and ranks in all."""
    del witnesses  # the rules follow from the case alone
    silent = [trace.rank for trace in ordered(run) if trace.operands is None]
    if silent or not run.traces:
        message = f"casts were not recorded on {rank_names(silent)}" if silent else "no rank left a trace"
        return [Finding(check=NAME, message=message, rank=min(silent, default=None), expected="recorded operands")]
    casts = {trace.rank: casts_of(trace) for trace in ordered(run)}
    return _summed_up(
        [
            *_counts(case, casts),
            *_forms(case, casts),
            *_shared(case, casts),
            *_not_shared(case, casts),
            *(violation for trace in ordered(run) for violation in _matmuls(case, trace)),
        ]
    )


def _summed_up(violations: list[Violation]) -> list[Finding]:
    by_rule: dict[str, list[Violation]] = {}
    for violation in sorted(violations, key=lambda violation: (violation.order, violation.rank)):
        by_rule.setdefault(violation.rule, []).append(violation)
    return [_finding(rule, broken) for rule, broken in by_rule.items()]


def _finding(rule: str, broken: list[Violation]) -> Finding:
    first = broken[0]
    where = f"{first.module} at step {first.step} on rank {first.rank}"
    total = f"{len(broken)} time(s) on {rank_names(violation.rank for violation in broken)}"
    return Finding(
        check=NAME,
        message=f"{rule}: {where}; {total}",
        step=first.step,
        rank=first.rank,
        module=first.module,
        expected=first.expected,
        found=first.found,
    )


def _counts(case: Case, casts: Casts) -> Iterator[Violation]:
    """Every linear is cast as often as the recipe demands, in every step, and nothing else is."""
    expected = expected_casts(case)
    for rank, mine in casts.items():
        found = Counter(kind for kind, _ in mine)
        for step in range(1, case.train.steps + 1):
            sites = {CastSite(*kind[1:]) for kind in found if kind.step == step} | set(expected)
            for site in sorted(sites):
                count, forms = found[CastKind(step, *site)], expected.get(site, ())
                if count != len(forms) and not (site.phase == "all_gather" and count > len(forms) > 0):
                    what = f"{site.role} casts in {site.phase}"
                    index = next((cast.index for (kind, _), cast in mine.items() if kind.step == step), 0)
                    yield Violation(
                        "wrong number of casts", index, rank, step, site.fqn, f"{len(forms)} {what}", f"{count} {what}"
                    )


def _forms(case: Case, casts: Casts) -> Iterator[Violation]:
    """Every cast has the form that the recipe gives it, and did what a cast does."""
    expected = expected_casts(case)
    for rank, mine in casts.items():
        for (kind, number), cast in mine.items():
            forms = expected.get(CastSite(*kind[1:]), ())
            form = forms[min(number, len(forms) - 1)] if forms else None
            for rule, right, found in _form_rules(case, cast, form):
                yield _violation(rule, rank, cast, right, found)


def _form_rules(case: Case, cast: CastRecord, form: CastForm | None) -> Iterator[tuple[str, str, str]]:
    """(rule, expected, found) of every rule that one cast breaks by itself."""
    if form is not None:
        found = CastForm(cast.axiswise_dim, cast.source_dtype, cast.target_dtype)
        names = ("scaled along the wrong dim", "cast from the wrong dtype", "cast to the wrong dtype")
        yield from (
            (name, f"{right}", f"{wrong}")
            for name, right, wrong in zip(names, form, found, strict=True)
            if right != wrong
        )
    if case.layout.tp > 1 and "tp" not in cast.mesh_axes:
        yield "cast of a local tensor, which does not know of what it is a part", "a DTensor over tp", "a plain tensor"
    if cast.scale.shape not in _scale_shapes(cast):
        yield "scale of the wrong shape", " or ".join(map(str, _scale_shapes(cast))), str(cast.scale.shape)
    yield from number_rules(case, cast)


def number_rules(case: Case, cast: CastRecord | GraphCast) -> Iterator[tuple[str, str, str]]:
    """(rule, expected, found) of every rule about its numbers alone that a cast breaks, eager or in a graph."""
    scale = cast.scale
    if scale.dtype != "float32":
        yield "scale of the wrong dtype", "float32", scale.dtype
    if not (scale.minimum > 0 and math.isfinite(scale.maximum)) and cast.elements:
        yield "scale not finite and positive", "finite, above 0", f"{scale.minimum} to {scale.maximum}"
    if case.float8.recipe != "tensorwise" and not scale.power_of_two:
        yield "scale is not a power of two", "powers of two", f"{scale.minimum} to {scale.maximum}"
    for count, rule in (
        (cast.mismatched, "float8 data are not the cast of their source by their scale"),
        (cast.saturated, "values saturate"),
        (cast.nonfinite, "values are NaN or infinite"),
    ):
        if count:
            yield rule, "0 elements", f"{count} of {cast.elements} elements"


def _scale_shapes(cast: CastRecord) -> tuple[tuple[int, ...], ...]:
    dim = scaled_dim(cast)
    if dim is None:
        return (), (1,)
    return (tuple(1 if axis == dim else size for axis, size in enumerate(cast.local_shape)),)


def _shared(case: Case, casts: Casts) -> Iterator[Violation]:
    """Ranks that hold one tensor share its scale, and that scale is the one for the largest magnitude among them."""
    for rank, mine in casts.items():
        for key, cast in mine.items():
            others = neighbours(case.layout, rank, scale_axes(case, cast))
            group = {other: casts[other][key] for other in others if key in casts.get(other, {})}
            first = min(group)
            if cast.scale.digest != group[first].scale.digest:
                expected = f"the scale of rank {first}: {_named(group[first].scale)}"
                yield _violation(
                    "ranks that hold one tensor have different scales", rank, cast, expected, _named(cast.scale)
                )
            twin = min(neighbours(case.layout, rank, replica_axes(cast)))
            if cast.data_digest != group.get(twin, cast).data_digest:
                expected = f"the data of rank {twin}: {group[twin].data_digest}"
                yield _violation(
                    "replicas of one tensor have different float8 data", rank, cast, expected, cast.data_digest
                )
            if rank == first:
                yield from _reach(case, rank, cast, list(group.values()))


def _reach(case: Case, rank: int, cast: CastRecord, group: list[CastRecord]) -> Iterator[Violation]:
    """The scale is that of the largest magnitude of the whole tensor.

    One scale for a tensor is fp8 max / amax, rounded once to float32: torchao divides in float64, so that eager,
    compiled and precomputed scales are the same to the last bit, and a stale one shows as soon as the amax moves.
    Powers of two put amax * scale into (1/2, 1] of fp8 max.
    """
    limit, amax = LARGEST.get(cast.target_dtype, math.nan), max(other.amax for other in group)
    if case.float8.recipe == "tensorwise" and scaled_dim(cast) is None:
        right = right_scale(cast.target_dtype, amax)
        if cast.scale.maximum != right:
            wanted = f"{right!r} = {limit:g} / amax {amax!r}"
            yield _violation(UNFIT, rank, cast, wanted, f"{cast.scale.maximum!r}")
        return
    yield from _reach_of_rows(rank, cast, group)


def right_scale(target_dtype: str, amax: float) -> float:
    """The one scale of a tensor whose largest magnitude is `amax`."""
    return _float32(LARGEST.get(target_dtype, math.nan) / max(amax, EPS))


UNFIT = "scale does not fit the largest magnitude"
_POWER_TOLERANCE = 1e-6  # log2 of a scale just below a power of two may round up to it


def _reach_of_rows(rank: int, cast: CastRecord, group: list[CastRecord]) -> Iterator[Violation]:
    """Exempt: rows of zeros, left out by the probe; and the smallest row where rows are spread over ranks, because
    the largest magnitude of each row may be on another rank.
    """
    highest = max(other.scaled_amax_maximum for other in group)
    dim = scaled_dim(cast)
    spread = dim is None or any(placement == f"Shard({dim})" for placement in cast.placements)
    lowest = highest if spread else min(other.scaled_amax_minimum for other in group)
    for wanted, found in power_reach(cast.target_dtype, lowest, highest):
        yield _violation(UNFIT, rank, cast, wanted, found)


def power_reach(target_dtype: str, lowest: float, highest: float) -> Iterator[tuple[str, str]]:
    """(expected, found) unless powers of two put every amax * scale into (1/2, 1] of the largest float8 value."""
    limit = LARGEST.get(target_dtype, math.nan)
    fits = lowest / limit > 0.5 * (1 - _POWER_TOLERANCE) and highest / limit <= 1 + _POWER_TOLERANCE
    if highest != 0 and not fits:
        yield f"amax * scale in (1/2, 1] of {limit:g}", f"{lowest / limit:.9g} to {highest / limit:.9g} of it"


def _not_shared(case: Case, casts: Casts) -> Iterator[Violation]:
    """Activations of data-parallel ranks are different tensors: the same scale for all, always, is no chance."""
    if case.layout.dp == 1 or 0 not in casts:
        return
    dp_ranks = neighbours(case.layout, 0, DP_AXES)
    first: CastRecord | None = None
    for key, cast in casts[0].items():
        if cast.role == "weight":
            continue
        group = [casts[rank][key] for rank in dp_ranks if key in casts.get(rank, {})]
        if len({other.data_digest for other in group}) > 1:
            if len({other.scale.digest for other in group}) > 1:
                return
            first = first or cast
    if first is not None:
        expected = "scales of their own on data-parallel ranks, whose data differ"
        yield _violation("ranks that hold different tensors share all scales", 0, first, expected, _named(first.scale))


def _matmuls(case: Case, trace: RankTrace) -> Iterator[Violation]:
    """Every matmul multiplies the last casts of its operands and divides by their scales."""
    assert trace.operands is not None
    records: Iterable[CastRecord | MatmulRecord] = sorted(
        (*trace.operands.casts, *trace.operands.matmuls), key=lambda record: record.index
    )
    last: dict[tuple[str, str], CastRecord] = {}
    for record in records:
        if isinstance(record, CastRecord):
            last[record.fqn, record.role] = record
            continue
        for side, role in zip("ab", ROLES[record.gemm], strict=True):
            site = input_site(case, record.fqn) if role == "input" else record.fqn
            yield from _operand(case, trace.rank, record, side, role, last.get((site, role)))


def _operand(
    case: Case, rank: int, matmul: MatmulRecord, side: str, role: str, cast: CastRecord | None
) -> Iterator[Violation]:
    def broken(rule: str, expected: str, found: str) -> Violation:
        where = f"{role} of {matmul.gemm}"
        return Violation(rule, matmul.index, rank, matmul.step, matmul.fqn, f"{where}: {expected}", f"{where}: {found}")

    if cast is None:
        yield broken("a matmul whose operand was never cast", "a cast", "none")
        return
    is_a = side == "a"
    scale, digest = (matmul.a_scale, matmul.a_digest) if is_a else (matmul.b_scale, matmul.b_digest)
    wanted = _dividing(case, matmul, cast.scale)
    if (scale.minimum, scale.maximum) != wanted:
        yield broken("a matmul does not divide by the scale of its operand", f"{wanted}", _named(scale))
    size = matmul.m * matmul.k if is_a else matmul.k * matmul.n
    whole = cast.elements == size and (matmul.gemm in ("forward", "recompute") or (matmul.gemm == "dgrad" and is_a))
    if whole and cast.phase != "gathered" and digest != cast.data_digest:
        yield broken("a matmul does not multiply what was cast", cast.data_digest, digest)


def _dividing(case: Case, matmul: MatmulRecord, scale: ScaleSummary) -> tuple[float, float]:
    """The range of the scales a matmul must be given.

    Rowwise gradients run without fast accumulation, where torchao multiplies without scales and divides afterwards.
    """
    if case.float8.recipe != "tensorwise" and matmul.gemm in ("dgrad", "wgrad"):
        return 1.0, 1.0
    return _reciprocal(scale.maximum), _reciprocal(scale.minimum)


def _reciprocal(value: float) -> float:
    return _float32(1 / value) if math.isfinite(value) and value else math.nan


def _float32(value: float) -> float:
    """Rounded as torch rounds; infinite where float32 cannot hold it."""
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(rounded)


def _named(scale: ScaleSummary) -> str:
    return f"{scale.minimum!r}" if scale.minimum == scale.maximum else f"{scale.minimum!r} to {scale.maximum!r}"


def _violation(rule: str, rank: int, cast: CastRecord, expected: str, found: str) -> Violation:
    what = f"{cast.role} in {cast.phase}"
    return Violation(rule, cast.index, rank, cast.step, cast.fqn, f"{what}: {expected}", f"{what}: {found}")
