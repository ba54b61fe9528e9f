"""The two sides of a gate: which results can be compared, and how exactly; and a reason, what differs there."""

import enum
import math
from collections import Counter
from functools import cached_property
from typing import Self

import msgspec

from harness.result import CaseResult, Environment, RunResult
from harness.text import changed_facts, counted
from harness.verdict import Verdict


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

    `phrase` follows the number of such reasons; `topic` is what moved, None if each reason says it.
    """

    NEW_FAILURE = "new-failure", "fails, and did not in the baseline", Topic.VERDICT
    OTHER_FAILURE = "other-failure", "fails differently", Topic.VERDICT
    REQUIRED = "required", "required case missing", None
    KNOWN_FAULT = "known-fault", "new known issue", Topic.VERDICT
    UNEXPECTED_PASS = "unexpected-pass", "passed despite a known issue", Topic.VERDICT
    INTERRUPTED = "interrupted", "run did not end", Topic.COVERAGE
    LOST_COVERAGE = "lost-coverage", "case was lost", Topic.COVERAGE
    LOST_CHECK = "lost-check", "check no longer runs", Topic.CHECKS
    GOLDEN = "golden", "golden changed", Topic.REFERENCES
    TOLERANCE = "tolerance", "tolerance changed", Topic.REFERENCES
    REFERENCES = "references", "golden or tolerance now comes from the run itself", Topic.REFERENCES
    MATMULS = "matmuls", "number of matmuls changed", Topic.MATMULS
    WIRE = "wire", "communicated bytes or calls changed", Topic.TRAFFIC
    SAVED_BYTES = "saved-bytes", "saved bytes changed", Topic.MEMORY
    FUSED = "fused", "fused operators changed", Topic.FUSION
    STILL_FAILING = "still-failing", "failed before and still fails", Topic.VERDICT
    FP8_MOVED = "fp8-moved", "FP8 numbers moved, BF16 did not", None
    MOVED = "moved", "numbers moved, no BF16 to tell why", None
    BF16_MOVED = "bf16-moved", "numbers moved, in BF16 too", None
    TIMES = "times", "times changed", Topic.TIMES
    EXPLAINED = "explained", "failed before, now a known issue", Topic.VERDICT
    FAULT_GONE = "fault-gone", "known issue is gone", Topic.VERDICT
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
        """Sort reasons: what gates first, then by weight, size and case."""
        size = math.inf if math.isnan(self.size) else self.size
        return (not self.gates, list(Kind).index(self.kind), -size, self.case or "")


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of change that a person accepts, and why."""

    kind: Kind
    reason: str


_SAME_ARITHMETIC = ("device", "cpu", "threads", "limits", "platform")


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    baseline: CaseResult
    candidate: CaseResult

    @property
    def id(self) -> str:
        return self.candidate.case_id


def _is_sound(case: CaseResult) -> bool:
    return case.good or case.verdict is Verdict.CHANGED


class Sides(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    baseline: RunResult
    candidate: RunResult

    @cached_property
    def before(self) -> dict[str, CaseResult]:
        return {case.case_id: case for case in self.baseline.results}

    @cached_property
    def after(self) -> dict[str, CaseResult]:
        return {case.case_id: case for case in self.candidate.results}

    @cached_property
    def pairs(self) -> dict[str, Pair]:
        """Return the cases that both ran, by id, in the order of the candidate."""
        return {
            name: Pair(baseline=self.before[name], candidate=case)
            for name, case in self.after.items()
            if name in self.before and self.before[name].ran and case.ran
        }

    @cached_property
    def compared(self) -> tuple[Pair, ...]:
        """Return the cases that are good, or only differ from a formula, on both sides: their numbers are compared."""
        return tuple(pair for pair in self.pairs.values() if _is_sound(pair.baseline) and _is_sound(pair.candidate))

    @property
    def undecidable(self) -> tuple[str, str] | None:
        """Return why these results decide nothing, whatever else differs between them, and what to do; None if they do.

        A case decides where both ran it, and the machine failed on neither side.
        """
        if not self.pairs:
            return "no case was run in both results", "run the same cases for both"
        verdicts = ((pair.baseline.verdict, pair.candidate.verdict) for pair in self.pairs.values())
        if all(Verdict.INFRA in both for both in verdicts):
            cases = counted(len(self.pairs), "case")
            return f"the machine or the harness failed in each of {cases} that both ran", "run them again"
        return None

    @property
    def nothing_good(self) -> tuple[str, str] | None:
        """Why not even equal results would be good ones, and what to do; None if a good case was checked twice."""
        if not self.compared:
            baseline, candidate = (sum(case.good for case in run.results) for run in (self.baseline, self.candidate))
            what = f"no case is good in both results (baseline {baseline} good, candidate {candidate} good)"
            return what, "make the failing cases pass, or compare with a run in which they do"
        if not any(pair.baseline.checks and pair.candidate.checks for pair in self.compared):
            return "no case that is good in both results was checked in both", "run the cases for both again"
        return None

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return which cases of either side are not compared: how many, for each reason that there is."""
        ids = {*self.before, *self.after} - {pair.id for pair in self.compared}
        counts = Counter(map(self._why_left_out, ids)).items()
        return tuple(f"{count} {reason}" for reason, count in sorted(counts, key=lambda item: (-item[1], item[0])))

    def _why_left_out(self, case_id: str) -> str:
        before, after = self.before.get(case_id), self.after.get(case_id)
        if before is None or after is None:
            return f"only in the {'candidate' if before is None else 'baseline'}"
        if not (before.ran and after.ran):
            return "not run"
        one_side = {(True, False): "the candidate", (False, True): "the baseline"}
        return f"not good in {one_side.get((before.good, after.good), 'both')}"

    @property
    def environments(self) -> tuple[Environment, Environment]:
        """Of the baseline and of the candidate; empty if a run does not say."""
        return self.baseline.start.environment or Environment(), self.candidate.start.environment or Environment()

    @property
    def inexact_reasons(self) -> tuple[str, ...]:
        """Return the hardware differences because of which bits may differ; empty if every bit can be compared."""
        before, after = self.environments
        if not (self.baseline.start.environment and self.candidate.start.environment):
            return ("a run does not say where it was made",)
        differs = changed_facts(before.words, after.words, _SAME_ARITHMETIC)
        return (*differs, *([f"{after.device} sums in any order"] if not differs and after.device != "cpu" else ()))

    @property
    def same_device(self) -> bool:
        """Return True if the same things are counted: the virtual device of a CPU, or a GPU of one name."""
        before, after = self.environments
        return before.device == after.device

    def cost(self, case_id: str) -> float:
        """Return the CPU seconds of a case in the candidate, or else in the baseline."""
        case = self.after.get(case_id) or self.before.get(case_id)
        return 0.0 if case is None else case.cpu_s

    def verdicts(self, case_id: str) -> tuple[str, str]:
        before, after = self.before.get(case_id), self.after.get(case_id)
        first, second = ("not selected" if case is None else case.verdict.value for case in (before, after))
        return first, second
