"""The result of one case, and of a whole run: what every report, the store and the exit code are made from."""

from __future__ import annotations

import msgspec

from harness.trace import Run
from harness.verdict import ExitCode, Finding, Verdict, exit_code


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try at running a case. More than one means that the earlier ones ended as `infra` and were retried."""

    verdict: Verdict
    message: str
    wall_s: float
    cpu_s: float
    detected_s: float | None = None  # from start to the detection of the first failure


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one case ended. `expectation` names the refusal or the known fault that this case must show, if any."""

    case_id: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    attempts: tuple[Attempt, ...]
    world_size: int
    expectation: str | None = None
    run: Run | None = None  # None when nothing came back
    checks: tuple[str, ...] = ()  # names of the checks that were executed, in order
    command: str = ""  # reproduces this case alone

    @property
    def seconds(self) -> float:
        """Wall seconds of all attempts together."""
        return sum(attempt.wall_s for attempt in self.attempts)

    @property
    def cpu_s(self) -> float:
        """User + system seconds of all ranks and attempts together."""
        return sum(attempt.cpu_s for attempt in self.attempts)


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run: results in the order of selection. `interrupted` means that Ctrl-C cut it short."""

    results: tuple[CaseResult, ...]
    wall_s: float
    interrupted: bool = False
    provenance: dict[str, str] = {}

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the command that made this run."""
        if self.interrupted:
            return ExitCode.INTERRUPTED
        return exit_code([result.verdict for result in self.results])
