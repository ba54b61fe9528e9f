"""Formulas are claims about versions: recorded where they agree, doubted elsewhere, and never lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from harness import pytest_plugin
from harness.checks.judge import Judgement, with_doubts
from harness.evidence.golden import Provenance
from harness.evidence.sealed import Damaged
from harness.evidence.verified import VerifiedWith, add_verified, doubts, formulas_path, read_verified
from harness.expect.expectations import CASTS, FORMULAS, FUSION, TRAFFIC
from harness.report.ci import annotation_lines, junit_report
from harness.report.run import run_markdown, run_sections
from harness.report.sections import text_of
from harness.result import CaseResult, RunResult, WithFix
from harness.studies.records import verification
from harness.verdict import ExitCode, Finding, Verdict
from tests.builders import a_finding, make_result

SENT = a_finding(check="traffic", message="wrong number of all_reduce", formula=TRAFFIC, expected="14", found="28")
CAST = a_finding(check="scales", message="wrong number of casts", formula=CASTS)
BROKEN = a_finding(check="scales", message="scale does not match the amax")
ALL_CHECKS = ("matmuls", "scales", "traffic", "memory", "live_memory", "graphs")
DIFFERS = "torch 2.16.0 differs from what holds since 2.13.0"


def record(torch: str, torchao: str = "0.18.0", **cases: int) -> VerifiedWith:
    said = Provenance(
        software={}, device="cpu", commit="c", command="x", reason="released", created="2026-11-23T00:00:00"
    )
    return VerifiedWith(torch=torch, torchao=torchao, cases=cases or dict.fromkeys(FORMULAS, 90), provenance=said)


KNOWN = (record("2.13.0"), record("2.13.0", "0.17.0"), record("2.15.0"))


def doubted(torch: str, torchao: str = "0.18.0") -> set[str]:
    return set(doubts(KNOWN, {"torch": torch, "torchao": torchao}).values())


def test_what_was_verified_is_not_doubted_and_a_formula_without_cases_is_not() -> None:
    for versions in (("2.13.0", "0.18.0"), ("2.13.0+cpu", "0.17.0"), ("2.15.0+cu130", "0.18.0+cu132")):
        assert doubted(*versions) == set()
    assert doubts(KNOWN, {"torch": "2.16.0"}) == {}  # a package that is not known
    reasons = doubts((record("2.13.0", traffic=3, casts=0),), {"torch": "2.13.0", "torchao": "0.18.0"})
    assert set(reasons) == set(FORMULAS) - {TRAFFIC}
    assert reasons[CASTS] == "torch 2.13.0 with torchao 0.18.0 differs from a formula that was verified with no version"


@pytest.mark.parametrize(
    ("torch", "torchao", "says"),
    [
        ("2.16.0", "0.18.0", DIFFERS),
        ("2.14.0", "0.18.0", "torch 2.14.0 differs from what holds with 2.13.0"),
        ("2.13.0", "0.19.0", "torchao 0.19.0 differs from what holds since 0.17.0"),
        ("2.15.0", "0.17.0", "torch 2.15.0 with torchao 0.17.0 differs from what holds with each of them"),
        ("unknown", "0.18.0", "torch unknown differs from what holds with 2.13.0"),
    ],
)
def test_a_doubt_names_the_package_that_nobody_verified(torch: str, torchao: str, says: str) -> None:
    assert doubts(KNOWN, {"torch": torch, "torchao": torchao}) == dict.fromkeys(FORMULAS, says)


def test_evidence_of_a_nightly_is_of_that_night_alone() -> None:
    night = "2.16.0.dev20261120+cpu"
    verified = (*KNOWN, record(night))
    assert doubts(verified, {"torch": night, "torchao": "0.18.0"}) == {}
    for other in ("2.16.0.dev20261121+cpu", "2.16.0.dev20261120+cu132", "2.16.0rc1", "2.16.0", "2.16.0a0+git12"):
        assert set(doubts(verified, {"torch": other, "torchao": "0.18.0"})) == set(FORMULAS)
    assert set(doubts(KNOWN, {"torch": "2.15.0.dev20260801", "torchao": "0.18.0"})) == set(FORMULAS)


def test_a_case_that_only_differs_from_unverified_formulas_is_changed() -> None:
    judgement = with_doubts(
        Judgement(verdict=Verdict.INVARIANT, findings=(SENT, CAST)), {TRAFFIC: DIFFERS, CASTS: DIFFERS}
    )
    assert judgement.verdict is Verdict.CHANGED
    assert judgement.findings[0] == replace(SENT, differs=DIFFERS)  # what records of known faults read is the same


NIGHT = "torch 2.16.0.dev20261120"


def differing(name: str, *formulas: str, unreleased: str = NIGHT) -> CaseResult:
    findings = tuple(
        a_finding(check="traffic", message=f"28 of {formula}", formula=formula, differs=f"{NIGHT} differs")
        for formula in formulas
    )
    return make_result(name, Verdict.CHANGED, findings=findings, unreleased=unreleased)


def test_with_a_nightly_a_difference_is_said_once_and_fails_no_run_and_with_a_release_it_does() -> None:
    night = run(make_result("a"), differing("b", TRAFFIC), differing("c", TRAFFIC, CASTS))
    assert night.exit_code is ExitCode.GOOD
    text = text_of(run_sections(night, rerun=""))
    assert text.count("28 of traffic") == text.count("28 of casts") == 1
    assert f"  traffic in 2 cases, first in b: {NIGHT} differs: 28 of traffic\n" in text
    assert f"  casts in 1 case, first in c: {NIGHT} differs: 28 of casts\n" in text
    assert f"{NIGHT} is not a release: this does not change the exit code." in text
    markdown = run_markdown(night)
    assert markdown.startswith("## fp8-harness: good\n") and markdown.count("28 of traffic") == 1
    assert annotation_lines(night) == ""
    assert b'failures="0" errors="0" skipped="2"' in junit_report(night)
    release = run(make_result("a"), differing("b", TRAFFIC, unreleased=""))
    assert release.exit_code is ExitCode.CHANGED
    text = text_of(run_sections(release, rerun=""))
    assert text.count("28 of traffic") == 1 and "not a release" not in text
    assert b'failures="1"' in junit_report(release)


def test_pytest_fails_for_a_release_and_not_for_a_nightly() -> None:
    def tested(result: CaseResult) -> None:
        session = SimpleNamespace(stash={pytest_plugin._RUN: lambda case: result})
        item = SimpleNamespace(session=session, case=None, user_properties=[])
        pytest_plugin.CaseItem.runtest(item)  # type: ignore[arg-type]

    with pytest.raises(pytest.xfail.Exception, match="differs from what the formula says of traffic"):
        tested(differing("b", TRAFFIC))
    for failing in (differing("b", TRAFFIC, unreleased=""), make_result("a", Verdict.INVARIANT, unreleased=NIGHT)):
        with pytest.raises(pytest_plugin.CaseFailed):
            tested(failing)


@pytest.mark.parametrize("verdict", [Verdict.INVARIANT, Verdict.NUMERIC, Verdict.CRASH, Verdict.UNEXPECTED_PASS])
def test_a_nightly_excuses_nothing_else(verdict: Verdict) -> None:
    bad = make_result("a", verdict, findings=(BROKEN,), unreleased=NIGHT)
    night = run(bad, differing("b", TRAFFIC))
    assert night.exit_code is ExitCode.FAILED and not bad.excused
    assert BROKEN.message in text_of(run_sections(night, rerun=""))
    assert annotation_lines(night).count("::error") == 1


@pytest.mark.parametrize("others", [(BROKEN,), (CAST,), (replace(BROKEN, verdict=Verdict.NUMERIC),)])
def test_what_breaks_a_rule_or_a_verified_formula_keeps_its_verdict(others: tuple[Finding, ...]) -> None:
    judgement = with_doubts(Judgement(verdict=Verdict.INVARIANT, findings=(SENT, *others)), {TRAFFIC: DIFFERS})
    assert judgement.verdict is Verdict.INVARIANT
    assert [finding.differs for finding in judgement.findings] == [DIFFERS, ""]


@pytest.mark.parametrize("verdict", [Verdict.PASSED, Verdict.KNOWN, Verdict.CRASH, Verdict.NUMERIC])
def test_no_other_verdict_becomes_changed(verdict: Verdict) -> None:
    findings = () if verdict is Verdict.PASSED else (SENT,)
    assert with_doubts(Judgement(verdict=verdict, findings=findings), {TRAFFIC: DIFFERS}).verdict is verdict


def test_a_record_is_kept_by_versions_in_order_and_says_that_it_was_edited(tmp_path: Path) -> None:
    for new in (KNOWN[2], KNOWN[0], KNOWN[1], record("2.13.0", traffic=1)):
        add_verified(tmp_path, new)
    stored = read_verified((tmp_path, tmp_path / "none", tmp_path))
    assert [verified.versions for verified in stored] == [
        ("2.13.0", "0.17.0"),
        ("2.13.0", "0.18.0"),
        ("2.15.0", "0.18.0"),
    ]
    assert stored[1].cases == {"traffic": 1}
    path = add_verified(tmp_path, KNOWN[0])
    path.write_text(path.read_text().replace("2.13.0", "2.99.0"))
    with pytest.raises(Damaged, match="changed after the tool wrote it"):
        read_verified((tmp_path,))
    assert path == formulas_path(tmp_path)


def run(*results: object) -> RunResult:
    return RunResult(results=tuple(results))  # type: ignore[arg-type]


def test_runs_verify_the_formulas_that_they_were_compared_with_and_agree_with() -> None:
    agreement = verification(run(make_result("a", checks=ALL_CHECKS), make_result("b", checks=("traffic",))))
    assert agreement.verified == dict.fromkeys(FORMULAS, 1) | {TRAFFIC: 2}
    assert agreement.complete
    part = verification(run(make_result("b", checks=("traffic",))))
    assert part.verified == {TRAFFIC: 1} and not part.complete
    changed = make_result("b", Verdict.CHANGED, findings=(SENT,), checks=ALL_CHECKS)
    agreement = verification(run(make_result("a", checks=ALL_CHECKS), changed))
    assert TRAFFIC not in agreement.verified and agreement.contradicted[TRAFFIC] == ("b",)
    assert set(agreement.verified) == set(FORMULAS) - {TRAFFIC} and not agreement.complete
    failed = make_result("b", Verdict.INVARIANT, findings=(BROKEN,), checks=ALL_CHECKS)
    agreement = verification(run(make_result("a", checks=ALL_CHECKS), failed))
    assert agreement.verified == dict.fromkeys(FORMULAS, 1)
    assert not agreement.complete
    known = make_result("k", Verdict.KNOWN, findings=(SENT,), checks=ALL_CHECKS)
    assert verification(run(known)).verified == {}
    fixed = replace(known, with_fix=WithFix(fixes=("f",), verdict=Verdict.PASSED, findings=(), checks=("graphs",)))
    assert verification(run(fixed)).verified == {FUSION: 1}
