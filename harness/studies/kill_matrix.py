"""The kill matrix: which checks detected which planted fault in which case, next to two common baselines.

`power.py` measures it, `report/power.py` renders it.
"""

from __future__ import annotations

import math

import msgspec

from harness.matrix.caseid import parse_case_id
from harness.matrix.faults import FaultClass
from harness.matrix.targets import REFERENCE
from harness.verdict import Verdict, check_of

LOSS_ONLY_NATS = 0.01  # what counts as a difference when loss curves are compared
SQNR_DB = 20.0  # the usual threshold in unit tests of FP8 code


class BaselineDetection(msgspec.Struct, frozen=True, kw_only=True):
    """What two common ways of testing FP8 training detect in a run: comparing losses, and the SQNR of gradients.

    `loss_gap`: largest |loss - golden| in nats, infinite for a run that did not finish. `sqnr_db`: of the worst
    gradient of the first step against the solo witness; None if there is nothing to compare.
    """

    loss_gap: float
    sqnr_db: float | None

    @property
    def by_loss(self) -> bool:
        """True if comparing losses detects it."""
        return not self.loss_gap <= LOSS_ONLY_NATS

    @property
    def by_sqnr(self) -> bool:
        """True if the SQNR is too low or the run did not finish."""
        return math.isinf(self.loss_gap) or (self.sqnr_db is not None and not self.sqnr_db > SQNR_DB)


UNFINISHED = BaselineDetection(loss_gap=math.inf, sqnr_db=None)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a carrier, with a planted fault or clean."""

    fault: str | None  # None: clean
    group: FaultClass | None
    equivalent: bool
    case_id: str
    verdict: Verdict
    rules: tuple[str, ...]  # that are broken, sorted, without those of checks that also fail in the clean run
    first_step: int | None
    excess: float | None  # the largest found/allowed of the findings that state both
    message: str  # of the first finding
    baseline: BaselineDetection = msgspec.field(name="sight")
    parity: float | None = None  # the largest relative distance of a gradient from solo; None where not compared
    not_reached: str = ""  # why it is not a trial of the checks: the fault changed nothing, or broke when planted

    @property
    def checks(self) -> tuple[str, ...]:
        """The names of the checks that found something."""
        return tuple(dict.fromkeys(map(check_of, self.rules)))

    @property
    def detected(self) -> bool:
        """True if a check, or the engine, failed that does not fail in the clean run of the case."""
        judged = not self.verdict.good and self.verdict not in (Verdict.INFRA, Verdict.NOT_RUN)
        return judged and bool(self.checks) and not self.not_reached

    @property
    def is_proof(self) -> bool:
        """True if the checks are to detect it."""
        return not self.equivalent and not self.not_reached


class Power(msgspec.Struct, frozen=True, kw_only=True):
    """The kill matrix: a trial of every fault in each of its carriers, and the clean runs of the carriers."""

    trials: tuple[Trial, ...]
    clean: tuple[Trial, ...]
    not_planted: dict[str, str] = msgspec.field(default_factory=dict)  # faults, and what they need
    wall_s: float
    interrupted: bool

    @property
    def false_positives(self) -> tuple[Trial, ...]:
        """Clean runs that failed: detections in these carriers prove nothing."""
        return tuple(trial for trial in self.clean if not trial.verdict.good)

    @property
    def undetected(self) -> tuple[Trial, ...]:
        """Trials of faults that must be detected and were not."""
        return tuple(trial for trial in self.trials if trial.is_proof and not trial.detected)

    @property
    def not_reached(self) -> tuple[Trial, ...]:
        """Trials of faults that did not reach the target."""
        return tuple(trial for trial in self.trials if trial.not_reached)

    @property
    def unplantable(self) -> tuple[Trial, ...]:
        """Of them those in cases that the list names for the fault: there it must have an effect."""
        return tuple(trial for trial in self.not_reached if parse_case_id(trial.case_id).target == REFERENCE)
