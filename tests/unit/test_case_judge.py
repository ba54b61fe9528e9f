"""The judge of a run: which witnesses a case is given, and what is added to what the checks say."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from harness.checks.loss_vs_golden import LOSS, NO_GOLDEN, NO_TOLERANCE
from harness.checks.parity import NO_REFERENCE
from harness.evidence.golden import write_golden
from harness.evidence.tolerance import tolerance_for
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, family_id, parse_case_id, reference_case
from harness.matrix.records import KnownFault, Symptom
from harness.project import find_project
from harness.running.case_judge import CaseJudge, JudgedBy, prepare_judge
from harness.running.plan import Injection, Plan
from harness.running.witnesses import WitnessCache
from harness.sources import installed_versions
from harness.trace import Run
from harness.trace.operands import OperandTrace
from harness.verdict import Finding, Verdict
from tests.builders import (
    make_case,
    make_cast,
    make_golden,
    make_known,
    make_matmul,
    make_run,
    make_tolerance,
    make_trace,
    make_witnesses,
    run_of,
)
from tests.jobs import make_capacity

CASE = make_case(recipe="tensorwise", dp_shard=2, steps=2)
RELATED = parse_case_id("tp2-tensorwise-ac.full-v2048-s2-b16")
REFUSED = parse_case_id("tp2-tensorwise-head.fp8-v2256-f32")
NOTHING = OperandTrace(casts=(), matmuls=())
CAST = make_cast()
SOMETHING = OperandTrace(casts=(CAST,), matmuls=(make_matmul(CAST, CAST, index=1),))
KNOWN = make_known()


class FakeCache:
    """Has the witnesses that it is given, and remembers which were asked for."""

    def __init__(self, **runs: Run) -> None:
        self.runs = runs
        self.asked: list[str] = []

    def __getattr__(self, kind: str) -> Any:
        def witness(case: Case, *_: object) -> Run | None:
            assert case in (CASE, RELATED)
            self.asked.append(kind)
            return self.runs.get(kind)

        return witness


def judge(*cases: Case, known: tuple[KnownFault, ...] = (), **given: Any) -> CaseJudge:
    tolerance = make_tolerance(0.125, 0.125)
    sound = {"golden": make_golden(CASE), "tolerance": tolerance, "parity_tolerance": tolerance}
    return CaseJudge(
        {
            case_id(case): JudgedBy(
                family=family_id(case),
                witnesses=make_witnesses(case, **{**sound, **given}),
                known=known,
                fixes=tuple(Injection(text=fault.fix, target=fault.fix) for fault in known if fault.fix),
            )
            for case in cases or (CASE,)
        }
    )


def findings(run: Run, cache: FakeCache, **given: Any) -> list[Finding]:
    return list(judge(**given).judge(CASE, run, "ok", cast("WitnessCache", cache)).findings)


def test_a_case_is_expected_to_show_its_fault_or_its_refusal_and_a_target_of_ones_own_neither() -> None:
    assert judge().expectation(CASE) is None
    assert judge(known=(KNOWN,)).expectation(CASE) == "recorded"
    assert judge(REFUSED).expectation(REFUSED) == "output_alignment"
    assert judge(REFUSED, known=(KNOWN,)).expectation(REFUSED) == "recorded"
    mine = make_case(target="mine", recipe="tensorwise", dp_shard=2, steps=2)
    fault = replace(KNOWN, everywhere=True)
    assert judge(mine, known=(fault,)).expectation(mine) is None
    assert judge(CASE, known=(fault,)).expectation(CASE) == "recorded"


def test_each_case_has_the_tolerance_of_its_own_number_of_tokens() -> None:
    project = find_project(Path(__file__).parents[2])
    cases = [make_case(recipe="tensorwise", global_batch=batch, dtype="float32") for batch in (8, 2, 4)]
    for order in (cases, cases[::-1]):
        judged = prepare_judge(project, order, Plan(capacity=make_capacity(2)))
        for case in order:
            assert judged._judged_by[case_id(case)].witnesses.tolerance == tolerance_for(case, project.root)


def test_goldens_are_missing_of_cases_that_train_alone() -> None:
    assert judge(CASE, REFUSED).missing_goldens == ()
    assert judge(CASE, REFUSED, golden=None).missing_goldens == (family_id(CASE),)


def test_the_golden_of_a_nightly_is_the_golden_of_no_other_build(tmp_path: Path) -> None:
    for folder in ("cases", "golden"):
        (tmp_path / folder).mkdir()
    project, plan = find_project(str(tmp_path)), Plan(capacity=make_capacity(2))
    golden = replace(make_golden(CASE), family=family_id(CASE), hardware=plan.hardware[0])
    here = installed_versions(["torch", "torchao"])
    for torch, held in (("2.16.0.dev20261120", False), ("2.12.0", True), (here.get("torch", "2.13.0"), True)):
        provenance = replace(golden.provenance, software=here | {"torch": torch})
        write_golden(tmp_path, replace(golden, provenance=provenance))
        judged = prepare_judge(project, [CASE], plan)
        assert judged.missing_goldens == judged.goldens_of_other_builds == (() if held else (family_id(CASE),))


def test_witnesses_are_run_for_what_was_sketched_alone() -> None:
    plain, sketched = FakeCache(), FakeCache()
    assert findings(make_run(CASE), plain) == []
    assert plain.asked == []
    (finding,) = findings(make_run(CASE, sketches=()), sketched)
    assert (finding.rule, finding.judged) == (NO_REFERENCE.name, False)
    assert "(solo witness)" in str(finding.values["who"])
    assert sketched.asked == ["solo", "partner"]


def test_a_failed_parity_is_explained_by_the_first_operand_that_differs() -> None:
    run = make_run(CASE, sketches=(), operands=NOTHING)
    cache = FakeCache(solo_with_operands=run_of(make_trace(CASE, operands=SOMETHING)))
    all_findings = findings(run, cache)
    assert cache.asked == ["solo", "partner", "solo_with_operands"]
    (first,) = [finding for finding in all_findings if finding.check == "divergence"]
    assert (first.step, first.rank, first.module) == (1, 0, CAST.fqn)
    assert [finding.check for finding in all_findings if finding.judged][-1] == "divergence"


@pytest.mark.parametrize("solo", [None, make_run(CASE, operands=NOTHING)], ids=["no witness", "an equal witness"])
def test_a_failed_parity_without_an_explanation_stays_as_it_is(solo: Run | None) -> None:
    cache = FakeCache(**({} if solo is None else {"solo_with_operands": solo}))
    all_findings = findings(make_run(CASE, sketches=(), operands=NOTHING), cache)
    assert "solo_with_operands" in cache.asked
    assert "parity" in {finding.check for finding in all_findings}
    assert "divergence" not in {finding.check for finding in all_findings}


def test_operands_are_not_compared_where_parity_holds_or_nothing_was_recorded() -> None:
    for run in (make_run(CASE, operands=NOTHING), make_run(CASE, sketches=())):
        cache = FakeCache()
        findings(run, cache)
        assert "solo_with_operands" not in cache.asked


def test_without_a_stored_golden_the_reference_is_run() -> None:
    absent = FakeCache()
    (finding,) = findings(make_run(CASE), absent, golden=None)
    assert (finding.rule, finding.judged, finding.values["why"]) == (NO_GOLDEN.name, False, "")
    assert absent.asked == ["reference"]
    reference = run_of(make_trace(reference_case(CASE)))
    for losses, verdict in ((None, Verdict.PASSED), ((8.0, 9.0), Verdict.NUMERIC)):
        run = make_run(CASE) if losses is None else make_run(CASE, losses=losses)
        cache = cast("WitnessCache", FakeCache(reference=reference))
        judgement = judge(golden=None).judge(CASE, run, "ok", cache)
        assert (judgement.verdict, judgement.golden) == (verdict, "run here")
    assert judge().judge(CASE, make_run(CASE), "ok", cast("WitnessCache", FakeCache())).golden == "stored"


def test_without_a_measured_tolerance_one_is_derived_from_noisy_references() -> None:
    reference, noisy = (
        run_of(make_trace(reference_case(CASE), losses=losses)) for losses in ((8.0, 7.0), (8.02, 7.02))
    )
    cache = FakeCache(reference=reference, noisy=noisy)
    run = make_run(CASE, losses=(8.15, 7.8))
    judgement = judge(tolerance=None).judge(CASE, run, "ok", cast("WitnessCache", cache))
    assert judgement.verdict is Verdict.PASSED
    assert sorted(cache.asked) == ["noisy"] * 4 + ["reference"]
    far = make_run(CASE, losses=(8.3, 7.8))
    (finding,) = judge(tolerance=None).judge(CASE, far, "ok", cast("WitnessCache", cache)).findings
    assert finding.rule == LOSS.name and finding.values["allowed"] == pytest.approx(0.24)
    assert "derived from 4 BF16 runs" in finding.details
    for runs in ({}, {"reference": reference}):
        (finding,) = findings(run, FakeCache(**runs), tolerance=None)
        assert (finding.rule, finding.judged) == (NO_TOLERANCE.name, False)


def test_a_recorded_fault_is_known_with_its_explanation() -> None:
    off = make_run(CASE, losses=(8.0, 9.0))
    judgement = judge(known=(KNOWN,)).judge(CASE, off, "ok", cast("WitnessCache", FakeCache()))
    assert judgement.verdict is Verdict.KNOWN
    assert judgement.findings[0].rule == LOSS.name
    other = replace(KNOWN, requires=(Symptom(rule="loss_vs_golden/frozen"),))
    assert judge(known=(other,)).judge(CASE, off, "ok", cast("WitnessCache", FakeCache())).verdict is Verdict.NUMERIC


def test_with_its_fix_a_recorded_fault_explains_nothing() -> None:
    fixed, other = replace(KNOWN, fix="x.py:apply"), replace(KNOWN, name="other")
    cache = cast("WitnessCache", FakeCache())
    off = make_run(CASE, losses=(8.0, 9.0))
    (fix,) = judge(known=(fixed,)).fixes(CASE)
    assert fix.text == "x.py:apply"
    assert judge(known=(fixed,)).judge(CASE, off, "ok", cache, (fix,)).verdict is Verdict.NUMERIC
    assert judge(known=(fixed,)).judge(CASE, make_run(CASE), "ok", cache, (fix,)).verdict is Verdict.PASSED
    assert judge(known=(fixed, other)).judge(CASE, off, "ok", cache, (fix,)).verdict is Verdict.KNOWN


@pytest.mark.parametrize("verdict", [Verdict.NUMERIC, Verdict.CRASH, Verdict.HANG])
def test_a_case_that_cannot_finish_needs_the_fixes_of_its_recorded_faults(verdict: Verdict) -> None:
    fixed = replace(KNOWN, fix="x.py:apply", verdict=verdict)
    needed = judge(known=(fixed,)).needed_fixes(CASE)
    assert needed == (() if verdict is Verdict.NUMERIC else judge(known=(fixed,)).fixes(CASE))


def test_partners_are_compared_in_the_run_with_the_fix_alone() -> None:
    fixed = replace(KNOWN, fix="x.py:apply")
    run = make_run(RELATED, sketches=(), losses=(8.0, 9.0))
    plain, second = FakeCache(), FakeCache()
    judgement = judge(RELATED, known=(fixed,)).judge(RELATED, run, "ok", cast("WitnessCache", plain))
    assert "partner" not in plain.asked and "metamorphic" not in judgement.checks
    assert {skipped.check: skipped.reason for skipped in judgement.not_judged}["metamorphic"].startswith(
        "judged in the second run"
    )
    judge(RELATED, known=(fixed,)).judge(
        RELATED, run, "ok", cast("WitnessCache", second), judge(RELATED, known=(fixed,)).fixes(RELATED)
    )
    assert "partner" in second.asked
    fixed = replace(KNOWN, fix="x.py:apply", requires=(Symptom(rule="metamorphic/*"),))
    cache = FakeCache()
    judge(RELATED, known=(fixed,)).judge(RELATED, make_run(RELATED, sketches=()), "ok", cast("WitnessCache", cache))
    assert "partner" in cache.asked
