"""What compiled blocks may save for backward: the formula, and what `memory` and `recompute` find in graphs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from msgspec.structs import replace

from harness.checks.memory import BYTES, LIMITS, NO_MARKS, check_memory
from harness.checks.memory import KEPT as KEPT_RESULTS
from harness.checks.recompute import NODES, NOTHING_REPEATED, check_recompute
from harness.expect import memory
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.trace.counts import SavedMemory
from harness.trace.graphs import GraphTrace, KeptTensor, UnequalNode
from harness.verdict import Finding
from tests.builders import make_graphs, make_partition, make_trace, make_witnesses, run_of, saved_as
from tests.strategies import TRAINED_DENSE_CASES

FULL = parse_case_id("tp2-rowwise-ac.full-graph-v2048-gb2-s2-b16")
FREE = parse_case_id("single-tensorwise-graph-v2048-gb2-s2-b16")
LAYER = parse_case_id("single-bf16-ac.layer2-graph-v2048-gb2-s2-b16")
KEPT = KeptTensor(node="mm_3", operator="aten.mm.default", dtype="bfloat16", shape=(64, 128), nbytes=16384)
UNEQUAL = UnequalNode(node="mul_3", moment="passes", forward="aten.mul.Tensor(a, b)", backward="aten.mul.Tensor(a, c)")


def compiled(case: Case) -> Case:
    return replace(case, compile="graph")


@given(TRAINED_DENSE_CASES)
def test_a_partition_saves_no_more_than_eager_but_for_scales_and_copies_of_weights(case: Case) -> None:
    layers = range(case.model.shape.layers)
    eager_case = replace(case, compile="none", layout=replace(case.layout, async_tp=False))
    eager = sum(memory.expected_saved(eager_case, step=1, rank=0).values())
    limits = memory.saved_limits(compiled(case), step=1, rank=0)
    assert 0 < limits.least <= limits.most
    free = not case.float8.enabled or (case.layout.tp == 1 and not case.float8.fp8_all_gather)
    if free and not any(case.checkpointing.wraps(layer) for layer in layers):
        assert limits.most == eager
    if memory.is_exact(compiled(case)):
        assert limits.least == limits.most == sum(memory.expected_saved(compiled(case), step=1, rank=0).values())


def test_ranks_agree_on_no_scale_of_a_block() -> None:
    """Measured on real ranks, with the candidate fix."""
    case = parse_case_id("tp2-mxfp8-aftertp-ac.full-graph-v2048-s2-seed7-b16")
    assert memory.expected_saved(case, step=1, rank=0)["float32"] == 1180164


# Measured on real ranks: bytes of rank 0 in step 1.
@pytest.mark.parametrize(
    ("text", "measured"),
    [  # blocks that are checkpointed whole have an exact formula, selective_op is known up to its scales
        ("single-tensorwise-ac.full-graph-v2048-gb2-s2-b16", 641284),
        ("tp2-rowwise-ac.full-graph-v2048-gb4-s2-f64", 1447432),
        ("tp2-tensorwise-ac.full-graph-v2048-gb4-s2-b16", 657684),
        ("tp2-rowwise_with_gw_hp-ac.full-graph-v2048-gb4-s2-b16", 657724),
        ("fsdp2-tensorwise-ag.fp8-ac.full-graph-v2048-gb4-s2-b16", 641340),
        ("atp2-tensorwise-tpstyle.fp8-ac.full-graph-v2048-gb4-s2-b16", 657668),
        ("single-bf16-ac.op-graph-v2048-gb2-s2-f64", 1901064),
        ("single-rowwise-ac.op-graph-v2048-gb2-s2-b16", 773380),
        ("tp2-nosp-rowwise-ac.op-graph-v2256-gb2-s2-f64", 1305096),
        ("fsdp2-atp2-tensorwise-ag.fp8-ac.op-graph-v2048-gb4-s2-b16", 411884),
        ("single-tensorwise-graph-v2048-gb2-s2-b16", 957792),
        ("tp2-bf16-graph-v2048-gb4-s2-b16", 1154308),
        ("fsdp2-tensorwise-ag.fp8-graph-v2048-gb2-s2-b16", 709316),
        ("tp2-rowwise_with_gw_hp-graph-v2048-gb1-s2-b16", 421244),
        ("atp2-tensorwise-tpstyle.fp8-ac.layer2-graph-v2048-gb4-s2-b16", 946992),
    ],
)
def test_what_was_measured_is_within_the_limits(text: str, measured: int) -> None:
    limits, room = limits_of(parse_case_id(text)), {"ac.full": 1.0, "ac.op": 1.02}
    assert limits.least <= measured <= limits.most
    assert limits.most <= limits.least * next((most for words, most in room.items() if words in text), math.inf)


def saved(case: Case, nbytes: int | None = None, **changes: Any) -> tuple[SavedMemory, ...]:
    """What a correct run records, or so many bytes in every step."""
    expect = Expectations(case)
    by_dtype = {"float32": nbytes or 0}
    if nbytes is None:
        exact = expect.saves_exactly
        by_dtype = expect.saved_bytes(step=1, rank=0) if exact else {"float32": limits_of(case).most}
    return tuple(replace(saved_as(step, by_dtype), **changes) for step in (1, 2))


def limits_of(case: Case) -> memory.SavedLimits:
    return Expectations(case).saved_limits(step=1, rank=0)


def check(case: Case, graphs: GraphTrace | None, memory: tuple[SavedMemory, ...] | None) -> list[Finding]:
    run = run_of(*(make_trace(case, rank, graphs=graphs, saved_memory=memory) for rank in range(case.world_size)))
    witnesses = make_witnesses(case)
    return [*check_memory(case, run, witnesses), *check_recompute(case, run, witnesses)]


def divided(case: Case, **changes: Any) -> GraphTrace:
    parts = [make_partition(case, **changes)]
    if case.checkpointing.mode == "selective_layer":
        parts.append(make_partition())
    return make_graphs(*parts)


@pytest.mark.parametrize("case", [FULL, FREE, LAYER], ids=["full", "none", "layer"])
def test_what_the_partitioner_may_do_is_good(case: Case) -> None:
    assert check(case, divided(case), saved(case)) == []


@pytest.mark.parametrize(("off", "words"), [(1, "too many"), (-1, "too few")])
def test_one_byte_beyond_the_limits_is_found(off: int, words: str) -> None:
    limits = limits_of(FREE)
    nbytes = limits.most + 1 if off > 0 else limits.least - 1
    (finding,) = check(FREE, divided(FREE), saved(FREE, nbytes))
    assert (finding.rule, finding.values["much"], finding.ranks) == (LIMITS.name, words, (0,))
    assert (finding.step, finding.found) == (1, f"{nbytes} bytes")
    (finding,) = check(FREE, divided(FREE), ())
    assert (finding.step, finding.found) == (1, "0 bytes")


def test_one_byte_one_result_and_one_node_are_found_where_every_block_is_checkpointed_whole() -> None:
    right = saved(FULL)
    wrong = {**right[0].by_dtype, "bfloat16": right[0].by_dtype["bfloat16"] + 1}
    (finding,) = check(FULL, divided(FULL), tuple(replace(record, by_dtype=wrong) for record in right))
    assert (finding.rule, finding.values["dtype"], finding.ranks) == (BYTES.name, "bfloat16", (0, 1))
    (finding,) = check(FULL, divided(FULL, kept=(KEPT, replace(KEPT, node="mm_4", nbytes=1))), saved(FULL))
    assert (finding.rule, finding.values["count"], finding.ranks) == (KEPT_RESULTS.name, 2, (0, 1))
    assert finding.found == "aten.mm.default mm_3, bfloat16[64, 128], is the largest"
    (finding,) = check(FULL, divided(FULL, unequal=(UNEQUAL, UNEQUAL)), saved(FULL))
    assert (finding.rule, finding.ranks) == (NODES.name, (0, 1))
    assert dict(finding.values) == {"count": 2, "node": "mul_3"}
    assert (finding.expected, finding.found) == (UNEQUAL.forward, UNEQUAL.backward)


def test_lost_marks_are_found() -> None:
    lost, nothing = check(FULL, make_graphs(make_partition()), saved(FULL))
    assert (lost.rule, nothing.rule) == (NO_MARKS.name, NOTHING_REPEATED.name)
    assert (lost.expected, lost.found) == ("graphs with operators to compute again", "graphs without")
    (lost,) = check(LAYER, make_graphs(make_partition(LAYER)), saved(LAYER))
    assert lost.expected == "graphs with operators to compute again and graphs without"
    assert check(FREE, make_graphs(), saved(FREE))[0].found == "no graphs"


@pytest.mark.parametrize("lost", ["repeated", "repeated_in_passes"])
def test_a_checkpointed_block_that_repeats_nothing_does_not_pass(lost: str) -> None:
    (finding,) = check(FULL, divided(FULL, **{lost: 0}), saved(FULL))
    assert finding.rule == NOTHING_REPEATED.name
    assert check(FREE, divided(FREE, **{lost: 0}), saved(FREE)) == []
