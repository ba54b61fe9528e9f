"""Orders findings: the one nearest to the cause first.

One fault breaks many things. The rule that a finding is about has a stage, which says how near it is to the cause: a
wrong scale makes gradients wrong, and no gradient makes a scale wrong in the same step. But nothing causes what was
seen in an earlier step: gradients that are wrong in step 1 make scales wrong in step 2. So causes come first if they
are not later than the first wrong number, by stage and then by step; everything else by step and then by stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness.checks.catalogue import place_of, stage_of
from harness.checks.rule import Stage
from harness.verdict import Finding, Verdict


def by_cause(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings in the order of causes. Those that could not be judged say nothing about a cause and come last."""
    found = tuple(findings)
    wrong_from = _first_wrong_number(found)

    def key(finding: Finding) -> tuple[int, ...]:
        stage, step = stage_of(finding.rule).place, finding.step or 1
        rank = place_of(finding.check), finding.verdict is not Verdict.INVARIANT
        if not finding.judged:
            return (2,)
        return (0, stage, step, *rank) if _may_be_cause(finding, wrong_from) else (1, step, stage, *rank)

    return tuple(sorted(found, key=key))


def first_effect(findings: Sequence[Finding]) -> int | None:
    """The index of the first finding that may follow from those before it; None where there is no such division."""
    wrong_from = _first_wrong_number(findings)
    causes = [_may_be_cause(finding, wrong_from) for finding in findings]
    return causes.index(False) if causes[:1] == [True] and not all(causes) else None


def _may_be_cause(finding: Finding, wrong_from: float) -> bool:
    return finding.judged and stage_of(finding.rule).is_cause and (finding.step or 1) <= wrong_from


def _first_wrong_number(findings: Iterable[Finding]) -> float:
    """The first step in which a number is wrong; infinite where none is. What is kept in memory is no number."""
    stages = ((stage_of(each.rule), each) for each in findings if each.judged)
    numbers = (each for stage, each in stages if not stage.is_cause and stage is not Stage.MEMORY)
    return min((each.step for each in numbers if each.step is not None), default=math.inf)
