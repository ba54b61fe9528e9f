"""What `--resume` finishes: the last run that was interrupted or killed, in the environment in which it began."""

from __future__ import annotations

from harness.environment import Environment
from harness.errors import HarnessError
from harness.hints import run_again
from harness.project import Project
from harness.running.plan import Plan
from harness.running.selection import NothingSelected
from harness.running.stored import Stored, runs_of
from harness.store import RunStart, RunStore


def run_to_resume(project: Project) -> Stored:
    """The last run of this machine that was interrupted or killed; `NothingSelected` when none has cases left."""
    for run in runs_of(project):
        stopped = run.state in ("interrupted", "killed") and not run.is_imported
        if stopped and RunStore(run.path).read().unfinished_ids:
            return run
    raise NothingSelected("no run that was interrupted or killed has cases left.", where="--resume")


def check_environment(start: RunStart, now: Environment, plan: Plan) -> None:
    """Raises HarnessError where the environment is not the one in which the run began."""
    before = start.environment or Environment()
    if found := before.differences(now):
        root = () if plan.root_option is None else ("--root", plan.root_option)
        raise HarnessError(
            f"since this run began ({start.started or 'by an earlier version'}), this changed: {', '.join(found)}. "
            "Its results would be of two environments.",
            where="--resume",
            fix=f"run it anew: `{run_again((*root, *start.asked))}`.",
        )
