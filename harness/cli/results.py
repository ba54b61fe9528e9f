"""`fp8-harness results list | merge | import | remove`."""

from __future__ import annotations

from pathlib import Path

import click
from msgspec.structs import replace

from harness.cli.options import OUTPUT, root_option
from harness.cli.output import print_sections
from harness.durable import write_whole
from harness.plural import counted
from harness.project import Project, find_project
from harness.report.run import totals_words
from harness.report.runs import runs_json, runs_sections
from harness.result import RunResult
from harness.running.merging import environment_differences, merged
from harness.running.stored import import_results, remove_run, results_of, runs_of, shards_of, stored_run
from harness.store import run_lines

_EPILOG = """\b
Examples:
  fp8-harness results list                          the stored runs, the latest first
  fp8-harness results import shard.json --name v2   results of another machine, for `history` and `gate`
  fp8-harness results merge all.json shards/        the shards of one run as one
"""

_MERGE_EPILOG = """\b
Examples:
  fp8-harness results merge all.json shard-1.json shard-2.json
  fp8-harness results merge all.json shards/ --latest
  fp8-harness results merge all.json last~1 last
"""

_IMPORT_EPILOG = """\b
Examples:
  fp8-harness results import result.json
  fp8-harness results import nightly/*.json --name nightly   runs, a file each
  fp8-harness results import shards/ --name v2               the shards of one run
"""

_REMOVE_EPILOG = """\b
Examples:
  fp8-harness results remove v1      the last run of this name
  fp8-harness results remove last~3
"""


@click.group("results", epilog=_EPILOG)
def results() -> None:
    """List, merge, import and remove results of runs.

    The last 100 runs of a project are kept, and all that have a name or were imported.
    """


@results.command("list", epilog="\b\nExamples:\n  fp8-harness results list\n  fp8-harness results list --json")
@root_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(*, root: str | None, as_json: bool) -> None:
    """List the stored runs, the latest first: number 2 is `last~2` for other commands."""
    found = list(runs_of(find_project(root)))
    if as_json:
        click.echo(runs_json(found), nl=False)
    else:
        print_sections(runs_sections(found))


@results.command("merge", epilog=_MERGE_EPILOG)
@click.argument("out", metavar="OUT.json", type=OUTPUT)
@click.argument("sources", metavar="FILE|FOLDER|RUN...", nargs=-1, required=True)
@root_option
@click.option("--latest", is_flag=True, help="If results of a case differ, keep that of the run that started last.")
@click.option("--mixed", is_flag=True, help="Merge results of different environments.")
def merge_command(*, out: Path, sources: tuple[str, ...], root: str | None, latest: bool, mixed: bool) -> None:
    """Write the results of several shards of one run as `run --json` writes those of one.

    A source is a file of `run --json`, a folder of them, or a stored run by its name.
    """
    project = find_project(root)
    shards = [shard for source in sources for shard in shards_of(project, source)]
    run = merged(shards, latest=latest, mixed=mixed)
    for difference in environment_differences(shards):
        click.echo(f"fp8-harness: note: the environments differ: {difference}.", err=True)
    write_whole(out, run_lines(run))
    totals = totals_words([result.verdict for result in run.results])
    click.echo(f"{out}: {counted(len(shards), 'shard')}, {counted(len(run.results), 'case')}: {totals}")


@results.command("import", epilog=_IMPORT_EPILOG)
@click.argument("files", metavar="FILE|FOLDER...", nargs=-1, required=True)
@root_option
@click.option("--name", default="", metavar="NAME", help="A name for the runs, such as a release.")
def import_command(*, files: tuple[str, ...], root: str | None, name: str) -> None:
    """Add results that `run --json` wrote elsewhere to the stored runs. Results already stored are skipped.

    The files of a folder are the shards of one run.
    """
    project = find_project(root)
    for file in files:
        run = results_of(project, file)
        start = replace(run.start, name=name or run.start.name)
        is_new = import_results(project, replace(run, start=start))
        done = "imported" if is_new else f"is there already as {_name(project, run)}"
        click.echo(f"{file}: {done}: {counted(len(run.results), 'case')}, started {start.started or 'unknown'}")


@results.command("remove", epilog=_REMOVE_EPILOG)
@click.argument("names", metavar="RUN...", nargs=-1, required=True)
@root_option
def remove_command(*, names: tuple[str, ...], root: str | None) -> None:
    """Remove stored runs: by name, by the name of their folder, or as `last~2`."""
    project = find_project(root)
    for run in {run.path: run for run in [stored_run(project, name) for name in names]}.values():
        remove_run(run)
        click.echo(f"removed: {run.start.name or run.path.stem}, started {run.start.started or 'unknown'}")


def _name(project: Project, run: RunResult) -> str:
    """What the stored run with these results can be called."""
    alike = (each.names[0] for each in runs_of(project) if each.start.started == run.start.started)
    return next(alike, "another run")
