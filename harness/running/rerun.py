"""What `--lf` runs again of the last run, and which run `--resume` finishes.

A case without a readable result counts as not good: its run may have been killed before it got there.
"""

from collections.abc import Sequence

import msgspec

from harness.errors import HarnessError
from harness.hints import run_cases
from harness.project import Project
from harness.result import Environment, RunStart
from harness.run_options import RunOptions
from harness.running.plan import Plan
from harness.running.selection import NothingSelected, Query
from harness.running.stored import Stored, runs_of
from harness.store import RunStore

_RUN_AGAIN = "run the tier of that run again."


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """The query for what is not known to be good in the last run, and the options of that run.

    `notes` say what is peculiar about it.
    """

    query: Query
    options: RunOptions
    notes: tuple[str, ...]


def rerun_query(project: Project) -> Rerun:
    """What to run again of the last stored run: the cases that were not good, and those without a readable result.

    Raises `NothingSelected` when there is no such run or no such case.
    """
    stored = (RunStore(path).read() for path in reversed(project.stored_runs()))
    last = next((run for run in stored if run.results or run.damaged), None)
    if last is None:
        raise NothingSelected("there is no earlier run.", where="--lf", fix="run a tier first.")
    failed = [result.case_id for result in last.results if result.ran and not result.good]
    missing = [result.case_id for result in last.results if not result.ran]
    # The list of cases names those of damaged lines too.
    nameless = [] if last.start.cases else [text for text, name in last.damaged.items() if name is None]
    if not failed and not missing:
        if nameless:
            raise NothingSelected(f"{nameless[0]}. No other case failed.", where="--lf", fix=_RUN_AGAIN)
        raise NothingSelected("nothing failed in the last run.", where="--lf")
    lost = [
        f"{text}. It does not say which case it was. Fix: {_RUN_AGAIN}" if text in nameless else f"{text}."
        for text in last.damaged
    ]
    notes = [*([_missing_text(missing, last.start.cases)] if missing and last.start.cases else []), *lost]
    return Rerun(query=Query(sources=(*failed, *missing)), options=last.start.options, notes=tuple(notes))


def _missing_text(missing: Sequence[str], planned: Sequence[str]) -> str:
    have, they_run = ("has", "It runs") if len(missing) == 1 else ("have", "They run")
    return (
        f"{len(missing)} of {len(planned)} cases of the last run {have} no result: it was killed or still runs, or the "
        f"result is damaged. {they_run} now."
    )


def run_to_resume(project: Project) -> Stored:
    """The last run of this machine that was interrupted or killed; `NothingSelected` when none has cases left."""
    for run in runs_of(project):
        stopped = run.state in ("interrupted", "killed") and not run.is_imported
        if stopped and not all(result.ran for result in RunStore(run.path).read().results):
            return run
    raise NothingSelected("no run that was interrupted or killed has cases left.", where="--resume")


def check_environment(start: RunStart, now: Environment, plan: Plan) -> None:
    """Raises HarnessError where the environment is not the one in which the run began."""
    if differences := (start.environment or Environment()).differences(now):
        raise HarnessError(
            f"since this run began ({start.started}), this changed: {', '.join(differences)}. "
            "Its results would be of two environments.",
            where="--resume",
            fix=f"run it anew: `{run_cases(*start.argv, root=plan.root_option)}`.",
        )
