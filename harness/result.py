"""The results of a case and of a run, from which the reports, the store and the exit code are made."""

from __future__ import annotations

import msgspec

from harness.environment import Environment
from harness.measured import Measured
from harness.trace import Run
from harness.verdict import (
    ExitCode,
    FailureSignature,
    Finding,
    GoldenSource,
    NotJudged,
    Verdict,
    is_excused,
    run_exit_code,
)


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


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one case. `expectation` names the refusal or known fault that the case must show, if any."""

    case_id: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    attempts: tuple[Attempt, ...]
    world_size: int
    expectation: str | None = None
    run: Run | None = None  # None if no rank reported anything
    checks: tuple[str, ...] = ()  # names of the checks that ran, in order
    not_judged: tuple[NotJudged, ...] = ()  # the other checks, with the reason
    golden: GoldenSource = ""  # what the losses were compared with
    golden_losses: tuple[float, ...] = ()  # nats; empty where nothing was compared
    derived: tuple[str, ...] = ()  # checks whose tolerance was derived, because none was measured for such cases
    command: str = ""  # runs only this case again
    failure_signature: FailureSignature | None = None  # None where nothing failed, or nothing was found out
    measured: Measured | None = None  # None where no rank finished
    with_fix: WithFix | None = None  # None: no fault with a candidate fix is recorded for it, or it does not show
    quarantined: str = ""  # until when, by whom and why it fails no run; empty where it counts

    @property
    def excused(self) -> bool:
        """True when it is not good and counts against no run, because it is quarantined."""
        return is_excused(self)

    @property
    def seconds(self) -> float:
        """Wall seconds of all attempts."""
        return sum(attempt.wall_s for attempt in self.attempts)

    @property
    def cpu_s(self) -> float:
        """User + system seconds of all ranks and attempts."""
        return sum(attempt.cpu_s for attempt in self.attempts)


class WitnessMade(msgspec.Struct, frozen=True, kw_only=True):
    """A witness that had to be run because none was kept, such as "solo single-rowwise-v2048-f64"."""

    name: str
    cpu_s: float


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a run, in the order of selection. `interrupted`: Ctrl-C ended it early."""

    results: tuple[CaseResult, ...]
    wall_s: float
    interrupted: bool = False
    provenance: dict[str, str] = {}
    environment: Environment | None = None
    name: str = ""  # that the user gave it by --name
    started: str = ""  # UTC, ISO 8601, seconds
    witnesses: tuple[WitnessMade, ...] = ()
    left_out: tuple[str, ...] = ()  # ids that were selected and did not fit into the budget
    shard: str = ""  # "2/4": the part of the selection that this is; empty: all of it

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the run."""
        return run_exit_code(self.results, interrupted=self.interrupted, shard=self.shard)
