"""Records of known faults: they explain exactly what they list, and nothing that is new hides behind them."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.judge import Judgement
from harness.checks.recorded import (
    GONE,
    KNOWN,
    MISSING,
    OTHER_END,
    OUTDATED,
    UNEXPLAINED,
    require_rules,
    showing,
    with_known_faults,
)
from harness.errors import HarnessError
from harness.matrix.known import KnownFault, Symptom
from harness.verdict import Finding, NotJudged, Verdict
from tests.builders import a_finding, make_case, make_known

TODAY = datetime.date(2026, 11, 22)
ROWS = a_finding(rule="graphs/rows", message="operator gives wrong rows: 4 of 8", verdict=Verdict.NUMERIC, size=0.5)
GRADIENTS = a_finding(
    rule="parity/gradients",
    message="2 of 21 gradients differ",
    verdict=Verdict.NUMERIC,
    module="layers.0.wo.weight",
    size=0.25,
)
FAULT = make_known(
    requires=(Symptom(rule="graphs/rows"),),
    may_cause=(Symptom(rule="parity/gradients", module="layers.*", at_most=0.3),),
)


def judged(*findings: Finding, verdict: Verdict = Verdict.NUMERIC) -> Judgement:
    return Judgement(verdict=verdict, findings=findings)


def verdict_of(*findings: Finding, faults: tuple[KnownFault, ...] = (FAULT,), **given: Any) -> Verdict:
    return with_known_faults(judged(*findings, **given), faults, TODAY).verdict


def test_what_is_required_with_or_without_what_it_may_cause_is_known() -> None:
    assert verdict_of(ROWS) is Verdict.KNOWN
    assert verdict_of(ROWS, GRADIENTS) is Verdict.KNOWN
    assert verdict_of(ROWS, faults=()) is Verdict.NUMERIC


def test_a_fault_of_everywhere_explains_a_target_of_ones_own_where_it_shows_and_is_told() -> None:
    mine, fault = make_case(target="mine"), replace(FAULT, everywhere=True)
    assert list(showing((fault, FAULT), mine, (GRADIENTS,))) == [FAULT]
    assert list(showing((fault,), mine, (ROWS, GRADIENTS))) == [fault]
    assert list(showing((fault,), make_case(), ())) == [fault]
    found = with_known_faults(judged(ROWS, GRADIENTS), (fault,), TODAY)
    assert found.verdict is Verdict.KNOWN
    assert found.findings[0].rule == KNOWN.name
    told = {"fault": fault.name, "reason": fault.reason, "link": fault.link}
    assert dict(found.findings[0].values) == told


def test_a_required_finding_that_is_missing_is_named() -> None:
    found = with_known_faults(judged(GRADIENTS), (FAULT,), TODAY)
    assert found.verdict is Verdict.NUMERIC
    assert found.findings[0] == GRADIENTS
    assert (found.findings[1].rule, found.findings[1].values["fault"]) == (MISSING.name, "recorded")
    assert len(found.findings) == 2
    assert found.findings[1].expected == "graphs/rows"


def test_a_finding_of_a_check_that_was_not_executed_is_not_missing() -> None:
    other = make_known(name="other", requires=(Symptom(rule="metamorphic/loss"),))
    skipped = NotJudged(check="metamorphic", reason="judged in the second run")
    found = replace(judged(ROWS), checks=("graphs",), not_judged=(skipped,))
    assert with_known_faults(found, (FAULT, other), TODAY).verdict is Verdict.KNOWN
    partly = replace(found, checks=("graphs", "metamorphic"))
    assert with_known_faults(partly, (FAULT, other), TODAY).verdict is Verdict.NUMERIC


@pytest.mark.parametrize(
    "other",
    [
        replace(GRADIENTS, size=0.31),
        replace(GRADIENTS, size=math.nan),
        replace(GRADIENTS, size=None),
        replace(GRADIENTS, module="output.weight"),
        replace(GRADIENTS, module=None),
        replace(GRADIENTS, rule="parity/grad-norm"),
        replace(GRADIENTS, rule="metamorphic/gradients"),
        replace(GRADIENTS, rule="scales/amax"),
    ],
)
def test_what_no_record_explains_keeps_its_verdict_and_comes_first(other: Finding) -> None:
    found = with_known_faults(judged(ROWS, GRADIENTS, other), (FAULT,), TODAY)
    assert (found.verdict, found.findings[:3]) == (Verdict.NUMERIC, (other, ROWS, GRADIENTS))
    assert found.findings[3].rule == UNEXPLAINED.name
    assert dict(found.findings[3].values) == {"first": "the first finding is", "faults": "recorded"}


def test_every_record_that_affects_a_case_must_show_and_all_of_them_explain() -> None:
    other = make_known(name="other", requires=(Symptom(rule="scales/*"),), verdict=Verdict.INVARIANT)
    wrong_scale = a_finding(check="scales", message="wrong scale")
    both = (FAULT, other)
    assert verdict_of(wrong_scale, ROWS, faults=both, verdict=Verdict.INVARIANT) is Verdict.KNOWN
    assert verdict_of(ROWS, faults=both) is Verdict.NUMERIC
    assert verdict_of(wrong_scale, ROWS, faults=(FAULT,), verdict=Verdict.INVARIANT) is Verdict.INVARIANT


def test_another_end_than_recorded_is_not_known() -> None:
    found = with_known_faults(judged(ROWS, verdict=Verdict.HANG), (FAULT,), TODAY)
    assert found.verdict is Verdict.HANG
    assert found.findings[-1].rule == OTHER_END.name


def test_a_record_past_its_day_explains_nothing() -> None:
    old = replace(FAULT, review_by=TODAY - datetime.timedelta(days=1))
    assert verdict_of(ROWS, faults=(replace(FAULT, review_by=TODAY),)) is Verdict.KNOWN
    found = with_known_faults(judged(ROWS), (old,), TODAY)
    assert found.verdict is Verdict.NUMERIC
    assert (found.findings[-1].rule, found.findings[-1].values["day"]) == (OUTDATED.name, "2026-11-21")


def test_a_recorded_fault_that_is_gone_must_be_closed() -> None:
    found = with_known_faults(judged(verdict=Verdict.PASSED), (FAULT,), TODAY)
    assert found.verdict is Verdict.UNEXPECTED_PASS
    assert (found.findings[0].rule, found.findings[0].values["link"]) == (GONE.name, "https://example.org/1")


def test_an_infrastructure_failure_says_nothing_of_a_record() -> None:
    failed = judged(ROWS, verdict=Verdict.INFRA)
    assert with_known_faults(failed, (FAULT,), TODAY) == failed


FINDINGS = st.builds(
    Finding,
    rule=st.sampled_from(["graphs/rows", "parity/gradients", "scales/amax"]),
    says=st.just("it is wrong"),
    module=st.sampled_from([None, "layers.0.wo.weight", "output.weight"]),
    size=st.sampled_from([None, 0.1, 0.3, 0.5, math.nan, math.inf]),
    verdict=st.just(Verdict.NUMERIC),
)


@given(st.lists(FINDINGS, max_size=4), st.sampled_from([Verdict.NUMERIC, Verdict.INVARIANT, Verdict.CRASH]))
def test_known_is_never_said_of_anything_unexplained(findings: list[Finding], verdict: Verdict) -> None:
    found = with_known_faults(judged(*findings, verdict=verdict), (FAULT,), TODAY)
    shows = any(FAULT.requires[0].explains(each) for each in findings)
    known = shows and all(FAULT.explains(each) for each in findings) and verdict is FAULT.verdict
    assert (found.verdict is Verdict.KNOWN) == known
    assert set(map(str, findings)) <= set(map(str, found.findings))


def test_a_record_that_names_a_rule_no_check_has_is_refused_and_not_silent() -> None:
    require_rules((FAULT, make_known(requires=(Symptom(rule="parity/*grad-norm"),))))
    with pytest.raises(HarnessError, match=r"no check has the rule 'scales/amx'.*did you mean scales/amax"):
        require_rules((make_known(requires=(Symptom(rule="scales/amx"),)),))
    with pytest.raises(HarnessError, match="explain --checks"):
        require_rules((replace(FAULT, may_cause=(Symptom(rule="zzz"),)),))
