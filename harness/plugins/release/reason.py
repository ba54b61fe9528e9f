"""A reason: one thing that differs between the candidate and the baseline, and how much it weighs."""

import enum
import math
from typing import Self

import msgspec


class Topic(enum.Enum):
    """What moved, in the order of reports. The value is the name in reports."""

    VERDICT = "verdict"
    LOSSES = "losses"
    GRADIENTS = "gradients"
    CASTS = "casts"
    OPERANDS = "operands"  # of matmuls
    MATMULS = "matmuls"
    TRAFFIC = "traffic"
    MEMORY = "memory"
    FUSION = "fusion"
    CHECKS = "checks"
    REFERENCES = "references"
    COVERAGE = "coverage"
    TIMES = "times"


class Kind(enum.Enum):
    """What kind of reason it is, the heaviest first. The value is the name in reports and of `--allow`.

    `phrase` follows the number of such reasons; `topic` is what moved, None where each reason says it.
    """

    NEW_FAILURE = "new-failure", "fails, and did not in the baseline", Topic.VERDICT
    OTHER_FAILURE = "other-failure", "fails differently", Topic.VERDICT
    REQUIRED = "required", "required case missing", None
    KNOWN_FAULT = "known-fault", "new known fault", Topic.VERDICT
    UNEXPECTED_PASS = "unexpected-pass", "passed although a fault is recorded", Topic.VERDICT
    INTERRUPTED = "interrupted", "run did not end", Topic.COVERAGE
    LOST_COVERAGE = "lost-coverage", "case was lost", Topic.COVERAGE
    LOST_CHECK = "lost-check", "check no longer runs", Topic.CHECKS
    GOLDEN = "golden", "golden changed", Topic.REFERENCES
    TOLERANCE = "tolerance", "tolerance changed", Topic.REFERENCES
    REFERENCES = "references", "golden or tolerance now comes from the run itself", Topic.REFERENCES
    MATMULS = "matmuls", "number of matmuls changed", Topic.MATMULS
    WIRE = "wire", "wire bytes or calls changed", Topic.TRAFFIC
    SAVED_BYTES = "saved-bytes", "saved bytes changed", Topic.MEMORY
    FUSED = "fused", "fused operators changed", Topic.FUSION
    STILL_FAILING = "still-failing", "failed before and still fails", Topic.VERDICT
    FP8_MOVED = "fp8-moved", "FP8 numbers moved, BF16 did not", None
    MOVED = "moved", "numbers moved, no BF16 to tell why", None
    BF16_MOVED = "bf16-moved", "numbers moved, in BF16 too", None
    TIMES = "times", "times changed", Topic.TIMES
    EXPLAINED = "explained", "failed before, now a known fault", Topic.VERDICT
    FAULT_GONE = "fault-gone", "known fault is gone", Topic.VERDICT
    FIXED = "fixed", "failed before, now good", Topic.VERDICT

    phrase: str
    topic: Topic | None

    def __new__(cls, value: str, phrase: str, topic: Topic | None) -> Self:
        made = object.__new__(cls)
        made._value_, made.phrase, made.topic = value, phrase, topic
        return made

    @property
    def can_be_allowed(self) -> bool:
        """False for what is waived case by case, by a record or a quarantine, or is required."""
        return self not in (Kind.NEW_FAILURE, Kind.OTHER_FAILURE, Kind.REQUIRED, Kind.INTERRUPTED, Kind.STILL_FAILING)


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One reason. `gates`: with it the answer is NO-GO. `waiver`: why it does not gate although it would."""

    kind: Kind
    case: str | None = None  # id; None: of the whole run
    what: str
    baseline: str = ""
    candidate: str = ""
    gates: bool = True
    size: float = 0.0  # how large it is among those of its kind
    command: str = ""  # reproduces it
    details: tuple[str, ...] = ()
    signature: str = ""  # of the failure: reports show equal ones once
    topics: tuple[Topic, ...] = ()  # what moved
    faults: tuple[str, ...] = ()  # the recorded faults that it is about
    waiver: str = ""

    @property
    def order(self) -> tuple[bool, int, float, str]:
        """Sorts reasons: what gates first, then by weight, size and case."""
        size = math.inf if math.isnan(self.size) else self.size
        return (not self.gates, list(Kind).index(self.kind), -size, self.case or "")


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of change that a person accepts, and why."""

    kind: Kind
    reason: str
