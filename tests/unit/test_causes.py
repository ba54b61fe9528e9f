"""The order of findings: the headline is the finding nearest to the cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks import causes
from harness.checks.causes import CAUSES, EFFECTS, by_cause, first_effect
from harness.checks.judge import CHECKS
from harness.verdict import UNJUDGED, Finding, Verdict

NUMERIC = Verdict.NUMERIC


def finding(check: str, step: int | None = 1, message: str = "", verdict: Verdict = Verdict.INVARIANT) -> Finding:
    return Finding(check=check, message=message, step=step, verdict=verdict)


def gradients(step: int = 1) -> Finding:
    return finding("parity", step, "21 of 21 gradients differ from the single-rank reference", NUMERIC)


def loss(step: int = 1) -> Finding:
    return finding("loss_vs_golden", step, "the loss differs by -0.0146 from the golden", NUMERIC)


def diverges(step: int = 1) -> Finding:
    return finding("divergence", step, "first operand that diverges: amax of input", NUMERIC)


def not_finite(step: int, what: str = "grad_norm") -> Finding:
    return finding("finite", step, f"{what} is nan at step {step} on rank 0", NUMERIC)


def reduction(step: int = 1) -> Finding:
    return finding("traffic", step, "wrong number or size of all_reduce (sum) in float64 along dp_replicate")


def scale(step: int = 1) -> Finding:
    return finding("scales", step, "scale does not match the amax: first in layers.0.attention.wq")


SATURATED = finding("scales", 1, "float8 values saturate: first in layers.0.attention.wq")
GATHERED = finding("traffic", 1, "float8 all-gather is on, but converted weights are gathered in high precision")
CASTS = finding("scales", 1, "wrong number of casts: first in layers.0.attention.wk")
MATMULS = finding("matmuls", 1, "wrong number of scaled matmuls at step 1: 42 instead of 56")
RECOMPUTED = finding("recompute", 1, "checkpointed forward was not recomputed: first in layers.0.attention.wk")
SAVED = finding("memory", 1, "saved memory is that of checkpointing none, not full: wrong number of float64 bytes")
KEPT = finding("live_memory", 1, "float8_e4m3fn[128, 256] is alive between forward and backward")
MODULE = finding("local_parity", 1, "the output of layers.0.attention.wo is not what one rank computes", NUMERIC)
TOKENS = finding("parity", None, "wrong tokens on rank 1")
DATA = finding("loss_vs_golden", None, "rank 1 trained on other data than the golden")
REPLICAS = finding("parity", 1, "replicas of a shard are not bitwise equal: grad of layers.0.attention.wk.weight")
SAME_DATA = finding("scales", 1, "replicas of a tensor have different float8 data: first in layers.0.attention.wq")
UNCONVERTED = finding("fp8_on", None, "layers.0.feed_forward.w2 was not converted to FP8 on rank 1")
NO_GOLDEN = finding("loss_vs_golden", None, f"{UNJUDGED}no golden is stored for tiny")

# What planted faults show, each in the order in which it must be told.
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
    "a scale of infinity": (scale(), diverges(), gradients(), not_finite(1), not_finite(2, "loss"), loss(2)),
    "NaN in one gradient": (gradients(2), not_finite(2), scale(3), not_finite(3, "loss"), loss(3)),
    "NaN in the loss": (not_finite(1, "loss"), gradients(), loss()),
    "output of TP not reduced": (reduction(), SAME_DATA, gradients()),
    "a wrong loss without a solo witness": (loss(3), finding("parity", None, f"{UNJUDGED}the solo witness")),
    "nothing to compare with": (NO_GOLDEN,),
}


@pytest.mark.parametrize("fault", TOLD)
def test_the_headline_is_nearest_to_the_cause(fault: str) -> None:
    told = TOLD[fault]
    assert by_cause(told) == by_cause(reversed(told)) == told


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


@given(st.lists(st.sampled_from([each for told in TOLD.values() for each in told]), max_size=8))
def test_nothing_is_lost_and_the_order_is_stable(found: list[Finding]) -> None:
    ordered = by_cause(found)
    assert sorted(map(repr, ordered)) == sorted(map(repr, found))
    assert by_cause(ordered) == ordered
    judged = [each.judged for each in ordered]
    assert judged == sorted(judged, reverse=True)


def test_every_check_has_a_stage_and_every_word_is_one_of_a_check() -> None:
    told = [each for stage in (*CAUSES, *EFFECTS) for each in stage.patterns]
    assert {each.check for each in told} == {check.name for check in CHECKS} | {"divergence"}
    sources = "".join(path.read_text() for path in Path(causes.__file__).parent.glob("*.py") if path.stem != "causes")
    for each in told:
        assert each.words in sources, each
