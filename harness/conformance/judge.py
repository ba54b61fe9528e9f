"""The judge: what four ranks saw of a check, turned into problems and a status.

Four questions: did it run at all, is the whole tensor right, are the placements legal, and did it move no more bytes
than it had to. A problem that a known deviation explains is no failure; a known deviation without its problem is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from harness.conformance.check import Check, Observation, Output, Placements, Value, local_shape, shard_dim
from harness.conformance.cost import cheapest_bytes
from harness.conformance.known import Deviation, deviations_of, explains
from harness.conformance.strategy import may_be_pending

ProblemKind = Literal["missing", "raised", "wrong", "placement", "bytes", "lost"]
Status = Literal["passed", "known", "failed", "unexpected_pass"]
_MISSING = ("sharding strategy", "is not supported", "not implemented")
_SLACK_BYTES = 0.5  # costs are fractions of integers


class Problem(Value, frozen=True):
    """One thing that is wrong, seen on one rank (the first of several)."""

    kind: ProblemKind
    rank: int | None
    expected: str
    found: str

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{self.kind}: {where}expected {self.expected}, found {self.found}"


class Conclusion(Value, frozen=True):
    """How a check ended. `deviations` names the known ones that explain its problems, or that are gone."""

    check: Check
    status: Status
    problems: tuple[Problem, ...]
    deviations: tuple[str, ...]
    wire_bytes: float
    cheapest_bytes: float

    @property
    def good(self) -> bool:
        """True when nothing has to be done about it."""
        return self.status in ("passed", "known")


def conclude(check: Check, seen: Sequence[Observation]) -> Conclusion:
    """Judge what all ranks saw of one check."""
    budget = cheapest_bytes(check)
    moved = max((each.wire_bytes for each in seen), default=0.0)
    return _conclusion(check, tuple(problems(check, seen, budget)), moved, budget)


def conclude_lost(check: Check, message: str) -> Conclusion:
    """The conclusion on a check that took its ranks down, or kept them from ever coming back."""
    problem = Problem(kind="lost", rank=None, expected="an answer of every rank", found=message)
    return _conclusion(check, (problem,), 0.0, cheapest_bytes(check))


def _conclusion(check: Check, found: tuple[Problem, ...], moved: float, budget: float) -> Conclusion:
    known = deviations_of(check)
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
    return next((each for each in known if explains(each, problem.kind, problem.found)), None)


def problems(check: Check, seen: Sequence[Observation], budget: float) -> Iterator[Problem]:
    """Everything that is wrong; of problems that several ranks share the first."""
    raised = [each for each in seen if each.error]
    if raised:
        first = next((each for each in raised if not each.consequence), raised[0])
        missing = any(word in first.error for word in _MISSING)
        yield Problem(
            kind="missing" if missing else "raised",
            rank=first.rank,
            expected="the operator to run" if first.phase != "result" else "a result that can be made whole",
            found=first.error,
        )
    else:
        yield from _first_of_each(problem for each in seen for problem in _output_problems(check, each))
    finished = all(each.phase == "result" for each in seen)
    over = max(seen, key=lambda each: each.wire_bytes, default=None)
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


def _output_problems(check: Check, seen: Observation) -> Iterator[Problem]:
    if not seen.outputs:
        yield Problem(kind="wrong", rank=seen.rank, expected="a result", found="none")
    for index, output in enumerate(seen.outputs):
        if output.wrong or output.dtype != output.expected_dtype or output.shape != output.expected_shape:
            yield _wrong(seen.rank, output)
        for expected, found in _illegal(check, seen, index, output):
            yield Problem(kind="placement", rank=seen.rank, expected=expected, found=found)


def _wrong(rank: int, output: Output) -> Problem:
    return Problem(
        kind="wrong",
        rank=rank,
        expected=f"{list(output.expected_shape)} {output.expected_dtype}, equal to the operator on the whole tensor",
        found=f"{list(output.shape)} {output.dtype}, {output.wrong} elements differ by up to {output.largest_error:g}: "
        f"{output.example}",
    )


def _illegal(check: Check, seen: Observation, index: int, output: Output) -> Iterator[tuple[str, str]]:
    """What the placements of an output should have been, and what they are."""
    words = output.placements
    if words is None:
        yield "a DTensor", "a plain tensor"
        return
    if len(words) != len(check.axes):
        yield f"{len(check.axes)} placements", f"{len(words)}"
        return
    for axis, word in enumerate(words):
        dim = _dim_or_none(word)
        if dim is not None and dim >= len(output.shape):
            yield f"a shard of one of {len(output.shape)} dims", word
            return
        if word[0] not in "RSTP":
            yield "a placement of a kind that the operator can cause", word
        if word[0] == "P" and not may_be_pending(check, axis, index, word):
            yield f"nothing pending on axis {axis}", word
    if check.target and words != check.target:
        yield ".".join(check.target), ".".join(words)
    yield from _misplaced(check, words, seen, output)


def _dim_or_none(word: str) -> int | None:
    return shard_dim(word) if word[1:].isdigit() else None


def _misplaced(check: Check, words: Placements, seen: Observation, output: Output) -> Iterator[tuple[str, str]]:
    """A piece of another size than its placements say. Strided shards of unequal size have no simple rule."""
    if any(word[0] == "T" for word in words):
        return
    expected = local_shape(output.shape, words, check.axes, seen.coordinates)
    if expected != output.local_shape:
        yield f"a local piece of {list(expected)} for {'.'.join(words)}", f"{list(output.local_shape)}"
