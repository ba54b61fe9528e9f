"""The two sides of a gate: which results can be compared, and how exactly."""

from __future__ import annotations

from functools import cached_property

import msgspec

from harness.environment import Environment, changed_facts
from harness.result import CaseResult, RunResult
from harness.verdict import Verdict

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
        """The cases that both ran, by id, in the order of the candidate."""
        return {
            name: Pair(baseline=self.before[name], candidate=case)
            for name, case in self.after.items()
            if name in self.before and self.before[name].ran and case.ran
        }

    @cached_property
    def compared(self) -> tuple[Pair, ...]:
        """The cases that are good, or only differ from a formula, on both sides: their numbers are compared."""
        return tuple(pair for pair in self.pairs.values() if _is_sound(pair.baseline) and _is_sound(pair.candidate))

    @property
    def environments(self) -> tuple[Environment, Environment]:
        """Of the baseline and of the candidate; empty where a run does not say."""
        return self.baseline.start.environment or Environment(), self.candidate.start.environment or Environment()

    @property
    def inexact_reasons(self) -> tuple[str, ...]:
        """The hardware differences because of which bits may differ; empty if every bit can be compared."""
        before, after = self.environments
        if not (self.baseline.start.environment and self.candidate.start.environment):
            return ("a run does not say where it was made",)
        differs = changed_facts(before.words, after.words, _SAME_ARITHMETIC)
        return (*differs, *([f"{after.device} sums in any order"] if not differs and after.device != "cpu" else ()))

    @property
    def same_device(self) -> bool:
        """True when the same things are counted: the virtual device of a CPU, or a GPU of one name."""
        before, after = self.environments
        return before.device == after.device

    def cost(self, case_id: str) -> float:
        """The CPU seconds of a case in the candidate, or else in the baseline."""
        case = self.after.get(case_id) or self.before.get(case_id)
        return 0.0 if case is None else case.cpu_s

    def verdicts(self, case_id: str) -> tuple[str, str]:
        before, after = self.before.get(case_id), self.after.get(case_id)
        first, second = ("not selected" if case is None else case.verdict.value for case in (before, after))
        return first, second
