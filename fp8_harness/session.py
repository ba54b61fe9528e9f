"""What the calls of one process share: the plan, and the nodes with their warm ranks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from unittest import SkipTest

if TYPE_CHECKING:
    from harness.engine.messages import JobOutcome
    from harness.matrix.case import Case
    from harness.request import CallRequest
    from harness.result import CaseResult
    from harness.running.case_runner import CaseRunner

CALL_S = 120.0  # that one call on ranks may take


class MachineFailed(RuntimeError):
    """The machine ended ranks, which says nothing of what they ran."""


class Session:
    """Runs cases and calls on CPU ranks, all forked from one process that has imported torch and torchao."""

    def __init__(self) -> None:
        from msgspec.structs import replace

        from harness.evidence.sealed import own_root
        from harness.project import Project, builds_folder, state_folder
        from harness.run_options import CommandOptions, RunOptions
        from harness.running.executor import open_executor
        from harness.running.plan import make_plan, with_command
        from harness.running.references import open_references

        self.project = Project(root=own_root(), state=state_folder(), own=False)
        plan = with_command(make_plan().on_cpu, RunOptions(), CommandOptions())
        self._plan = replace(plan, one_fork_server=True, compiles=False, measures=False)
        builds_folder().mkdir(parents=True, exist_ok=True)
        self._executor = open_executor(self._plan, self.project)
        self._references = open_references(self.project, self._plan, self._executor)
        self._numbers = itertools.count(1)
        atexit.register(self.close)

    def close(self) -> None:
        """End the ranks and what they are forked from."""
        with contextlib.suppress(RuntimeError):  # at the end of the interpreter, which ends them too
            self._executor.stop()

    def run(self, cases: Sequence[Case], *, goldens: bool) -> list[CaseResult]:
        """Return the results of the cases, in their order. HarnessError where one cannot be run here.

        `goldens`: losses are compared with those of BF16 too.
        """
        from harness.running.case_runner import CaseRunner
        from harness.workflow import prepared

        for case in cases:
            self.check_ranks(case.world_size, self._plan.most_ranks(case))
        judge, plan = prepared(self.project, cases, self._plan.serving(cases), lambda _: None, goldens=goldens)
        executor = self._executor.with_plan(plan)
        runner = CaseRunner(plan, executor, judge, self._references)
        with ThreadPoolExecutor(max(1, min(len(cases), plan.jobs or 1))) as threads:
            return list(threads.map(functools.partial(_result, runner), cases))

    def call(self, request: CallRequest, ranks: int) -> JobOutcome:
        """Return the outcome of a call on so many ranks."""
        self.check_ranks(ranks, self._plan.capacity.largest)
        name = f"call-{next(self._numbers)}"
        outcome = self._executor.call(request, ranks, job_id=name, deadline_s=CALL_S)
        if outcome is None or outcome.status == "infra":
            raise MachineFailed("ranks were stopped" if outcome is None else outcome.message)
        return outcome

    @staticmethod
    def check_ranks(wanted: int, most: int) -> None:
        """Skip the test where the machine cannot hold so many ranks."""
        if wanted > most:
            raise SkipTest(f"needs {wanted} ranks, and this machine has room for {most}")


def _result(runner: CaseRunner, case: Case) -> CaseResult:
    return runner.run(case) or runner.not_run(case)


@functools.cache
def session() -> Session:
    """Return the session of this process, with its first call."""
    return Session()


def close() -> None:
    """End the session of this process; the next call starts another one."""
    if session.cache_info().currsize:
        session().close()
        session.cache_clear()
