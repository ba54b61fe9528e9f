"""Scale invariants inside of compiled graphs: the rules of `scales.py` that need no name of a linear or a placement.

A compiler merges equal casts and forgets what a tensor is a part of. What stays is that every cast of a TP group stands
at the same place of the same graph: there, one scale for a tensor must be the same on all TP ranks and fit the largest
magnitude that any of them holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from harness.checks.expectedcasts import LARGEST
from harness.checks.mesh import neighbours
from harness.checks.ranks import ordered, rank_names
from harness.checks.scales import UNFIT, number_rules, power_reach, right_scale
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case
from harness.trace import Run
from harness.trace.graphs import GraphCast
from harness.verdict import Finding

NAME = "graph_scales"

Casts = dict[int, dict[tuple[int, int], GraphCast]]  # of every rank, by step and place in it


class _Violation(NamedTuple):
    rule: str
    cast: GraphCast
    rank: int
    expected: str
    found: str


def check_graph_casts(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """One finding for every rule that is broken: the first place, and on how many casts and ranks in all."""
    del witnesses  # the rules follow from the case alone
    if case.compile == "inductor" or not case.float8.enabled:
        return []  # EXEMPT: generated code cannot be looked into; without FP8 there are no casts
    casts: Casts = {
        trace.rank: {(cast.step, cast.order): cast for cast in (trace.graphs.casts or ()) if cast.step}
        for trace in ordered(run)
        if trace.graphs is not None
    }
    steps = range(1, case.train.steps + 1)
    idle = [rank for rank, mine in casts.items() if {step for step, _ in mine} != set(steps)]
    if idle or not casts:
        message = f"no cast to float8 was executed in some step on {rank_names(idle) if idle else 'any rank'}"
        return [Finding(check=NAME, message=message, expected="casts in the graphs of every step")]
    return _summed_up([*_by_itself(case, casts), *_of_groups(case, casts)])


def _summed_up(violations: list[_Violation]) -> list[Finding]:
    by_rule: dict[str, list[_Violation]] = {}
    for violation in sorted(violations, key=lambda each: (each.cast.step, each.cast.order, each.rank)):
        by_rule.setdefault(violation.rule, []).append(violation)
    return [_finding(rule, broken) for rule, broken in by_rule.items()]


def _finding(rule: str, broken: list[_Violation]) -> Finding:
    first = broken[0]
    cast = first.cast
    what = f"cast {cast.order} of step {cast.step}, in {cast.phase} of {cast.fqn}, {list(cast.shape)}"
    total = f"{len(broken)} time(s) on {rank_names(violation.rank for violation in broken)}"
    return Finding(
        check=NAME,
        message=f"{rule}: {what}; {total}",
        step=cast.step,
        rank=first.rank,
        module=cast.fqn,
        expected=first.expected,
        found=first.found,
    )


def _by_itself(case: Case, casts: Casts) -> Iterator[_Violation]:
    for rank, mine in casts.items():
        for cast in mine.values():
            for rule, expected, found in _rules(case, cast):
                yield _Violation(rule, cast, rank, expected, found)


def _rules(case: Case, cast: GraphCast) -> Iterator[tuple[str, str, str]]:
    """(rule, expected, found) of every rule that one cast breaks by itself."""
    if cast.target_dtype not in LARGEST:
        yield "cast to the wrong dtype", " or ".join(LARGEST), cast.target_dtype
    if not _shape_fits(cast):
        yield "scale of the wrong shape", f"one scale, or one per row of {list(cast.shape)}", str(cast.scale.shape)
    yield from number_rules(case, cast)


def _shape_fits(cast: GraphCast) -> bool:
    shape = cast.scale.shape
    if math.prod(shape) == 1:
        return True
    spanned = [axis for axis, size in enumerate(cast.shape) if len(shape) == len(cast.shape) and shape[axis] != size]
    return len(shape) == len(cast.shape) and len(spanned) == 1 and shape[spanned[0]] == 1


def _of_groups(case: Case, casts: Casts) -> Iterator[_Violation]:
    """TP ranks at the same place of the same graph."""
    for rank in casts:
        group = neighbours(case.layout, rank, ("tp",))
        if rank != group[0]:
            continue
        for place, cast in casts[rank].items():
            together = {other: casts[other][place] for other in group if place in casts.get(other, {})}
            if len(together) != len(group):
                yield _Violation(
                    "TP ranks execute different casts", cast, rank, f"{len(group)} ranks", f"{len(together)}"
                )
            elif math.prod(cast.scale.shape) == 1:
                yield from _one_scale(case, rank, together)
            else:
                yield from _rows(rank, together)


def _one_scale(case: Case, rank: int, group: dict[int, GraphCast]) -> Iterator[_Violation]:
    """One scale for a tensor: TP ranks hold it or parts of it, and the scale is that of its largest magnitude."""
    cast = group[rank]
    for other, theirs in group.items():
        if theirs.scale.digest != cast.scale.digest:
            expected, found = f"that of rank {rank}: {cast.scale.maximum!r}", f"{theirs.scale.maximum!r}"
            yield _Violation("TP ranks that hold one tensor have different scales", theirs, other, expected, found)
    amax = max(each.amax for each in group.values())
    if case.float8.recipe == "tensorwise":
        right = right_scale(cast.target_dtype, amax)
        if cast.scale.maximum != right:
            wanted = f"{right!r}, for amax {amax!r}"
            yield _Violation(UNFIT, cast, rank, wanted, f"{cast.scale.maximum!r}")
    else:
        most = max(each.scaled_amax_maximum for each in group.values())
        yield from _reach(rank, cast, most, most)


def _rows(rank: int, group: dict[int, GraphCast]) -> Iterator[_Violation]:
    """One scale a row. Where all ranks share the scales their rows are parts of one: only the largest can be judged."""
    cast = group[rank]
    if len({each.scale.digest for each in group.values()}) == 1 and len(group) > 1:
        most = max(each.scaled_amax_maximum for each in group.values())
        yield from _reach(rank, cast, most, most)
        return
    for other, theirs in group.items():
        yield from _reach(other, theirs, theirs.scaled_amax_minimum, theirs.scaled_amax_maximum)


def _reach(rank: int, cast: GraphCast, lowest: float, highest: float) -> Iterator[_Violation]:
    for wanted, found in power_reach(cast.target_dtype, lowest, highest):
        yield _Violation(UNFIT, cast, rank, wanted, found)
