"""The mesh of a layout: every rank has one place, and the groups along an axis share the ranks out."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.matrix.case import Layout
from harness.matrix.layout import (
    DP_AXES,
    MESH_AXES,
    axis_of_group,
    batch_of,
    coordinates,
    dp_rank,
    peers,
    positions,
    positions_of_ranks,
)

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
