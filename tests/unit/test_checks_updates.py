"""The check `updates`: what optimizers do on every rank in every step. Real ranks: `tests/worker/test_updates.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from harness.checks.check import Rule
from harness.checks.updates import FORMULA, NO_UPDATE, OPTION, UNMOVED, check_updates
from harness.trace import RankTrace
from harness.trace.model import Options, StepUpdate
from harness.verdict import Finding
from tests.builders import make_case, make_model, make_parameter, make_sketch, make_trace, make_witnesses, run_of

CASE = make_case(tp=2, steps=2)
GIVEN = {"lr": "0.1", "exp_avg": "float32"}


def options(*names: str, **changes: str) -> tuple[Options, ...]:
    return (Options(names=names, values=GIVEN | changes),)


def trace(rank: int, second: StepUpdate | None = None, *, elements: int = 8, digest: str = "new") -> RankTrace:
    first = StepUpdate(step=1, updated=True, options=options("up", "down"))
    held = (make_parameter(fqn, local_elements=elements) for fqn in ("up", "down"))
    model = make_model(*held, updates=(first, second or StepUpdate(step=2, updated=True)))
    sketch = make_sketch("up")
    kinds = [("param", 1, "old"), ("grad", 2, "g"), ("param", 2, digest)]
    sketches = tuple(replace(sketch, kind=kind, step=step, digest=of) for kind, step, of in kinds)
    return make_trace(CASE, rank, model=model, sketches=sketches)


def check(**of_second: Any) -> list[Finding]:
    run = run_of(trace(0), trace(1, **of_second))
    return check_updates(CASE, run, make_witnesses(CASE, solo=run_of(trace(0))))


@pytest.mark.parametrize(
    ("second", "rule", "module"),
    [
        ({"second": StepUpdate(step=2)}, NO_UPDATE, None),
        ({"second": StepUpdate(step=2, updated=True, options=options("up"))}, NO_UPDATE, "down"),
        ({"second": StepUpdate(step=2, updated=True, options=options("up", "down", lr="0.2"))}, OPTION, "down"),
        ({"second": StepUpdate(step=2, updated=True, options=options("up", "down", exp_avg="b"))}, OPTION, "down"),
        ({"second": StepUpdate(step=2, updated=True, fqn="up", what="param", distance=9.0)}, FORMULA, "up"),
        ({"second": StepUpdate(step=2, updated=True, fqn="up", what="param", distance=math.nan)}, FORMULA, "up"),
        ({"digest": "old"}, UNMOVED, "up"),
    ],
)
def test_a_rank_that_updates_otherwise_is_found_in_its_step(
    second: dict[str, Any], rule: Rule, module: str | None
) -> None:
    (finding,) = check(**second)
    assert (finding.rule, finding.module, finding.step, finding.ranks) == (rule.name, module, 2, (1,))


def test_the_same_updates_and_a_rank_whose_shards_are_empty_have_no_finding() -> None:
    assert check() == []
    assert check(second=StepUpdate(step=2), elements=0) == []
    assert check_updates(CASE, run_of(trace(0), trace(1)), make_witnesses(CASE)) == []
