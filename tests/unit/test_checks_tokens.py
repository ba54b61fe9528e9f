"""The check `tokens`: what the model is called with is what the rank was given, in any form."""

from __future__ import annotations

from typing import Any

import pytest

from harness.checks.rule import Rule
from harness.checks.tokens import FOREIGN, LABELS, OTHER_RANK, SOME, check_tokens
from harness.trace import Run
from harness.trace.model import StepInputs
from harness.verdict import Finding
from tests.builders import make_case, make_trace, make_witnesses, run_of

CASE = make_case(dp_shard=2, tp=2, global_batch=8)  # rank // 2 is the data-parallel rank, with 4 sequences


def inputs(sequences: Any, **changes: Any) -> StepInputs:
    values: dict[str, Any] = {"labels": (), "covered": 1.0, "shapes": ((4, 32),), "step": 1}
    return StepInputs(inputs=tuple(sequences), **{**values, **changes})


def own(rank: int) -> range:
    return range(rank // 2 * 4, rank // 2 * 4 + 4)


def run(wrong: dict[int, StepInputs] | None = None) -> Run:
    wrong = wrong or {}
    return run_of(*(make_trace(rank=rank, inputs=(wrong.get(rank) or inputs(own(rank)),)) for rank in range(4)))


def check(checked_run: Run, reference: StepInputs | None = None) -> list[Finding]:
    solo = run_of(make_trace(inputs=(reference or inputs(range(8)),)))
    return check_tokens(CASE, checked_run, make_witnesses(CASE, solo=solo))


def test_every_rank_on_its_own_part_has_no_findings() -> None:
    assert check(run()) == []


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (inputs((), labels=range(4, 8)), LABELS),
        (inputs(range(4)), OTHER_RANK),
        (inputs((4, 5)), SOME),
        (inputs((), covered=0.1), FOREIGN),
    ],
)
def test_other_tokens_are_named_with_what_to_do(wrong: StepInputs, rule: Rule) -> None:
    (finding,) = check(run({2: wrong, 3: wrong}))
    assert (finding.rule, finding.ranks, finding.values["who"]) == (rule.name, (2, 3), "ranks 2-3")
    assert rule is not SOME or (finding.values["got"], finding.values["wanted"]) == (2, 4)
    assert (finding.step, finding.rank, finding.expected) == (1, 2, "sequences 4-7 of the global batch")
    assert finding.fix


def test_the_reference_is_looked_at_too() -> None:
    (finding,) = check(run(), inputs(range(4)))
    assert (finding.rule, finding.values["who"]) == (SOME.name, "the single-rank reference")
    assert (finding.rank, finding.ranks) == (None, ())


def test_tokens_in_another_form_are_no_finding() -> None:
    assert check(run(dict.fromkeys(range(4), inputs((), covered=1.0)))) == [], "packed, or with special tokens"
    pieces = dict.fromkeys(range(4), inputs((), covered=15 / 31))
    assert check(run(pieces)) == [], "every tensor-parallel rank has a half of each sequence"
