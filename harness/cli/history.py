"""`fp8-harness history`."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from pathlib import Path

import click

from harness.cli.options import json_option, print_or_write, project_parameter, query_parameter
from harness.errors import HarnessError
from harness.matrix.caseid import case_id, parse_case_id
from harness.project import Project
from harness.report.runs import histories_sections, history_document, history_sections
from harness.running.selection import NothingSelected, Query, cases_to_explain, wanted
from harness.running.stored import runs_of
from harness.studies.history import histories

_EPILOG = """\b
Examples:
  fp8-harness history tp2-rowwise-v2048-s2-b16            every run of a case
  fp8-harness history --select 'recipe=rowwise tp=2'      a summary of each of these cases

\b
Exit codes: 0 there is a history, 3 no run of such a case is stored.
"""


@click.command("history", epilog=_EPILOG)
@query_parameter
@click.option("--runs", "most", type=click.IntRange(min=1), metavar="N", help="Show only the last N runs of each case.")
@project_parameter
@json_option("the histories")
def history_command(*, query: Query, most: int | None, project: Project, json_file: Path | None) -> None:
    """Show how cases ended and what they measured in stored runs.

    Also what changed together with what.

    On a CPU numbers repeat exactly: NONDETERMINISTIC is a case whose numbers changed in one environment, FLAKY one that
    ended differently in one environment. One case is shown whole; several are summarized, by default all that ran.
    """
    found = histories(list(runs_of(project))[::-1], _wanted(project, query), most=most)
    if not found:
        asked = shlex.join(query.words) if query != Query() else "any case"
        raise NothingSelected("no run of it is stored.", where=asked, fix="run it, or import results of it.")
    single = len(found) == 1 and len(query.sources) == 1
    sections = history_sections(found[0]) if single else histories_sections(found)
    print_or_write(sections, json_file, list(map(history_document, found)))


def _wanted(project: Project, query: Query) -> Callable[[str], bool]:
    named = {case_id(case) for source in query.sources for case in cases_to_explain(project, source)}
    kept = wanted(query)

    @functools.cache
    def matches(found: str) -> bool:
        try:
            return (not named or found in named) and kept(parse_case_id(found))
        except HarnessError:  # an id of another version
            return query == Query()

    return matches
