"""The judge of a run: which witnesses a case is given, and what is added to what the checks say."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from harness.checks import reported
from harness.checks.catalogue import BROKEN, CHECKS
from harness.checks.judge import Judgement
from harness.checks.loss_vs_golden import LOSS, NO_GOLDEN, NO_TOLERANCE
from harness.checks.parity import NO_REFERENCE
from harness.evidence.golden import write_golden
from harness.evidence.references import BF16, DRAWS, NOISE, OPERANDS, PARTNER, REPLAY, SOLO, Reference, RunsByRole
from harness.evidence.tolerance import tolerance_for
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, family_id, parse_case_id, reference_case
from harness.matrix.records import KnownFault, Symptom
from harness.project import find_project
from harness.running import case_judge
from harness.running.case_judge import CaseJudge, JudgedBy, prepare_judge
from harness.running.case_runner import NONE
from harness.running.plan import Injection, Plan, parse_injection
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


def concluded(
    judge: CaseJudge, run: Run, have: RunsByRole = NONE, fixes: tuple[Injection, ...] = (), case: Case = CASE
) -> Judgement:
    return judge.concluded(case, run, judge.judge(case, run, "ok", have, fixes), have, fixes)


def findings(run: Run, have: RunsByRole = NONE, **given: Any) -> list[Finding]:
    return list(concluded(judge(**given), run, have).findings)


def roles(wanted: Iterable[Reference]) -> list[str]:
    return [reference.role for reference in wanted]


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


RECORD = """
[[fault]]
name = "planted"
where = "recipe=tensorwise"
verdict = "crash"
requires = [{rule = "engine/raised"}]
link = "https://example.org/1"
torchao = ">=0.1"
review_by = 2999-01-01
fix = "cases/fixes/it.py:apply"
reason = "It is planted."
"""


def test_a_recorded_fault_is_not_expected_where_its_fix_is_injected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case_judge, "installed_versions", lambda _: {"torchao": "0.18.0"})
    (tmp_path / "cases" / "fixes").mkdir(parents=True)
    (tmp_path / "cases" / "known.toml").write_text(RECORD)
    for name in ("it", "other"):
        (tmp_path / "cases" / "fixes" / f"{name}.py").write_text("def apply(): ...")
    project, plan = find_project(str(tmp_path)), Plan(capacity=make_capacity(2))
    for name, expected in (("", "planted"), ("other", "planted"), ("it", None)):
        given = (parse_injection(f"cases/fixes/{name}.py:apply", folder=tmp_path),) if name else ()
        judged = prepare_judge(project, [CASE], replace(plan, injections=given), goldens=False)
        assert judged.expectation(CASE) == expected


SKETCHED = make_run(CASE, sketches=())
RECORDED = ("sketches", "module_tensors")


def test_references_are_named_before_the_run_and_again_by_what_it_recorded() -> None:
    planned = judge(RELATED, records=RECORDED).needs(RELATED)
    assert roles(planned) == [SOLO, PARTNER, REPLAY]
    assert [reference.request is None for reference in planned] == [False, False, True]
    ready = make_run(RELATED, sketches=(), module_tensors=())
    assert roles(judge(RELATED, records=RECORDED).needs(RELATED, ready)) == [SOLO, PARTNER, REPLAY]
    assert all(reference.request for reference in judge(RELATED).needs(RELATED, ready))
    assert roles(judge().needs(CASE, make_run(CASE))) == []
    assert roles(judge().needs(CASE, SKETCHED)) == [SOLO]
    assert judge(REFUSED, records=RECORDED).needs(REFUSED) == ()
    assert judge().needs(CASE, Run(traces=(), failures=())) == (), "a run that did not finish"


def test_without_evidence_references_are_planned_for_it() -> None:
    assert roles(judge(golden=None).needs(CASE, make_run(CASE))) == [BF16]
    assert roles(judge(tolerance=None).needs(CASE, make_run(CASE))) == [NOISE]
    assert roles(judge(parity_tolerance=None).needs(CASE, make_run(CASE))) == []
    assert roles(judge(parity_tolerance=None).needs(CASE, SKETCHED)) == [SOLO, NOISE]


def test_a_sketched_run_without_its_reference_is_not_judged_by_parity() -> None:
    assert findings(make_run(CASE)) == []
    (finding,) = findings(SKETCHED)
    assert (finding.rule, finding.judged) == (NO_REFERENCE.name, False)


def test_a_failed_parity_is_explained_by_the_first_operand_that_differs() -> None:
    run = make_run(CASE, sketches=(), operands=NOTHING)
    first_look = judge().judge(CASE, run, "ok", NONE)
    assert roles(judge().needs_if_failing(CASE, run, first_look)) == [OPERANDS]
    all_findings = findings(run, {OPERANDS: run_of(make_trace(CASE, operands=SOMETHING))})
    (first,) = [finding for finding in all_findings if finding.check == "divergence"]
    assert (first.step, first.rank, first.module) == (1, 0, CAST.fqn)
    assert [finding.check for finding in all_findings if finding.judged][-1] == "divergence"


@pytest.mark.parametrize("solo", [None, make_run(CASE, operands=NOTHING)], ids=["no reference", "an equal one"])
def test_a_failed_parity_without_an_explanation_stays_as_it_is(solo: Run | None) -> None:
    all_findings = findings(make_run(CASE, sketches=(), operands=NOTHING), {OPERANDS: solo})
    assert "parity" in {finding.check for finding in all_findings}
    assert "divergence" not in {finding.check for finding in all_findings}


def test_operands_are_not_compared_where_parity_holds_or_nothing_was_recorded() -> None:
    for run in (make_run(CASE, operands=NOTHING), SKETCHED):
        assert judge().needs_if_failing(CASE, run, judge().judge(CASE, run, "ok", NONE)) == ()


def test_without_a_stored_golden_the_reference_is_compared_with() -> None:
    (finding,) = findings(make_run(CASE), golden=None)
    assert (finding.rule, finding.judged, finding.values["why"]) == (NO_GOLDEN.name, False, "")
    reference = run_of(make_trace(reference_case(CASE)))
    for losses, verdict in ((None, Verdict.PASSED), ((8.0, 9.0), Verdict.NUMERIC)):
        run = make_run(CASE) if losses is None else make_run(CASE, losses=losses)
        judgement = judge(golden=None).judge(CASE, run, "ok", {BF16: reference})
        assert (judgement.verdict, judgement.golden) == (verdict, "run here")
    assert judge().judge(CASE, make_run(CASE), "ok").golden == "stored"


def test_without_a_measured_tolerance_one_is_derived_from_noisy_references() -> None:
    reference, noisy = (make_trace(reference_case(CASE), losses=of) for of in ((8.0, 7.0), (8.02, 7.02)))
    have = {NOISE: run_of(replace(reference, draws=(noisy,) * DRAWS))}
    run, far = make_run(CASE, losses=(8.15, 7.8)), make_run(CASE, losses=(8.3, 7.8))
    assert judge(tolerance=None).judge(CASE, run, "ok", have).verdict is Verdict.PASSED
    (finding,) = findings(far, have, tolerance=None)
    assert finding.rule == LOSS.name and finding.values["allowed"] == pytest.approx(0.24)
    assert "derived from 4 BF16 runs" in finding.details
    for incomplete in ({}, {NOISE: None}, {NOISE: Run(traces=(), failures=())}):
        (finding,) = findings(run, incomplete, tolerance=None)
        assert (finding.rule, finding.judged) == (NO_TOLERANCE.name, False)


def test_a_check_that_breaks_takes_no_other_finding_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    off = make_run(CASE, losses=(8.0, 9.0))

    def broken(*_: object) -> list[Finding]:
        raise KeyError("shape")

    breaks = replace(reported.check_finite, function=broken)
    monkeypatch.setattr(case_judge, "CHECKS", (breaks, *CHECKS[1:]))
    judgement = concluded(judge(), off)
    assert judgement.verdict is Verdict.NUMERIC
    assert {LOSS.name, BROKEN.name} <= {finding.rule for finding in judgement.findings}
    alone = concluded(judge(), make_run(CASE))
    assert alone.verdict is Verdict.INFRA and "check finite: KeyError" in alone.findings[0].message


def test_a_recorded_fault_is_known_with_its_explanation() -> None:
    off = make_run(CASE, losses=(8.0, 9.0))
    judgement = concluded(judge(known=(KNOWN,)), off)
    assert judgement.verdict is Verdict.KNOWN
    assert [finding.rule for finding in judgement.findings[:2]] == ["judge/known", LOSS.name]
    other = replace(KNOWN, requires=(Symptom(rule="loss_vs_golden/frozen"),))
    assert concluded(judge(known=(other,)), off).verdict is Verdict.NUMERIC


def test_with_its_fix_a_recorded_fault_explains_nothing() -> None:
    fixed, other = replace(KNOWN, fix="x.py:apply"), replace(KNOWN, name="other")
    off = make_run(CASE, losses=(8.0, 9.0))
    (fix,) = judge(known=(fixed,)).fixes(CASE)
    assert fix.text == "x.py:apply"
    assert concluded(judge(known=(fixed,)), off, NONE, (fix,)).verdict is Verdict.NUMERIC
    assert concluded(judge(known=(fixed,)), make_run(CASE), NONE, (fix,)).verdict is Verdict.PASSED
    assert concluded(judge(known=(fixed, other)), off, NONE, (fix,)).verdict is Verdict.KNOWN


@pytest.mark.parametrize("verdict", [Verdict.NUMERIC, Verdict.CRASH, Verdict.HANG])
def test_a_case_that_cannot_finish_needs_the_fixes_of_its_recorded_faults(verdict: Verdict) -> None:
    fixed = replace(KNOWN, fix="x.py:apply", verdict=verdict)
    needed = judge(known=(fixed,)).needed_fixes(CASE)
    assert needed == (() if verdict is Verdict.NUMERIC else judge(known=(fixed,)).fixes(CASE))


def test_partners_are_compared_in_the_run_with_the_fix_alone() -> None:
    fixed = replace(KNOWN, fix="x.py:apply")
    run, of_fixed = make_run(RELATED, sketches=(), losses=(8.0, 9.0)), judge(RELATED, known=(fixed,))
    assert PARTNER not in roles(of_fixed.needs(RELATED, run))
    judgement = of_fixed.judge(RELATED, run, "ok")
    assert "metamorphic" not in judgement.checks
    reasons = {skipped.check: skipped.reason for skipped in judgement.not_judged}
    assert reasons["metamorphic"].startswith("checked in the second run")
    assert PARTNER in roles(of_fixed.needs(RELATED, run, NONE, of_fixed.fixes(RELATED)))
    seen_by_it = replace(KNOWN, fix="x.py:apply", requires=(Symptom(rule="metamorphic/*"),))
    assert PARTNER in roles(judge(RELATED, known=(seen_by_it,)).needs(RELATED, run))
