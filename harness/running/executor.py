"""The executor: one request to one job, and its outcome back. It does not judge: see `case_runner.py`."""

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from harness.engine.cluster import Cluster
from harness.engine.fork_server_engine import ForkServerEngine
from harness.engine.hardware import open_leases
from harness.engine.messages import Job, JobOutcome
from harness.engine.node import LocalNode, Runner
from harness.engine.processes import StoreProcess
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.project import Project, builds_folder
from harness.registry import REFERENCE, launcher
from harness.request import CALL, CallRequest, RunRequest
from harness.running.identity import own_source_digest, search_path
from harness.running.plan import Injection, Plan

RENDEZVOUS_PROGRAM = "harness.worker.process_group"  # serves the store where ranks of several nodes meet


class Executor:
    """Runs cases on the nodes of a cluster until closed. Thread-safe. `root`: of the project."""

    def __init__(self, plan: Plan, cluster: Cluster, root: Path) -> None:
        self._plan = plan
        self._cluster = cluster
        self._root = root
        self._stopped = threading.Event()

    def with_plan(self, plan: Plan) -> "Executor":
        """Return an executor on the same nodes, closed with this one, for a plan whose ranks record something else."""
        other = Executor(plan, self._cluster, self._root)
        other._stopped = self._stopped
        return other

    @property
    def stopped(self) -> bool:
        """Return True after `stop`: outcomes that arrive now say nothing about their case."""
        return self._stopped.is_set()

    def execute(self, case: Case, fixes: Sequence[Injection] = ()) -> JobOutcome | None:
        """Run one case once, with the fixes and the injections; None when stopped before its end."""
        return self.serve(
            RunRequest(
                case=case,
                injections=tuple(injection.patch for injection in (*fixes, *self._plan.injections)),
                probes=self._plan.probes_for(case),
                digests_built=self._plan.digests_built,
            )
        )

    def serve(self, request: RunRequest) -> JobOutcome | None:
        """Answer a request on the device of the plan; None when stopped before its end. Waits for free slots.

        What the machine ended was tried again: an outcome that is `infra` is final.
        """
        if self.stopped:
            return None
        plan = self._plan
        here = msgspec.structs.replace(request, device=plan.device, backend=plan.backend, arithmetic=plan.arithmetic)
        return self._run(
            Job(
                job_id=f"{_kind(request)}{case_id(request.case)}",
                world_size=request.world_size,
                payload=msgspec.msgpack.encode(here),
                deadline_s=self._plan.deadline_s(request.case),
                preload=_preload(self._plan, request.case.target, self._root),
                one_node=self._plan.one_node(request.case),
            )
        )

    def call(self, request: CallRequest, ranks: int, *, job_id: str, deadline_s: float) -> JobOutcome | None:
        """Call a function on so many ranks that share a node; None when stopped before its end."""
        payload = CALL + msgspec.msgpack.encode(request)
        preload = _preload(self._plan, REFERENCE, self._root)
        job = Job(
            job_id=job_id, world_size=ranks, payload=payload, deadline_s=deadline_s, preload=preload, one_node=True
        )
        return self._run(job)

    def _run(self, job: Job) -> JobOutcome | None:
        outcome = None if self.stopped else self._cluster.run(job)
        return None if self.stopped else outcome

    def stop(self) -> None:
        """Start nothing any more and kill every rank. Job folders are removed unless logs are kept."""
        self._stopped.set()
        self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()


def _kind(request: RunRequest) -> str:
    """Return what the name of a job starts with: whether it is the case itself or one of these references of it."""
    if request.noise is not None:
        return "noise-"
    return "solo-" if request.solo else "replay-" if request.replayed else ""


def open_executor(plan: Plan, project: Project, note: Callable[[str], None] = lambda _: None) -> Executor:
    """Return an executor for `plan`; ranks are warmed up when the first case needs them. Close it by `with`.

    `note` gets what is lost in this environment, when ranks are warmed up. The nodes of a Ray cluster are reserved
    here, which may wait for other runs: `note` tells the user.
    """
    if plan.launcher == "ray":
        ray = launcher("ray")
        nodes = ray.open_nodes(plan.address, plan.capacity, program=plan.program, logs=plan.logs, note=note)
        store = StoreProcess(RENDEZVOUS_PROGRAM, ray.own_address(plan.address))
        return Executor(plan, Cluster(nodes, store, note), project.root)
    return Executor(plan, Cluster([local_node(plan, project, note)], note=note), project.root)


def local_node(plan: Plan, project: Project, note: Callable[[str], None]) -> LocalNode:
    """This machine as a node of the plan, with the plan's first capacity. `note`: gets what it waits for."""
    once = functools.cache(note)  # several fork servers say the same of one environment

    def launch(preload: Mapping[str, str]) -> Runner:
        if plan.launcher == "torchrun":
            engine: Runner = launcher("torchrun")(plan.program, preload)
            return engine
        return ForkServerEngine(plan.program, preload, note=once)

    here = plan.capacity.nodes[0]
    leases = open_leases(project.lease_folder(), plan.device, here.slots, note)
    return LocalNode(launch, leases, here, logs=plan.logs)


def _preload(plan: Plan, target: str, root: Path) -> dict[str, str]:
    compiles = "on" if plan.compiles else "off"
    options = {"device": plan.device, "arithmetic": plan.arithmetic, "compile": compiles}
    if plan.one_fork_server:
        options["path"] = str(builds_folder())
    elif target != REFERENCE:
        options |= {"target": target, "path": os.pathsep.join(search_path(root))}
        if plan.launcher == "ray":
            options["source"] = own_source_digest(target, root)  # other nodes may have another one
    return options
