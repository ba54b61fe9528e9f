"""The options of several nodes: what they must be together."""

from __future__ import annotations

import pytest

from harness.engine.joining import Rendezvous
from harness.errors import HarnessError
from harness.running.nodes import parse_rendezvous
from harness.running.plan import make_plan
from tests.builders import make_case

AT = "node-0:29400"


def test_without_the_options_there_is_one_node() -> None:
    assert parse_rendezvous(nnodes=1, node_rank=0, endpoint=None, timeout_s=600) is None


def test_both_options_make_a_meeting() -> None:
    found = parse_rendezvous(nnodes=2, node_rank=1, endpoint=AT, timeout_s=600)
    assert found == Rendezvous(nnodes=2, node_rank=1, endpoint=AT, timeout_s=600)
    assert found.address == ("node-0", 29400)


@pytest.mark.parametrize(
    ("nnodes", "node_rank", "endpoint", "told"),
    [
        (2, 0, None, "an address where they meet"),
        (1, 0, AT, "a number of nodes"),
        (1, 1, None, "a number of nodes"),
        (2, 2, AT, "there is no node 2 of 2"),
        (2, 0, "node-0", "'node-0' is no HOST:PORT"),
    ],
)
def test_options_that_do_not_fit_are_told(nnodes: int, node_rank: int, endpoint: str | None, told: str) -> None:
    with pytest.raises(HarnessError, match=told):
        parse_rendezvous(nnodes=nnodes, node_rank=node_rank, endpoint=endpoint, timeout_s=600)


def test_the_ranks_of_a_program_of_ones_own_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(tp=2)
    assert make_plan(device="cpu").one_node(case)
    monkeypatch.setenv("FP8_HARNESS_PROGRAM", "tests.acceptance.fake_program")
    assert not make_plan(device="cpu").one_node(case)
