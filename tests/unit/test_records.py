"""Records about cases: their files are read strictly, and what each of them explains, excuses or asks for.

A known fault explains what it lists and hides nothing new.
"""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.catalogue import GONE, KNOWN, MISSING, OTHER_END, OUTDATED, UNEXPLAINED
from harness.checks.judge import Judgement, require_rules, showing, with_known_faults
from harness.errors import HarnessError
from harness.matrix.caseid import parse_case_id
from harness.matrix.records import (
    KnownFault,
    Symptom,
    known_rules,
    known_with_shipped,
    matching,
    quarantine_of,
    read_known,
    read_quarantine,
    read_required,
)
from harness.report.ci import junit_report
from harness.report.run import run_sections, totals_line
from harness.report.sections import text_of
from harness.result import RunResult
from harness.verdict import ExitCode, Finding, NotJudged, Verdict
from tests.builders import a_finding, make_case, make_known, make_result
from tests.unit.conftest import written

RECORD = """\
[[fault]]
name = "nan-scale"
where = "tp>1 recipe=rowwise"
verdict = "crash"
requires = [{rule = "engine/raised", values = {error = "*scale * nan*"}}]
link = "https://github.com/pytorch/ao/issues/1"
torch = ">=2.13,<2.14"
review_by = 2027-03-01
reason = "An example."
"""


def test_records_of_the_package_apply_in_every_project(tmp_path: Path) -> None:
    shipped = tmp_path / "package" / "cases" / "known.toml"
    shipped.parent.mkdir(parents=True)
    shipped.write_text(RECORD + 'fix = "cases/fixes/a.py:apply"\n')
    (fault,) = known_with_shipped(tmp_path / "none.toml", shipped)
    assert fault.everywhere
    assert fault.fix == f"{tmp_path / 'package' / 'cases' / 'fixes' / 'a.py'}:apply"
    own = written(tmp_path, RECORD)
    assert known_with_shipped(own, shipped) == read_known(own), "the project's record replaces the package's"
    assert known_with_shipped(written(tmp_path, f'without = ["{fault.name}"]\n'), shipped) == ()
    with pytest.raises(HarnessError, match="did you mean nan-scale"):
        known_with_shipped(written(tmp_path, f'without = ["{fault.name}s"]\n'), shipped)
    assert known_with_shipped(shipped, shipped) == read_known(shipped)


def test_a_target_of_ones_own_may_show_what_a_llama_must() -> None:
    fault = make_known(everywhere=True)
    llama, mine = map(parse_case_id, ("single-tensorwise-v2048-b16", "target.mine-single-tensorwise-v2048-b16"))
    assert fault.must_show(llama) and fault.masks_new_findings(llama)
    assert not fault.must_show(mine) and not fault.masks_new_findings(mine)
    (rule,) = known_rules((fault,))
    assert rule.applies(llama) and not rule.applies(mine)
    assert known_rules((replace(fault, fix="x.py:apply"),)) == []


def test_a_record_hits_its_cases(tmp_path: Path) -> None:
    (fault,) = faults = read_known(written(tmp_path, RECORD))
    assert fault.verdict is Verdict.CRASH
    assert matching((*faults, *faults), parse_case_id("tp2-rowwise-v2048-f32")) == (fault, fault)
    assert matching(faults, parse_case_id("tp2-tensorwise-v2048-f32")) == ()


@pytest.mark.parametrize(
    ("installed", "hit"),
    [
        ({"torch": "2.13.0+cpu", "torchao": "0.18.0"}, True),
        ({"torch": "2.13.1", "torchao": "0.18.2"}, True),
        ({"torch": "2.12.9", "torchao": "0.18.0"}, False),
        ({"torch": "2.14.0", "torchao": "0.18.0"}, False),
        ({"torch": "2.13.0+git12", "torchao": "0.18.0+git5"}, True),
        ({"torch": "2.13.0a0+git12", "torchao": "0.18.0"}, None),
        ({"torch": "2.14.0.dev20260601", "torchao": "0.18.0"}, None),
        ({"torch": "2.14.0.dev20260601", "torchao": "0.17.0"}, False),
        ({"torch": "2.15.0.dev20260801", "torchao": "0.18.0"}, False),
        ({"torch": "2.13.0", "torchao": "0.19.0"}, False),
        ({"torch": "2.13.0", "torchtitan": "9.9"}, True),
        ({}, True),
    ],
)
def test_a_record_hits_its_versions(tmp_path: Path, installed: dict[str, str | None], hit: bool | None) -> None:
    (fault,) = read_known(written(tmp_path, RECORD + 'torchao = "==0.18.*"\n'))
    assert fault.affects(installed) is hit
    here, case = fault.here(installed), parse_case_id("tp2-rowwise-v2048-f32")
    assert (here is None) is (hit is False)
    assert here is None or here.must_show(case) is (hit is True)  # a pre-release may show it, and may pass


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nan-scale", "", "file.toml:2: 'name' must be a non-empty string"),
        ('reason = "An example."', "", "file.toml:1: 'reason' must be a non-empty string"),
        ("crash", "crahs", "file.toml:4: Invalid enum value 'crahs' - at `$.verdict`. Fix: did you mean crash"),
        ("crash", "passed", "verdict 'passed' is not a failure"),
        ('"*scale * nan*"', "1", "file.toml:5: Expected `str | array`, got `int`"),
        ("rule = ", "ruel = ", "file.toml:5: Object contains unknown field `ruel`"),
        (
            '[{rule = "engine/raised", values = {error = "*scale * nan*"}}]',
            "[]",
            "file.toml:5: 'requires' must name at least one",
        ),
        ("2027-03-01", '"soon"', "file.toml:8: "),
        ("review_by = 2027-03-01\n", "", "missing required field `review_by`. Fix: write review_by = 2027-03-01."),
        ('torch = ">=2.13,<2.14"\n', "", "no version is named"),
        ("tp>1", "tpp>1", "unknown axis 'tpp'"),
        (">=2.13,<2.14", "2.13", "'2.13' is not a version specifier"),
        ("link =", "links =", "file.toml:6: unknown key 'links'"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(HarnessError) as caught:
        read_known(written(tmp_path, RECORD.replace(old, new, 1)))
    assert message in caught.value.text


def test_two_records_of_one_name_are_refused_and_those_of_the_project_are_readable(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="two faults are named 'nan-scale'"):
        read_known(written(tmp_path, RECORD + RECORD))
    read_known(Path(__file__).parents[2] / "cases" / "known.toml")


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


def test_what_is_required_with_or_without_what_it_may_cause_is_known_and_missed() -> None:
    assert verdict_of(ROWS) is Verdict.KNOWN
    assert verdict_of(ROWS, GRADIENTS) is Verdict.KNOWN
    assert verdict_of(ROWS, faults=()) is Verdict.NUMERIC
    judgement = with_known_faults(judged(GRADIENTS), (FAULT,), TODAY)
    assert judgement.verdict is Verdict.NUMERIC
    assert judgement.findings[0] == GRADIENTS
    assert (judgement.findings[1].rule, judgement.findings[1].values["fault"]) == (MISSING.name, "recorded")
    assert len(judgement.findings) == 2
    assert judgement.findings[1].expected == "graphs/rows"


def test_a_fault_of_everywhere_explains_a_target_of_ones_own_where_it_shows_and_is_told() -> None:
    mine, fault = make_case(target="mine"), replace(FAULT, everywhere=True)
    assert list(showing((fault, FAULT), mine, (GRADIENTS,))) == [FAULT]
    assert list(showing((fault,), mine, (ROWS, GRADIENTS))) == [fault]
    assert list(showing((fault,), make_case(), ())) == [fault]
    judgement = with_known_faults(judged(ROWS, GRADIENTS), (fault,), TODAY)
    assert judgement.verdict is Verdict.KNOWN
    assert judgement.findings[0].rule == KNOWN.name
    expected = {"fault": fault.name, "reason": fault.reason, "link": fault.link}
    assert dict(judgement.findings[0].values) == expected


def test_a_fault_whose_cases_a_compiler_chooses_need_not_show_there() -> None:
    compiled, fault = make_case(compile="inductor"), replace(FAULT, may_show=("compile=inductor",))
    assert list(showing((fault,), compiled, ())) == []
    assert list(showing((fault,), compiled, (ROWS,))) == [fault]
    assert list(showing((fault,), make_case(), ())) == [fault]


def test_a_finding_of_a_check_that_was_not_executed_is_not_missing() -> None:
    other = make_known(name="other", requires=(Symptom(rule="metamorphic/loss"),))
    skipped = NotJudged(check="metamorphic", reason="judged in the second run")
    judgement = replace(judged(ROWS), checks=("graphs",), not_judged=(skipped,))
    assert with_known_faults(judgement, (FAULT, other), TODAY).verdict is Verdict.KNOWN
    partly = replace(judgement, checks=("graphs", "metamorphic"))
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
    judgement = with_known_faults(judged(ROWS, GRADIENTS, other), (FAULT,), TODAY)
    assert (judgement.verdict, judgement.findings[:3]) == (Verdict.NUMERIC, (other, ROWS, GRADIENTS))
    assert judgement.findings[3].rule == UNEXPLAINED.name
    assert dict(judgement.findings[3].values) == {"count": 1, "faults": "recorded", "rules": other.rule}


def test_every_record_that_affects_a_case_must_show_and_all_of_them_explain() -> None:
    other = make_known(name="other", requires=(Symptom(rule="scales/*"),), verdict=Verdict.INVARIANT)
    wrong_scale = a_finding(check="scales", message="wrong scale")
    both = (FAULT, other)
    assert verdict_of(wrong_scale, ROWS, faults=both, verdict=Verdict.INVARIANT) is Verdict.KNOWN
    assert verdict_of(ROWS, faults=both) is Verdict.NUMERIC
    assert verdict_of(wrong_scale, ROWS, faults=(FAULT,), verdict=Verdict.INVARIANT) is Verdict.INVARIANT


def test_a_record_of_another_end_past_its_day_or_of_a_fault_that_is_gone_explains_nothing() -> None:
    judgement = with_known_faults(judged(ROWS, verdict=Verdict.HANG), (FAULT,), TODAY)
    assert judgement.verdict is Verdict.HANG
    assert judgement.findings[-1].rule == OTHER_END.name
    old = replace(FAULT, review_by=TODAY - datetime.timedelta(days=1))
    assert verdict_of(ROWS, faults=(replace(FAULT, review_by=TODAY),)) is Verdict.KNOWN
    judgement = with_known_faults(judged(ROWS), (old,), TODAY)
    assert judgement.verdict is Verdict.NUMERIC
    assert (judgement.findings[-1].rule, judgement.findings[-1].values["day"]) == (OUTDATED.name, "2026-11-21")
    judgement = with_known_faults(judged(verdict=Verdict.PASSED), (FAULT,), TODAY)
    assert judgement.verdict is Verdict.UNEXPECTED_PASS
    assert (judgement.findings[0].rule, judgement.findings[0].values["link"]) == (GONE.name, "https://example.org/1")
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
    judgement = with_known_faults(judged(*findings, verdict=verdict), (FAULT,), TODAY)
    shows = any(FAULT.requires[0].explains(finding) for finding in findings)
    known = shows and all(FAULT.explains(finding) for finding in findings) and verdict is FAULT.verdict
    assert (judgement.verdict is Verdict.KNOWN) == known
    assert set(map(str, findings)) <= set(map(str, judgement.findings))


def test_a_record_that_names_a_rule_no_check_has_is_refused_and_not_silent() -> None:
    require_rules((FAULT, make_known(requires=(Symptom(rule="parity/*grad-norm"),))))
    with pytest.raises(HarnessError, match=r"no check has the rule 'scales/amx'.*did you mean scales/amax"):
        require_rules((make_known(requires=(Symptom(rule="scales/amx"),)),))
    with pytest.raises(HarnessError, match="explain --list checks"):
        require_rules((replace(FAULT, may_cause=(Symptom(rule="zzz"),)),))


CASE = "tp2-rowwise-v2048-b16"
ENTRY = f"""\
[[quarantine]]
id = "{CASE}"
owner = "ana"
reason = "differs once a week"
link = "https://github.com/pytorch/ao/issues/1"
expires = 2027-03-01
"""
REQUIRED = """\
[[required]]
name = "TP"
select = "tp>1"
at_least = 2
max_age_days = 7
reason = "users run it"
"""


def test_a_quarantine_covers_its_cases_up_to_its_day_and_one_for_ever_is_remarked_on(tmp_path: Path) -> None:
    (entry,) = read_quarantine(written(tmp_path, ENTRY))
    link = "https://github.com/pytorch/ao/issues/1"
    text = f"quarantined until 2027-03-01 by ana: differs once a week ({link})"
    assert entry.text(datetime.date(2026, 3, 1)) == text, "a year before"
    assert entry.text(datetime.date(2025, 3, 1)) == f"{text}. That is 2.0 years away: set a date within a year"
    assert entry.covers(parse_case_id(CASE)) and not entry.covers(parse_case_id("single-rowwise-v2048-b16"))
    assert entry.holds(datetime.date(2027, 3, 1)) and not entry.holds(datetime.date(2027, 3, 2))
    assert read_quarantine(tmp_path / "none.toml") == ()
    (entry,) = read_quarantine(written(tmp_path, ENTRY.replace("2027-03-01", "9999-12-31")))
    assert entry.text(datetime.date(2026, 1, 1)).endswith("That is 7973.8 years away: set a date within a year")


def test_of_two_entries_the_one_that_holds_longer_counts(tmp_path: Path) -> None:
    later = ENTRY.replace(f'id = "{CASE}"', 'select = "tp=2"').replace("2027-03-01", "2027-04-01")
    entries = read_quarantine(written(tmp_path, later + ENTRY))
    entry = quarantine_of(entries, parse_case_id(CASE))
    assert entry is not None and entry.expires == datetime.date(2027, 4, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('owner = "ana"\n', "", r":1: 'owner' must be a non-empty string"),
        ('"differs once a week"', '" "', r":4: 'reason' must be a non-empty string"),
        ("expires = 2027-03-01\n", "", r"missing required field `expires`. Fix: write expires = 2027-03-01"),
        ("2027-03-01", '"soon"', r":6: Invalid RFC3339 encoded date.* Fix: write expires"),
        (CASE, "tp2-rowwise-v2048-b17", r":2: unknown token 'b17'"),
        (f'id = "{CASE}"', 'select = "tpx=1"', r":2: unknown axis 'tpx'"),
        (f'id = "{CASE}"\n', "", r":1: an entry has either 'id'"),
        ("owner", 'select = "tp>1"\nowner', r":1: an entry has either 'id'"),
        ("link", "lnk", r":5: unknown key 'lnk'.*did you mean link"),
    ],
)
def test_a_quarantine_that_is_not_complete_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        read_quarantine(written(tmp_path, ENTRY.replace(old, new)))


def test_required_cells_are_read(tmp_path: Path) -> None:
    (entry,) = read_required(written(tmp_path, REQUIRED))
    assert (entry.name, entry.which, entry.at_least, entry.max_age_days) == ("TP", "tp>1", 2, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (REQUIRED + REQUIRED, r":8: two entries are named 'TP'"),
        (REQUIRED.replace("at_least = 2", "at_least = 0"), r":4: Expected `int` >= 1"),
        (REQUIRED.replace("at_least = 2", "at_least = 1.5"), r"Expected `int`"),
        (REQUIRED.replace('reason = "users run it"', ""), r"'reason' must be"),
    ],
)
def test_required_cells_that_make_no_sense_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        read_required(written(tmp_path, text))


def test_a_quarantined_case_fails_no_run_and_is_still_told() -> None:
    finding = a_finding(check="finite", message="loss is nan", verdict=Verdict.NUMERIC)
    excuse = "quarantined until 2027-03-01 by ana: differs once a week"
    bad = make_result(CASE, Verdict.NUMERIC, findings=(finding,), quarantined=excuse)
    run = RunResult(results=(make_result("b"), bad))
    assert run.exit_code is ExitCode.GOOD
    assert totals_line(run).startswith("2 cases: 1 passed, 1 numeric (1 of them quarantined); ")
    text = text_of(run_sections(run, rerun=""))
    assert f"  {excuse}\n" in text and "quarantined until 2027-03-01 by ana: finite/test: loss is nan" in text
    assert b'<skipped type="numeric"' in junit_report(run) and b'failures="0"' in junit_report(run)
    assert RunResult(results=(make_result(CASE, Verdict.NOT_RUN, quarantined=excuse),)).exit_code == 3
    counts = RunResult(results=(make_result("b", Verdict.NUMERIC), bad))
    assert counts.exit_code is ExitCode.FAILED
