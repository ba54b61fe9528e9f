"""Recomputed casts and matmuls, and operands of another step or microbatch."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from harness.checks import recompute
from harness.checks.check import Rule, Witnesses
from harness.expect.expectations import Expectations
from harness.expect.model import found_model, llama_model, recomputed_calls
from harness.matrix.case import Case
from harness.matrix.linears import converted_fqns, gemms, is_checkpointed
from harness.trace.model import Linear, ModelRecord
from harness.trace.operands import Aged, CastRecord, KeptWeight, MatmulRecord, OperandTrace
from harness.verdict import Finding
from tests.builders import (
    make_case,
    make_cast,
    make_matmul,
    make_scale,
    make_trace,
    make_witnesses,
    not_judged,
    rules,
    run_of,
)

OTHER = make_scale(1.0)


def case(**axes: object) -> Case:
    return make_case(recipe="tensorwise", steps=1, **axes)


def cast(index: int, fqn: str, role: Any, phase: Any) -> CastRecord:
    return make_cast(index=index, fqn=fqn, role=role, phase=phase, data_digest=f"{fqn} {role}")


def matmul(index: int, fqn: str, gemm: Any) -> MatmulRecord:
    return make_matmul(make_cast(fqn=fqn), make_cast(role="weight"), gemm, index=index)


def recorded(of: Case) -> OperandTrace:
    """Forward, recomputation and backward of every linear, without gradients."""
    again = [fqn for fqn in converted_fqns(of) if is_checkpointed(of, fqn)]
    sites = [
        (fqn, role, "gathered" if role == "weight" and of.float8.fp8_all_gather else phase)
        for phase in ("forward", "recompute", "backward")
        for fqn in (again if phase == "recompute" else converted_fqns(of))
        for role in ("input", "weight")
    ]
    casts = tuple(cast(index, *site) for index, site in enumerate(sites))
    forwards = [(gemm.fqn, gemm.role) for gemm in gemms(of) if gemm.role == "forward"]
    recomputed = [(fqn, "recompute") for fqn in again[: recomputed_calls(of, llama_model(of))]]
    matmuls = (matmul(100 + index, *site) for index, site in enumerate((*forwards, *recomputed)))
    return OperandTrace(casts=casts, matmuls=tuple(matmuls))


def last_changed(mine: OperandTrace, **change: Any) -> OperandTrace:
    """The operands with the last cast changed."""
    return replace(mine, casts=(*mine.casts[:-1], replace(mine.casts[-1], **change)))


def check(of: Case, operands: OperandTrace | None) -> list[Finding]:
    return recompute.check_recompute(of, run_of(make_trace(of, operands=operands)), make_witnesses(of))


FULL = case(checkpointing="full")
GATHERED_CASE = case(dp_shard=2, fp8_all_gather=True, checkpointing="full")


@pytest.mark.parametrize(
    "of", [case(), FULL, GATHERED_CASE, case(checkpointing="selective_op"), case(checkpointing="selective_layer")]
)
def test_the_same_the_second_time_has_no_findings(of: Case) -> None:
    assert check(of, recorded(of)) == []


@pytest.mark.parametrize("phase", ["recompute", "backward"])
@pytest.mark.parametrize("role", ["input", "weight"])
@pytest.mark.parametrize(
    "change", [{"scale": OTHER}, {"data_digest": "x"}, {"elements": 8}, {"target_dtype": "float8_e5m2"}]
)
def test_a_cast_that_differs_is_found(phase: str, role: str, change: dict[str, Any]) -> None:
    wrong = tuple(
        replace(one, **change) if (one.phase, one.role) == (phase, role) and "wk" in one.fqn else one
        for one in recorded(FULL).casts
    )
    (finding,) = check(FULL, replace(recorded(FULL), casts=wrong))
    assert (finding.step, finding.rank, finding.module) == (1, 0, "layers.0.attention.wk")
    assert (finding.rule, finding.operand, finding.values["total"]) == (recompute.CAST.name, f"{role} in {phase}", 2)
    assert finding.expected != finding.found


def test_nan_that_is_computed_twice_does_not_differ() -> None:
    def nan() -> Any:  # never the same object, as from another rank
        return make_scale(math.nan, digest="nan")

    mine = recorded(FULL)
    casts = tuple(replace(one, scale=nan()) for one in mine.casts)
    matmuls = tuple(replace(one, a_scale=nan(), b_scale=nan()) for one in mine.matmuls)
    assert check(FULL, OperandTrace(casts=casts, matmuls=matmuls)) == []
    assert len(check(FULL, last_changed(OperandTrace(casts=casts, matmuls=matmuls), scale=OTHER))) == 1


def test_a_gathered_weight_that_changes_between_forward_and_backward_is_found() -> None:
    wrong = last_changed(recorded(GATHERED_CASE), data_digest="x")
    (finding,) = check(GATHERED_CASE, wrong)
    assert (finding.module, finding.operand) == (wrong.casts[-1].fqn, "weight in gathered")
    assert "first execution in its data" in finding.message
    evaluated = replace(GATHERED_CASE, train=replace(GATHERED_CASE.train, evaluate=True))
    (finding,) = check(evaluated, wrong)
    assert "first execution (in the evaluation) in its data" in finding.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": make_scale(1 / 3, digest="dig")}, ("224", "0.333333")),
        ({"data_digest": "dig"}, ("float8 data", "other bits of float8 data")),
    ],
)
def test_what_differs_is_told_without_digests_which_the_values_have(change: dict[str, Any], words: Any) -> None:
    (finding,) = check(FULL, last_changed(recorded(FULL), **change))
    assert (finding.expected, finding.found) == words and "dig" in str(finding.values["again"])


@pytest.mark.parametrize("change", [{"a_scale": OTHER}, {"b_digest": "x"}, {"m": 8}, {"b_dtype": "float8_e5m2"}])
def test_a_recomputed_matmul_that_differs_is_found(change: dict[str, Any]) -> None:
    mine = recorded(FULL)
    wrong = (*mine.matmuls[:-1], replace(mine.matmuls[-1], **change))
    (finding,) = check(FULL, replace(mine, matmuls=wrong))
    assert (finding.rule, finding.operand) == (recompute.MATMUL.name, "matmul recompute")


def test_checkpointing_that_recomputes_nothing_is_found() -> None:
    mine = recorded(FULL)
    casts = tuple(one for one in mine.casts if one.phase != "recompute")
    (finding,) = check(FULL, replace(mine, casts=casts))
    assert (finding.rule, finding.expected) == (recompute.NOT_RECOMPUTED.name, "a recomputation")
    (finding,) = check(FULL, replace(mine, matmuls=mine.matmuls[:-1]))
    assert finding.rule == recompute.NUMBER.name


def test_a_model_that_no_formula_describes_recomputes_where_it_is_asked_to_alone() -> None:
    of, parts = case(target="my_pkg.net"), {"parameters": (), "checkpointed": (), "compiled": ()}
    up = Linear(fqn="up", in_features=32, out_features=32, converted=True)
    for times in (0, 1):
        record = ModelRecord(linears=(up,), calls={"up": 1}, recomputed={"up": times}, **parts)
        run = run_of(make_trace(operands=OperandTrace(casts=(cast(0, "up", "weight", "recompute"),), matmuls=())))
        witnesses = Witnesses(expect=Expectations(of, found_model(of, record, record)))
        assert (recompute.UNASKED.name in rules(recompute.check_recompute(of, run, witnesses))) == bool(times)


CASE = make_case(recipe="tensorwise", steps=3)


AGED = Aged(
    index=7,
    what="data",
    step=3,
    fqn="wq",
    role="weight",
    where="forward",
    microbatch=2,
    first_step=2,
    first_fqn="wq",
    first_role="weight",
    first_phase="forward",
    first_microbatch=1,
)


def lifetime(*reused: Aged, kept: tuple[KeptWeight, ...] = (), updates: int = 1) -> list[Finding]:
    trace = make_trace(CASE, operands=OperandTrace(casts=(), matmuls=(), aged=reused, kept=kept))
    steps = tuple(replace(step, optimizer_steps=updates) for step in trace.steps)
    return recompute.check_lifetime(CASE, run_of(replace(trace, steps=steps)), make_witnesses(CASE))


@pytest.mark.parametrize(
    ("use", "rule", "expected", "found"),
    [
        ({}, recompute.STALE_CAST, "of step 3", "of step 2"),
        ({"what": "source"}, recompute.COPY, "of step 3", "of step 2"),
        ({"what": "scale"}, recompute.SCALE, "of step 3", "of step 2"),
        ({"role": "input"}, recompute.MICROBATCH, "of step 3, microbatch 2", "of step 2, microbatch 1"),
        (
            {"role": "input", "what": "scale"},
            recompute.MICROBATCH,
            "of step 3, microbatch 2",
            "of step 2, microbatch 1",
        ),
        ({"role": "grad_output", "microbatch": 0}, recompute.MICROBATCH, "of step 3", "of step 2, microbatch 1"),
        (
            {"role": "input", "step": 2, "microbatch": 1, "first_phase": "evaluation"},
            recompute.MICROBATCH,
            "of step 2, microbatch 1",
            "of the evaluation of step 2, microbatch 1",
        ),
        (
            {"what": "other_scale", "first_fqn": "wk", "first_role": "input"},
            recompute.OTHER_SCALE,
            "of step 3",
            "of step 2, input of wk",
        ),
    ],
)
def test_what_is_used_again_is_named_with_its_time(use: dict[str, Any], rule: Rule, expected: str, found: str) -> None:
    (finding,) = lifetime(replace(AGED, **use))
    assert (finding.rule, finding.expected, finding.found) == (rule.name, expected, found)
    assert (finding.step, finding.rank, finding.module) == (use.get("step", 3), 0, "wq")


def test_a_weight_that_no_optimizer_has_updated_since_has_no_age() -> None:
    assert lifetime(AGED, updates=0) == []
    assert [finding.rule for finding in lifetime(replace(AGED, role="input"), updates=0)] == [recompute.MICROBATCH.name]


def test_a_weight_that_stays_gathered_is_named() -> None:
    (finding,) = lifetime(kept=tuple(KeptWeight(step=step, fqn="wq", name="weight") for step in (1, 2)))
    assert (finding.rule, finding.step, finding.module, finding.operand) == (recompute.GATHERED.name, 1, "wq", "weight")


def test_it_judges_eager_runs_in_float8_alone() -> None:
    assert "lifetime" not in not_judged(CASE)
    assert "lifetime" in not_judged(make_case())
    assert "lifetime" in not_judged(make_case(recipe="tensorwise", compile="inductor"))
