"""`fp8-harness run`."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from harness.cli import options
from harness.cli.new import checked_case
from harness.cli.show import page_of, report_to_github, workflow_commands_off
from harness.durable import WriteFailed, write_whole
from harness.errors import HarnessError
from harness.hints import run_cases
from harness.matrix.axes import read_assignments
from harness.matrix.caseid import case_id
from harness.matrix.choice import parse_shard
from harness.project import Project
from harness.report.ci import junit_report
from harness.report.run import run_markdown, run_sections
from harness.result import RunResult
from harness.run_options import CommandOptions, QueryOptions, RunOptions, option_named, options_of
from harness.running.plan import Plan, with_command
from harness.running.selection import NothingSelected, Query, select_cases
from harness.running.stored import Stored
from harness.store import run_lines
from harness.text import counted
from harness.verdict import ExitCode
from harness.workflow import rerun_query, resume, run, run_to_resume

_EPILOG = """\b
Examples:
  fp8-harness run                               the smoke tier
  fp8-harness run pr -j 4 --json result.json    tier pr, results for a program
  fp8-harness run pr --select 'recipe=rowwise'  a part of it
  fp8-harness run tp4-rowwise-v2256-f32         one case
  fp8-harness run --set tp=2 --set lr=0.1       the case with these axes
  fp8-harness run pr --shard 1/4 --json 1.json  the first of four parts
  fp8-harness run pr --target my_pkg.my_target  with your own trainer
  fp8-harness run --lf                          cases that failed last time
  fp8-harness run pr --inject fix.py:apply      with a patch in every rank
"""

_OF_ONE_RUN = ("name", "json_file", "junit_file", "markdown_file", "keep_logs", "last_failed")
_STDOUT = Path("-")  # of --json: the report for people goes to stderr then


@click.command("run", cls=options.SectionedCommand, epilog=_EPILOG)
@options.query_parameter(*options_of(QueryOptions))
@options.every_plan_option
@options.run_options(CommandOptions)
def run_command(*, query: Query, plan_for: Callable[..., Plan], **rest: Any) -> int:
    """Run cases on new ranks and check them."""
    asked = CommandOptions(**{name: rest[name] for name in CommandOptions.__struct_fields__})
    shard = None if asked.shard is None else parse_shard(asked.shard)
    if asked.axes:
        query = _of_axes(query, asked.axes)
    project = options.project_of(query.sources)
    if asked.environments:
        from harness.cli.environments import given_words, refuse_with_env, run_in_environments

        refuse_with_env({option_named(name).flag: getattr(asked, name) for name in _OF_ONE_RUN})
        words = given_words(click.get_current_context().params.keys() - {"environments"})
        return run_in_environments(project, asked.environments, words)
    query = msgspec.structs.replace(query, budget_s=asked.budget_s, shard=shard)
    given = options.given_run_options()
    stopped = _stopped(project, query, given, alone=not (asked.last_failed or asked.name)) if asked.resume else None
    if stopped is not None:
        given = stopped.start.options
    if asked.last_failed:
        query, given = _failed(project, query, given)
    plan = with_command(plan_for(**given.as_given), given, asked)
    return _run_and_report(project, query, plan, stopped, asked)


def _of_axes(asked: Query, words: tuple[str, ...]) -> Query:
    """Return the query for the case of `--set`. HarnessError if tiers, files or ids are named besides."""
    if asked.sources:
        fix = "leave one of them out; `--select` keeps cases of a tier."
        raise HarnessError(f"{' '.join(asked.sources)} says which cases.", where=f"--set {words[0]}", fix=fix)
    case = checked_case(read_assignments(words, option="--set"), where="run")
    return msgspec.structs.replace(asked, sources=(case_id(case),))


def _run_and_report(project: Project, query: Query, plan: Plan, stopped: Stored | None, asked: CommandOptions) -> int:
    """Run, print, and write the files that are asked for. Returns the exit code."""
    renders: list[tuple[Path | None, Callable[[RunResult], bytes]]] = [
        (asked.json_file, run_lines),
        (asked.junit_file, junit_report),
        (asked.markdown_file, lambda result: run_markdown(result).encode()),
        (asked.html_file, lambda result: page_of(project, result)),
    ]
    outputs = [(path, render) for path, render in renders if path]
    since_s = click.get_current_context().meta[options.SINCE]
    with options.open_progress(verbose=asked.verbose) as progress:
        if stopped:
            result, stored = resume(project, stopped, plan, progress, since_s=since_s)
        else:
            result, stored = run(project, query, plan, progress, since_s=since_s)
    text_file = sys.stderr if any(path == _STDOUT for path, _ in outputs) else sys.stdout
    rerun = run_cases("--resume" if result.end.interrupted else "--lf", root=options.before_command().root)
    with workflow_commands_off(text_file, on=asked.github):
        sections = run_sections(result, rerun=rerun, quiet=options.before_command().quiet, whole=asked.verbose)
        options.print_sections(sections, file=text_file)
    if asked.durations is not None:
        slowest = sorted(result.results, key=lambda case: case.seconds, reverse=True)[: asked.durations or None]
        click.echo(f"\nslowest {counted(len(slowest), 'case')}", file=text_file)
        for case in slowest:
            click.echo(f"{case.seconds:>8.1f} s  {case.case_id}", file=text_file)
    if asked.github:
        report_to_github(result, text_file)
    return _write(result, outputs, stored=stored)


def _stopped(project: Project, asked: Query, given: RunOptions, *, alone: bool) -> Stored:
    """Return the run to finish. Its cases, options and name are known: HarnessError if anything is given besides."""
    if asked != Query() or given != RunOptions() or not alone:
        raise HarnessError(
            "a resumed run keeps its cases, options and name.",
            where="--resume",
            fix="drop them; -j, --slots, --maxfail and where to write results may be given.",
        )
    return run_to_resume(project)


def _failed(project: Project, asked: Query, given: RunOptions) -> tuple[Query, RunOptions]:
    """Return what was not good among the cases named, with the options of that run where none is given anew."""
    rerun = rerun_query(project)
    failed = rerun.query.sources
    if asked.sources:
        named = {case_id(case) for case in select_cases(project, Query(sources=asked.sources))}
        failed = tuple(name for name in failed if name in named)
        if not failed:
            raise NothingSelected("none of these failed in the last run.", where=f"--lf {' '.join(asked.sources)}")
    repeated = rerun.options.besides(given)
    notes = [f"repeats {shlex.join(repeated.words)} of the last run."] if repeated.words else []
    for note in (*rerun.notes, *notes):
        options.print_note(note)
    query = msgspec.structs.replace(asked, sources=failed)
    return query, msgspec.structs.replace(repeated, **given.as_given)


def _write(result: RunResult, outputs: list[tuple[Path, Callable[[RunResult], bytes]]], *, stored: Path) -> int:
    """Write the files; a file that cannot be written is one line and exit code 2, after everything else was done."""
    code: int = result.exit_code
    for path, render in outputs:
        if path == _STDOUT:
            click.echo(render(result), nl=False)
            continue
        try:
            write_whole(path, render(result))
        except WriteFailed as error:
            text = f"fp8-harness: error: {error.text} Every result is kept in {stored}."
            options.say(text, err=True)
            code = ExitCode.USAGE
    return code
