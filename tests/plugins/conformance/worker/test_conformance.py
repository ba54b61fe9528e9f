"""Conformance on real ranks: nothing is reported on what is right, and every planted fault is found where it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from harness.engine.cluster import unleased_cluster
from harness.plugins.conformance.checks import MESHES, PARTIALS, OperatorCheck, select_checks
from harness.plugins.conformance.judge import PROGRAM, Conclusion, run_checks
from harness.running.plan import parse_injection

FAULTS = Path(__file__).with_name("conformancefaults.py")
Run = Callable[..., dict[str, Conclusion]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Ask checks, with a fault planted or not; conclusions by id."""
    with unleased_cluster(PROGRAM, 4) as engine:

        def ask(checks: Sequence[OperatorCheck], fault: str | None = None) -> dict[str, Conclusion]:
            injections = [parse_injection(f"{FAULTS}:{fault}").patch] if fault else []
            return {conclusion.check.id: conclusion for conclusion in run_checks(engine, checks, injections)}

        yield ask


def bad(conclusions: dict[str, Conclusion]) -> dict[str, list[str]]:
    return {
        name: [str(problem) for problem in conclusion.problems]
        for name, conclusion in conclusions.items()
        if not conclusion.good
    }


def kinds(conclusions: dict[str, Conclusion]) -> dict[str, set[str]]:
    return {
        name: {problem.kind for problem in conclusion.problems}
        for name, conclusion in conclusions.items()
        if not conclusion.good
    }


def test_every_seventh_check_of_each_operator_holds(run: Run):
    """Placements and meshes follow each other by other periods, so each has its share."""
    checks = sorted(select_checks(), key=lambda check: check.op)  # stable
    asked = [check for _, alike in itertools.groupby(checks, lambda check: check.op) for check in list(alike)[::7]]
    conclusions = run(asked)
    assert len(conclusions) > 230
    assert not bad(conclusions)


@pytest.mark.sweep
def test_the_fixed_list_holds_on_the_installed_torch(run: Run):
    conclusions = run(select_checks())
    assert len(conclusions) > 1500
    assert not bad(conclusions)


# fault; of the checks that are asked, those that must be among the failed ones, and what kind of problem they have
PLANTED = [
    ("amax_without_strategy", {"amax-8x16-f32-m4-S0": "missing", "tensor_to_scale-8x16-f32-m4-R": "missing"}),
    (
        "amax_of_the_shard",
        {
            "amax-8x16-f32-m4-S0": "wrong",
            "tensor_to_scale-8x16-f32-m2-S1": "wrong",
            "to_float8-8x16-f32-m4-S0": "wrong",
        },
    ),
    ("amax_of_pending_parts", {"amax-8x16-f32-m4-Psum": "wrong"}),
    ("amax_gathers", {"amax-8x16-f32-m4-S0": "bytes", "tensor_to_scale-8x16-f32-m4-S0": "bytes"}),
    ("abs_keeps_pending", {"abs-8x16-f32-m4-Psum": "wrong"}),
    ("transpose_keeps_its_placement", {"t-8x16-f32-m4-S0": "raised"}),
    ("mm_forgets_the_sum", {"mm.12-8x16-f32-m4-S1*S0": "wrong", "f8.mm.64-16x64-f32-m4-S1*S0": "wrong"}),
    ("scale_of_the_local_tensor", {"to_float8-8x16-f32-m4-S0": "wrong"}),
    ("float8_gathered_in_float32", {"f8.redistribute-8x16-f32-m4-S0-to.R": "bytes"}),
]


@pytest.mark.parametrize(("fault", "expected"), PLANTED, ids=[fault for fault, _ in PLANTED])
def test_a_planted_fault_is_found(run: Run, fault: str, expected: dict[str, str]):
    """Among all checks of the same operators, shape and mesh."""
    globs = [f"{name.split('-m')[0]}-m[24]-*" for name in expected]
    failed = kinds(run(select_checks(globs), fault))
    for name, kind in expected.items():
        assert kind in failed[name]


def test_a_rank_that_fails_alone_is_named_and_the_others_go_on(run: Run):
    checks = select_checks(["clamp-8x16-f32-m4-S?", "abs-8x16-f32-m4-*"])
    conclusions = run(checks, "one_rank_raises")
    failed = bad(conclusions)
    assert list(failed) == ["clamp-8x16-f32-m4-S0"]
    assert "rank 1" in failed["clamp-8x16-f32-m4-S0"][0]
    assert "planted on rank 1" in failed["clamp-8x16-f32-m4-S0"][0]
    assert len(conclusions) == len(checks)


def test_a_check_that_kills_its_rank_is_lost_alone(run: Run):
    conclusions = run(select_checks(["clamp-8x16-f32-m4-S?", "abs-8x16-f32-m4-S?"]), "one_rank_dies")
    assert kinds(conclusions) == {"clamp-8x16-f32-m4-S0": {"lost"}}
    assert len(conclusions) == 4


# What hypothesis may combine: operators that take any shape.
FREE = ("abs", "clamp", "reciprocal", "cast.bfloat16", "cast.float64", "max", "aminmax", "tensor_to_amax", "to_float8")
WITH_DIM = ("amax", "amin", "max", "aminmax", "tensor_to_amax", "tensor_to_scale", "to_float8")
ENDS = (0, -1)  # the dims that rowwise scaling knows


@st.composite
def checks(draw: st.DrawFn) -> OperatorCheck:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    mesh = draw(st.sampled_from(list(MESHES)))
    op = draw(st.sampled_from([*FREE, "amax", "amin", "tensor_to_scale", "redistribute", "transpose", "split", "mul"]))
    words = [*(f"S{dim}" for dim in range(len(shape))), "R"]
    pending = draw(st.sampled_from(PARTIALS))  # torch allows one kind in one tensor
    axes = len(MESHES[mesh])
    inputs = tuple(draw(st.sampled_from([*words, pending])) for _ in range(axes))
    check = {"op": op, "shape": shape, "mesh": mesh, "inputs": (inputs,)}
    scaling = op.startswith(("tensor", "to_"))
    if op == "transpose" and len(shape) < 2:
        check["op"] = "abs"
    if op == "mul":
        check["inputs"] = (inputs, tuple(draw(st.sampled_from(words)) for _ in range(axes)))
    if op == "redistribute":
        check["target"] = tuple(draw(st.sampled_from(words)) for _ in range(axes))
    elif op == "split":
        check |= {"dim": draw(st.integers(0, len(shape) - 1)), "sizes": (draw(st.integers(1, 4)),)}
    elif op in WITH_DIM and draw(st.booleans()):
        check["dim"] = draw(st.sampled_from(ENDS) if scaling else st.integers(-len(shape), len(shape) - 1))
        check["keepdim"] = draw(st.booleans()) and not scaling
    return OperatorCheck(**check)


def failures(conclusions: dict[str, Conclusion]) -> list[Conclusion]:
    return [conclusion for conclusion in conclusions.values() if conclusion.status == "failed"]


def smaller(check: OperatorCheck) -> Iterator[OperatorCheck]:
    for dim, length in enumerate(check.shape):
        for less in sorted({1, length // 2, length - 1} - {0, length}):
            shape = (*check.shape[:dim], less, *check.shape[dim + 1 :])
            yield msgspec.structs.replace(check, shape=shape)


def simplest(run: Run, failed: Conclusion) -> Conclusion:
    """The same failure with the fewest elements, found by asking all smaller shapes in one job at a time."""
    while smaller_failures := failures(run(list(smaller(failed.check)))):
        failed = min(smaller_failures, key=lambda conclusion: math.prod(conclusion.check.shape))
    return failed


# Without hypothesis' own shrinking: one job per attempt would take minutes, and a batch hides what matters in it.
@settings(
    max_examples=4,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(batch=st.lists(checks(), min_size=30, max_size=40, unique_by=lambda check: check.id))
def test_generated_checks_hold(run: Run, batch: list[OperatorCheck]):
    failed = failures(run(batch))
    if failed:
        shown = simplest(run, failed[0])
        pytest.fail(f"{shown.check.id}: {[str(problem) for problem in shown.problems]}")
