"""The check of a target: which cases it runs, what counts as a refusal, and how its report groups what it found."""

from __future__ import annotations

from typing import Any

import pytest

from harness.checks.failures import refusal_words
from harness.errors import HarnessError
from harness.matrix.caseid import case_id, parse_layout
from harness.plugins.check_target.commands import problems_of, target_exit_code, target_sections
from harness.plugins.check_target.target_check import CheckOptions, TargetReport, TargetRun, cases_of
from harness.report.sections import text_of
from harness.verdict import Finding, NotJudged, Verdict
from tests.builders import a_finding, make_case, make_failure


def ids(**asked: Any) -> list[str]:
    cases = cases_of(CheckOptions(target="mine", **asked), device=asked.pop("device", "cpu"))
    return [case_id(case).removeprefix("target.mine-").replace("-v2048-lr0.004", "") for case in cases]


def test_every_layout_in_float64_and_one_as_users_run_it() -> None:
    assert ids() == [
        "single-bf16-b16",
        "single-tensorwise-f64",
        "fsdp2-bf16-b16",
        "fsdp2-tensorwise-f64",
        "tp2-tensorwise-f64",
        "hsdp2x2-tensorwise-f64",
        "fsdp2-tensorwise-b16",
    ]


def test_cases_are_those_that_are_asked_for() -> None:
    layouts = (parse_layout("fsdp2-tp2"),)
    case_ids = ids(recipe="rowwise", layouts=layouts)
    assert case_ids[2:] == ["fsdp2-tp2-bf16-b16", "fsdp2-tp2-rowwise-f64", "fsdp2-tp2-rowwise-b16"]
    base = make_case(tp=2, recipe="rowwise", checkpointing="full", steps=3)
    case_ids = ids(base=base)
    assert "tp2-rowwise-ac.full-v2048-s3-f64" in case_ids
    assert len(case_ids) == 5
    assert not any(case.train.dtype == "float64" for case in cases_of(CheckOptions(target="mine"), device="cuda"))
    with pytest.raises(HarnessError, match="excludes"):
        ids(layouts=(parse_layout("fsdp3"),))


@pytest.mark.parametrize("text", ["rowwise", "fdsp2", "f64"])
def test_words_that_are_no_layout(text: str) -> None:
    with pytest.raises(HarnessError, match="is no layout"):
        parse_layout(text)


RAISED = """Traceback (most recent call last):
  File "/x/harness/worker/targets/contract.py", line 40, in build_target
    built = module.build(case, world)
  File "/home/me/mine.py", line 7, in build
    raise ValueError("tp must be 1")
ValueError: tp must be 1
"""


def test_only_a_raise_of_the_target_itself_in_build_is_a_refusal() -> None:
    refused = make_failure(message="ValueError: tp must be 1", traceback=RAISED, phase="build")
    assert refusal_words([refused], any_error=True) == "tp must be 1"
    assert refusal_words([], any_error=True) is None
    in_step = make_failure(message="ValueError: tp must be 1", traceback=RAISED, phase="step 1")
    assert refusal_words([refused, in_step], any_error=True) is None
    inside = '  File "/v/site-packages/torch/x.py", line 1, in f\n    x\nValueError: tp'
    deeper = make_failure(message="ValueError: x", traceback=RAISED.replace("ValueError: tp", inside), phase="build")
    assert refusal_words([deeper], any_error=True) is None
    fault = make_failure(message="TypeError: x", traceback=RAISED.replace("raise ValueError", "call"), phase="build")
    assert refusal_words([fault], any_error=True) is None
    assert refusal_words([refused], any_error=False) is None
    said, raised = (
        "NotImplementedError: this trainer has FSDP2 only",
        RAISED.replace("ValueError", "NotImplementedError"),
    )
    without = make_failure(message=said, traceback=raised, phase="build")
    assert refusal_words([without], any_error=False) == "this trainer has FSDP2 only"


def ran(layout: str = "single", *findings: Finding, **changes: Any) -> TargetRun:
    values: dict[str, Any] = {
        "case_id": f"{layout}-id",
        "layout": layout,
        "recipe": "tensorwise",
        "dtype": "float64",
        "verdict": Verdict.NUMERIC if findings else Verdict.PASSED,
        "findings": findings,
        "checks": ("finite",),
        "not_judged": (NotJudged(check="graphs", reason="nothing is compiled"),),
        "refused": None,
        "probes_neutral": True,
        "command": "fp8-harness run x",
        "seconds": 1.0,
    }
    return TargetRun(**{**values, **changes})


def report(*runs: TargetRun) -> TargetReport:
    empty: dict[str, Any] = {"built": (), "notes": (), "software": {}}
    return TargetReport(schema=1, target="mine", file="/mine.py", runs=runs, interrupted=False, seconds=9.0, **empty)


CAUSE = a_finding(check="parity", message="loss is twice as large", fix="divide it")
EFFECT = a_finding(check="loss_vs_golden", message="the loss is off")


def test_one_mistake_in_many_runs_is_told_once_and_its_effects_by_name_and_others_in_full() -> None:
    target_report = report(ran(), ran("fsdp2", CAUSE, EFFECT), ran("tp2", CAUSE))
    cause, effect = problems_of(target_report)
    assert (cause.cases, cause.likely_effect) == (("fsdp2-id", "tp2-id"), False)
    assert (effect.check, effect.likely_effect) == ("loss_vs_golden", True)
    text = text_of(target_sections(target_report), width=60)
    assert "also failed, likely effects: loss_vs_golden" in text and "1 thing to fix in mine." in text
    assert target_exit_code(target_report) == 1
    (problem,) = problems_of(report(ran(), ran("fsdp2", EFFECT)))
    assert not problem.likely_effect
    _, effect = problems_of(report(ran("single", CAUSE), ran("fsdp2", EFFECT)))
    assert effect.likely_effect


def test_a_target_that_refuses_every_layout_does_not_work() -> None:
    target_report = report(*(ran(layout, verdict=Verdict.CRASH, refused="not yet") for layout in ("single", "tp2")))
    assert problems_of(target_report) == () and target_exit_code(target_report) == 3
    assert "nothing ran: mine supports none of these layouts. 9 s" in text_of(target_sections(target_report))


def test_a_run_that_the_machine_ended_says_nothing_of_the_target() -> None:
    killed = ran("tp2", a_finding(check="engine", message="killed by SIGKILL"), verdict=Verdict.INFRA)
    target_report = report(ran(), killed)
    assert target_exit_code(target_report) == 4
    assert "the machine ended runs, which say nothing of mine. 9 s" in text_of(target_sections(target_report), width=80)
    assert target_exit_code(report(ran("fsdp2", CAUSE), killed)) == 1


def test_a_refusal_is_no_problem_and_lines_fit() -> None:
    refused = ran("tp2", a_finding(check="engine", message="x"), verdict=Verdict.CRASH, refused="no tp " * 20)
    target_report = report(ran(), refused)
    assert problems_of(target_report) == () and target_exit_code(target_report) == 0
    text = text_of(target_sections(target_report), width=60)
    assert "Not supported by it: tp2." in text and "not supported: no tp" in text
    assert max(map(len, text.splitlines())) <= 60
