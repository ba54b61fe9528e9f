"""A reason: one thing that is not in a candidate as it was in the baseline, and how much it weighs."""

from __future__ import annotations

import enum
import math

import msgspec


class Topic(enum.Enum):
    """What moved. The value is the name in reports."""

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

    @property
    def place(self) -> int:
        """Its place in reports."""
        return list(Topic).index(self)


class Kind(enum.Enum):
    """What kind of reason it is, the heaviest first. The value is the name in reports and of `--allow`."""

    NEW_FAILURE = "new-failure"
    OTHER_FAILURE = "other-failure"
    REQUIRED = "required"
    KNOWN_FAULT = "known-fault"
    UNEXPECTED_PASS = "unexpected-pass"
    INTERRUPTED = "interrupted"
    LOST_COVERAGE = "lost-coverage"
    LOST_CHECK = "lost-check"
    GOLDEN = "golden"
    TOLERANCE = "tolerance"
    REFERENCES = "references"
    MATMULS = "matmuls"
    WIRE = "wire"
    SAVED_BYTES = "saved-bytes"
    FUSED = "fused"
    STILL_FAILING = "still-failing"
    FP8_MOVED = "fp8-moved"
    MOVED = "moved"
    BF16_MOVED = "bf16-moved"
    TIMES = "times"
    EXPLAINED = "explained"
    FAULT_GONE = "fault-gone"
    FIXED = "fixed"

    @property
    def weight(self) -> int:
        """Its place from the end: the heaviest has the largest."""
        return len(Kind) - list(Kind).index(self)

    @property
    def can_be_allowed(self) -> bool:
        """False for what is excused case by case, by a record or a quarantine, or must be shown."""
        return self not in (Kind.NEW_FAILURE, Kind.OTHER_FAILURE, Kind.REQUIRED, Kind.INTERRUPTED, Kind.STILL_FAILING)

    @property
    def phrase(self) -> str:
        """What such reasons say together, after their number."""
        return _PHRASES[self]


_PHRASES = {
    Kind.NEW_FAILURE: "fails, and did not in the baseline",
    Kind.OTHER_FAILURE: "fails otherwise than before",
    Kind.REQUIRED: "required, and not shown",
    Kind.KNOWN_FAULT: "new known fault",
    Kind.UNEXPECTED_PASS: "passed although a fault is recorded",
    Kind.INTERRUPTED: "run did not end",
    Kind.LOST_COVERAGE: "case was lost",
    Kind.LOST_CHECK: "check is judged no more",
    Kind.GOLDEN: "golden changed",
    Kind.TOLERANCE: "tolerance changed",
    Kind.REFERENCES: "golden or tolerance is made by the run now",
    Kind.MATMULS: "number of matmuls changed",
    Kind.WIRE: "wire bytes or calls changed",
    Kind.SAVED_BYTES: "saved bytes changed",
    Kind.FUSED: "fused operators changed",
    Kind.STILL_FAILING: "failed before and still fails",
    Kind.FP8_MOVED: "FP8 numbers moved, BF16 did not",
    Kind.MOVED: "numbers moved, no BF16 to tell why",
    Kind.BF16_MOVED: "numbers moved, of BF16 too",
    Kind.TIMES: "times changed",
    Kind.EXPLAINED: "failed before, and is a known fault",
    Kind.FAULT_GONE: "known fault is gone",
    Kind.FIXED: "failed before, and is good",
}


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One reason. `gates`: with it the answer is NO-GO. `pardon` says why one does not that otherwise would."""

    kind: Kind
    case: str | None = None  # id; None: of the whole run
    what: str
    baseline: str = ""
    candidate: str = ""
    gates: bool = True
    size: float = 0.0  # how large it is among those of its kind
    command: str = ""  # reproduces it
    details: tuple[str, ...] = ()
    signature: str = ""  # of the failure: equal ones are told once
    topics: tuple[Topic, ...] = ()  # what moved
    faults: tuple[str, ...] = ()  # the recorded faults that it is about
    pardon: str = ""

    @property
    def order(self) -> tuple[bool, int, float, str]:
        """Sorts reasons: what gates first, then by weight, size and case."""
        size = math.inf if math.isnan(self.size) else self.size
        return (not self.gates, -self.kind.weight, -size, self.case or "")


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of change that a person accepts, and why."""

    kind: Kind
    reason: str
