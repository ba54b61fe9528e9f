"""Runs checks on ranks and judges what these observed.

Four questions: did it run, is the whole tensor right, are the placements valid, and did it receive no more bytes than
necessary? A problem that a known deviation explains is not a failure; a known deviation without its problem is one.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from harness.engine.cluster import Cluster
from harness.engine.messages import Job, JobOutcome
from harness.plugins.conformance.known import Deviation, deviations_of
from harness.plugins.conformance.operator_checks import (
    WORLD_SIZE,
    Batch,
    Observation,
    OperatorCheck,
    Output,
    local_shape,
    shard_dim,
)
from harness.plugins.conformance.strategy import cheapest_bytes, may_be_partial
from harness.sources import installed_version
from harness.studies.surviving import run_surviving
from harness.trace.record import Patch, Record

PROGRAM = "harness.plugins.conformance.worker.checks"

ProblemKind = Literal["missing", "raised", "wrong", "placement", "bytes", "lost"]
Status = Literal["passed", "known", "failed", "unexpected_pass"]
_MISSING = ("sharding strategy", "is not supported", "not implemented")
_SLACK_BYTES = 0.5  # costs are not always integers
# A check takes about 6 ms on two busy cores. A hanging rank must not delay a small run by more than a minute.
_BASE_DEADLINE_S = 45.0
_DEADLINE_PER_CHECK_S = 0.1


class Problem(Record, frozen=True, kw_only=True):
    """One problem, as observed on one rank: the first, if several ranks have it."""

    kind: ProblemKind
    rank: int | None = None
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
        return self.status in ("passed", "known")


def run_checks(engine: Cluster, checks: Sequence[OperatorCheck], injections: Sequence[Patch] = ()) -> list[Conclusion]:
    """Run and judge all checks, in order. Raises RanksFailed when the ranks fail outside of any check."""
    torch = installed_version("torch") or "0"

    def judge(pending: Sequence[OperatorCheck], outcome: JobOutcome) -> list[Conclusion]:
        ranks = [msgspec.msgpack.decode(rank.payload or b"", type=list[Observation]) for rank in outcome.ranks]
        observed = zip(*ranks, strict=True)
        return [conclude(check, seen, torch=torch) for check, seen in zip(pending, observed, strict=True)]

    return run_surviving(
        engine,
        checks,
        job_of=lambda pending: Job(
            job_id="conformance",
            world_size=WORLD_SIZE,
            payload=msgspec.msgpack.encode(Batch(checks=pending, injections=tuple(injections))),
            deadline_s=_BASE_DEADLINE_S + _DEADLINE_PER_CHECK_S * len(pending),
            one_node=True,
        ),
        judge=judge,
        conclude_lost=conclude_lost,
        where="conformance",
        fix="check the memory of this machine, and --inject.",
    )


def conclude(check: OperatorCheck, observed: Sequence[Observation], *, torch: str) -> Conclusion:
    budget = cheapest_bytes(check)
    moved = max((observation.wire_bytes for observation in observed), default=0.0)
    return _conclusion(check, deviations_of(check, torch), tuple(_problems(check, observed, budget)), moved, budget)


def conclude_lost(check: OperatorCheck, message: str) -> Conclusion:
    """Return the conclusion on a check that brought its ranks down or made them hang."""
    problem = Problem(kind="lost", expected="a result from every rank", found=message)
    return _conclusion(check, (), (problem,), 0.0, cheapest_bytes(check))


def _conclusion(
    check: OperatorCheck, known: Sequence[Deviation], problems: tuple[Problem, ...], moved: float, budget: float
) -> Conclusion:
    explanations = [
        next((deviation for deviation in known if deviation.explains(one.kind, one.found)), None) for one in problems
    ]
    status: Status = "passed"
    shown = [explanation for explanation in explanations if explanation is not None]
    if problems:
        status = "failed" if None in explanations else "known"
    elif outdated := [deviation for deviation in known if deviation.always]:
        status, shown = "unexpected_pass", outdated
    return Conclusion(
        check=check,
        status=status,
        problems=problems,
        deviations=tuple(dict.fromkeys(deviation.name for deviation in shown)),
        wire_bytes=moved,
        cheapest_bytes=budget,
    )


def _problems(check: OperatorCheck, observed: Sequence[Observation], budget: float) -> Iterator[Problem]:
    """All problems of a check; of problems that several ranks share, the first."""
    raised = sorted(
        (observation for observation in observed if observation.error), key=lambda observation: observation.consequence
    )
    if raised:
        first = raised[0]
        yield Problem(
            kind="missing" if any(text in first.error for text in _MISSING) else "raised",
            rank=first.rank,
            expected="the operator to run" if first.phase != "result" else "a result that can be replicated",
            found=first.error,
        )
    else:
        first_of_kind: dict[str, Problem] = {}
        for problem in (problem for observation in observed for problem in _output_problems(check, observation)):
            first_of_kind.setdefault(problem.kind, problem)
        yield from first_of_kind.values()
    finished = all(observation.phase == "result" for observation in observed)
    over = max(observed, key=lambda observation: observation.wire_bytes, default=None)
    if finished and over is not None and over.wire_bytes > budget + _SLACK_BYTES:
        yield Problem(
            kind="bytes",
            rank=over.rank,
            expected=f"at most {budget:g} bytes received",
            found=f"{over.wire_bytes:g} bytes by {', '.join(over.calls)}",
        )


def _output_problems(check: OperatorCheck, seen: Observation) -> Iterator[Problem]:
    if not seen.outputs:
        yield Problem(kind="wrong", rank=seen.rank, expected="a result", found="none")
    for index, output in enumerate(seen.outputs):
        right = f"{list(output.expected_shape)} {output.expected_dtype}"
        found = f"{list(output.shape)} {output.dtype}"
        if output.wrong or found != right:
            yield Problem(
                kind="wrong",
                rank=seen.rank,
                expected=f"{right}, equal to the operator on the full tensor",
                found=f"{found}, {output.wrong} elements differ by up to {output.largest_error:g}: {output.example}",
            )
        for expected, given in _invalid_placements(check, seen, index, output):
            yield Problem(kind="placement", rank=seen.rank, expected=expected, found=given)


def _invalid_placements(
    check: OperatorCheck, seen: Observation, index: int, output: Output
) -> Iterator[tuple[str, str]]:
    placements = output.placements
    if placements is None:
        yield "a DTensor", "a plain tensor"
        return
    if len(placements) != len(check.axes):
        yield f"{len(check.axes)} placements", f"{len(placements)}"
        return
    for axis, placement in enumerate(placements):
        dim = shard_dim(placement) if placement[1:].isdigit() else None
        if dim is not None and dim >= len(output.shape):
            yield f"a shard of one of {len(output.shape)} dims", placement
            return
        if placement[0] not in "RSTP":
            yield "a replicated, sharded or partial placement", placement
        if placement[0] == "P" and not may_be_partial(check, axis, index, placement):
            yield f"no such partial placement on mesh axis {axis}", placement
    written = ".".join(placements)
    if check.target and placements != check.target:
        yield ".".join(check.target), written
    if "T" not in {placement[0] for placement in placements}:  # uneven strided shards follow no simple rule
        local = local_shape(output.shape, placements, check.axes, seen.coordinates)
        if local != output.local_shape:
            yield f"local shape {list(local)} for {written}", f"{list(output.local_shape)}"
