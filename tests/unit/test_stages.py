"""Which blocks the ranks of a pipeline hold."""

from __future__ import annotations

import pytest

from harness.expect.expectations import Expectations
from harness.expect.traffic import expected_transfers, votes
from harness.expect.upstream import changes_in
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.matrix.layout import Schedule
from harness.matrix.linears import (
    blocks_of,
    connections,
    forwards_in_flight,
    holds,
    modules_of_stage,
    neighbours,
    stages_of,
)
from harness.plugins.predict.cost import metrics
from tests.builders import make_case

TWO = parse_case_id("pp2-fsdp2-tensorwise-v2048-gb16-s2-accum4-reduce.last-f64")
INTERLEAVED = parse_case_id("pp2-interleaved-bf16-layers.4-v2048-s3-accum4-f64")
UNEVEN = parse_case_id("pp4-tensorwise-layers.6-v2048-s3-accum4-f64")


def test_which_blocks_are_held_where_they_do_not_divide_or_stages_are_interleaved() -> None:
    assert [len(blocks_of(UNEVEN, rank)) for rank in range(4)] == [2, 2, 1, 1]
    assert modules_of_stage(UNEVEN, 0) == ("tok_embeddings", "layers.0", "layers.1")
    assert modules_of_stage(UNEVEN, 3) == ("layers.5", "norm", "output")
    assert [stages_of(INTERLEAVED, rank) for rank in (0, 1)] == [(0, 2), (1, 3)]
    assert [blocks_of(INTERLEAVED, rank) for rank in (0, 1)] == [(0, 2), (1, 3)]
    assert [neighbours(INTERLEAVED, rank) for rank in (0, 1)] == [(2, 1), (1, 2)]
    assert [neighbours(TWO, rank) for rank in range(4)] == [(1, 0), (1, 0), (0, 1), (0, 1)]


@pytest.mark.parametrize("case", [TWO, INTERLEAVED, UNEVEN])
def test_every_linear_is_held_by_the_ranks_of_one_place_in_the_pipeline(case: Case) -> None:
    whole = Expectations(case)
    parts = [whole.of(rank) for rank in range(0, case.world_size, case.world_size // case.layout.pp)]
    assert sorted(fqn for part in parts for fqn in part.converted_fqns) == sorted(whole.converted_fqns)
    assert sum(part.scaled_mm_calls[0] for part in parts) == whole.scaled_mm_calls[0]
    assert sum(part.cast_calls for part in parts) == whole.cast_calls
    assert all(holds(case, rank, "layers.0.attention.wq.weight") is (0 in blocks_of(case, rank)) for rank in (0, 1))


@pytest.mark.parametrize(
    ("schedule", "resharding", "gathers"),
    [("", "", (10, 6)), ("-gpipe", "", (10, 6)), ("", "-reshard.never", (2, 2)), ("", "-reshard.always", (10, 10))],
)
def test_weights_are_gathered_as_counted_on_ranks(schedule: str, resharding: str, gathers: tuple[int, int]) -> None:
    """A backward pass keeps what it has gathered for the next forward: once more than there are microbatches."""
    text = f"pp2-fsdp2{resharding}{schedule}-tensorwise-v2048-gb16-s2-accum4-reduce.last-f64"
    case = parse_case_id(text)
    of_ranks = (expected_transfers(case, step=2, rank=rank) for rank in (0, 2))
    assert gathers == tuple(sum(transfer.times for transfer in of if transfer.kind == "all_gather") for of in of_ranks)


def test_microbatches_in_flight_are_those_whose_saved_bytes_were_measured() -> None:
    assert [forwards_in_flight(TWO, rank) for rank in (0, 2)] == [{0: 2}, {1: 1}]
    assert [forwards_in_flight(UNEVEN, rank) for rank in range(4)] == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]
    assert [forwards_in_flight(INTERLEAVED, rank) for rank in (0, 1)] == [{0: 3, 2: 2}, {1: 2, 3: 1}]
    gpipe = parse_case_id("pp2-gpipe-rowwise-ac.full-v2048-s2-accum6-f64")
    assert [forwards_in_flight(gpipe, rank) for rank in (0, 1)] == [{0: 6}, {1: 6}]


@pytest.mark.parametrize(
    ("schedule", "share"), [("", 1 / 5), ("-gpipe", 1 / 5), ("-interleaved", 1 / 9), ("-zb", 1 / 13)]
)
def test_the_bubble_of_a_schedule(schedule: str, share: float) -> None:
    case = parse_case_id(f"pp2{schedule}-bf16-layers.4-v2048-s3-accum4-f64")
    assert metrics(case, rank=1).bubble == pytest.approx(share)


def test_stages_send_every_microbatch_and_its_gradient_and_vote_when_they_are_new() -> None:
    first = [transfer for transfer in expected_transfers(TWO, step=1, rank=0) if transfer.axis == "pp"]
    assert [(transfer.dtype, transfer.elements, transfer.times) for transfer in first] == [("float64", 2 * 32 * 128, 4)]
    assert [transfer.purpose for transfer in expected_transfers(TWO, step=2, rank=2) if transfer.axis == "pp"] == [
        "input gradients of stages"
    ]
    assert [(vote.dtype, vote.elements, vote.times) for vote in votes(TWO, 0, 1)] == [("int32", 1, 1)]
    resumed = make_case(pp=2, accumulation=4, steps=4, resume="same")
    assert [step for step in range(1, 5) if list(votes(resumed, 0, step))] == [1, 3]
    assert not list(votes(make_case(tp=2), 0, 1))
    together = votes(TWO, 0, 1, changes_in({"torch": "2.15.0"}))
    assert [(vote.kind, vote.op) for vote in together] == [
        ("all_reduce", "min"),
        ("all_reduce", "sum"),
        ("send", ""),
    ]


@pytest.mark.parametrize(
    ("pp", "schedule", "sends", "rounds"),
    [
        (2, "1f1b", (1, 0), 1),
        (2, "interleaved", (1, 0), 1),
        (4, "1f1b", (1, 1, 1, 0), 2),
        (4, "interleaved", (2, 1, 1, 0), 2),
        (3, "1f1b", (1, 1, 0), 2),
        (3, "interleaved", (2, 1, 0), 3),
    ],
)
def test_neighbours_connect_in_rounds(pp: int, schedule: Schedule, sends: tuple[int, ...], rounds: int) -> None:
    case = make_case(pp=pp, schedule=schedule, accumulation=pp, layers=2 * pp)
    assert [connections(case, rank) for rank in range(pp)] == [(count, rounds) for count in sends]
