"""The mesh of a layout: every rank has one place, groups along an axis share the ranks out, and stages hold blocks."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.expect.expectations import Expectations
from harness.expect.traffic import expected_transfers
from harness.matrix.case import Case, Layout
from harness.matrix.caseid import parse_case_id
from harness.matrix.dims.dimension import Sender
from harness.matrix.dims.pp import (
    blocks_of,
    connections,
    forwards_in_flight,
    holds,
    modules_of_stage,
    neighbors,
    stages_of,
    votes,
)
from harness.matrix.layout import (
    DP_AXES,
    MESH_AXES,
    Schedule,
    axis_of_group,
    batch_of,
    coordinates,
    dp_rank,
    peers,
    positions,
    positions_of_ranks,
)
from harness.matrix.upstream import changes_in
from harness.plugins.predict.cost import metrics
from tests.builders import make_case

SIZES = st.integers(1, 3)
LAYOUTS = st.builds(Layout, dp_replicate=SIZES, dp_shard=SIZES, tp=SIZES)
SOME_AXES = st.sets(st.sampled_from(MESH_AXES))


def ranks(layout: Layout) -> range:
    return range(layout.world_size)


@given(LAYOUTS)
def test_every_rank_has_a_place_of_its_own_and_the_last_axis_varies_fastest(layout: Layout) -> None:
    places = [tuple(coordinates(layout, rank)[axis] for axis in MESH_AXES) for rank in ranks(layout)]
    assert places == list(itertools.product(*(range(layout.mesh[axis]) for axis in MESH_AXES)))


@given(LAYOUTS, SOME_AXES)
def test_every_rank_is_in_exactly_one_group_of_some_axes(layout: Layout, axes: set[str]) -> None:
    groups = {peers(layout, rank, axes) for rank in ranks(layout)}
    assert sorted(rank for group in groups for rank in group) == list(ranks(layout))
    assert {len(group) for group in groups} == {math.prod(layout.mesh[axis] for axis in axes)}


@given(LAYOUTS, SOME_AXES, st.data())
def test_peers_differ_on_these_axes_only(layout: Layout, axes: set[str], data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from(ranks(layout)))
    mine, peer_ranks = coordinates(layout, rank), peers(layout, rank, axes)
    assert rank in peer_ranks and list(peer_ranks) == sorted(peer_ranks)
    for other in ranks(layout):
        theirs = coordinates(layout, other)
        assert (other in peer_ranks) is ({axis for axis in MESH_AXES if theirs[axis] != mine[axis]} <= axes)
        if other in peer_ranks:
            assert peers(layout, other, axes) == peer_ranks


@given(LAYOUTS, SOME_AXES, st.data())
def test_a_group_of_peers_is_named_by_the_axes_that_have_several_ranks(
    layout: Layout, axes: set[str], data: st.DataObject
) -> None:
    rank = data.draw(st.sampled_from(ranks(layout)))
    used = [axis for axis in MESH_AXES if layout.mesh[axis] > 1]
    chosen = [axis for axis in used if axis in axes]
    name = axis_of_group(layout, rank, peers(layout, rank, axes))
    if not chosen:
        assert name == "self"
    elif chosen == used and len(used) > 1:
        assert name == "world"
    else:
        assert name == "+".join(chosen)


@given(LAYOUTS, st.data())
def test_other_sets_of_ranks_are_named_as_ranks(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from(ranks(layout)))
    others = data.draw(st.sets(st.sampled_from(ranks(layout)), min_size=2) if layout.world_size > 1 else st.just({0}))
    group = tuple(sorted({rank, *others}))
    groups = {peers(layout, rank, axes) for count in range(4) for axes in itertools.combinations(MESH_AXES, count)}
    name = axis_of_group(layout, rank, group)
    assert (name == f"ranks {','.join(map(str, group))}") is (group not in groups)


@given(LAYOUTS)
def test_data_parallel_axes_and_tp_are_the_whole_mesh(layout: Layout) -> None:
    assert len(peers(layout, 0, DP_AXES)) == layout.dp
    assert len(peers(layout, 0, ("tp",))) == layout.tp
    assert peers(layout, 0, MESH_AXES) == tuple(ranks(layout))


@pytest.mark.parametrize(
    ("layout", "rank", "group", "name"),
    [
        (Layout(dp_replicate=2, dp_shard=2, tp=2), 5, (0, 1, 2, 3, 4, 5, 6, 7), "world"),
        (Layout(dp_replicate=2, dp_shard=2, tp=2), 5, (1, 3, 5, 7), "dp_replicate+dp_shard"),
        (Layout(dp_replicate=2, dp_shard=2, tp=2), 5, (4, 5, 6, 7), "dp_shard+tp"),
        (Layout(dp_replicate=2, dp_shard=2, tp=2), 5, (4, 5), "tp"),
        (Layout(dp_replicate=2, dp_shard=2, tp=2), 0, (0, 3), "ranks 0,3"),
        (Layout(dp_replicate=2, dp_shard=2, tp=2), 5, (5,), "self"),
        (Layout(tp=2), 0, (0, 1), "tp"),  # all ranks, but of one axis
        (Layout(dp_shard=4, cp=2, tp=2), 5, (5, 7), "cp"),
        (Layout(dp_shard=4, cp=2, tp=2), 5, (1, 5), "dp_sequence"),
        (Layout(dp_shard=2, cp=2, tp=2), 1, (1, 3), "dp_shard"),  # all of them share one sequence
    ],
)
def test_how_groups_are_called(layout: Layout, rank: int, group: tuple[int, ...], name: str) -> None:
    assert axis_of_group(layout, rank, group) == name


ORDERS = st.sampled_from(["headtail", "contiguous"])


@given(st.builds(Layout, dp_shard=st.just(8), cp=st.sampled_from([1, 2, 4, 8]), sequence_order=ORDERS))
def test_ranks_that_share_a_sequence_have_every_position_once(layout: Layout) -> None:
    pieces = positions_of_ranks(layout, 64)
    assert sorted(position for piece in pieces for position in piece) == list(range(64))
    assert {len(piece) for piece in pieces} == {64 // layout.cp}
    assert all(list(piece) == sorted(piece) for piece in pieces)


@given(st.sampled_from([2, 4, 8]))
def test_under_a_causal_mask_head_and_tail_are_as_much_work_on_every_rank(ranks: int) -> None:
    pieces = positions_of_ranks(Layout(dp_shard=ranks, cp=ranks), 64)
    assert len({sum(position + 1 for position in piece) for piece in pieces}) == 1


def test_ranks_of_other_slices_have_the_same_positions() -> None:
    layout = Layout(dp_replicate=2, dp_shard=4, cp=2, tp=2)
    of_ranks = [(batch_of(layout, rank), positions(layout, 8, dp_rank(layout, rank))) for rank in ranks(layout)]
    assert layout.batches == 4 and {batch for batch, _ in of_ranks} == {0, 1, 2, 3}
    for batch, mine in of_ranks:
        assert [other for number, other in of_ranks if number == batch].count(mine) == layout.tp


TWO = parse_case_id("pp2-fsdp2-tensorwise-v2048-gb16-s2-accum4-reduce.last-f64")
INTERLEAVED = parse_case_id("pp2-interleaved-bf16-layers.4-v2048-s3-accum4-f64")
UNEVEN = parse_case_id("pp4-tensorwise-layers.6-v2048-s3-accum4-f64")


def test_which_blocks_are_held_where_they_do_not_divide_or_stages_are_interleaved() -> None:
    assert [len(blocks_of(UNEVEN, rank)) for rank in range(4)] == [2, 2, 1, 1]
    assert modules_of_stage(UNEVEN, 0) == ("tok_embeddings", "layers.0", "layers.1")
    assert modules_of_stage(UNEVEN, 3) == ("layers.5", "norm", "output")
    assert [stages_of(INTERLEAVED, rank) for rank in (0, 1)] == [(0, 2), (1, 3)]
    assert [blocks_of(INTERLEAVED, rank) for rank in (0, 1)] == [(0, 2), (1, 3)]
    assert [neighbors(INTERLEAVED, rank) for rank in (0, 1)] == [(2, 1), (1, 2)]
    assert [neighbors(TWO, rank) for rank in range(4)] == [(1, 0), (1, 0), (0, 1), (0, 1)]


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
    assert [(vote.dtype, vote.elements, vote.times) for vote in votes(Sender(TWO, 0, 1))] == [("int32", 1, 1)]
    resumed = make_case(pp=2, accumulation=4, steps=4, resume="same")
    assert [step for step in range(1, 5) if list(votes(Sender(resumed, 0, step)))] == [1, 3]
    assert not list(votes(Sender(make_case(tp=2), 0, 1)))
    together = votes(Sender(TWO, 0, 1, changes_in({"torch": "2.15.0"})))
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
def test_neighbors_connect_in_rounds(pp: int, schedule: Schedule, sends: tuple[int, ...], rounds: int) -> None:
    case = make_case(pp=pp, schedule=schedule, accumulation=pp, layers=2 * pp)
    assert [connections(case, rank) for rank in range(pp)] == [(count, rounds) for count in sends]
