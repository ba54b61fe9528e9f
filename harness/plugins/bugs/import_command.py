"""`fp8-harness bug import`."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import click

from harness.cli.options import FILE, json_option, print_sections, root_option, write_json
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.plugins.bugs.bugfile import FOLDER, Symptom, write_bug_file
from harness.plugins.bugs.importing import ImportOptions, import_configuration, import_report
from harness.plugins.bugs.report import MAX_BYTES, read_file, read_report
from harness.plugins.bugs.sections import imported_document, imported_sections, job_notes
from harness.project import find_project

_EPILOG = """\b
Examples:
  fp8-harness bug import - --link https://github.com/pytorch/ao/issues/1 < report.md
  fp8-harness bug import llama3_8b.toml --id ours --date 2025-06-01

\b
FILE is a report with its configuration or command in fenced blocks, or a
configuration alone: TOML, YAML, JSON, Python or flags of torchtitan, torchao,
accelerate, transformers, axolotl, AutoModel, torchtune or Megatron-LM. Nothing
in it is executed. Every line of it is used, has no effect, or is asked about.
Prose is not read: docs/describe-a-case.md says how to write a case from it.
"""


@click.command("import", epilog=_EPILOG)
@click.argument("file", metavar="FILE|-")
@click.option("--id", "bug_id", metavar="NAME", default="", help="Name of the bug file. Default: from the link.")
@click.option("--link", metavar="URL", default="", help="The report on GitHub. Default: from its first lines.")
@click.option("--title", metavar="TEXT", default="", help="What it is about. Default: the first heading.")
@click.option("--message", metavar="TEXT", default="", help="The error as reported. Default: the first that is found.")
@click.option(
    "--symptom", type=click.Choice(get_args(Symptom)), help="What was seen. Default: an error or NaN in a log."
)
@click.option("--version", "versions", metavar="PACKAGE=VERSION", multiple=True, help="What was run. Repeatable.")
@click.option(
    "--date",
    "day",
    type=click.DateTime(["%Y-%m-%d"]),
    help="The date that decides what options and defaults mean. Default: a version's, else today.",
)
@click.option("--full-size", is_flag=True, help="Keep sizes and ranks as reported.")
@click.option(
    "--output",
    metavar="FILE.toml",
    type=FILE,
    help="Write this file, in a folder bugs/. Default: cases/bugs/<id>.toml.",
)
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@click.option("--dry-run", is_flag=True, help="Print the bug file, write nothing.")
@json_option("what was understood")
@root_option
def import_command(  # noqa: PLR0913  one parameter per option
    *,
    file: str,
    bug_id: str,
    link: str,
    title: str,
    message: str,
    symptom: Symptom | None,
    versions: tuple[str, ...],
    day: datetime.datetime | None,
    full_size: bool,
    output: Path | None,
    force: bool,
    dry_run: bool,
    json_file: Path | None,
    root: str | None,
) -> None:
    """Turn a bug report into a bug file: the case that it describes, and where every value comes from."""
    pairs = [pair.partition("=") for pair in versions]
    if not all(name and version for name, _, version in pairs):
        raise HarnessError("no version of a package.", where="--version", fix="write it as --version torch=2.13.0.")
    options = ImportOptions(
        today=datetime.datetime.now(tz=datetime.UTC).date(),
        id=bug_id,
        link=link,
        title=title,
        message=message,
        symptom=symptom,
        versions={name: version for name, _, version in pairs},
        day=None if day is None else day.date(),
        full_size=full_size,
    )
    content = sys.stdin.buffer.read(MAX_BYTES + 1) if file == "-" else read_file(file)
    imported = import_report(read_report(content, where="stdin" if file == "-" else Path(file).name), options)
    text = write_bug_file(imported.bug)
    path = None if dry_run else _path(imported.bug.id, output, root, force=force)
    if path is not None:
        write_whole(path, text.encode())
    shown = None if path is None else str(path)
    to_stderr = dry_run or str(json_file) == "-"
    print_sections(imported_sections(imported, file=shown), err=to_stderr)
    if json_file is not None:
        write_json(json_file, imported_document(imported, file=shown))
    elif dry_run:
        click.echo(text, nl=False)


def _path(bug_id: str, output: Path | None, root: str | None, *, force: bool) -> Path:
    """Where the bug file goes. HarnessError where one is that nobody asked to replace."""
    path = output
    if path is None:
        project = find_project(root)
        project.check_writable()
        path = project.bugs / f"{bug_id}.toml"
        path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    if path.suffix != ".toml":
        raise HarnessError("there is no file to write to.", where=str(path), fix="give FILE.toml.")
    if path.resolve().parent.name != FOLDER:
        fix = f"name a file in a folder {FOLDER}/, such as cases/{FOLDER}/{bug_id}.toml."
        raise HarnessError("a bug file must be in a folder named bugs/.", where=str(path), fix=fix)
    if path.exists() and not force:
        raise HarnessError("this file exists.", where=str(path), fix="name another by --output, or give --force.")
    return path


def case_of_configuration(
    config: str, given: Mapping[str, object], *, ranks: int | None, ignore: tuple[str, ...]
) -> tuple[Case, tuple[str, ...]]:
    """Returns the case of a configuration, a file or flags, and how it differs from the job.

    `given`: axes that replace those of the configuration. `ignore`: its lines that mean nothing.
    """
    flags = config.lstrip().startswith("--")
    content = config.encode() if flags else read_file(config)
    report = read_report(content, where="--from" if flags else config)
    today = datetime.datetime.now(tz=datetime.UTC).date()
    job = import_configuration(report, ImportOptions(today=today, axes=given, ranks=ranks, ignore=ignore))
    assert job.case is not None, "a job without a refusal has a case"
    return job.case, job_notes(job)
