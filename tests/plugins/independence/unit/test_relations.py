"""What a recipe promises, and what follows from what ranks found. No ranks, no torch."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest

from harness.matrix.case import Case, Float8
from harness.matrix.caseid import parse_case_id
from harness.matrix.recipes import Recipe
from harness.plugins.independence.commands import exit_code_of, independence_sections
from harness.plugins.independence.relations import GRADIENTS, RELATIONS, Moved, Relation, Row, judged, promised
from harness.report.sections import text_of
from harness.verdict import ExitCode
from tests.builders import WQ

ROWWISE = parse_case_id("fsdp2-rowwise-v2048-b16")


def found(relation: Relation, **changes: Any) -> Moved:
    return Moved(relation=relation, **{"compared": 9, "replaced": True, **changes})


def row(*ranks: Moved, case: Case = ROWWISE) -> Row:
    return judged(case, [(rank,) for rank in ranks])


def test_promises_follow_from_casts_and_not_from_names() -> None:
    promises = {recipe: promised(Case(float8=Float8(recipe=recipe))) for recipe in get_args(Recipe)}
    assert all(of["other microbatch"] for of in promises.values())
    assert {recipe for recipe, of in promises.items() if not of["later token"]} == {"tensorwise"}
    exact = {recipe for recipe, of in promises.items() if of[GRADIENTS]}
    assert exact == {"bf16", "rowwise_with_gw_hp", "mxfp8_with_gw_hp"}
    other = promised(Case(float8=Float8(recipe="rowwise", casts=("i:ten",))))
    assert not other["padding"] and other["other microbatch"]
    own = promised(Case(float8=Float8(recipe="tensorwise", casts=("i:axs", "i_gw:dis", "go_gw:dis"))))
    assert all(own.values())


@pytest.mark.parametrize("of", ["scale", "experts", "module", "between"])
def test_a_broken_promise_names_the_first_module_and_the_rank(of: Any) -> None:
    moved = found("padding", of=of, first=WQ, distance=1e-9)
    broken = row(found("padding"), moved)
    (finding,) = broken.findings
    assert (finding.rule, finding.module, finding.ranks) == (f"independence/{of}", WQ, (1,))
    assert exit_code_of([broken]) == ExitCode.FAILED
    tensorwise = row(found("padding"), moved, case=Case(float8=Float8(recipe="tensorwise")))
    assert not tensorwise.findings and "(1e-09)" in text_of(independence_sections([tensorwise]))


def test_one_finding_has_all_relations_that_a_module_breaks() -> None:
    both = [[found(name, of="scale", first=WQ, distance=0.1) for name in ("later token", "padding")]]
    (finding,) = judged(ROWWISE, both).findings
    assert finding.message.startswith(f"a later token, padding changes what {WQ} returns")


RULES = {
    "number": found("later token", of="scale", first=WQ, distance=math.nan),
    "not-replaced": found("other sequence", replaced=False),
    "not-compared": found("other sequence", compared=0),
    "loss": found("padding", loss=0.1),
}


@pytest.mark.parametrize("rule", RULES)
def test_nan_and_what_was_not_tested_and_padding_in_the_loss_are_failures(rule: str) -> None:
    (finding,) = row(RULES[rule]).findings
    assert finding.rule == f"independence/{rule}"
    assert row(RULES["number"], case=Case(float8=Float8(recipe="tensorwise"))).findings, "NaN never passes"


def test_gradients_are_judged_where_they_are_in_high_precision() -> None:
    moved = found("padding", gradients=1e-7, gradient=f"{WQ}.weight")
    assert not row(moved).findings
    (finding,) = row(moved, case=Case(float8=Float8(recipe="rowwise_with_gw_hp"))).findings
    assert finding.rule == "independence/gradients"


def test_what_was_not_checked_says_why_and_nothing_compared_is_no_success() -> None:
    empty = judged(ROWWISE, [[Moved(relation=relation, why=f"there is no {relation}") for relation in RELATIONS]])
    assert exit_code_of([empty]) == ExitCode.NOTHING_RAN
    assert "other sequence was not checked" in text_of(independence_sections([empty]))
    assert exit_code_of([Row(case_id="a", recipe="bf16", promised={}, failed="it raised")]) == ExitCode.FAILED
