"""A script beside itself on one rank: what is told of losses, gradients and updates, and of what was not lined up."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.plugins.exec.against import Against, compare, lines
from harness.plugins.exec.request import OneRankRecord
from tests.builders import make_sketch

KINDS = {"initial": 1.0, "grad": 2.0, "param": 1.5}


def record(rank: int = 0, ranks: int = 1, *, values: dict[str, float] | None = None, **changes: Any) -> OneRankRecord:
    """What a rank of one step recorded: a weight of 1 that becomes 1.5 by a gradient of 2."""
    of_kinds = {**KINDS, **(values or {})}
    sketches = (make_sketch("up", 1, kind, value=value, part=rank, parts=ranks) for kind, value in of_kinds.items())
    given = {"losses": (4.0,), "dtype": "bfloat16", "world_size": ranks, "batches": 2, "sketches": tuple(sketches)}
    return OneRankRecord(rank=rank, **{**given, **changes})


def beside(*, one: dict[str, Any] | None = None, **changes: Any) -> Against:
    return compare([record(rank, 2, **changes) for rank in range(2)], record(**(one or {})))


def test_shards_of_ranks_are_one_tensor() -> None:
    against = beside()
    assert against.verdict == "equal" and against.findings == []
    assert against.rows[0].gradient == (0.0, "up")


@pytest.mark.parametrize(
    ("changes", "rule", "words"),
    [
        ({"values": {"grad": 4.0}}, "parity/gradients", "1 of 1 gradients are 2 times the values on one rank: summed"),
        ({"values": {"grad": 1.0}}, "parity/gradients", "1 of 1 gradients are 1/2 of the values on one rank: averaged"),
        ({"values": {"grad": 2.1}}, "parity/gradients", "1 of 1 gradients differ"),
        ({"values": {"param": 1.0}}, "parity/parameters", "updates of parameters differ"),
        ({"losses": (4.1,)}, "parity/loss", "loss differs"),
        ({"losses": (math.nan,)}, "parity/loss", "loss differs"),
    ],
)
def test_what_is_off_is_told(changes: dict[str, Any], rule: str, words: str) -> None:
    against = beside(**changes)
    assert against.verdict == "wrong" and against.findings[0].rule == rule
    assert words in "\n".join(lines(against))


def test_a_loss_in_bfloat16_may_be_a_last_place_off() -> None:
    assert beside(losses=(4.01,), one={"loss_dtype": "bfloat16"}).verdict == "equal"


def test_ranks_with_other_numbers_of_labels_are_told_where_gradients_differ() -> None:
    ranks = [record(rank, 2, values={"grad": 2.1}, labels=(8 + rank,)) for rank in range(2)]
    (finding,) = compare(ranks, record()).findings
    assert finding.notes == ("ranks have 8, 9 labels, and the mean of their means is not the mean over all",)
    assert finding.fix and finding.fix.startswith("divide the sum")


def test_replicas_that_differ_are_told_with_their_ranks() -> None:
    ranks = [record(values={"grad": 2.0 + rank / 1000}, rank=0, ranks=1) for rank in range(2)]
    held = [OneRankRecord(rank=rank, losses=(4.0,), sketches=one.sketches) for rank, one in enumerate(ranks)]
    finding = compare(held, record()).findings[0]
    assert finding.rule == "parity/replicas" and tuple(finding.ranks) == (0, 1)


@pytest.mark.parametrize(
    ("ranks", "one", "name"),
    [
        ({}, {"not_lined_up": {"labels": "they are not seen"}}, "labels"),
        ({"world_size": 3}, {}, "ranks"),
        ({}, {"sketches": (), "losses": ()}, "gradients"),
    ],
)
def test_what_is_not_lined_up_is_not_equal(ranks: dict[str, Any], one: dict[str, Any], name: str) -> None:
    against = beside(one=one, **ranks)
    assert against.verdict == "not compared" and name in against.not_compared


@pytest.mark.parametrize(("gradient", "verdict"), [(2.4, "equal"), (2.6, "wrong")])
def test_partial_sums_in_bfloat16_may_move_values_that_are_cast_next(gradient: float, verdict: str) -> None:
    assert beside(values={"grad": gradient}, shares_linears=True).verdict == verdict
