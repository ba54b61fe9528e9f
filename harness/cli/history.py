"""`fp8-harness history`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import click

from harness.cli.options import json_option, root_option, write_output
from harness.cli.output import print_sections
from harness.errors import HarnessError
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.selector import parse_selector
from harness.project import find_project
from harness.report.runs import histories_json, histories_sections, history_sections
from harness.running.selection import NothingSelected
from harness.running.stored import runs_of
from harness.studies.history import histories

_EPILOG = """\b
Examples:
  fp8-harness history tp2-rowwise-v2048-s2-b16            every run of a case
  fp8-harness history tp2-rowwise-v2048-s2-b16 --runs 5   the last five
  fp8-harness history --select 'recipe=rowwise tp=2'      a summary of each of these cases
  fp8-harness history --json -                            all cases, for a program

\b
Exit codes: 0 there is a history, 2 usage or bad input, 3 no run of such a case is stored.
"""


@click.command("history", epilog=_EPILOG)
@click.argument("case", metavar="[CASE]", required=False)
@click.option("--select", "expressions", metavar="EXPR", multiple=True, help="Cases that match, as in `run`.")
@click.option("--runs", "most", type=click.IntRange(min=1), metavar="N", help="Show only the last N runs of each case.")
@root_option
@json_option("the histories")
def history_command(
    *, case: str | None, expressions: tuple[str, ...], most: int | None, root: str | None, json_file: Path | None
) -> None:
    """Show how a case ended and what it measured in every stored run, and what changed together with what.

    On a CPU numbers repeat exactly: NONDETERMINISTIC is a case whose numbers changed in one environment, FLAKY one that
    ended differently in one environment. Without CASE, one summary for every case.
    """
    if case is not None and expressions:
        raise HarnessError("a case and --select are given.", where="history", fix="give one of them.")
    runs = list(runs_of(find_project(root)))[::-1]
    found = histories(runs, _wanted(case, expressions), most=most)
    if not found:
        asked = case or " ".join(f"--select '{text}'" for text in expressions) or "any case"
        raise NothingSelected("no run of it is stored.", where=asked, fix="run it, or import results of it.")
    write_output(json_file, lambda: histories_json(found))
    if json_file is None:
        print_sections(histories_sections(found) if case is None else history_sections(found[0]))


def _wanted(case: str | None, expressions: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether the history of a case is wanted, by its id."""
    if case is not None:
        name = case_id(parse_case_id(case))
        return lambda found: found == name
    selectors = [parse_selector(text) for text in expressions]

    @functools.cache
    def matches(found: str) -> bool:
        try:
            return all(selector.matches(parse_case_id(found)) for selector in selectors)
        except HarnessError:  # an id of another version
            return not selectors

    return matches
