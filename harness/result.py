"""The record of a run: how it started, the result of every case, and how it ended.

`store.py` writes each of `RunStart`, `CaseResult` and `RunEnd` as a line of its own; everything that is shown, compared
or merged is read from a `RunResult`.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from harness.environment import Environment
from harness.measured import Measured, Numbers
from harness.run_options import RunOptions
from harness.trace import RankFailure, Run
from harness.verdict import (
    ExitCode,
    FailureSignature,
    Finding,
    GoldenSource,
    NotJudged,
    Verdict,
    exit_code,
)

SCHEMA: Literal[4] = 4


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at running a case. It is retried only after an attempt that ended as `infra`."""

    verdict: Verdict
    message: str
    wall_s: float
    cpu_s: float
    detected_s: float | None = None  # from the start to the detection of the first failure
    nodes: tuple[str, ...] = ()  # of a cluster: where its ranks ran


class WithFix(msgspec.Struct, frozen=True, kw_only=True):
    """The second run of a case with a recorded fault: with the candidate fixes, judged by every check."""

    fixes: tuple[str, ...]  # "cases/fixes/scattered_rows.py:apply"
    verdict: Verdict
    findings: tuple[Finding, ...]
    checks: tuple[str, ...]


class WitnessMade(msgspec.Struct, frozen=True, kw_only=True):
    """A witness that had to be run because none was kept, such as "solo single-rowwise-v2048-f64"."""

    name: str
    cpu_s: float
    retried: tuple[str, ...] = ()  # why earlier attempts ended, each a fault of the machine


class RunStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="start"):
    """What is known of a run before its first rank starts.

    `cases` are ids in the order of selection; those in `left_out` did not fit into the budget. `environment` is null
    for a run of several environments. `started` is UTC in ISO 8601. `shard` is "2/4" for a part of the selection.
    `argv` is the command line that runs these cases in this way.
    """

    schema: Literal[4] = SCHEMA
    cases: tuple[str, ...] = ()
    options: RunOptions = RunOptions()
    environment: Environment | None = None
    name: str = ""  # given by the user
    started: str = ""
    left_out: tuple[str, ...] = ()
    shard: str = ""
    argv: tuple[str, ...] = ()


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a case ran on a machine with GPUs, and why not on these. `idle`: GPUs that `dev evidence` could verify."""

    device: str  # "cpu" or the name of the GPUs
    gpus: int = 0  # that the run had
    exact: bool = False  # with the exact matmul, which nobody asked for
    why: str = ""
    idle: str = ""


class CaseResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="case"):
    """The result of one case.

    `losses` (nats) and `grad_norms` are those of the lowest rank that finished; empty if none did. `expectation` is the
    refusal or known fault that it must show. `checks` ran, in this order; `not_judged` did not. The tolerance of those
    in `derived` was derived, because none was measured for such cases. `command` runs only this case again. What is
    null was not there: no rank finished, nothing failed, nothing is recorded, there are no GPUs.
    """

    case_id: str = msgspec.field(name="id")
    verdict: Verdict
    findings: tuple[Finding, ...]
    attempts: tuple[Attempt, ...]
    world_size: int
    expectation: str | None = None
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    checks: tuple[str, ...] = ()
    not_judged: tuple[NotJudged, ...] = ()
    golden: GoldenSource = ""  # what the losses were compared with
    golden_losses: tuple[float, ...] = ()  # nats; empty where nothing was compared
    derived: tuple[str, ...] = ()
    command: str = ""
    failure_signature: FailureSignature | None = None  # None where nothing failed, or nothing was found out
    measured: Measured | None = None  # None where no rank finished
    with_fix: WithFix | None = None  # None: no fault with a candidate fix is recorded for it, or it does not show
    quarantined: str = ""  # until when, by whom and why it fails no run; empty where it counts
    unreleased: str = ""  # the unreleased builds it ran with, "torch 2.16.0.dev20261120"; empty with releases
    place: Place | None = None  # None without GPUs, with --device cuda, and where the case did not run
    run: Run | None = None  # what ranks reported, until it is stored: no line has it

    @property
    def ran(self) -> bool:
        """False for a case that the run never got to."""
        return self.verdict is not Verdict.NOT_RUN

    @property
    def good(self) -> bool:
        return self.verdict.good

    @property
    def excused(self) -> bool:
        """True when it is not good and counts against no run: it is quarantined, or only differs from a formula.

        The latter with an unreleased build alone: a release can be verified, once for all who use it.
        """
        differs = bool(self.unreleased) and self.verdict is Verdict.CHANGED
        return self.ran and not self.good and (bool(self.quarantined) or differs)

    @property
    def headline(self) -> str:
        """The sentence of the first finding; empty where there is none."""
        return self.findings[0].first_line if self.findings else ""

    @property
    def seconds(self) -> float:
        """Wall seconds of all attempts."""
        return sum(attempt.wall_s for attempt in self.attempts)

    @property
    def cpu_s(self) -> float:
        """User + system seconds of all ranks and attempts."""
        return sum(attempt.cpu_s for attempt in self.attempts)


class CaseNumbers(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="case"):
    """What `history` follows of the line of a case: much faster to read than all of it."""

    verdict: Verdict
    seconds: float
    measured: Numbers | None


class RunEnd(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="end"):
    """What is known of a run when it ends."""

    wall_s: float = 0.0  # of all its parts, where it was resumed
    interrupted: bool = False
    provenance: dict[str, str] = {}
    witnesses: tuple[WitnessMade, ...] = ()  # those that had to be run


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run, with its cases in the order of selection."""

    results: tuple[CaseResult, ...]
    start: RunStart = RunStart()
    end: RunEnd = RunEnd()
    damaged: Mapping[str, str | None] = {}  # what could not be read of its file, with the case that it names

    @property
    def exit_code(self) -> ExitCode:
        if self.end.interrupted:
            return ExitCode.INTERRUPTED
        if self.start.shard and not self.results:  # more shards than cases
            return ExitCode.GOOD
        return exit_code([Verdict.PASSED if result.excused else result.verdict for result in self.results])

    @property
    def cpu_s(self) -> float:
        """User + system seconds of the ranks of all cases, without witnesses."""
        return sum(result.cpu_s for result in self.results)

    @property
    def totals(self) -> dict[str, int]:
        """The number of cases of every verdict."""
        return verdict_totals([result.verdict for result in self.results])

    @property
    def check_totals(self) -> dict[str, int]:
        """How many checks were judged over all cases, and how many were not."""
        return {
            "judged": sum(len(result.checks) for result in self.results),
            "not_judged": sum(len(result.not_judged) for result in self.results),
        }


def verdict_totals(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """The number of cases of every verdict, zeros too, in the order of `Verdict`."""
    return {verdict.value: verdicts.count(verdict) for verdict in Verdict}
