"""Over torch's gloo on real ranks: the numbers and records of the shared-memory backend, and an end of every failed
job.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.checks.assembly import assemble, relative_distances
from harness.checks.failures import main_stack, place_of
from harness.engine.fork_server_engine import ForkServerEngine
from harness.engine.messages import JobOutcome
from harness.matrix.caseid import parse_case_id
from harness.trace import RankTrace, Run
from tests.builders import probes_for
from tests.jobs import run_request
from tests.worker.conftest import make_request
from tests.worker.runs import sweep

# Sums of float64 in another order; seen: 5e-16.
REORDERED = 1e-14


def timeless(run: Run) -> list[RankTrace]:
    """The traces without times, memory of the process and the name of the backend."""
    return [
        msgspec.structs.replace(
            trace,
            steps=tuple(msgspec.structs.replace(step, seconds=0.0) for step in trace.steps),
            traffic=tuple(msgspec.structs.replace(record, starts=()) for record in trace.traffic or ()),
            peak_memory_bytes=0,
            virtual=(),
            installed=(),
        )
        for trace in run.traces
    ]


@pytest.mark.parametrize(
    "text",
    [
        "tp2-rowwise-v2048-gb2-s1-b16",
        sweep("hsdp2x2-tensorwise-ag.fp8pre-v2048-gb4-s2-b16"),
        sweep("fsdp2-tp2-tensorwise-tpstyle.fp8-ac.op-v2048-gb4-s2-f64"),
        sweep("fsdp2-atp2-tensorwise-tpstyle.fp8-ac.full-graph-v2048-gb2-s2-b16"),
    ],
)
def test_groups_of_two_have_every_bit_and_record_of_the_shared_fabric(trained, text: str):
    case = parse_case_id(text)
    shared, gloo = (trained(case, probes=probes_for(case), backend=backend) for backend in ("shared", "gloo"))
    rest = ("casts", "scaled_mm") if case.compile == "none" else ("casts", "scaled_mm", "symm_mem")
    assert {trace.virtual for trace in shared.traces} == {tuple(sorted(("collectives", *rest)))}
    assert {trace.virtual for trace in gloo.traces} == {tuple(sorted(("gloo", *rest)))}
    assert timeless(gloo) == timeless(shared)


def test_wider_groups_sum_in_another_order_and_differ_in_nothing_else(trained):
    case = parse_case_id("fsdp4-rowwise-v2048-gb4-s1-f64")
    probes = ("sketches", "traffic", "saved_memory")
    shared, gloo = (trained(case, probes=probes, backend=backend) for backend in ("shared", "gloo"))
    for left, right in zip(shared.traces, gloo.traces, strict=True):
        traffic = [
            [msgspec.structs.replace(record, starts=()) for record in trace.traffic or ()] for trace in (left, right)
        ]
        assert traffic[0] == traffic[1] and left.saved_memory == right.saved_memory
        assert right.steps[0].loss == pytest.approx(left.steps[0].loss, rel=REORDERED, abs=0)
    distances = relative_distances(assemble(gloo.traces), assemble(shared.traces))
    assert 0 < max(distances.values()) < REORDERED


WAYS = """
import os, signal, time
import torch
import torch.distributed as dist

def _after(fails):
    if dist.get_rank() == 1:
        fails()
    dist.all_reduce(torch.ones(8))

def faulted():
    _after(lambda: os.kill(os.getpid(), signal.SIGSEGV))

def exited():
    _after(lambda: os._exit(7))

def raised():
    _after(lambda: 1 / 0)

def asleep():
    _after(lambda: time.sleep(60))

def another_collective():
    _after(lambda: dist.broadcast(torch.ones(8), src=1))

def another_size():
    _after(lambda: dist.all_reduce(torch.ones(4096)))
"""


@pytest.fixture
def failing(engine: ForkServerEngine, plant, tmp_path: Path):
    def run(way: str, *, deadline_s: float = 60.0) -> JobOutcome:
        case = parse_case_id("tp4-bf16-v2048-gb4-s1-f32")
        request = make_request(case, backend="gloo", injections=plant(WAYS, way))
        return run_request(engine, tmp_path, request, deadline_s=deadline_s)

    return run


@pytest.mark.parametrize(
    ("way", "status", "message"),
    [
        ("faulted", "signaled", "killed by SIGSEGV"),
        ("exited", "exited", "exited with code 7"),
        ("raised", "raised", "ZeroDivisionError"),
    ],
)
def test_a_rank_that_fails_ends_the_job_as_its_only_cause(failing, way: str, status: str, message: str):
    outcome = failing(way)
    assert outcome.status == "crash" and outcome.detected_s < 5
    assert outcome.message.startswith("rank 1 ") and message in outcome.message
    assert [rank.consequence for rank in outcome.ranks] == [True, False, True, True]
    assert outcome.ranks[1].status == status
    assert {rank.status for rank in outcome.ranks if rank.consequence} <= {"raised", "stuck"}


@pytest.mark.parametrize("way", ["asleep", "another_collective"])
def test_ranks_that_wait_are_a_hang_that_says_where(failing, way: str):
    outcome = failing(way, deadline_s=2.0)
    assert outcome.status == "hang"
    places = [place_of(main_stack(rank.traceback)) for rank in outcome.ranks]
    waits = [place.collective for place in places if place is not None]
    assert waits == ["all_reduce", "" if way == "asleep" else "broadcast", "all_reduce", "all_reduce"]


def test_sizes_that_differ_end_the_job_with_the_words_of_gloo(failing):
    outcome = failing("another_size")
    assert outcome.status == "crash" and outcome.detected_s < 5
    said = [f"{rank.message}\n{rank.log_tail}" for rank in outcome.ranks if not rank.consequence]
    assert len(said) == 1 and "SIGABRT" in said[0] and "preamble" in said[0]
