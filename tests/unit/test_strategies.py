"""What torch's validation of sharding strategies reports about a layout."""

from __future__ import annotations

from harness.studies.strategies import validated_layout
from harness.trace.operator_checks import Validated, Validation

RULES = Validation(operators={"mm": Validated(right=5, wrong=0), "embedding": Validated(right=8, wrong=7)})


def test_a_layout_is_judged_by_the_operators_that_it_calls() -> None:
    assert validated_layout(["mm", "_foreach_mul"], RULES).text == "agrees: 1 operator"
    assert validated_layout(["embedding", "mm"], RULES).text == "objects: embedding: 7 rules wrong"


def test_where_nothing_is_validated_it_says_why() -> None:
    assert validated_layout([], RULES).text == "nothing to validate: no operator takes a DTensor"
    assert validated_layout(["topk"], RULES).text == "nothing to validate: torch has no samples of topk"
    missing = Validation(unavailable="No module named 'expecttest'")
    assert validated_layout(["mm"], missing).text == "not available: No module named 'expecttest'"
