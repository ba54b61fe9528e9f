"""Quarantined and required cases: their files are read strictly, and what they excuse in a run."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.matrix.caseid import parse_case_id
from harness.matrix.records import quarantine_of, read_quarantine, read_required
from harness.report.ci import junit_report
from harness.report.run import run_sections, totals_line
from harness.report.sections import text_of
from harness.result import RunResult
from harness.verdict import ExitCode, Verdict
from tests.builders import a_finding, make_result
from tests.unit.conftest import written

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
    assert f"  {excuse}\n" in text and "quarantined until 2027-03-01 by ana: loss is nan" in text
    assert b'<skipped type="numeric"' in junit_report(run) and b'failures="0"' in junit_report(run)
    assert RunResult(results=(make_result(CASE, Verdict.NOT_RUN, quarantined=excuse),)).exit_code == 3
    counts = RunResult(results=(make_result("b", Verdict.NUMERIC), bad))
    assert counts.exit_code is ExitCode.FAILED
