"""`fp8-harness report`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli import options
from harness.cli.output import print_sections
from harness.hints import rerun_failed
from harness.project import Project, find_project
from harness.report.ci import junit_report
from harness.report.run import run_markdown, run_sections
from harness.running.stored import results_of
from harness.store import run_lines

if TYPE_CHECKING:
    from harness.report.html.page import Front
    from harness.report.sections import Section, Table
    from harness.result import RunResult

_EPILOG = """\b
Examples:
  fp8-harness report                                 print the report of the last run again
  fp8-harness report --html out.html                 a page of it that a browser opens from disk
  fp8-harness report last~2 --html before.html       of the run two before
  fp8-harness report release --junit out.xml         of a run by its name
  fp8-harness report result.json --html out.html     of what `run --json` wrote elsewhere
  fp8-harness report --html out.html --power power.json --conformance conformance.json

\b
Exit codes: 0 written, 2 usage error or bad input.
"""

_HISTORY_RUNS = 20  # that a page tells of, at most


@click.command("report", epilog=_EPILOG)
@click.argument("run", metavar="[RUN|FILE.json]", default="last")
@options.run_option("html_file")
@options.json_option("the results")
@click.option("--junit", "junit_file", metavar="FILE", type=options.OUTPUT, help="Write JUnit XML.")
@options.run_option("markdown_file")
@click.option(
    "--power", metavar="FILE", type=options.EXISTING_FILE, help="Add the kill matrix that `power --json` wrote."
)
@click.option(
    "--conformance", metavar="FILE", type=options.EXISTING_FILE, help="Add the table that `conformance --json` wrote."
)
@options.root_option
def report_command(  # noqa: PLR0913  one parameter an option
    *,
    run: str,
    html_file: Path | None,
    json_file: Path | None,
    junit_file: Path | None,
    markdown_file: Path | None,
    power: Path | None,
    conformance: Path | None,
    root: str | None,
) -> None:
    """Write reports of a finished run: the last one, RUN by its name or folder, or a file of `run --json`."""
    if html_file is None and (power or conformance):
        raise click.UsageError("--power and --conformance add to --html.")
    project = find_project(root)
    result = results_of(project, run)

    def html() -> bytes:
        return page_of(project, result, power=power, conformance=conformance)

    outputs: tuple[tuple[Path | None, Callable[[], bytes]], ...] = (
        (html_file, html),
        (json_file, lambda: run_lines(result)),
        (junit_file, lambda: junit_report(result)),
        (markdown_file, lambda: run_markdown(result).encode()),
    )
    if not any(path for path, _ in outputs):
        print_sections(run_sections(result, rerun=rerun_failed(root=root)))
    for path, render in outputs:
        options.write_output(path, render)


def page_of(
    project: Project,
    run: RunResult,
    *,
    front: Front | None = None,
    power: Path | None = None,
    conformance: Path | None = None,
) -> bytes:
    """The page of a run, with the coverage of the tiers that it ran whole, and earlier results where it is stored."""
    from harness.report.html.page import html_report

    sections = tuple(_sections(project, run, power, conformance))
    return html_report(run, front=front, sections=sections, history=_history(project, run))


def _history(project: Project, run: RunResult) -> dict[str, Table]:
    """The history of every case that earlier runs have too, by its id."""
    from harness.report.runs import history_table
    from harness.running.stored import runs_before
    from harness.studies.history import histories

    ids = {result.case_id for result in run.results}
    found = histories(runs_before(project, run, most=_HISTORY_RUNS), ids.__contains__)
    return {each.case_id: history_table(each) for each in found if len(each.moments) > 1}


def _sections(project: Project, run: RunResult, power: Path | None, conformance: Path | None) -> Iterator[Section]:
    from harness.jsonform import read_json
    from harness.matrix.coverage import coverage
    from harness.report.conformance import ConformanceDocument, conformance_section
    from harness.report.coverage import coverage_section
    from harness.report.mutation import mutation_section
    from harness.running.selection import whole_tiers
    from harness.studies.mutation import MutationMatrix

    tiers = whole_tiers(project, {result.case_id for result in run.results})
    if tiers:
        yield coverage_section([(tier, coverage(tier, 2)) for tier in tiers])
    if power is not None:
        yield mutation_section(read_json(power, MutationMatrix, command="power --json"))
    if conformance is not None:
        yield conformance_section(read_json(conformance, ConformanceDocument, command="conformance --json"))
