"""What torch's judges say of a layout."""

from __future__ import annotations

from harness.matrix.caseid import parse_case_id
from harness.studies.judges import judged, spmd_types_says
from harness.trace.operator_checks import Validated, Validation

RULES = Validation(operators={"mm": Validated(right=5, wrong=0), "embedding": Validated(right=8, wrong=7)})


def test_a_layout_is_judged_by_the_operators_that_it_calls() -> None:
    assert judged(["mm", "_foreach_mul"], RULES).text == "agrees: 1 operator"
    assert judged(["embedding", "mm"], RULES).text == "objects: embedding: 7 rules wrong"


def test_a_judge_that_cannot_judge_says_why() -> None:
    assert judged([], RULES).text == "nothing to judge: no operator takes a DTensor"
    assert judged(["topk"], RULES).text == "nothing to judge: torch has no samples of topk"
    missing = Validation(unavailable="No module named 'expecttest'")
    assert judged(["mm"], missing).text == "not available: No module named 'expecttest'"
    assert spmd_types_says(parse_case_id("tp2-rowwise-v2048-b16")).word == "nothing to judge"
