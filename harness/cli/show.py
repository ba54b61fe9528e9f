"""`fp8-harness show`."""

from __future__ import annotations

import click

from harness.cli.options import root_option
from harness.cli.output import print_sections
from harness.errors import HarnessError
from harness.project import find_project
from harness.report.case import shown_case
from harness.running.stored import results_of

_EPILOG = """\b
Examples:
  fp8-harness show tp4-rowwise-v2256-f32               a case of the last run
  fp8-harness show rowwise                             the only case whose id contains it
  fp8-harness show tp4-rowwise-v2256-f32 --run last~2  of the run two before
  fp8-harness show rowwise --run result.json           of what `run --json` wrote
"""


@click.command("show", epilog=_EPILOG)
@click.argument("case", metavar="CASE")
@click.option("--run", default="last", show_default=True, metavar="RUN|FILE.json", help="The run to read.")
@root_option
def show_command(case: str, run: str, root: str | None) -> None:
    """Show one case of a run: what is wrong, its curves and numbers, what judged it, and how to run it again.

    CASE is an id, or a part of one that no other case of the run has.
    """
    results = results_of(find_project(root), run).results
    found = [each for each in results if each.case_id == case]
    found = found or [each for each in results if case in each.case_id]
    if len(found) != 1:
        ids = [each.case_id for each in found or results]
        shown = ", ".join(ids[:5]) + (f", … ({len(ids)})" if len(ids) > 5 else "")
        what = "several cases of the run have this." if found else "the run has no such case."
        raise HarnessError(what, where=case, fix=f"use one of {shown}.")
    print_sections(shown_case(found[0]))
