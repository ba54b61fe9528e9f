"""Operands that a trainer owns: the record of every unshard on real ranks, and what the check finds in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import msgspec
import pytest

from harness.checks import unshards
from harness.checks.check import Rule
from harness.engine.fork_server_engine import ForkServerEngine
from harness.trace.unshards import UnshardTrace
from tests.builders import make_trace
from tests.jobs import make_share, run_alone

Records = Callable[..., list[UnshardTrace]]

FAULTS: dict[str, Rule] = {
    "refill_forgotten": unshards.REFILL,
    "orientation_not_refilled": unshards.PARTLY,
    "scale_not_refilled": unshards.PARTLY,
    "refilled_by_another_recipe": unshards.PARTLY,
    "other_rows_gathered": unshards.ARRIVED,
    "first_weight_gathered_again": unshards.ARRIVED,
    "gathered_in_half": unshards.DTYPE,
    "padding_in_scales": unshards.PADDED,
    "quantized_twice": unshards.CASTS,
    "quantized_for_every_microbatch": unshards.AGAIN,
    "step_without_reshard": unshards.OUTDATED,
    "memory_used_before_backward": unshards.OVERWRITTEN,
    "operands_not_freed": unshards.HELD,
    "gathered_weight_not_freed": unshards.BESIDE,
    "operands_copied_for_use": unshards.UNREAD,
}
KEPT = ("quantized_for_every_microbatch", "memory_used_before_backward")  # between forward and backward


@pytest.fixture(scope="module")
def engine() -> Iterator[ForkServerEngine]:
    with ForkServerEngine("tests.worker.ownedprogram") as fork_server:
        yield fork_server


@pytest.fixture(scope="module")
def records(engine: ForkServerEngine, tmp_path_factory: pytest.TempPathFactory) -> Records:
    def run(fault: str = "", *, reshard: bool) -> list[UnshardTrace]:
        payload = json.dumps({"fault": fault, "reshard": reshard}).encode()
        outcome = run_alone(engine, make_share(tmp_path_factory.mktemp("owned"), 3, payload))
        assert outcome.status == "ok", f"{outcome.message}\n{outcome.ranks[0].traceback}"
        return [msgspec.json.decode(rank.payload or b"", type=UnshardTrace) for rank in outcome.ranks]

    return run


def broken(of_ranks: list[UnshardTrace]) -> list[str]:
    traces = (make_trace(rank=rank, unshards=record) for rank, record in enumerate(of_ranks))
    found = sorted((mismatch for trace in traces for mismatch in unshards.mismatches(trace)), key=lambda one: one[:3])
    return [mismatch.rule.name for mismatch in found]


@pytest.mark.parametrize(("reshard", "times"), [(True, 4), (False, 1)])
def test_a_weight_is_quantized_once_an_unshard_and_read_while_it_is_right(
    records: Records, reshard: bool, times: int
) -> None:
    of_ranks = records(reshard=reshard)
    assert broken(of_ranks) == []
    for record in of_ranks:
        assert record.weights == record.read == ("0.weight", "1.weight")
        steps = [unshard.step for unshard in record.unshards if unshard.fqn == "0.weight"]
        assert steps == [step for step in (1, 2, 3) for _ in range(times)]
        assert all((unshard.casts, len(unshard.operands)) == (2, 4) for unshard in record.unshards)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(records: Records, fault: str) -> None:
    names = broken(records(fault, reshard=fault not in KEPT))
    assert FAULTS[fault].name in names[:4], names[:4]
