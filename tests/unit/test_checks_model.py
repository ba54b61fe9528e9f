"""The check `model`: what differs between ranks, or from one rank, and what is not trained."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from harness.checks.check import Rule
from harness.checks.model import (
    BUFFER,
    BUFFER_CHANGED,
    CALLS,
    CONSTANT,
    DTYPE,
    INITIAL,
    LINEAR,
    NO_GRADIENT,
    NO_STEP,
    NOT_UPDATED,
    NOTHING_UPDATED,
    PARAMETER,
    SETTING,
    SEVERAL_STEPS,
    SHAPE,
    TRAINED,
    UNSEEN_GRADIENTS,
    check_model,
    unequal_initial_weights,
)
from harness.trace import RankTrace, Run
from harness.trace.model import Buffer, Linear, ModelRecord, Parameter, StateChange
from harness.verdict import Finding
from tests.builders import (
    make_case,
    make_model,
    make_parameter,
    make_sketch,
    make_steps,
    make_trace,
    make_witnesses,
    run_of,
)

CASE = make_case(dp_shard=2, steps=1)
CHANGED = BUFFER_CHANGED.name


def parameter(fqn: str, **changes: Any) -> Parameter:
    return make_parameter(fqn, **{"built": "b", **changes})


def model(*parameters: Parameter, **changes: Any) -> ModelRecord:
    made = make_model(
        *(parameters or (parameter("up.weight"), parameter("gain"))),
        linears=(Linear(fqn="up", in_features=4, out_features=4, converted=True),),
        calls={"up": 1},
        buffers=(Buffer(fqn="tilt", shape=(4,), dtype="float32", digest="t"),),
        constants={"norm.eps": "1e-05"},
    )
    return replace(made, **changes)


def trace(rank: int = 0, built: ModelRecord | None = None, **changes: Any) -> RankTrace:
    sketches = tuple(make_sketch(fqn) for fqn in ("up.weight", "gain"))
    return make_trace(rank=rank, losses=[8.0], model=built or model(), **{"sketches": sketches, **changes})


def solo(built: ModelRecord | None = None, **changes: Any) -> Run:
    return run_of(trace(0, built or model(calls={"up": 2}), **changes))


def check(*traces: RankTrace, reference: Run | None = None) -> list[Finding]:
    run = run_of(*(traces or (trace(0), trace(1))))
    return check_model(CASE, run, make_witnesses(CASE, solo=reference or solo()))


def test_a_model_that_is_the_same_everywhere_has_no_findings() -> None:
    assert check() == []
    assert check_model(CASE, run_of(trace(0), trace(1)), make_witnesses(CASE)) == []


@pytest.mark.parametrize(("asked", "count"), [("bfloat16", 1), ("float32", 0)])
def test_bfloat16_parameters_are_those_that_the_case_asks_for(asked: str, count: int) -> None:
    """A run in bfloat16 that asks for float32 ones may have master weights of its own."""
    case = make_case(dp_shard=2, dtype="bfloat16", parameter_dtype=asked)
    one = make_witnesses(case, solo=solo())
    wrong = check_model(case, run_of(trace(0), trace(1)), one)
    assert [(finding.rule, finding.values["asked"]) for finding in wrong] == [(DTYPE.name, "bfloat16")] * count


UP, GAIN = parameter("up.weight"), parameter("gain")
TILTED = model(buffers=(Buffer(fqn="tilt", shape=(4,), dtype="float32", digest="u"),))


@pytest.mark.parametrize(
    ("second", "rule", "module", "values"),
    [
        (model(parameter("inner.up.weight"), GAIN), PARAMETER, "inner.up.weight", {"here": "a", "there": "none"}),
        (model(replace(UP, shape=(2, 4)), GAIN), SHAPE, "up.weight", {"who": "one rank"}),
        (model(UP, replace(GAIN, trained=False)), TRAINED, "gain", {"here": "frozen"}),
        (model(linears=()), LINEAR, "up", {"here": "no", "there": "one"}),
        (model(constants={"norm.eps": "None"}), CONSTANT, "norm", {"here": "None", "there": "1e-05"}),
        (model(replace(UP, dtype="float64"), GAIN), DTYPE, "up.weight", {"dtype": "float64", "asked": "float32"}),
        (TILTED, BUFFER, "tilt", {"pair": "rank 0 and rank 1"}),
        (("default dtype", "float32", "float64"), SETTING, None, {"setting": "default dtype", "phase": "build"}),
        (("training mode", "on", "off in 2 of 2 modules"), SETTING, None, {"setting": "training mode"}),
    ],
)
def test_one_rank_that_differs_is_found_with_what_to_do(
    second: ModelRecord | tuple[str, str, str], rule: Rule, module: str | None, values: dict[str, str]
) -> None:
    if isinstance(second, tuple):
        name, before, after = second
        other = trace(1, state=(StateChange(name=name, phase="build", before=before, after=after),))
    else:
        other = trace(1, second)
    (finding,) = check(trace(0), other)
    assert (finding.rule, finding.module) == (rule.name, module)
    assert {name: finding.values[name] for name in values} == values
    assert finding.fix


def test_a_buffer_that_training_changes_is_found_unless_one_rank_changes_it_too() -> None:
    other = model(buffers=(replace(model().buffers[0], changed=True),))
    assert [(finding.rule, finding.ranks) for finding in check(trace(0), trace(1, other))] == [(CHANGED, (1,))]
    alone = check_model(CASE, run_of(trace(0), trace(1, other)), make_witnesses(CASE))
    assert [(finding.rule, finding.ranks) for finding in alone] == [(CHANGED, (1,))]
    assert check(trace(0, other), trace(1, other), reference=solo(replace(other, calls={"up": 2}))) == []


def test_buffers_are_compared_with_one_rank_too() -> None:
    (finding,) = check(trace(0, TILTED), trace(1, TILTED))
    assert (finding.rule, finding.values["pair"]) == (BUFFER.name, "rank 0 and the single-rank reference")


def test_a_reference_that_joins_its_microbatches_is_found() -> None:
    (finding,) = check(reference=solo(model(calls={"up": 1})))
    assert (finding.rule, finding.module) == (CALLS.name, "up")
    assert dict(finding.values) == {"ours": 1, "theirs": 1, "dp": 2, "count": 1}


def both(**changes: Any) -> list[Finding]:
    return check(trace(0, **changes), trace(1, **changes))


def test_parameters_without_gradients_are_named_but_not_those_lost_in_rounding() -> None:
    (finding,) = both(sketches=(make_sketch("up.weight"),))
    assert (finding.rule, finding.module) == (NO_GRADIENT.name, "gain")
    assert dict(finding.values) == {"count": 1, "all": 2, "names": "gain"}
    (finding,) = both(sketches=())
    assert finding.fix is not None and "loss.backward() before optimizer.step()" in finding.fix
    small = (make_sketch("up.weight"), make_sketch("gain", value=1e-6))
    assert both(built=model(parameter("up.weight"), parameter("gain", updated=False)), sketches=small) == []


def test_optimizers_that_step_too_often_train_nothing_or_are_not_seen() -> None:
    often = tuple(replace(step, optimizer_steps=2) for step in make_steps([8.0]))
    (finding,) = check(reference=solo(steps=often))
    assert (finding.rule, finding.values["count"]) == (SEVERAL_STEPS.name, 2)
    still = model(*(parameter(fqn, updated=False) for fqn in ("up.weight", "gain")))
    once = tuple(replace(step, optimizer_steps=1) for step in make_steps([8.0]))
    (finding,) = both(built=still, steps=once)
    assert finding.rule == NOTHING_UPDATED.name
    (finding,) = both(built=still)
    assert finding.rule == NO_STEP.name
    (finding,) = both(built=model(parameter("up.weight"), parameter("gain", updated=False)))
    assert (finding.rule, finding.module) == (NOT_UPDATED.name, "gain")
    assert dict(finding.values) == {"count": 1, "all": 2, "names": "gain"}
    never = tuple(replace(step, optimizer_steps=0) for step in make_steps([8.0]))
    (finding,) = both(sketches=(), steps=never)
    assert finding.rule == UNSEEN_GRADIENTS.name
    still = model(*(parameter(fqn, updated=False) for fqn in ("up.weight", "gain")))
    (finding,) = both(sketches=(), steps=never, built=still)
    assert finding.rule == NO_STEP.name, "told once"


def test_weights_that_the_target_built_differently_on_ranks_that_hold_the_same() -> None:
    def held(rank: int, built: str, offset: int) -> RankTrace:
        return trace(rank, model(replace(parameter("gain", offset=(offset,)), built=built)))

    assert unequal_initial_weights(run_of(held(0, "a", 0), held(1, "b", 8))) == []
    (finding,) = unequal_initial_weights(run_of(held(0, "a", 0), held(1, "b", 0)))
    assert (finding.rule, finding.module, finding.ranks) == (INITIAL.name, "gain", (0, 1))
    assert finding.values["count"] == 1
