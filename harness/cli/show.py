"""`fp8-harness show`: a stored run, or one case of it, in the terminal and as files."""

import contextlib
import functools
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import click

from harness import registry
from harness.cli import options
from harness.errors import HarnessError
from harness.evidence.curve import curve_of_case, text_of_curve
from harness.hints import rerun_failed
from harness.jsonform import compact
from harness.matrix.tier import coverage
from harness.project import Project, find_project
from harness.report.case import shown_case
from harness.report.ci import annotation_lines, job_summary, junit_report
from harness.report.coverage import coverage_section
from harness.report.html.page import Front, html_report
from harness.report.run import run_markdown, run_sections
from harness.report.runs import history_table
from harness.report.sections import Section
from harness.result import CaseResult, RunResult
from harness.running.selection import whole_tiers
from harness.running.stored import results_of, runs_before, stored_run
from harness.store import line_schema, run_lines
from harness.studies.history import histories

_EPILOG = """\b
Examples:
  fp8-harness show                                the report of the last run
  fp8-harness show tp4-rowwise-v2256-f32          a case of the last run
  fp8-harness show last~2 rowwise                 its rowwise case
  fp8-harness show --html out.html                the last run as a page
  fp8-harness show result.json --junit out.xml    of what `run --json` wrote
  fp8-harness show --schema > result.schema.json  of what `run --json` writes
  fp8-harness show tp2-rowwise-v2048-b16 --curve t.txt  for `parity --golden`
"""

_HISTORY_RUNS = 20  # that a page tells of, at most


def _section_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each section that a plug-in adds to pages."""
    for option, section in reversed(list(registry.sections().items())):
        command = click.option(f"--{option}", metavar="FILE", type=options.EXISTING_FILE, help=section.help)(command)
    return command


@click.command("show", epilog=_EPILOG)
@click.argument("words", metavar="[RUN|FILE.json] [CASE]", nargs=-1)
@options.run_option("html_file")
@options.json_option("the results")
@options.run_option("junit_file")
@options.run_option("markdown_file")
@options.run_option("github")
@_section_options
@options.curve_option
@click.option("--schema", is_flag=True, help="Print the JSON schema of the lines of --json; write nothing.")
@options.root_option
def show_command(  # noqa: PLR0913  one parameter an option
    *,
    words: tuple[str, ...],
    html_file: Path | None,
    json_file: Path | None,
    junit_file: Path | None,
    markdown_file: Path | None,
    github: bool,
    curve_file: Path | None,
    schema: bool,
    root: str | None,
    **section_files: Path | None,
) -> None:
    """Show a run or one of its cases, or write reports; the last run by default.

    RUN is its name or folder. CASE is an id, or a part of one that no other case of the run has: what is wrong with it,
    its curves and numbers, what judged it, and how to run it again.
    """
    if schema:
        click.echo(compact(line_schema()))
        return
    added = {option: file for option, file in section_files.items() if file is not None}
    if html_file is None and added:
        raise click.UsageError(f"--{next(iter(added))} adds to --html.")
    project = find_project(root)
    run, case = _named(project, words)
    result = results_of(project, run)
    writes = any((html_file, json_file, junit_file, markdown_file))
    if case is not None:
        if writes:
            raise click.UsageError(f"reports are of a whole run: leave out {case}.")
        case_result = _case_of(result, case)
        if curve_file is None:
            options.print_sections(shown_case(case_result))
        options.write_output(curve_file, lambda: _curve(case_result))
        return
    if curve_file is not None:
        raise click.UsageError("--curve needs a case: add its id.")
    if github:
        report_to_github(result, sys.stdout)
    elif not writes:
        options.print_sections(run_sections(result, rerun=rerun_failed(root=root)))
    page = functools.partial(page_of, project, result, added=added)
    options.write_output(html_file, page)
    options.write_output(json_file, lambda: run_lines(result))
    options.write_output(junit_file, lambda: junit_report(result))
    options.write_output(markdown_file, lambda: run_markdown(result).encode())


def _named(project: Project, words: tuple[str, ...]) -> tuple[str, str | None]:
    if len(words) > 2:
        raise click.UsageError("give at most a run and a case.")
    if len(words) == 1 and not Path(words[0]).exists() and Path(words[0]).suffix != ".json":
        try:
            stored_run(project, words[0])
        except HarnessError:
            return "last", words[0]
    return (words[0] if words else "last", words[1] if len(words) > 1 else None)


def _case_of(run: RunResult, case: str) -> CaseResult:
    matches = [result for result in run.results if result.case_id == case]
    matches = matches or [result for result in run.results if case in result.case_id]
    if len(matches) != 1:
        ids = [result.case_id for result in matches or run.results]
        shown = ", ".join(ids[:5]) + (f", … ({len(ids)})" if len(ids) > 5 else "")
        what = "several cases of the run have this." if matches else "the run has no such case."
        raise HarnessError(what, where=case, fix=f"use one of {shown}.")
    return matches[0]


def _curve(case: CaseResult) -> bytes:
    if not case.losses:
        raise HarnessError("this run has no losses for it.", where=case.case_id, fix="give a case that trained.")
    return text_of_curve(curve_of_case(case.case_id, case.losses, case.grad_norms)).encode()


def page_of(
    project: Project,
    run: RunResult,
    *,
    front: Front | None = None,
    added: Mapping[str, Path] = MappingProxyType({}),
) -> bytes:
    """The page of a run, with the coverage of the tiers that it ran whole, and earlier results where it is stored.

    `added`: files of sections that plug-ins add, by their option.
    """
    sections = tuple(_sections(project, run, added))
    ids = {result.case_id for result in run.results}
    case_histories = histories(runs_before(project, run, most=_HISTORY_RUNS), ids.__contains__)
    history = {
        case_history.case_id: history_table(case_history)
        for case_history in case_histories
        if len(case_history.moments) > 1
    }
    return html_report(run, front=front, sections=sections, history=history)


def _sections(project: Project, run: RunResult, added: Mapping[str, Path]) -> Iterator[Section]:
    tiers = whole_tiers(project, {result.case_id for result in run.results}, run.start.argv)
    if tiers:
        yield coverage_section([(tier, coverage(tier, 2)) for tier in tiers])
    for option, file in added.items():
        yield registry.load(registry.sections()[option].read)(file)


@contextlib.contextmanager
def workflow_commands_off(file: TextIO, *, on: bool) -> Iterator[None]:
    """Keep the runner from reading printed text, such as output of ranks, as workflow commands; no-op unless `on`."""
    token = secrets.token_hex(16)
    if on:
        click.echo(f"::stop-commands::{token}", file=file)
    try:
        yield
    finally:
        if on:
            click.echo(f"::{token}::", file=file)


def report_to_github(result: RunResult, file: TextIO) -> None:
    """Print the annotations, and append to the summary where GitHub wants one."""
    click.echo(annotation_lines(result), nl=False, file=file)
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    try:
        with Path(path).open("a", encoding="utf-8") as summary:
            summary.write(job_summary(result))
    except OSError as error:
        click.echo(f"fp8-harness: warning: {path}: no job summary written: {error.strerror}.", err=True)
