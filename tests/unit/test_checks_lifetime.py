"""The check `lifetime`: what is of an earlier step or of another microbatch is named with both."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from harness.checks.lifetime import CAST, COPY, GATHERED, MICROBATCH, OTHER_SCALE, SCALE, check_lifetime
from harness.checks.rule import Rule
from harness.trace.operands import Aged, KeptWeight, OperandTrace
from harness.verdict import Finding
from tests.builders import make_case, make_trace, make_witnesses, not_judged, run_of

CASE = make_case(recipe="tensorwise", steps=3)


def aged(**fields: Any) -> Aged:
    known = {
        "index": 7,
        "what": "data",
        "step": 3,
        "fqn": "wq",
        "role": "weight",
        "where": "forward",
        "microbatch": 2,
        "first_step": 2,
        "first_fqn": "wq",
        "first_role": "weight",
        "first_phase": "forward",
        "first_microbatch": 1,
    }
    return Aged(**{**known, **fields})


def check(*reused: Aged, kept: tuple[KeptWeight, ...] = (), updates: int = 1) -> list[Finding]:
    trace = make_trace(CASE, operands=OperandTrace(casts=(), matmuls=(), aged=reused, kept=kept))
    steps = tuple(replace(step, optimizer_steps=updates) for step in trace.steps)
    return check_lifetime(CASE, run_of(replace(trace, steps=steps)), make_witnesses(CASE))


@pytest.mark.parametrize(
    ("use", "rule", "expected", "found"),
    [
        ({}, CAST, "of step 3", "of step 2"),
        ({"what": "source"}, COPY, "of step 3", "of step 2"),
        ({"what": "scale"}, SCALE, "of step 3", "of step 2"),
        ({"role": "input"}, MICROBATCH, "of step 3, microbatch 2", "of step 2, microbatch 1"),
        ({"role": "input", "what": "scale"}, MICROBATCH, "of step 3, microbatch 2", "of step 2, microbatch 1"),
        ({"role": "grad_output", "microbatch": 0}, MICROBATCH, "of step 3", "of step 2, microbatch 1"),
        (
            {"role": "input", "step": 2, "microbatch": 1, "first_phase": "evaluation"},
            MICROBATCH,
            "of step 2, microbatch 1",
            "of the evaluation of step 2, microbatch 1",
        ),
        (
            {"what": "other_scale", "first_fqn": "wk", "first_role": "input"},
            OTHER_SCALE,
            "of step 3",
            "of step 2, input of wk",
        ),
    ],
)
def test_what_is_used_again_is_named_with_its_time(use: dict[str, Any], rule: Rule, expected: str, found: str) -> None:
    (finding,) = check(aged(**use))
    assert (finding.rule, finding.expected, finding.found) == (rule.name, expected, found)
    assert (finding.step, finding.rank, finding.module) == (use.get("step", 3), 0, "wq")


def test_a_weight_that_no_optimizer_has_updated_since_has_no_age() -> None:
    assert check(aged(), updates=0) == []
    assert [finding.rule for finding in check(aged(role="input"), updates=0)] == [MICROBATCH.name]


def test_a_weight_that_stays_gathered_is_named() -> None:
    (finding,) = check(kept=(KeptWeight(step=1, fqn="wq", name="weight"), KeptWeight(step=2, fqn="wq", name="weight")))
    assert (finding.rule, finding.step, finding.module, finding.operand) == (GATHERED.name, 1, "wq", "weight")


def test_it_judges_eager_runs_in_float8_alone() -> None:
    assert "lifetime" not in not_judged(CASE)
    assert "lifetime" in not_judged(make_case())
    assert "lifetime" in not_judged(make_case(recipe="tensorwise", compile="inductor"))
