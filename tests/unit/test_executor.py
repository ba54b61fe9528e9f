"""A request becomes a job: what it is called, what its ranks are forked from, and whether nodes may divide it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from harness.engine.cluster import Cluster
from harness.engine.messages import Job, JobOutcome
from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.request import RunRequest
from harness.running.executor import Executor
from harness.running.plan import Plan, parse_injection
from harness.workflow import check_fits
from tests.builders import make_case
from tests.jobs import make_capacity


class FakeCluster:
    """Answers every job with nothing and remembers it."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def run(self, job: Job) -> JobOutcome:
        self.jobs.append(job)
        return JobOutcome(job_id=job.job_id, status="ok", ranks=())

    def close(self) -> None:
        return


def asked(plan: Plan, case: Case, root: Path = Path("/project")) -> Job:
    cluster = FakeCluster()
    assert Executor(plan, cast("Cluster", cluster), root).execute(case) is not None
    (job,) = cluster.jobs
    return job


def test_jobs_have_the_name_of_their_request() -> None:
    cluster, case = FakeCluster(), parse_case_id("tp2-rowwise-v2048-b16")
    executor = Executor(Plan(), cast("Cluster", cluster), Path("/project"))
    executor.execute(case)
    executor.serve(RunRequest(case=case, solo=True))
    executor.serve(RunRequest(case=case, replayed=((), ())))
    name = "tp2-rowwise-v2048-b16"
    assert [job.job_id for job in cluster.jobs] == [name, f"solo-{name}", f"replay-{name}"]
    assert [job.world_size for job in cluster.jobs] == [2, 1, 1]


def test_what_ranks_are_forked_from_follows_the_target_and_the_cases(tmp_path: Path) -> None:
    plan = Plan()
    here = {"device": "cpu", "arithmetic": "exact"}
    assert asked(plan, make_case()).preload == {**here, "compile": "off"}
    compiled = plan.serving([make_case(), make_case(compile="graph")])
    assert asked(compiled, make_case()).preload == {**here, "compile": "on"}
    mine = asked(plan, make_case(target="mine"), tmp_path).preload
    assert mine["target"] == "mine" and str(tmp_path) in mine["path"] and "source" not in mine


def test_other_nodes_must_have_the_same_target(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def build(): ...")
    plan, case = Plan(launcher="ray"), make_case(target="mine")
    first = asked(plan, case, tmp_path).preload["source"]
    (tmp_path / "mine.py").write_text("def build(): return 1")
    assert first and asked(plan, case, tmp_path).preload["source"] != first


@pytest.mark.parametrize(
    ("options", "axes", "one_node"),
    [
        ({"device": "cpu"}, {}, True),
        ({"device": "cpu", "backend": "gloo"}, {}, False),
        ({"device": "cuda", "backend": "nccl"}, {}, False),
        ({"device": "cuda", "backend": "nccl", "launcher": "torchrun"}, {}, False),
        ({"device": "cuda", "backend": "nccl"}, {"resume": "same"}, True),
    ],
)
def test_nodes_divide_what_shares_neither_memory_nor_files(
    options: dict[str, Any], axes: dict[str, object], *, one_node: bool
) -> None:
    case = make_case(tp=4, **axes)
    plan = Plan(capacity=make_capacity(3, 2), **options)
    assert asked(plan, case).one_node == one_node
    if one_node:
        with pytest.raises(HarnessError, match="more than the 3 slots"):
            check_fits([case], plan)
    else:
        check_fits([case], plan)
        with pytest.raises(HarnessError, match="more than the 5 slots"):
            check_fits([make_case(tp=8)], plan)


@pytest.mark.plugin("faults")
def test_ranks_get_the_source_of_an_injection(tmp_path: Path) -> None:
    file = tmp_path / "patch.py"
    file.write_text("def apply(): ...\n")
    plan = Plan(injections=(parse_injection(f"{file}:apply"), parse_injection("fault:amax_without_abs")))
    file.unlink()
    patches = msgspec.msgpack.decode(asked(plan, make_case()).payload, type=RunRequest).injections
    assert [(patch.text, patch.source) for patch in patches] == [
        (f"{file}:apply", b"def apply(): ...\n"),
        ("fault:amax_without_abs", b""),
    ]
    with pytest.raises(HarnessError, match=r"Fix: write --inject fault:amax_without_abs\."):
        parse_injection("amax_without_abs")


def test_a_stopped_executor_asks_for_nothing() -> None:
    cluster = FakeCluster()
    executor = Executor(Plan(), cast("Cluster", cluster), Path("/project"))
    executor.stop()
    assert executor.execute(make_case()) is None and cluster.jobs == []
