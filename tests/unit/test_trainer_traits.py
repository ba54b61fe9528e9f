"""What targets do differently around the same Llama, in the formulas."""

from __future__ import annotations

import pytest

from harness.expect.live_memory import expected_live, expected_scalars
from harness.expect.model import TrainerTraits, traits_of
from harness.expect.saved_memory import expected_saved
from harness.expect.traffic import expected_transfers
from harness.matrix.case import Case
from harness.matrix.linears import parameter_count
from tests.builders import make_case


def of_torchtitan(**axes: object) -> Case:
    return make_case(target="torchtitan", dtype="float64", **axes)


def counts(case: Case) -> dict[tuple[str, str, str, str, int], int]:
    found: dict[tuple[str, str, str, str, int], int] = {}
    for term in expected_transfers(case, step=2, rank=0):
        key = term.axis, term.kind, term.op, term.dtype, term.elements
        found[key] = found.get(key, 0) + term.times
    return found


def more_than_reference(**axes: object) -> dict[tuple[str, str, str, str, int], int]:
    theirs, ours = counts(of_torchtitan(**axes)), counts(make_case(dtype="float64", **axes))
    return {key: times - ours.get(key, 0) for key, times in theirs.items() if times != ours.get(key, 0)}


def test_other_targets_have_those_of_the_reference() -> None:
    assert traits_of(make_case()) == traits_of(make_case(target="my.target")) == TrainerTraits()


@pytest.mark.parametrize(
    ("layout", "axis"),
    [
        ({"dp_shard": 2}, "dp_shard"),
        ({"dp_shard": 2, "dp_replicate": 2}, "world"),
        ({"dp_shard": 2, "dp_replicate": 2, "tp": 2}, "dp_replicate+dp_shard"),
    ],
)
def test_torchtitan_sums_what_it_logs(layout: dict[str, int], axis: str) -> None:
    norms = {(each, "all_reduce", "sum", "float64", 21): 1 for each in ("dp_shard", "tp") if each in layout}
    assert more_than_reference(**layout) == norms | {
        (axis, "all_reduce", "sum", "int64", 1): 2,
        (axis, "all_reduce", "sum", "float64", 1): 1,
        (axis, "all_reduce", "max", "float64", 1): 1,
    }


def test_torchtitan_reads_partial_gradients_once_more_and_recomputes_whole_blocks() -> None:
    assert more_than_reference(tp=2, checkpointing="full") == {
        ("tp", "all_reduce", "sum", "float64", 128): 5,
        ("tp", "all_reduce", "sum", "float64", 21): 1,
        ("tp", "reduce_scatter", "sum", "float64", 8 * 32 * 128): 2,
    }


def test_torchtitan_logs_nothing_on_one_rank() -> None:
    assert more_than_reference() == {}


def test_torchtitan_saves_a_token_count_and_no_rope_cache() -> None:
    single = expected_saved(of_torchtitan(), step=1, rank=0)
    assert single.get("float32", 0) - expected_saved(make_case(dtype="float64"), step=1, rank=0).get("float32", 0) == 4
    theirs, ours = (
        expected_saved(make_case(target=target, dtype="bfloat16", dp_shard=2), step=1, rank=0)
        for target in ("torchtitan", "reference")
    )
    assert ours["bfloat16"] - theirs["bfloat16"] == 2 * 32 * 16 * 2  # layers, positions, features of a head, bytes
    assert ours["float32"] == theirs["float32"]


@pytest.mark.parametrize(("layout", "storages"), [({}, 21), ({"dp_shard": 2}, 4)])
def test_torchtitan_keeps_its_gradients_and_not_its_logits(layout: dict[str, int], storages: int) -> None:
    case = of_torchtitan(**layout)
    kept = expected_live(case, rank=0, moment="step")
    assert len(kept) == storages
    assert sum(each.nbytes for each in kept) == parameter_count(case) * 8 // case.world_size
    assert "the logits" not in {each.purpose for each in expected_live(case, rank=0, moment="forward")}


@pytest.mark.parametrize(
    ("layout", "alive"),
    [
        ({}, 4),
        ({"dp_shard": 2}, 4),
        ({"tp": 2}, 4),
        ({"dp_shard": 2, "tp": 2}, 5),
        ({"tp": 2, "loss_parallel": False}, 4),
    ],
)
def test_scalars_of_torchtitan(layout: dict[str, object], alive: int) -> None:
    assert expected_scalars(of_torchtitan(**layout), moment="forward") == alive
    assert expected_scalars(of_torchtitan(**layout), moment="step") == 0
