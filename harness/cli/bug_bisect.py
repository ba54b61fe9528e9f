"""`fp8-harness bug bisect`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli.options import json_option, quiet_option, root_option, versions_parameter, write_json
from harness.cli.output import print_sections

if TYPE_CHECKING:
    from harness.running.versions import Versions

_EPILOG = """\b
Examples:
  fp8-harness bug bisect ao-1938 --package torchao --good 0.6.1 --bad 0.18.0
  fp8-harness bug bisect tp2-rowwise-v2048-s2-f64 --package torchao --good 0.14.1 --bad 0.18.0
  fp8-harness bug bisect ao-2677 --package torchao --bad 0.10.0 --good 0.18.0
  fp8-harness bug bisect my.toml --package torchao --good 0.14.1 --bad 0.18.0 --find-links wheels/
  fp8-harness bug bisect CASE --package torch --good 2.13.0 --bad 2.15.0 --env 2.15.0=.venv-new

\b
Every version is installed once, into an environment in the state folder
that sees all other packages of this one, unless --env has it or it runs
now; torch comes with its libraries, 5 GB with CUDA. Results are kept. Over
commits: git bisect run fp8-harness bug repro CASE --exit-code

\b
Exit codes: 0 the version was found, 2 usage error, or the good
version is not good or the bad one not bad, 130 interrupted.
"""


@click.command("bisect", epilog=_EPILOG)
@click.argument("case", metavar="CASE")
@click.option("--package", required=True, help="The package to bisect, such as torchao.")
@click.option("--good", metavar="VERSION", required=True, help="A version with which CASE does not fail.")
@click.option("--bad", metavar="VERSION", required=True, help="A version with which it fails.")
@versions_parameter
@click.option("--inject", metavar="FILE.py:FUNCTION", multiple=True, help="Call this in every rank. Repeatable.")
@json_option("what was tried")
@quiet_option
@root_option
def bisect_command(  # noqa: PLR0913  one parameter per option
    *,
    case: str,
    package: str,
    good: str,
    bad: str,
    versions_for: Callable[..., Versions],
    inject: tuple[str, ...],
    json_file: Path | None,
    quiet: bool,
    root: str | None,
) -> None:
    """Find the released version of a package with which CASE starts or stops to fail.

    Where --good is older than --bad, the first version that fails; otherwise the first one without the failure.

    CASE is the id of a case, a file with one case, or the name of a bug file.
    """
    from harness.bugs.bisect import VersionTrial, bisect, open_answers, versions_between
    from harness.bugs.trials import named_case
    from harness.project import find_project
    from harness.report.bugs import bisected_sections
    from harness.running.progress import open_progress

    project = find_project(root)
    named = named_case(project, case)
    words = (*(("--root", root) if root is not None else ()), *(word for each in inject for word in ("--inject", each)))
    with open_progress(quiet=quiet) as progress:
        environments = versions_for(project, package, progress.note)
        versions = versions_between(package, good, bad, environments.source, given=environments.given)
        trial = VersionTrial(project, case, named.case, environments, words=words)
        answers = open_answers(project, trial.depends_on)
        found = bisect(versions, _spelled(bad, versions), trial.run, answers, package=package, note=progress.note)
    print_sections(bisected_sections(found), err=str(json_file) == "-")
    write_json(json_file, found)


def _spelled(version: str, versions: Sequence[str]) -> str:
    """The version as the index spells it."""
    from packaging.version import Version

    return next(each for each in versions if Version(each) == Version(version))
