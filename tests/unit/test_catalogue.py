"""The catalogue of checks: which finding is nearest to the cause, and what every rule means."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.advice import advice, advice_of
from harness.checks.catalogue import CHECKS, OF_NO_CASE, RULES, by_cause, first_effect
from harness.errors import HarnessError
from harness.report.checks import checks_markdown, explained
from harness.report.sections import text_of
from harness.verdict import Finding, Verdict
from tests.builders import a_finding

NUMERIC = Verdict.NUMERIC


def finding(rule: str, step: int | None = 1, *, judged: bool = True) -> Finding:
    verdict = NUMERIC if RULES[rule].numeric else Verdict.INVARIANT
    return a_finding(rule=rule, step=step, verdict=verdict, judged=judged)


gradients, loss, diverges, reduction, scale, norm_lost, loss_lost = (
    partial(finding, rule)
    for rule in (
        "parity/gradients",
        "loss_vs_golden/loss",
        "divergence/operand",
        "traffic/volume",
        "scales/amax",
        "finite/grad-norm",
        "finite/loss",
    )
)
SATURATED = finding("scales/saturated")
GATHERED = finding("traffic/high-precision")
CASTS = finding("scales/number")
MATMULS = finding("matmuls/number")
RECOMPUTED = finding("recompute/not-recomputed")
SAVED = finding("memory/other-checkpointing")
KEPT = finding("live_memory/too-much")
MODULE = finding("module_replay/tensor")
TOKENS = finding("parity/tokens", None)
REPLAY = finding("module_replay/incomparable")
DATA = finding("loss_vs_golden/data", None)
REPLICAS = finding("parity/replicas")
SAME_DATA = finding("scales/replicas")
UNCONVERTED = finding("fp8_on/not-converted", None)
NO_GOLDEN = finding("loss_vs_golden/no-golden", None, judged=False)
# What injected faults show, each in the order in which it must be told.
TOLD = {
    "amax of the local shard": (scale(), SATURATED, reduction(), diverges(), gradients(), loss(5)),
    "gradients not reduced over replicas": (reduction(), REPLICAS, gradients(), scale(2), diverges(2), loss(2)),
    "gradients divided twice": (gradients(), diverges(2), loss(3)),
    "shards gathered in the wrong order": (diverges(), gradients(), loss()),
    "a module computes something else": (MODULE, gradients(), loss(2)),
    "float8 all-gather lost": (GATHERED, CASTS, reduction()),
    "checkpointing lost": (RECOMPUTED, SAVED, CASTS, MATMULS),
    "a linear in high precision": (UNCONVERTED, CASTS, MATMULS, diverges(), gradients()),
    "weights of the first step": (scale(2), KEPT, diverges(2), gradients(2)),
    "scales precomputed once": (scale(3), reduction(2), diverges(3), gradients(3)),
    "gradients of the last step kept": (KEPT, gradients(2), diverges(3), loss(3)),
    "other tokens": (DATA, TOKENS, diverges(), gradients()),
    "a scale of infinity": (scale(), diverges(), norm_lost(1), gradients(), loss_lost(2), loss(2)),
    "NaN in one gradient": (norm_lost(2), gradients(2), scale(3), loss_lost(3), loss(3)),
    "NaN in the loss": (loss_lost(1), gradients(), loss()),
    "output of TP not reduced": (reduction(), SAME_DATA, gradients()),
    "a wrong loss without a solo witness": (loss(3), finding("parity/no-reference", None, judged=False)),
    "nothing to compare with": (NO_GOLDEN,),
    "norms not reduced over TP": (replace(REPLICAS, notes=("not reduced over tp",)), reduction(), gradients(), REPLAY),
}


@pytest.mark.parametrize("fault", TOLD)
def test_the_headline_is_nearest_to_the_cause(fault: str) -> None:
    in_order = TOLD[fault]
    assert by_cause(in_order) == by_cause(reversed(in_order)) == in_order


@pytest.mark.parametrize(
    ("fault", "effects"),
    [
        ("amax of the local shard", 3),
        ("gradients not reduced over replicas", 1),
        ("scales precomputed once", 2),
        ("a wrong loss without a solo witness", None),
        ("gradients divided twice", None),
        ("checkpointing lost", None),
        ("nothing to compare with", None),
    ],
)
def test_effects_begin_where_nothing_after_can_be_the_cause(fault: str, effects: int | None) -> None:
    assert first_effect(TOLD[fault]) == effects
    assert first_effect(()) is None


def test_a_norm_that_is_no_number_has_the_module_whose_gradient_is_none() -> None:
    lost = replace(gradients(2), module="wq", values={"norm": math.nan})
    assert [each.module for each in by_cause((norm_lost(2), lost))] == ["wq", "wq"]
    assert by_cause((norm_lost(2), replace(lost, values={"norm": 1.0})))[0].module is None


@given(st.lists(st.sampled_from([shown for findings in TOLD.values() for shown in findings]), max_size=8))
def test_nothing_is_lost_and_the_order_is_stable(findings: list[Finding]) -> None:
    ordered = by_cause(findings)
    assert sorted(map(repr, ordered)) == sorted(map(repr, findings))
    assert by_cause(ordered) == ordered
    judged = [ordered_finding.judged for ordered_finding in ordered]
    assert judged == sorted(judged, reverse=True)


def test_every_rule_is_one_of_its_check_and_is_told_apart_by_values_of_its_sentence() -> None:
    assert len(RULES) > 150
    for check in CHECKS:
        assert {rule.check for rule in check.rules} == {check.name}
    for rule in RULES.values():
        assert re.fullmatch(r"[a-z0-9_]+/[a-z0-9-]+", rule.name), rule.name
        assert all(f"{{{key}" in rule.says or rule.name in ("divergence/operand", "engine/raised") for key in rule.key)


ROOT = Path(__file__).parents[2]
# Broken by no planted fault: formulas describe the model of the cases that faults are planted in.
# `tests/power/test_example.py` plants faults in a model that has profiles, `tests/worker/test_unshards.py` in operands.
UNPROVEN = {"profile", "unshards"}


def test_every_rule_has_a_meaning_usual_causes_and_what_to_do() -> None:
    page = checks_markdown()
    for rule in RULES:
        found, shown = advice_of(rule), text_of([explained(rule)])
        assert found is not None, f"add {rule} to harness/checks/advice.toml"
        for text in (found.meaning, found.causes, found.action):
            assert text.endswith(".") and text in shown and (text in page or rule in OF_NO_CASE)
    assert {advice_of(rule) for rule in RULES} == {*advice()}, "some advice is about no rule"


def test_every_check_is_described_with_its_rules() -> None:
    for check in CHECKS:
        assert check.question.endswith("?") and check.blind.endswith(".")
        shown = text_of([explained(check.name)])
        assert check.question in shown and all(rule.name in shown for rule in check.rules)
    with pytest.raises(HarnessError, match="did you mean scales/amax"):
        explained("scales/amx")


@pytest.mark.plugin("faults")
def test_the_recorded_mutation_matrix_is_that_of_the_catalogue_and_proves_every_check() -> None:
    from harness.plugins.faults.faults import all_faults
    from harness.plugins.faults.kills import read_kills

    kills = read_kills(ROOT)
    assert kills is not None and kills.found.keys() == all_faults().keys()
    for name, cases in kills.found.items():
        assert all(kill.rules for kill in cases.values()) or all_faults()[name].equivalent, name
    rules = {rule for cases in kills.found.values() for kill in cases.values() for rule in kill.rules}
    assert rules <= RULES.keys() | {"judge/unexplained", "judge/other-end", "judge/missing"}
    unproven = {check.name for check in CHECKS if not kills.by_check(check.name)}
    assert unproven == UNPROVEN, (
        "record a fault that it finds (`dev mutate --fault NAME --record`), or name it in UNPROVEN"
    )
