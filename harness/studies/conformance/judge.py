"""Judges the observations of a check by all ranks: its problems and its status.

Four questions: did it run, is the whole tensor right, are the placements valid, and did it receive no more bytes than
necessary? A problem that a known deviation explains is not a failure; a known deviation without its problem is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from harness.studies.conformance.cost import cheapest_bytes
from harness.studies.conformance.known import Deviation, deviations_of
from harness.studies.conformance.strategy import may_be_partial
from harness.trace.operator_checks import Observation, OperatorCheck, Output, Placements, local_shape, shard_dim
from harness.trace.record import Record

ProblemKind = Literal["missing", "raised", "wrong", "placement", "bytes", "lost"]
Status = Literal["passed", "known", "failed", "unexpected_pass"]
_MISSING = ("sharding strategy", "is not supported", "not implemented")
_SLACK_BYTES = 0.5  # costs are not always integers


class Problem(Record, frozen=True, kw_only=True):
    """One problem, as observed on one rank: the first, if several ranks have it."""

    kind: ProblemKind
    rank: int | None
    expected: str
    found: str

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{self.kind}: {where}expected {self.expected}, found {self.found}"


class Conclusion(Record, frozen=True, kw_only=True):
    """The result of a check. `deviations` names those that explain its problems, or that no longer occur."""

    check: OperatorCheck
    status: Status
    problems: tuple[Problem, ...]
    deviations: tuple[str, ...]
    wire_bytes: float
    cheapest_bytes: float

    @property
    def good(self) -> bool:
        """True if the result is as expected."""
        return self.status in ("passed", "known")


def conclude(check: OperatorCheck, observed: Sequence[Observation], *, torch: str) -> Conclusion:
    """Judge the observations of one check by all ranks, with this version of torch."""
    budget = cheapest_bytes(check)
    moved = max((each.wire_bytes for each in observed), default=0.0)
    known = deviations_of(check, torch)
    return _conclusion(check, known, tuple(problems(check, observed, budget)), moved, budget)


def conclude_lost(check: OperatorCheck, message: str) -> Conclusion:
    """The conclusion on a check that brought its ranks down or made them hang."""
    problem = Problem(kind="lost", rank=None, expected="a result from every rank", found=message)
    return _conclusion(check, (), (problem,), 0.0, cheapest_bytes(check))


def _conclusion(
    check: OperatorCheck, known: Sequence[Deviation], found: tuple[Problem, ...], moved: float, budget: float
) -> Conclusion:
    used = [_explanation(known, problem) for problem in found]
    names = dict.fromkeys(deviation.name for deviation in used if deviation is not None)
    status: Status = "passed"
    if found:
        status = "failed" if None in used else "known"
    elif any(deviation.always for deviation in known):
        status, names = "unexpected_pass", dict.fromkeys(each.name for each in known if each.always)
    return Conclusion(
        check=check,
        status=status,
        problems=found,
        deviations=tuple(names),
        wire_bytes=moved,
        cheapest_bytes=budget,
    )


def _explanation(known: Sequence[Deviation], problem: Problem) -> Deviation | None:
    return next((each for each in known if each.explains(problem.kind, problem.found)), None)


def problems(check: OperatorCheck, observed: Sequence[Observation], budget: float) -> Iterator[Problem]:
    """All problems of a check; of problems that several ranks share, the first."""
    raised = [each for each in observed if each.error]
    if raised:
        first = next((each for each in raised if not each.consequence), raised[0])
        missing = any(text in first.error for text in _MISSING)
        yield Problem(
            kind="missing" if missing else "raised",
            rank=first.rank,
            expected="the operator to run" if first.phase != "result" else "a result that can be replicated",
            found=first.error,
        )
    else:
        yield from _first_of_each(problem for each in observed for problem in _output_problems(check, each))
    finished = all(each.phase == "result" for each in observed)
    over = max(observed, key=lambda each: each.wire_bytes, default=None)
    if finished and over is not None and over.wire_bytes > budget + _SLACK_BYTES:
        yield Problem(
            kind="bytes",
            rank=over.rank,
            expected=f"at most {budget:g} bytes received",
            found=f"{over.wire_bytes:g} bytes by {', '.join(over.calls)}",
        )


def _first_of_each(found: Iterator[Problem]) -> list[Problem]:
    first: dict[str, Problem] = {}
    for problem in found:
        first.setdefault(problem.kind, problem)
    return list(first.values())


def _output_problems(check: OperatorCheck, observation: Observation) -> Iterator[Problem]:
    if not observation.outputs:
        yield Problem(kind="wrong", rank=observation.rank, expected="a result", found="none")
    for index, output in enumerate(observation.outputs):
        if output.wrong or output.dtype != output.expected_dtype or output.shape != output.expected_shape:
            yield _wrong(observation.rank, output)
        for expected, found in _invalid_placements(check, observation, index, output):
            yield Problem(kind="placement", rank=observation.rank, expected=expected, found=found)


def _wrong(rank: int, output: Output) -> Problem:
    return Problem(
        kind="wrong",
        rank=rank,
        expected=f"{list(output.expected_shape)} {output.expected_dtype}, equal to the operator on the full tensor",
        found=f"{list(output.shape)} {output.dtype}, {output.wrong} elements differ by up to {output.largest_error:g}: "
        f"{output.example}",
    )


def _invalid_placements(
    check: OperatorCheck, observation: Observation, index: int, output: Output
) -> Iterator[tuple[str, str]]:
    """The expected and the actual value of every invalid placement."""
    placements = output.placements
    if placements is None:
        yield "a DTensor", "a plain tensor"
        return
    if len(placements) != len(check.axes):
        yield f"{len(check.axes)} placements", f"{len(placements)}"
        return
    for axis, placement in enumerate(placements):
        dim = _dim_or_none(placement)
        if dim is not None and dim >= len(output.shape):
            yield f"a shard of one of {len(output.shape)} dims", placement
            return
        if placement[0] not in "RSTP":
            yield "a replicated, sharded or partial placement", placement
        if placement[0] == "P" and not may_be_partial(check, axis, index, placement):
            yield f"no such partial placement on mesh axis {axis}", placement
    if check.target and placements != check.target:
        yield ".".join(check.target), ".".join(placements)
    yield from _wrong_local_shape(check, placements, observation, output)


def _dim_or_none(placement: str) -> int | None:
    return shard_dim(placement) if placement[1:].isdigit() else None


def _wrong_local_shape(
    check: OperatorCheck, placements: Placements, observation: Observation, output: Output
) -> Iterator[tuple[str, str]]:
    """A local shape that contradicts the placements. Skips strided shards: uneven ones follow no simple rule."""
    if any(placement[0] == "T" for placement in placements):
        return
    expected = local_shape(output.shape, placements, check.axes, observation.coordinates)
    if expected != output.local_shape:
        yield f"local shape {list(expected)} for {'.'.join(placements)}", f"{list(output.local_shape)}"
