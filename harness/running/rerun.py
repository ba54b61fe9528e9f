"""The rerun: what `--rerun-failed` runs again, read from the last stored run of a project.

A case without a readable result counts as not good: its run may have been killed before it got there.
"""

from __future__ import annotations

import msgspec

from harness.project import Project
from harness.run_options import RunOptions
from harness.running.selection import NothingSelected, Query
from harness.store import RunStore, StoredRun

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
    stored = (RunStore(folder).read() for folder in reversed(project.stored_runs()))
    last = next((run for run in stored if run.results or run.damaged or run.planned), None)
    if last is None:
        raise NothingSelected("there is no earlier run.", where="--rerun-failed", fix="run a tier first.")
    # The list of cases names those of damaged lines too.
    nameless = [] if last.planned else [damage for damage in last.damaged if damage.case_id is None]
    case_ids = tuple(dict.fromkeys((*last.failed_ids, *last.unfinished_ids, *last.damaged_ids)))
    lost = tuple(f"{damage.text}. It does not say which case it was. Fix: {_RUN_AGAIN}" for damage in nameless)
    if not case_ids and nameless:
        raise NothingSelected(f"{nameless[0].text}. No other case failed.", where="--rerun-failed", fix=_RUN_AGAIN)
    if not case_ids:
        raise NothingSelected("nothing failed in the last run.", where="--rerun-failed")
    return Rerun(query=Query(case_ids=case_ids), options=last.start.options, notes=(*_unfinished_note(last), *lost))


def _unfinished_note(last: StoredRun) -> tuple[str, ...]:
    count = len(last.unfinished_ids)
    if not count:
        return ()
    have = "has" if count == 1 else "have"
    text = (
        f"{count} of {len(last.planned)} cases of the last run {have} no result: it was killed or still runs, or the "
        f"result is damaged. {'It runs' if count == 1 else 'They run'} now."
    )
    return (text,)
