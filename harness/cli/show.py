"""`fp8-harness show`: a stored run, or one case of it, in the terminal and as files; and `fp8-harness runs`."""

import contextlib
import functools
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import click
from msgspec.structs import replace

from harness import registry
from harness.cli import options
from harness.cli.options import Group
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.evidence.golden import curve_text
from harness.hints import run_cases
from harness.jsonform import compact
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.tier import coverage
from harness.project import Project
from harness.report import runs as reports
from harness.report.case import shown_case
from harness.report.ci import annotation_lines, job_summary, junit_report
from harness.report.html.page import Front, html_report
from harness.report.run import coverage_section, damage_section, run_markdown, run_sections, totals_words
from harness.report.sections import Section
from harness.result import CaseResult, RunResult
from harness.running import stored as stored_runs
from harness.running.selection import NothingSelected, Query, cases_to_explain, wanted, whole_tiers
from harness.store import line_schema, run_lines
from harness.text import counted

_EPILOG = """\b
Examples:
  fp8-harness show                                the report of the last run
  fp8-harness show tp4-rowwise-v2256-f32          a case of the last run
  fp8-harness show last~2 rowwise                 its rowwise case
  fp8-harness show --html out.html                the last run as a page
  fp8-harness show result.json --junit out.xml    from `run --json`
  fp8-harness show --schema > result.schema.json  of `run --json`
  fp8-harness show tp2-rowwise-v2048-b16 --curve t.txt  for `parity --golden`
"""

_HISTORY_RUNS = 20  # that a page tells of, at most


def _section_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each section that a plug-in adds to pages."""
    for option, section in reversed(list(registry.sections().items())):
        command = click.option(f"--{option}", metavar="FILE", type=options.EXISTING_FILE, help=section.help)(command)
    return command


@click.command("show", epilog=_EPILOG)
@click.argument("words", metavar="[RUN|FILE.json] [CASE]", nargs=-1, shell_complete=options.names_of("cases"))
@options.run_option("html_file")
@options.json_option("the results")
@options.run_option("junit_file")
@options.run_option("markdown_file")
@options.run_option("github")
@_section_options
@options.curve_option
@click.option("--schema", is_flag=True, help="Print the JSON schema of the lines of --json; write nothing.")
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
    **section_files: Path | None,
) -> None:
    """Show a run or one of its cases, or write reports; the last run by default.

    RUN is its name or folder. CASE is an id, or a part that no other case of the run has. Shows its findings, curves,
    numbers and checks, and the command that runs it again.
    """
    if schema:
        click.echo(compact(line_schema()))
        return
    added = {option: file for option, file in section_files.items() if file is not None}
    if html_file is None and added:
        raise click.UsageError(f"--{next(iter(added))} adds to --html.")
    project = options.project_of()
    run, case = _named(project, words)
    result = stored_runs.results_of(project, run)
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
        options.print_sections(run_sections(result, rerun=run_cases("--lf", root=options.before_command().root)))
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
            stored_runs.stored_run(project, words[0])
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
    return curve_text(case.case_id, case.losses, case.grad_norms).encode()


def page_of(
    project: Project, run: RunResult, *, front: Front | None = None, added: Mapping[str, Path] = MappingProxyType({})
) -> bytes:
    """The page of a run, with the coverage of the tiers that it ran whole, and earlier results where it is stored.

    `added`: files of sections that plug-ins add, by their option.
    """
    sections = tuple(_sections(project, run, added))
    ids = {result.case_id for result in run.results}
    case_histories = reports.histories(stored_runs.runs_before(project, run, most=_HISTORY_RUNS), ids.__contains__)
    history = {
        case_history.case_id: reports.history_table(case_history)
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


_MERGE_EPILOG = """\b
Examples:
  fp8-harness runs merge all.json shards/ --latest
  fp8-harness runs merge all.json last~1 last
"""
_IMPORT_EPILOG = """\b
Examples:
  fp8-harness runs import nightly/*.json --name nightly  runs, a file each
  fp8-harness runs import shards/ --name v2              the shards of one run
"""
_REMOVE_EPILOG = """\b
Examples:
  fp8-harness runs remove last~3
  fp8-harness runs remove --references
      cached references: the next run makes what it needs
"""
_HISTORY_EPILOG = """\b
Examples:
  fp8-harness runs history tp2-rowwise-v2048-s2-b16  every run of a case
  fp8-harness runs history --select 'recipe=rowwise tp=2'
      a summary of each of these cases

\b
Exit codes: 0 there is a history, 3 no run of such a case is stored.
"""


@click.group(cls=Group, epilog="\b\nExamples:\n  fp8-harness runs list\n  fp8-harness runs import shard.json --name v2")
def runs() -> None:
    """List, import, merge and remove stored runs; history of a case.

    The last 100 runs of a project are kept, and all that have a name or were imported.
    """


@runs.command("list", epilog="\b\nExamples:\n  fp8-harness runs list\n  fp8-harness runs list --json -")
@options.json_option("the runs")
@options.project_parameter
def list_command(*, json_file: Path | None, project: Project) -> None:
    """List the stored runs, the last one first: number 2 is `last~2` for other commands. Then the space they take.

    Imported runs have no number: they are found by their name.
    """
    stored = list(stored_runs.runs_of(project))
    options.print_or_write(reports.runs_sections(stored), json_file, reports.run_documents(stored))
    if json_file is not None:
        return
    for name, folder in (("runs", project.runs), ("references", project.witness_folder())):
        sizes = []
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):  # removed by another run meanwhile
                sizes += [path.stat().st_size] if path.is_file() else []
        count = len(sizes) if name == "references" else len(project.stored_runs())
        click.echo(f"{name:<10} {count:>6} {sum(sizes) / 1e6:>9.1f} MB  {folder}", err=True)


@runs.command("merge", epilog=_MERGE_EPILOG)
@click.argument("out", metavar="OUT.json", type=options.OUTPUT)
@click.argument("sources", metavar="FILE|FOLDER|RUN...", nargs=-1, required=True)
@options.project_parameter
@click.option("--latest", is_flag=True, help="If results of a case differ, keep the one of the run that started last.")
@click.option("--mixed", is_flag=True, help="Merge results of different environments.")
def merge_command(*, out: Path, sources: tuple[str, ...], project: Project, latest: bool, mixed: bool) -> None:
    """Write the results of several shards of one run as `run --json` writes those of one.

    A source is a file of `run --json`, a folder of them, or a stored run by its name.
    """
    shards = [shard for source in sources for shard in stored_runs.shards_of(project, source)]
    run = stored_runs.merged(shards, latest=latest, mixed=mixed)
    for difference in stored_runs.environment_differences(shards):
        options.print_note(f"the environments differ: {difference}.")
    options.print_sections([damage_section(tuple(run.damaged))], err=True)
    write_whole(out, run_lines(run))
    totals = totals_words([result.verdict for result in run.results])
    options.say(f"{out}: {counted(len(shards), 'shard')}, {counted(len(run.results), 'case')}: {totals}")


@runs.command("import", epilog=_IMPORT_EPILOG)
@click.argument("files", metavar="FILE|FOLDER...", nargs=-1, required=True)
@options.project_parameter
@click.option("--name", default="", metavar="NAME", help="A name for the runs, such as a release.")
def import_command(*, files: tuple[str, ...], project: Project, name: str) -> None:
    """Add results that `run --json` wrote elsewhere to the stored runs. Results already stored are skipped.

    The files of a folder are the shards of one run.
    """
    for file in files:
        run = stored_runs.results_of(project, file)
        start = replace(run.start, name=name or run.start.name)
        alike = (one.names[0] for one in stored_runs.runs_of(project) if one.start.started == run.start.started)
        there = f"is there already as {next(alike, 'another run')}"
        done = "imported" if stored_runs.import_results(project, replace(run, start=start)) else there
        options.say(f"{file}: {done}: {counted(len(run.results), 'case')}, started {start.started or 'unknown'}")


@runs.command("remove", epilog=_REMOVE_EPILOG)
@click.argument("names", metavar="[RUN]...", nargs=-1)
@click.option("--references", is_flag=True, help="Remove the cached references.")
@options.project_parameter
def remove_command(*, names: tuple[str, ...], references: bool, project: Project) -> None:
    """Remove stored runs: by name, by the name of their folder, or as `last~2`."""
    if not names and not references:
        raise click.UsageError("name a run, or give --references.")
    for run in {run.path: run for run in [stored_runs.stored_run(project, name) for name in names]}.values():
        stored_runs.remove_run(run)
        options.say(f"removed: {run.start.name or run.path.stem}, started {run.start.started or 'unknown'}")
    if references:
        folder = project.witness_folder()
        count = sum(1 for _ in folder.glob("*.msgpack")) if folder.is_dir() else 0
        shutil.rmtree(folder, ignore_errors=True)
        click.echo(f"references removed: {count}, from {folder}")


@runs.command("history", epilog=_HISTORY_EPILOG)
@options.query_parameter("expressions")
@click.option("--runs", "most", type=click.IntRange(min=1), metavar="N", help="Show only the last N runs of each case.")
@options.project_parameter
@options.json_option("the histories")
def history_command(*, query: Query, most: int | None, project: Project, json_file: Path | None) -> None:
    """Show how cases ended and what they measured in stored runs, and what changed together with what.

    On a CPU numbers repeat exactly: NONDETERMINISTIC is a case whose numbers changed in one environment, FLAKY one that
    ended differently in one environment. One case is shown whole; several are summarized, by default all that ran.
    """
    stored = list(stored_runs.runs_of(project))[::-1]
    case_histories = reports.histories(stored, _wanted(project, query), most=most)
    if not case_histories:
        asked = shlex.join(query.words) if query != Query() else "any case"
        raise NothingSelected("no run of it is stored.", where=asked, fix="run it, or import results of it.")
    single = len(case_histories) == 1 and len(query.sources) == 1
    sections = reports.history_sections(case_histories[0]) if single else reports.histories_sections(case_histories)
    options.print_or_write(sections, json_file, list(map(reports.history_document, case_histories)))
    options.print_sections([damage_section([line for run in stored for line in run.damaged])], err=True)


def _wanted(project: Project, query: Query) -> Callable[[str], bool]:
    named = {case_id(case) for source in query.sources for case in cases_to_explain(project, source)}
    kept = wanted(query)

    @functools.cache
    def matches(name: str) -> bool:
        try:
            return (not named or name in named) and kept(parse_case_id(name))
        except HarnessError:  # an id of another version
            return query == Query()

    return matches
