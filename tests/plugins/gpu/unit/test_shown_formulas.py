"""What `dev evidence formulas` says of formulas and of the versions that they were verified with."""

from __future__ import annotations

from msgspec.structs import replace

from harness.evidence.golden import Provenance
from harness.evidence.verified import VerifiedWith
from harness.expect.expectations import FORMULAS, TRAFFIC
from harness.plugins.gpu.formulas import formulas_sections, verified_line
from harness.report.sections import text_of
from harness.result import CaseResult, RunResult
from harness.studies.records import verification
from harness.verdict import Verdict
from tests.builders import a_finding, make_result

ALL_CHECKS = ("matmuls", "scales", "traffic", "memory", "live_memory", "graphs")


def text(*results: CaseResult) -> str:
    return text_of(formulas_sections(verification(RunResult(results=results))))


def test_each_formula_has_a_line_and_other_failures_are_shown() -> None:
    sent = a_finding(check="traffic", message="wrong number of all_reduce", formula=TRAFFIC)
    broken = a_finding(check="scales", message="scale does not match the amax")
    good = make_result("a", checks=ALL_CHECKS)
    assert "not verified: no clean run" in text(make_result("b", checks=("traffic",)))
    changed = make_result("b", Verdict.CHANGED, findings=(sent,), checks=ALL_CHECKS)
    assert "not verified: 2 cases compared; disagrees in 1: b" in text(good, changed)
    assert broken.message in text(good, replace(changed, verdict=Verdict.INVARIANT, findings=(broken,)))


def test_a_pair_of_versions_is_one_line_that_names_what_is_missing() -> None:
    made = Provenance(
        software={}, device="cpu", commit="c", command="x", reason="released", created="2026-11-23T00:00:00"
    )
    record = VerifiedWith(torch="2.13.0", torchao="0.18.0", cases=dict.fromkeys(FORMULAS, 90), provenance=made)
    assert verified_line(record) == "formulas with torch 2.13.0 and torchao 0.18.0: 90 cases, 2026-11-23: released"
    assert "not matmuls, casts, " in verified_line(replace(record, cases={"traffic": 3}))
