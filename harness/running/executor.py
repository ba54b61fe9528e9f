"""The executor: one case to one job and back, on leased slots, in a folder of its own.

Owns the engine, the leases and the job folders. It does not judge: see `case_runner.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from harness.engine.devices import cuda_names
from harness.engine.leases import Leases
from harness.engine.messages import Job, JobOutcome
from harness.engine.torchrun import TorchrunEngine
from harness.engine.zygote_engine import ZygoteEngine
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.targets import REFERENCE
from harness.project import Project
from harness.request import Noise, RunRequest
from harness.running.injection import Injection
from harness.running.plan import Plan
from harness.running.target_source import search_path
from harness.trace.modules import ModuleShard

_ID_IN_FOLDER = 80  # characters; sockets in a job folder have at most 107 for their whole path


class Engine(Protocol):
    """Runs jobs on fresh ranks. `run` is called from several threads; `close` ends what still runs."""

    def run(self, job: Job) -> JobOutcome:
        """Run one job to its end; never raises for what ranks do."""

    def close(self) -> None:
        """Kill every rank and the zygote."""


class Engines:
    """One engine for every target that is asked for: what ranks are forked from holds one target only. Thread-safe."""

    def __init__(self, make: Callable[[str], Engine]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: dict[str, Engine] = {}
        self._closed = False

    def of(self, target: str) -> Engine:
        """The engine whose ranks train this target. After `close`, one that is closed."""
        with self._lock:
            if target not in self._made:
                self._made[target] = self._make(target)
                if self._closed:
                    self._made[target].close()
            return self._made[target]

    def close(self) -> None:
        """Close every engine."""
        with self._lock:
            self._closed, made = True, tuple(self._made.values())
        for engine in made:
            engine.close()


class Executor:
    """Runs cases on the engines of their targets until closed. Thread-safe."""

    def __init__(self, plan: Plan, engines: Engines, leases: Leases, folder: Path) -> None:
        self._plan = plan
        self._engines = engines
        self._leases = leases
        self._folder = folder
        self._numbers = itertools.count(1)
        self._stopped = threading.Event()

    def with_plan(self, plan: Plan) -> Executor:
        """The same engine, slots and end for a plan that asks its ranks for something else."""
        other = Executor(plan, self._engines, self._leases, self._folder)
        other._numbers, other._stopped = self._numbers, self._stopped
        return other

    @property
    def stopped(self) -> bool:
        """True after `stop`: outcomes that arrive now say nothing about their case."""
        return self._stopped.is_set()

    def execute(self, case: Case, fixes: Sequence[Injection] = ()) -> JobOutcome | None:
        """Run one case once, with the fixes and the injections; None when stopped before its ranks started.

        Waits for free slots.
        """
        return self._serve(
            RunRequest(
                case=case,
                device=self._plan.device,
                injections=tuple(injection.patch for injection in (*fixes, *self._plan.injections)),
                probes=self._plan.probes,
                digests_built=self._plan.digests_built,
            )
        )

    def execute_solo(self, case: Case, probes: tuple[str, ...]) -> JobOutcome | None:
        """Run the solo witness of a case, without the injections: it says what the case should compute."""
        return self._serve(RunRequest(case=case, device=self._plan.device, probes=probes, solo=True))

    def execute_replay(self, case: Case, ranks: tuple[tuple[ModuleShard, ...], ...]) -> JobOutcome | None:
        """Repeat on one rank what the modules of a run of this case recorded on `ranks`, without the injections."""
        return self._serve(RunRequest(case=case, device=self._plan.device, replayed=ranks))

    def execute_plain(
        self, case: Case, *, probes: tuple[str, ...] = (), fixes: Sequence[Injection] = ()
    ) -> JobOutcome | None:
        """Run one case without the injections, with these fixes and with these probes alone."""
        patches = tuple(fix.patch for fix in fixes)
        return self._serve(RunRequest(case=case, device=self._plan.device, injections=patches, probes=probes))

    def execute_noisy(self, case: Case, noise: Noise, probes: tuple[str, ...]) -> JobOutcome | None:
        """Run one case with these random errors, without the injections."""
        return self._serve(RunRequest(case=case, device=self._plan.device, probes=probes, noise=noise))

    def _serve(self, request: RunRequest) -> JobOutcome | None:
        with self._leases.acquire(request.world_size) as slots:
            if self.stopped:
                return None
            name = f"{_kind(request)}{case_id(request.case)}"
            try:
                with self._job_folder(name) as folder:
                    return self._engines.of(request.case.target).run(self._job(request, name, folder, slots))
            except OSError as error:
                return JobOutcome(job_id=name, status="infra", ranks=(), message=f"job folder: {error}")

    def stop(self) -> None:
        """Start nothing any more and kill every rank."""
        self._stopped.set()
        self._engines.close()

    def close(self) -> None:
        """Stop, and remove the job folders unless logs are kept."""
        self.stop()
        if self._plan.logs is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _job(self, request: RunRequest, name: str, folder: Path, slots: tuple[int, ...]) -> Job:
        return Job(
            job_id=name,
            world_size=request.world_size,
            payload=msgspec.msgpack.encode(request),
            deadline_s=self._plan.deadline_s(request.case),
            folder=str(folder),
            devices=slots if self._plan.device == "cuda" else (),
        )

    @contextlib.contextmanager
    def _job_folder(self, name: str) -> Iterator[Path]:
        folder = self._folder / f"{next(self._numbers):04d}-{name[:_ID_IN_FOLDER]}"
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            if self._plan.logs is None:
                shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _kind(request: RunRequest) -> str:
    """What the name of a job starts with: whether it is the case itself or a witness."""
    if request.noise is not None:
        return f"noise{request.noise.draw}-"
    return "solo-" if request.solo else "replay-" if request.replayed else ""


def open_executor(plan: Plan, project: Project) -> Executor:
    """An executor for `plan`; ranks are warmed up when the first case needs them. Close it by `with`."""
    names = cuda_names(os.environ)[: plan.slots] if plan.device == "cuda" else None
    leases = Leases(project.lease_folder() / plan.device, plan.slots, names=names)
    folder = plan.logs or Path(tempfile.mkdtemp(prefix="fp8-harness-"))
    return Executor(plan, Engines(lambda target: _engine(plan, target, project)), leases, folder)


def _engine(plan: Plan, target: str, project: Project) -> Engine:
    options = {"device": plan.device, "compile": "on" if plan.compiles else "off"}
    if target != REFERENCE:
        options |= {"target": target, "path": os.pathsep.join(search_path(project.root))}
    if plan.engine == "torchrun":
        return TorchrunEngine(plan.program, options)
    return ZygoteEngine(plan.program, options)
