"""The kill matrix: which checks saw which planted fault in which case, and what weaker harnesses saw of the same runs.

Owns these values and what follows from them. `power.py` fills the matrix, `report/power.py` shows it.
"""

from __future__ import annotations

import math

import msgspec

from harness.planted.faults import FaultClass
from harness.verdict import Verdict

LOSS_ONLY_NATS = 0.01  # what a watcher of loss curves calls a difference
SQNR_DB = 20.0  # the usual bar for "the same but for FP8" in unit tests of FP8 code


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What two weaker harnesses see of one run.

    `loss_gap`: largest |loss - golden| in nats, infinite for a run that did not finish. `sqnr_db`: of the worst
    gradient of the first step against the solo witness; None when there is nothing to compare.
    """

    loss_gap: float
    sqnr_db: float | None

    @property
    def by_loss(self) -> bool:
        """True when watching the loss would have found it."""
        return not self.loss_gap <= LOSS_ONLY_NATS

    @property
    def by_sqnr(self) -> bool:
        """True when the signal-to-noise ratio, or a run that did not finish, would have found it."""
        return math.isinf(self.loss_gap) or (self.sqnr_db is not None and not self.sqnr_db > SQNR_DB)


BLIND = Sight(loss_gap=math.inf, sqnr_db=None)  # of a run that did not finish


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one carrier, with a fault in it or clean."""

    fault: str | None  # None: clean
    group: FaultClass | None
    equivalent: bool
    case_id: str
    verdict: Verdict
    checks: tuple[str, ...]  # names of the checks that saw something, without those that cry in the clean run as well
    first_step: int | None
    excess: float | None  # the largest found/allowed among findings that state both
    message: str  # of the first finding
    sight: Sight

    @property
    def caught(self) -> bool:
        """True when a check, or the engine, saw what it does not see in the clean run of the case."""
        judged = not self.verdict.good and self.verdict not in (Verdict.INFRA, Verdict.NOT_RUN)
        return judged and bool(self.checks)


class Power(msgspec.Struct, frozen=True, kw_only=True):
    """The kill matrix: trials of faults in the order of the list, and the clean runs of their carriers."""

    trials: tuple[Trial, ...]
    clean: tuple[Trial, ...]
    wall_s: float
    interrupted: bool

    @property
    def false_findings(self) -> tuple[Trial, ...]:
        """Clean runs that did not come out good: what their carriers catch is worth nothing."""
        return tuple(trial for trial in self.clean if not trial.verdict.good)

    @property
    def escaped(self) -> tuple[Trial, ...]:
        """Trials of faults that must be found and were not."""
        return tuple(trial for trial in self.trials if not trial.equivalent and not trial.caught)
