"""`fp8-harness runs list | history | import | merge | remove`."""

import contextlib
import functools
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import click
from msgspec.structs import replace

from harness.cli import options
from harness.cli.groups import Group
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.matrix.caseid import case_id, parse_case_id
from harness.project import Project
from harness.report.run import damage_section, totals_words
from harness.report.runs import histories_sections, history_document, history_sections, run_documents, runs_sections
from harness.running.merging import environment_differences, merged
from harness.running.selection import NothingSelected, Query, cases_to_explain, wanted
from harness.running.stored import import_results, remove_run, results_of, runs_of, shards_of, stored_run
from harness.store import run_lines
from harness.studies.history import histories
from harness.text import counted

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
  fp8-harness runs remove --witnesses
      cached witnesses: the next run makes those that it needs
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
    stored = list(runs_of(project))
    options.print_or_write(runs_sections(stored), json_file, run_documents(stored))
    if json_file is not None:
        return
    for name, folder in (("runs", project.runs), ("witnesses", project.witness_folder())):
        sizes = []
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):  # removed by another run meanwhile
                sizes += [path.stat().st_size] if path.is_file() else []
        count = len(sizes) if name == "witnesses" else len(project.stored_runs())
        click.echo(f"{name:<9} {count:>6} {sum(sizes) / 1e6:>9.1f} MB  {folder}", err=True)


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
    shards = [shard for source in sources for shard in shards_of(project, source)]
    run = merged(shards, latest=latest, mixed=mixed)
    for difference in environment_differences(shards):
        options.say(f"fp8-harness: note: the environments differ: {difference}.", err=True)
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
        run = results_of(project, file)
        start = replace(run.start, name=name or run.start.name)
        alike = (stored.names[0] for stored in runs_of(project) if stored.start.started == run.start.started)
        there = f"is there already as {next(alike, 'another run')}"
        done = "imported" if import_results(project, replace(run, start=start)) else there
        options.say(f"{file}: {done}: {counted(len(run.results), 'case')}, started {start.started or 'unknown'}")


@runs.command("remove", epilog=_REMOVE_EPILOG)
@click.argument("names", metavar="[RUN]...", nargs=-1)
@click.option("--witnesses", is_flag=True, help="Remove the cached witnesses.")
@options.project_parameter
def remove_command(*, names: tuple[str, ...], witnesses: bool, project: Project) -> None:
    """Remove stored runs: by name, by the name of their folder, or as `last~2`."""
    if not names and not witnesses:
        raise click.UsageError("name a run, or give --witnesses.")
    for run in {run.path: run for run in [stored_run(project, name) for name in names]}.values():
        remove_run(run)
        options.say(f"removed: {run.start.name or run.path.stem}, started {run.start.started or 'unknown'}")
    if witnesses:
        folder = project.witness_folder()
        count = sum(1 for _ in folder.glob("*.msgpack")) if folder.is_dir() else 0
        shutil.rmtree(folder, ignore_errors=True)
        click.echo(f"witnesses removed: {count}, from {folder}")


@runs.command("history", epilog=_HISTORY_EPILOG)
@options.query_parameter
@click.option("--runs", "most", type=click.IntRange(min=1), metavar="N", help="Show only the last N runs of each case.")
@options.project_parameter
@options.json_option("the histories")
def history_command(*, query: Query, most: int | None, project: Project, json_file: Path | None) -> None:
    """Show how cases ended and what they measured in stored runs, and what changed together with what.

    On a CPU numbers repeat exactly: NONDETERMINISTIC is a case whose numbers changed in one environment, FLAKY one that
    ended differently in one environment. One case is shown whole; several are summarized, by default all that ran.
    """
    stored = list(runs_of(project))[::-1]
    case_histories = histories(stored, _wanted(project, query), most=most)
    if not case_histories:
        asked = shlex.join(query.words) if query != Query() else "any case"
        raise NothingSelected("no run of it is stored.", where=asked, fix="run it, or import results of it.")
    single = len(case_histories) == 1 and len(query.sources) == 1
    sections = history_sections(case_histories[0]) if single else histories_sections(case_histories)
    options.print_or_write(sections, json_file, list(map(history_document, case_histories)))
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
