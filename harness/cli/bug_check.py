"""`fp8-harness bug check`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from harness.cli.options import json_option, plan_parameter, quiet_option, root_option, write_json
from harness.cli.output import print_sections
from harness.running.plan import Plan

_EPILOG = """\b
Examples:
  fp8-harness bug check                    every bug file that is live or fixed
  fp8-harness bug check ao-1086 ao-933     two of them
  fp8-harness bug check -j 4 --json corpus.json

\b
Exit codes: 0 all as their files say, 1 a mismatch, 2 usage error or bad input, 3 no bug to check, 4 only infrastructure
failed, 130 interrupted.
"""


@click.command("check", epilog=_EPILOG)
@click.argument("names", metavar="[ID]...", nargs=-1)
@json_option("the proofs")
@quiet_option
@plan_parameter
@root_option
def check_command(
    *, names: tuple[str, ...], json_file: Path | None, quiet: bool, plan_for: Callable[..., Plan], root: str | None
) -> int:
    """Verify bug files: live bugs fail as recorded; fixed ones pass, and fail with their planted faults.

    ID is the name of a bug file. Only findings of checks in its `detected_by` count.
    """
    from harness.bugs.corpus import check_corpus, provable_bugs
    from harness.project import find_project
    from harness.report.bugs import corpus_sections
    from harness.running.progress import open_progress

    project = find_project(root)
    bugs = provable_bugs(project, names)
    plan = msgspec.structs.replace(plan_for(), root_option=root)
    with open_progress(quiet=quiet) as progress:
        corpus = check_corpus(project, bugs, plan, progress)
    print_sections(corpus_sections(corpus), err=str(json_file) == "-")
    write_json(json_file, corpus)
    return corpus.exit_code
