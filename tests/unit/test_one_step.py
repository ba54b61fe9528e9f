"""One step each of what training loops get wrong: which cases, what a target does not take, what the split changes."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from harness.matrix.caseid import parse_layout
from harness.result import CaseResult
from harness.studies.one_step import CLIPPED, LABELS, SPLIT, WHOLE, OneStep, judged_one_step, one_step_cases
from harness.verdict import Verdict
from tests.builders import a_finding, make_case, make_failure, make_result

LAYOUTS = [parse_layout(text) for text in ("single", "tp2", "fsdp2")]
CASES = one_step_cases(make_case(target="mine"), LAYOUTS, "float64")


def test_one_rank_and_the_first_layout_with_several_batches_take_a_step_each() -> None:
    shown = [(case.layout.dp_shard, shows) for shows, case in CASES.values()]
    assert shown == [(1, WHOLE), (2, SPLIT), (2, CLIPPED), (1, LABELS), (2, LABELS)]
    assert {case.train.steps for _, case in CASES.values()} == {1}
    assert one_step_cases(make_case(), LAYOUTS, "float64") == {}
    odd = one_step_cases(make_case(target="mine", global_batch=2), LAYOUTS, "float64")
    assert [shows for shows, _ in odd.values()] == [WHOLE, CLIPPED, LABELS, LABELS]  # no two microbatches of one


def judged(*changes: dict[str, Any]) -> list[OneStep]:
    """What the cases show where their results are changed so."""
    numbers = [(8.0, 1.0), (8.0, 1.0), (8.0, 0.01), (7.0, 1.0), (7.0, 1.0)]
    results: list[CaseResult] = []
    for name, (loss, norm), changed in zip(CASES, numbers, changes or [{}] * 5, strict=True):
        results.append(replace(make_result(name, losses=(loss,), grad_norms=(norm,)), **changed))
    return list(judged_one_step(CASES, results).values())


def test_a_sound_target_has_no_finding_and_takes_all() -> None:
    shown = judged()
    assert all(one.refused is None and not one.result.findings for one in shown)
    assert [one.label for one in shown][:2] == ["single with one microbatch", "fsdp2 with two microbatches"]


FOUND: dict[str, Any] = {"verdict": Verdict.NUMERIC, "findings": (a_finding(check="parity", message="it differs"),)}


@pytest.mark.parametrize(
    ("split", "labels", "at", "words", "has_fix"),
    [
        ({}, {"losses": (7.5,)}, 4, "it is a mean over the labels of each rank or microbatch", True),
        ({}, {"losses": (7.5,), **FOUND}, 4, "labels per rank: 104, 40", True),
        ({"losses": (8.5,)}, {}, 1, "or the sequences of a batch change one another in the model", False),
        ({"grad_norms": (2.0,)}, {}, 1, "when the batch is split, 2 times", False),
        ({"losses": (float("nan"),)}, {}, 1, "the loss of a batch is nan", False),
    ],
)
def test_what_depends_on_the_split_is_found(
    split: dict[str, Any], labels: dict[str, Any], at: int, words: str, has_fix: bool
) -> None:
    shown = judged({}, split, {}, {}, labels)
    finding = shown[at].result.findings[0]
    assert finding.rule == "batch/split" and words in finding.message, finding.message
    assert (finding.fix is not None) == has_fix and shown[at].result.verdict is Verdict.NUMERIC
    assert not any(one.result.findings for number, one in enumerate(shown) if number != at)


def test_a_target_without_microbatches_is_compared_in_the_step_that_clips() -> None:
    raised = '  File "/my/target.py", line 7, in build\n    raise NotImplementedError("none")\n'
    lacks = {"failures": (make_failure(message="NotImplementedError: none", traceback=raised, phase="build"),)}
    split = {"verdict": Verdict.CRASH, "losses": (), **lacks}
    plain = {"grad_norms": (1.0,), **FOUND, "findings": (a_finding(check="clipping", message="not clipped"),)}
    shown = judged({}, split, plain, {}, {"losses": (7.5,)})
    assert [one.refused for one in shown[1:3]] == ["none", "gradients are the same without case.train.max_norm"]
    assert shown[4].result.findings[0].fix is not None
    shown = judged({}, split, {**plain, "losses": (8.5,)}, {}, {"losses": (7.5,)})
    assert shown[2].refused is None and "of which the target leaves some out" in shown[2].result.findings[0].message
    assert shown[4].result.findings[0].fix is None


def test_labels_are_blamed_only_where_nothing_differs_without_them() -> None:
    shown = judged({}, FOUND, {}, {}, {"losses": (7.5,), **FOUND})
    assert [finding.rule for finding in shown[4].result.findings] == [FOUND["findings"][0].rule]


def test_what_a_target_does_not_take_is_no_fault() -> None:
    what = "TargetMisfit: step() takes no labels, and the case has ignored_tokens. Fix: give it"
    lacks = {"verdict": Verdict.CRASH, "failures": (make_failure(message=what),), "losses": ()}
    shown = judged({}, {}, {"grad_norms": (1.0,), **FOUND}, lacks, lacks)
    assert [one.refused for one in shown[2:]] == [
        "gradients are the same without case.train.max_norm",
        "step() takes no labels",
        "step() takes no labels",
    ]
