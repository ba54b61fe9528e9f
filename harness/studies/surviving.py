"""Runs checks on ranks, all in one job. A check that brings its ranks down is left out of the next job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from harness.engine.messages import JobOutcome

MAX_LOST = 8  # checks that may bring their ranks down before the rest is given up


class Check(Protocol):
    """A check as its ranks name it: the phase that they report while they run it."""

    @property
    def id(self) -> str:
        """What no other check is called."""


AnyCheck = TypeVar("AnyCheck", bound=Check)
Concluded = TypeVar("Concluded")


def conclude_all(
    checks: Sequence[AnyCheck],
    *,
    run: Callable[[tuple[AnyCheck, ...]], JobOutcome],
    judge: Callable[[tuple[AnyCheck, ...], JobOutcome], Sequence[Concluded]],
    lose: Callable[[AnyCheck, str], Concluded],
    fail: Callable[[JobOutcome], Exception],
    ranks: str = "ranks",
) -> list[Concluded]:
    """The conclusions on all checks, in order.

    `judge` concludes on the checks of a job that ended well, `lose` on one that brought its ranks down. Raises what
    `fail` makes of a job whose ranks failed outside of any check. `ranks`: what a job has, in words.
    """
    lost: dict[str, Concluded] = {}
    while True:
        pending = tuple(check for check in checks if check.id not in lost)
        if not pending:
            return [lost[check.id] for check in checks]
        outcome = run(pending)
        if outcome.status == "ok":
            judged = dict(zip((check.id for check in pending), judge(pending, outcome), strict=True))
            return [lost[check.id] if check.id in lost else judged[check.id] for check in checks]
        culprit = _culprit(outcome, pending)
        if culprit is None:
            raise fail(outcome)
        lost[culprit.id] = lose(culprit, f"{outcome.status}: {outcome.message}")
        if len(lost) > MAX_LOST:
            message = f"not run: more than {MAX_LOST} other checks brought their {ranks} down"
            lost |= {check.id: lose(check, message) for check in pending if check.id not in lost}


def _culprit(outcome: JobOutcome, checks: Sequence[AnyCheck]) -> AnyCheck | None:
    """The check that the first failed rank was running; None if it was running none."""
    phases = [rank.phase for rank in sorted(outcome.ranks, key=lambda rank: rank.consequence)]
    by_id = {check.id: check for check in checks}
    return next((by_id[phase] for phase in phases if phase in by_id), None)
