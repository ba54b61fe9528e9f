"""Models of a user that are built in other ways than the Llama: clean runs are clean, and injected faults are found."""

from __future__ import annotations

from typing import Any

import pytest

from harness.checks import metamorphic, recompute, scales
from harness.checks.catalogue import KNOWN as KNOWN_FAULT
from harness.checks.check import Rule
from harness.checks.data import OTHER_STATE
from harness.checks.model import SETTING
from harness.checks.parity import GRADIENTS
from harness.checks.reported import OTHER_LOSS
from harness.checks.traffic import REDUCE_DTYPE
from tests.acceptance.conftest import Inside, with_targets
from tests.builders import sentence
from tests.fork_servers import ForkServers
from tests.lines import read_run
from tests.worker.runs import sweep

# `variants.py` says which model each of them is about.
STYLED = "target.variants-tp2-tensorwise-tpstyle.fp8-v2048-s2-seed1-f64"
TIED = "target.variants-fsdp2-tensorwise-ag.fp8-head.fp8-v2048-s2-seed2-f64"
KNOWN = "target.variants-fsdp2-tp2-tensorwise-ag.fp8-head.fp8-v2048-s2-seed2-f64"
ACCUMULATED = "target.variants-fsdp2-tensorwise-v2048-s2-lr0.004-f32"
REDUCED = "target.variants-hsdp2x2-tensorwise-v2048-s2-lr0.004-reduce.b16-b16"
EVALUATED = "target.variants-fsdp2-tensorwise-v2048-s2-eval-lr0.004-f64"
RESUMED = "target.variants-tp2-tensorwise-v2048-s2-resume.resharded-lr0.004-b16"
RESUMED_ON_TWO_AXES = "target.variants-fsdp2-tp2-tensorwise-v2048-s2-resume.resharded-lr0.004-b16"
SIGNED = "target.variants-single-tensorwise-v2048-s2-lr0.004-f64-tol.0.004"
# Linears of a user that cast their weight once in a step, and once for all steps.
CACHED = "target.variants-single-tensorwise-v2048-s3-lr0.004-seed4-f32-tol.0.004"
KEPT = "target.variants-single-tensorwise-v2048-s3-lr0.004-seed5-f32-tol.0.004"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, warm: ForkServers) -> Inside:
    """A project with this target in it, run on the real ranks."""
    return with_targets(tmp_path_factory.mktemp("models"), warm, "toy.py", "variants.py")


def test_clean_runs_pass_and_a_fault_of_torchao_is_known_in_a_project_without_records(project: Inside) -> None:
    result = project.folder / "result.json"
    done = project.run("run", STYLED, TIED, ACCUMULATED, KNOWN, "--json", str(result))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 cases: 3 passed, 1 known" in done.stdout
    known_fault = sentence_of_record(read_run(result))
    assert known_fault.startswith("fp8-all-gather-scale-per-tp-rank (")
    assert known_fault in done.stdout


def sentence_of_record(document: dict[str, Any]) -> str:
    """The name and the reason of the one known fault that is told."""
    findings = [finding for case in document["cases"] for finding in case["findings"]]
    (values,) = [finding["values"] for finding in findings if finding["rule"] == KNOWN_FAULT.name]
    return f"{values['fault']} ({values['link']}), passes with the candidate fix: {values['reason']}"


@pytest.mark.sweep
def test_clean_runs_that_evaluate_and_resume_pass(project: Inside) -> None:
    done = project.run("run", REDUCED, EVALUATED, RESUMED, RESUMED_ON_TWO_AXES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("case", "fault", "rule", "starts"),
    [
        sweep(STYLED, "gathered_input_has_local_scale", scales.LOCAL, {"module": "blocks.0.up"}),
        sweep(STYLED, "fp8_tp_styles_lost", scales.NOT_STYLED, {}),
        (REDUCED, "gradients_reduced_in_another_dtype", REDUCE_DTYPE, {"dtypes": "float32", "asked": "bfloat16"}),
        (ACCUMULATED, "one_row_of_a_gradient_scaled", GRADIENTS, {"expected": "distance <= 1e-08"}),
        sweep(EVALUATED, "old_weight_in_evaluation", OTHER_LOSS, {}),
        sweep(
            EVALUATED,
            "evaluation_mode_left_on",
            SETTING,
            {"setting": "training mode", "phase": "the evaluation of step 1"},
        ),
        (RESUMED, "optimizer_state_not_loaded", OTHER_STATE, {"layout": "fsdp2", "parts": "exp_avg of"}),
        sweep(
            RESUMED_ON_TWO_AXES,
            "optimizer_state_not_loaded",
            OTHER_STATE,
            {"layout": "fsdp4", "parts": "exp_avg of"},
        ),
        (TIED, "fp8_all_gather_flag_lost", scales.RULES.number, {"module": "blocks.0.down"}),
    ],
)
def test_a_planted_fault_is_found(project: Inside, case: str, fault: str, rule: Rule, starts: dict[str, str]) -> None:
    """`starts`: how values and places of a finding by the rule begin."""
    result = project.folder / "result.json"
    done = project.run("run", case, "--inject", f"fault:{fault}", "--json", str(result))
    assert done.returncode == 1, done.stdout + done.stderr
    (case_result,) = read_run(result)["cases"]
    findings = [{**finding, **finding["values"]} for finding in case_result["findings"] if finding["rule"] == rule.name]
    assert any(all(str(finding[name]).startswith(text) for name, text in starts.items()) for finding in findings), (
        case_result["findings"]
    )


def run(project: Inside, case: str, *words: str) -> tuple[int, str]:
    done = project.run("run", case, "--verbose", *words)
    return done.returncode, done.stdout


def test_a_fault_is_found_by_the_recorded_profile_and_by_nothing_else(project: Inside) -> None:
    kept = ("--inject", "fault:float8_weight_kept_for_backward")
    code, out = run(project, SIGNED, *kept)
    assert code == 0 and "memory in 1 case: no formula for the model of variants; see `profile`" in out, out
    assert "profile in 1 case: no profile is recorded" in out, out
    recorded = project.run("baseline", "update", "--profiles", SIGNED, "--reason", "first")
    assert recorded.returncode == 0 and run(project, SIGNED)[0] == 0, recorded.stdout + recorded.stderr
    code, out = run(project, SIGNED, *kept)
    words = sentence(metamorphic.MEMORY, what="float8_e4m3fn bytes saved for backward")
    assert code == 1 and f"{metamorphic.MEMORY.name} [step 1]: {words}" in out and "/gradients" not in out, out


def test_a_cache_of_casts_is_clean_within_a_step_and_found_behind_it_where_the_reference_has_it_too(
    project: Inside,
) -> None:
    code, out = run(project, CACHED)
    assert code == 0, out
    code, out = run(project, KEPT)
    assert code == 1 and "parity/" not in out, out
    rule = recompute.STALE_CAST
    expected = f"{rule.name}: {sentence(rule)}: first for weight in forward of blocks.0.up at step 2"
    assert expected in out, out
