"""The corpus: what a proof of a bug file says, that every shipped file can be proved, and the pages ready to file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from harness.checks.catalogue import RULES
from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.choice import carries
from harness.matrix.records import KnownFault, matching
from harness.matrix.rules import expected_refusal
from harness.matrix.upstream import CHANGES
from harness.plugins.bugs.bugfile import Bug, BugFile, read_bugs
from harness.plugins.bugs.corpus import Corpus, Proof, proofs, provable_bugs
from harness.plugins.bugs.sections import corpus_sections
from harness.plugins.faults.faults import fault_named
from harness.plugins.faults.mutation import MutationMatrix, Trial
from harness.project import Project, find_project
from harness.report.sections import text_of
from harness.running.selection import recorded_faults
from harness.verdict import ExitCode, Verdict
from tests.builders import make_known
from tests.plugins.faults.unit.test_mutation import make_trial

TRAINS = parse_case_id("single-tensorwise-v2048-s2-f64")
REFUSED = parse_case_id("tp2-tensorwise-head.fp8-v2256-s2-f64")
FAULT = "amax_without_abs"
PARITY = "parity/gradients"
Faults = tuple[KnownFault, ...]
LIVE: dict[str, Any] = {"status": "live", "planted": ()}


def bug(case: Case = TRAINS, **changes: Any) -> BugFile:
    fields: dict[str, Any] = {"title": "t", "link": "l", "status": "fixed", "symptom": "wrong_numbers"}
    detection = {"detected_by": ("scales/amax",), "planted": (FAULT,)}
    return BugFile(id="ao-1", where="ao-1.toml", bug=Bug(**(fields | detection | changes)), case=case)


def trial(verdict: Verdict, *rules: str, fault: str | None = None, not_reached: str = "") -> Trial:
    message = "it says so" if rules else ""
    return make_trial(fault, verdict=verdict, rules=rules, message=message, not_reached=not_reached)


def check(file: BugFile, *trials: Trial, known: Faults = (), records: Faults = (), interrupted: bool = False) -> Corpus:
    assert file.case is not None
    ran = [replace(given, case_id=case_id(file.case)) for given in trials]
    planted, clean = (tuple(one for one in ran if bool(one.fault) is faulty) for faulty in (True, False))
    matrix = MutationMatrix(trials=planted, clean=clean, wall_s=1.0, interrupted=interrupted)
    return proofs([file], matrix, known, records or known)


def only(corpus: Corpus) -> Proof:
    (proof,) = corpus.proofs
    return proof


PASSED = trial(Verdict.PASSED)
FOUND = trial(Verdict.INVARIANT, "parity/gradients", "scales/amax", fault=FAULT)


def test_a_fixed_bug_passes_and_its_fault_is_found_by_every_check_that_the_file_names() -> None:
    corpus = check(bug(), PASSED, FOUND)
    assert only(corpus).mismatches == only(corpus).undecided == ()
    assert only(corpus).detected_by == ("scales/amax",)
    assert corpus.exit_code == ExitCode.GOOD
    corpus = check(bug(detected_by=("scales/amax", "traffic/volume")), PASSED, FOUND)
    assert only(corpus).mismatches == ("traffic/volume found nothing; found by parity/gradients, scales/amax",)


OTHER = "is found by parity/gradients, not by scales/amax"


@pytest.mark.parametrize(
    ("trials", "says"),
    [
        ((trial(Verdict.NUMERIC, PARITY), FOUND), "it must pass, but it computed wrong numbers: it says so"),
        ((PASSED, trial(Verdict.PASSED, fault=FAULT)), "no check found the fault"),
        ((PASSED, trial(Verdict.NUMERIC, PARITY, fault=FAULT)), OTHER),
        ((PASSED, trial(Verdict.CRASH, "engine/raised", fault=FAULT, not_reached="KeyError: x")), "KeyError: x"),
    ],
)
def test_a_fixed_bug_that_is_not_so(trials: tuple[Trial, ...], says: str) -> None:
    corpus = check(bug(), *trials)
    (mismatch,) = only(corpus).mismatches
    assert says in mismatch
    assert corpus.exit_code == ExitCode.FAILED


def test_a_fixed_bug_needs_a_fault_that_fits_a_case_that_trains() -> None:
    assert only(check(bug(planted=()), PASSED)).mismatches == ("no injected fault brings it back",)
    corpus = check(bug(planted=("amax_not_reduced_over_tp",)), PASSED)
    assert only(corpus).mismatches == ("amax_not_reduced_over_tp cannot be planted in it",)
    assert only(check(bug(REFUSED), PASSED)).mismatches == ("it is refused: a fixed bug trains",)


def test_another_recorded_bug_may_show_in_the_case_of_a_fixed_one() -> None:
    clean, record = trial(Verdict.KNOWN, "traffic/volume"), make_known(where="tp=1", fix="x.py:apply")
    assert only(check(bug(), clean, FOUND, known=(record,))).mismatches == ()
    corpus = check(bug(link=record.link), clean, FOUND, known=(record,))
    assert only(corpus).mismatches == ("it is recorded in known.toml: it is live",)


@pytest.mark.parametrize(
    ("clean", "says"),
    [
        (trial(Verdict.KNOWN, "scales/amax"), ""),
        (trial(Verdict.KNOWN, "traffic/volume"), "scales/amax found nothing; found by traffic/volume"),
        (trial(Verdict.UNEXPECTED_PASS), "it must fail as recorded, but it passed, although a known issue"),
        (PASSED, "it must fail as recorded, but it passed every check"),
    ],
)
def test_a_live_bug_fails_as_recorded(clean: Trial, says: str) -> None:
    mismatches = only(check(bug(**LIVE), clean)).mismatches
    assert (says in mismatches[0]) if says else not mismatches


@pytest.mark.parametrize(("clean", "good"), [(PASSED, True), (trial(Verdict.NUMERIC, "scales/amax"), False)])
def test_a_live_bug_of_other_versions_passes_here(clean: Trial, good: bool) -> None:
    newer = make_known(torch=">=2.15")
    corpus = check(bug(**LIVE), clean, records=(newer, newer))
    assert (only(corpus).elsewhere, not only(corpus).mismatches) == ("torch >=2.15", good)
    assert ("passes: only torch >=2.15 has it" in text_of(corpus_sections(corpus))) == good


def test_a_refusal_is_live() -> None:
    file = bug(REFUSED, **LIVE | {"detected_by": ("alignment/trained",)})
    assert only(check(file, PASSED)).mismatches == ()
    (mismatch,) = only(check(file, trial(Verdict.INVARIANT, "alignment/trained"))).mismatches
    assert mismatch.startswith("it must be refused (")


def test_what_did_not_run_proves_nothing() -> None:
    corpus = check(bug(), PASSED, interrupted=True)
    assert only(corpus).undecided == (f"{FAULT} was not run",)
    assert corpus.exit_code == ExitCode.INTERRUPTED
    corpus = check(bug(), PASSED, trial(Verdict.INFRA, fault=FAULT))
    assert only(corpus).mismatches == ()
    assert corpus.exit_code == ExitCode.INFRA


def test_the_report_has_a_line_for_every_fault_and_says_what_is_wrong() -> None:
    file = bug(planted=(FAULT, "eps_lost"))
    corpus = check(file, PASSED, FOUND)
    text = text_of(corpus_sections(corpus))
    assert "ao-1  single-tensorwise-v2048-s2-f64  passed  amax_without_abs: invariant  MISMATCH" in text
    assert "  ao-1: eps_lost cannot be planted in it" in text
    assert text.endswith("1 bug: 0 live, 1 fixed; 1 with a mismatch; 1 s\n")
    assert b'"bug": "ao-1"' in to_json(corpus, indent=2)


def test_bugs_are_asked_for_by_name(tmp_path: Path) -> None:
    project = find_project()
    assert [file.id for file in provable_bugs(project, ["ao-1938", "ao-933"])] == ["ao-1938", "ao-933"]
    with pytest.raises(HarnessError, match="no bug file is named 'ao-193'"):
        provable_bugs(project, ["ao-193"])
    with pytest.raises(HarnessError, match="a bug that is refused proves nothing"):
        provable_bugs(project, ["torchtitan-560"])
    with pytest.raises(HarnessError, match="no bug file is named"):
        provable_bugs(Project(root=tmp_path, state=tmp_path), ["ao-1"])


def test_the_shipped_bugs_are_many_and_different_and_each_can_be_proved() -> None:
    shipped, records = read_bugs(find_project().bugs), recorded_faults(find_project())
    assert sum(file.runs for file in shipped) >= 45
    assert len({file.bug.title for file in shipped}) == len(shipped)
    for file in shipped:
        shipped_bug = file.bug
        assert shipped_bug.link == "unreported" or shipped_bug.link.startswith("https://github.com/"), file.id
        assert set(shipped_bug.detected_by) <= RULES.keys(), file.id
        if shipped_bug.status == "live":
            assert matching(records, file.runnable()) or expected_refusal(file.runnable()) is not None, file.id
        elif shipped_bug.status == "fixed":
            lost = [name for name in shipped_bug.planted if not carries(file.runnable(), fault_named(name), records)]
            assert shipped_bug.planted and not lost, file.id


ROOT = Path(__file__).parents[4]


def test_the_page_of_versions_has_every_named_change_of_torch() -> None:
    text = (ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| `([\w/.]+)` \|", text, flags=re.MULTILINE)
    assert rows == [(change.name, change.since, change.file) for change in CHANGES]
