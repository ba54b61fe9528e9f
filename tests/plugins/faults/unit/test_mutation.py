"""The mutation matrix: what counts as detected, what the baselines detect, and how it is reported."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from msgspec.structs import replace

from harness.jsonform import to_json
from harness.plugins.faults.commands import mutation_section, mutation_sections
from harness.plugins.faults.faults import NEEDS
from harness.plugins.faults.mutation import (
    NO_EFFECT,
    UNFINISHED,
    BaselineDetection,
    MutationMatrix,
    Trial,
    baseline_detection,
    fault_effect,
    recorded_kills,
)
from harness.report.sections import Table, text_of
from harness.trace import Run
from harness.verdict import Verdict
from tests.builders import make_failure, make_golden, make_sketch, make_trace, run_of
from tests.unit.test_html_report import of_kind


def make_trial(fault: str | None = "amax_without_abs", **changes: Any) -> Trial:
    """The run of a planted fault that a check found in step 1; None: a clean run."""
    trial = Trial(
        fault=fault,
        group="A" if fault else None,
        equivalent=False,
        case_id="single-tensorwise-v2048-f64",
        verdict=Verdict.NUMERIC,
        rules=("parity/gradients",),
        first_step=1,
        excess=None,
        message="gradients are off",
        baseline=BaselineDetection(loss_gap=0.0, sqnr_db=math.inf),
    )
    return replace(trial, **changes)


def matrix_of(
    *trials: Trial, clean: tuple[Trial, ...] = (), not_planted: dict[str, str] | None = None
) -> MutationMatrix:
    return MutationMatrix(trials=trials, clean=clean, not_planted=not_planted or {}, wall_s=1.0, interrupted=False)


def run(losses: list[float], gradient: float) -> Run:
    return run_of(make_trace(losses=losses, sketches=(make_sketch("w", value=gradient),)))


def test_only_a_verdict_on_the_case_by_a_check_that_passes_in_the_clean_run_counts_as_detected():
    for verdict in (Verdict.NUMERIC, Verdict.INVARIANT, Verdict.CRASH, Verdict.HANG):
        assert make_trial(verdict=verdict).detected and not make_trial(verdict=verdict, rules=()).detected
    for verdict in (Verdict.PASSED, Verdict.KNOWN, Verdict.INFRA, Verdict.NOT_RUN):
        assert not make_trial(verdict=verdict).detected


def test_what_is_not_detected_and_what_is_no_proof():
    missed = make_trial(verdict=Verdict.PASSED, rules=())
    equivalent = replace(missed, equivalent=True)
    unsound = make_trial(None)
    matrix = matrix_of(make_trial(), missed, equivalent, clean=(unsound, make_trial(None, verdict=Verdict.PASSED)))
    assert matrix.undetected == (missed,)
    assert matrix.false_positives == (unsound,)


def test_what_did_not_reach_the_target_is_neither_detected_nor_missed():
    idle = make_trial(not_reached=NO_EFFECT, verdict=Verdict.PASSED, rules=())
    broken = make_trial(not_reached="AssertionError: no norm", verdict=Verdict.CRASH, rules=("engine/raised",))
    foreign = replace(idle, case_id="target.my_pkg.net-single-tensorwise-v2048-f64")
    matrix = matrix_of(make_trial(), idle, broken, foreign)
    assert not broken.detected
    assert matrix.undetected == ()
    assert matrix.not_reached == (idle, broken, foreign)
    assert matrix.unplantable == (idle, broken)  # the list says that they have an effect there
    text = text_of(mutation_sections(matrix))
    assert "did not reach the target, so they prove nothing (3)" in text
    (line,) = (line for line in text.splitlines() if line.startswith("  all"))
    assert line.split()[1] == "1/1"


def test_detections_whose_headline_is_listed_are_scored():
    right, wrong = make_trial(misnamed=()), make_trial(misnamed=("rank", "step"), message="rank 0")
    missed = replace(wrong, verdict=Verdict.PASSED, rules=())
    matrix = matrix_of(make_trial(), right, wrong, missed)
    assert (matrix.scored, matrix.misnamed) == ((right, wrong), (wrong,))
    text = text_of(mutation_sections(matrix))
    assert "headlines that misname the fault, of 2 detections (1)" in text
    misled = replace(wrong, misnamed=("module", "cause", "misleading"))
    score = matrix_of(right, wrong, misled).scores["A"]
    assert score == {"headlines": 3, "place": 1, "cause": 2, "misleading": 1}
    assert recorded_kills(matrix_of(misled)).scores["A"]["misleading"] == 1
    assert "amax_without_abs in single-tensorwise-v2048-f64: not the rank and step: rank 0" in text


def test_only_what_a_run_records_tells_it_from_another():
    clean = run([8.0], 1.0)
    steps = (replace(clean.traces[0].steps[0], seconds=9),)
    slower = run_of(replace(clean.traces[0], peak_memory_bytes=1, steps=steps))
    assert fault_effect(slower) == fault_effect(clean)
    assert fault_effect(run([8.0], 1.5)) != fault_effect(clean)
    assert fault_effect(run_of(*clean.traces, make_failure(rank=1))) != fault_effect(clean)


_OWN = """\
Traceback (most recent call last):
  File "/x/harness/worker/train.py", line 1, in prepare
    built()
  File "/x/harness/plugins/faults/worker/hooks.py", line 2, in norms
    assert found
AssertionError: no module has an eps

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/x/torch/_dynamo/output_graph.py", line 3, in compile
    compiled()
BackendCompilerFailed: no module has an eps
"""


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ({"traceback": _OWN}, "AssertionError: no module has an eps"),
        ({"traceback": _OWN.replace("faults", "probes")}, ""),
        ({"traceback": _OWN, "consequence": True}, ""),
        ({"phase": "injection fault:eps_lost", "message": "InjectionError: x"}, "InjectionError: x"),
    ],
)
def test_what_the_code_of_a_fault_raises_is_told_from_what_it_causes(failure, said):
    assert fault_effect(run_of(make_failure(**failure))).broken == said


def test_losses_differ_by_more_than_a_hundredth_of_a_nat_and_gradients_below_twenty_decibels():
    for gap, seen in ((0.0, False), (0.01, False), (0.0101, True), (math.nan, True)):
        assert BaselineDetection(loss_gap=gap, sqnr_db=None).by_loss is seen
    for sqnr, seen in ((math.inf, False), (20.1, False), (20.0, True), (math.nan, True), (None, False)):
        assert BaselineDetection(loss_gap=0.0, sqnr_db=sqnr).by_sqnr is seen


def test_both_baselines_detect_nan_and_a_run_that_does_not_finish():
    detection = baseline_detection(run([math.nan], math.nan), make_golden(losses=(8.0,)), run([8.0], 1.0))
    assert UNFINISHED.by_loss and UNFINISHED.by_sqnr and detection.by_loss and detection.by_sqnr


def test_a_run_is_compared_with_the_loss_of_the_golden_and_the_gradient_of_the_solo_witness():
    detection = baseline_detection(run([8.0, 7.5], 1.1), make_golden(losses=(8.0, 7.48)), run([8.0, 7.5], 1.0))
    assert detection.loss_gap == pytest.approx(0.02)
    assert detection.sqnr_db == pytest.approx(20.0)
    same = baseline_detection(run([8.0, 7.5], 1.0), make_golden(losses=(8.0, 7.5)), run([8.0, 7.5], 1.0))
    assert (same.loss_gap, same.sqnr_db) == (0.0, math.inf)


def test_the_report_names_what_is_not_detected_equivalent_or_not_planted_with_its_reason():
    missed = make_trial("scale_margin", verdict=Verdict.PASSED, rules=(), case_id="fsdp2-tensorwise-v2048-f64")
    text = text_of(mutation_sections(matrix_of(make_trial(), make_trial("scale_margin"), missed)))
    assert "undetected (1)\n  scale_margin in fsdp2-tensorwise-v2048-f64: passed" in text
    (line,) = (line for line in text.splitlines() if line.startswith("  all"))
    assert line.split()[1] == "1/2"
    quiet = make_trial("clamp_dropped", equivalent=True, verdict=Verdict.PASSED, rules=())
    text = text_of(mutation_sections(matrix_of(quiet, clean=(make_trial(None),))))
    assert "clamp_dropped: Under dynamic scaling" in text
    assert "prove nothing (1)" in text
    needs = {"rope_base_of_another_model": NEEDS["reference"]}
    text = text_of(mutation_sections(matrix_of(make_trial(), not_planted=needs)))
    assert "rope_base_of_another_model: base of RoPE" in text and "(needs the reference target" in text


def test_the_json_keeps_infinity():
    document = json.loads(to_json(matrix_of(make_trial(baseline=UNFINISHED))))
    assert document["trials"][0]["sight"]["loss_gap"] == "Infinity"


def test_some_faults_are_recorded_beside_the_others_in_the_order_of_the_catalogue() -> None:
    before = recorded_kills(matrix_of(make_trial("gradients_not_clipped"), make_trial(rules=("parity/loss",))))
    after = recorded_kills(matrix_of(make_trial(rules=("scales/amax",))), before)
    assert list(after.found) == ["amax_without_abs", "gradients_not_clipped"]
    assert [kill.rules for kill in after.found["amax_without_abs"].values()] == [("scales/amax",)]
    other = replace(before, software={"torch": "2.15.0"})
    assert list(recorded_kills(matrix_of(make_trial()), other).found) == ["amax_without_abs"]


def test_a_mutation_matrix_lists_what_was_not_detected_first() -> None:
    trials = (make_trial("found"), make_trial("missed", verdict=Verdict.PASSED, rules=()))
    section = mutation_section(MutationMatrix(trials=trials, clean=(), wall_s=1.0, interrupted=False))
    missed, every = (table for table in of_kind(Table, section) if table.rows)
    assert [row[1] for row in missed.rows] == ["missed"] and [row[1] for row in every.rows] == ["found", "missed"]
    assert section.blocks[0] == "1 of 2 trials not detected."
