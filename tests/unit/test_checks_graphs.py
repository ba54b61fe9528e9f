"""The check `graphs` finds what was not compiled, not fused, fused over the wrong ranks, misshapen or wrong."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.graphs import (
    CONSTANTS,
    GENERATED,
    GRADIENT,
    NO_GRAPH,
    NOTHING_FUSED,
    NUMBER,
    ROWS,
    SCALE_SHAPE,
    UNPAIRED,
    WRONG_RANKS,
    FusionKind,
    check_graphs,
    expected_fusions,
)
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.trace.graphs import (
    FusedCall,
    FusedNode,
    GeneratedResult,
    GradientDistance,
    GraphRecord,
    GraphTrace,
    Unfused,
    WrongRow,
)
from harness.verdict import Finding, Verdict
from tests.builders import make_fused, make_trace, make_witnesses, rules, run_of

ASYNC = parse_case_id("atp2-tensorwise-tpstyle.fp8-graph-v2048-s2-b16")
PLAIN = parse_case_id("tp2-tensorwise-graph-v2048-s2-b16")

NODE = FusedNode(
    operator="fused_scaled_matmul_reduce_scatter",
    collective="reduce_scatter",
    axis="tp",
    a_shape=(64, 64),
    a_scale_shape=(),
)
LEFT = Unfused(
    collective="reduce_scatter", axis="tp", shape=(4, 16, 128), dtype="bfloat16", reason="it sums several matmuls"
)
FORWARD = GraphRecord(phase="forward", fused=(NODE,), unfused=())
BACKWARD = GraphRecord(phase="backward", fused=(), unfused=(LEFT,))
PLAIN_GRAPHS = (replace(FORWARD, fused=()), BACKWARD)
SAME = GradientDistance(step=1, fqn="layers.0.attention.wq.weight", distance=0.0)


def calls(case: Case) -> tuple[FusedCall, ...]:
    """What a correct run executes."""
    return tuple(
        make_fused(
            step=step,
            phase=kind.phase,
            operator=f"fused_{kind.collective}",
            collective=kind.collective,
            times=times,
            rows=64,
        )
        for step in range(1, case.train.steps + 1)
        for kind, times in expected_fusions(Expectations(case)).items()
    )


def correct(case: Case, **changes: Any) -> GraphTrace:
    return replace(GraphTrace(graphs=(FORWARD, BACKWARD), calls=calls(case), casts=(), workarounds=()), **changes)


def check(case: Case, *graphs: GraphTrace | None) -> list[Finding]:
    run = run_of(*(make_trace(case, rank, graphs=recorded) for rank, recorded in enumerate(graphs)))
    return check_graphs(case, run, make_witnesses(case))


def test_a_correct_run_has_no_finding() -> None:
    assert check(ASYNC, correct(ASYNC), correct(ASYNC)) == []
    plain = correct(PLAIN, graphs=PLAIN_GRAPHS)
    assert check(PLAIN, plain, plain) == []


def test_what_was_not_compiled_or_fused_or_over_the_wrong_ranks_is_found() -> None:
    (finding,) = check(ASYNC, correct(ASYNC), GraphTrace(graphs=(), calls=(), casts=(), workarounds=()))
    assert (finding.rule, finding.ranks, finding.verdict) == (NO_GRAPH.name, (1,), Verdict.INVARIANT)
    (finding,) = check(ASYNC, correct(ASYNC, graphs=(FORWARD, BACKWARD, FORWARD)))
    assert finding.rule == UNPAIRED.name
    (finding,) = check(ASYNC, correct(ASYNC, calls=()))
    assert finding.rule == NOTHING_FUSED.name
    assert "1 x reduce_scatter of bfloat16 [4, 16, 128]: it sums several matmuls" in (finding.found or "")
    (finding,) = check(PLAIN, correct(PLAIN, calls=calls(ASYNC)[:1]))
    assert (finding.rule, finding.expected) == (NUMBER.name, "0 a step")
    strayed = replace(FORWARD, fused=(replace(NODE, axis="dp_shard"),))
    (finding,) = check(ASYNC, correct(ASYNC, graphs=(strayed, BACKWARD)))
    assert (finding.rule, finding.values["operator"]) == (WRONG_RANKS.name, NODE.operator)
    assert finding.found == "dp_shard"


@given(st.integers(0, len(calls(ASYNC)) - 1), st.sampled_from([-1, 1]))
def test_one_fusion_more_or_less_is_found_in_its_step(place: int, more: int) -> None:
    every = list(calls(ASYNC))
    every[place] = replace(every[place], times=every[place].times + more)
    (finding,) = check(ASYNC, correct(ASYNC, calls=tuple(every)))
    assert (finding.rule, finding.step) == (NUMBER.name, every[place].step)
    assert finding.values["kind"] == str(FusionKind(every[place].phase, every[place].collective))


@pytest.mark.parametrize(
    ("a_shape", "a_scale_shape", "fits"),
    [
        ((5, 64, 64), (320, 1), False),  # A from before the reshape, its scale from after it
        ((320, 64), (320, 1), True),
        ((5, 64, 64), (5, 64, 1), True),
        ((320, 64), (), True),
        ((320, 64), (1, 1), True),
        ((320, 64), (1, 64), False),
        ((320, 64), None, True),
    ],
)
def test_a_scale_belongs_to_the_shape_of_its_operand(
    a_shape: tuple[int, ...], a_scale_shape: tuple[int, ...] | None, fits: bool
) -> None:
    node = replace(NODE, a_shape=a_shape, a_scale_shape=a_scale_shape)
    graph = replace(FORWARD, fused=(node,))
    findings = check(ASYNC, correct(ASYNC, graphs=(graph, BACKWARD)))
    assert rules(findings) == (set() if fits else {SCALE_SHAPE.name})


def test_wrong_rows_say_where_they_belong_if_anywhere() -> None:
    row = WrongRow(index=(1, 0), distance=0.8, holds_rank=1, holds_index=(0, 0))
    every = list(calls(ASYNC))
    every[1] = replace(every[1], wrong_rows=32, example=row)
    (finding,) = check(ASYNC, correct(ASYNC, calls=tuple(every)))
    assert finding.verdict is Verdict.NUMERIC
    assert (finding.rule, finding.size) == (ROWS.name, 0.5)
    assert dict(finding.values) == {"operator": every[1].operator, "rows": 32, "total": 64}
    assert "row [1, 0] of this rank holds row [0, 0] of TP rank 1" in (finding.found or "")
    row = WrongRow(index=(3,), distance=float("nan"), holds_rank=None, holds_index=None)
    every = (replace(calls(ASYNC)[0], wrong_rows=1, example=row), *calls(ASYNC)[1:])
    (finding,) = check(ASYNC, correct(ASYNC, calls=every))
    assert "matches no other row" in (finding.found or "")


def test_one_code_has_one_set_of_constants_on_every_rank() -> None:
    case = parse_case_id("fsdp2-tensorwise-inductor-v2048-s2-b16")
    same = replace(correct(case), graphs=(replace(FORWARD, fused=(), constants=("aten::attention 0.125",)), BACKWARD))
    same = replace(same, gradients=(SAME,))
    off = replace(same, graphs=(replace(same.graphs[0], constants=("aten::attention 0.12501",)), BACKWARD))
    assert check(case, same, same) == []
    (finding,) = check(case, same, off)
    assert (finding.rule, finding.ranks, finding.found) == (CONSTANTS.name, (1,), "aten::attention 0.12501")


@pytest.mark.parametrize(
    ("dtype", "clean", "wrong"),
    [
        ("float8_e4m3fn", 0.02, 0.05),
        ("float8_e5m2", 0.031, 0.07),
        ("float32", 0.006, 0.03),
        ("bfloat16", 0.0056, 0.03),
        ("bfloat16", 0.0, math.nan),
    ],
)
def test_generated_code_is_held_against_its_graph(dtype: str, clean: float, wrong: float) -> None:
    case = parse_case_id("tp2-tensorwise-inductor-v2048-s2-b16")
    place: dict[str, Any] = {"step": 2, "order": 3, "phase": "forward", "fqn": "feed_forward.w1", "tensor": "a"}
    near = GeneratedResult(**place, dtype=dtype, distance=clean, farthest_row=2 * clean)
    graphs = replace(correct(case), graphs=PLAIN_GRAPHS, generated=(near,), gradients=(SAME,))
    assert check(case, graphs, graphs) == []
    assert check(case, graphs, replace(graphs, emulates_roundings=True)) == [] or clean > 0
    assert rules(check(case, replace(graphs, generated=(replace(near, farthest_row=0.3),)))) == {GENERATED.name}
    cancelled = replace(near, tensor="result", dtype="bfloat16", distance=0.024, farthest_row=0.024)
    assert rules(check(case, replace(graphs, generated=(cancelled,)))) == {GENERATED.name}
    assert check(case, graphs, replace(graphs, generated=(replace(cancelled, cancelled=2.0),))) == []
    far = replace(near, order=4, tensor="b", distance=wrong)
    (finding,) = check(case, graphs, replace(graphs, generated=(near, far)))
    assert (finding.rule, finding.step, finding.rank, finding.module) == (GENERATED.name, 2, 1, "feed_forward.w1")
    assert finding.values["tensor"] == "b" and finding.operand == "b in forward"


@pytest.mark.parametrize(
    ("case_id", "clean", "wrong"),
    [
        ("tp2-tensorwise-inductor-v2048-s2-b16", 0.0, 1e-9),
        ("fsdp2-tensorwise-inductor-v2048-s2-b16", 1e-7, 1e-5),
        ("fsdp2-tensorwise-inductor-v2048-s2-b16", 1e-7, math.nan),
    ],
)
def test_the_optimizer_gets_the_gradients_that_generated_code_returned(
    case_id: str, clean: float, wrong: float
) -> None:
    case = parse_case_id(case_id)
    same = replace(SAME, distance=clean)
    other = replace(same, step=2, fqn="layers.1.attention.wo.weight", distance=wrong)
    graphs = replace(correct(case), graphs=PLAIN_GRAPHS, gradients=(same,))
    assert check(case, graphs, graphs) == []
    (finding,) = check(case, graphs, replace(graphs, gradients=(same, other)))
    assert (finding.rule, finding.step, finding.rank, finding.module) == (GRADIENT.name, 2, 1, other.fqn)
    assert rules(check(case, replace(graphs, gradients=()))) == {GRADIENT.name}
