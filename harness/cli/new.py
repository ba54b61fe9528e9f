"""`fp8-harness new`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import click

from harness.cli.axes import axis_options, checked_case, given_axes
from harness.cli.options import FILE
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.hints import explain_case
from harness.jsonform import to_json
from harness.matrix.case import Case
from harness.matrix.casefile import FILE_NAME, case_file_schema, write_case
from harness.matrix.caseid import case_id
from harness.matrix.rules import expected_refusal

_EPILOG = """\b
Examples:
  fp8-harness new my.toml --tp 2 --recipe rowwise --dtype bfloat16
  fp8-harness new my.toml --dp-shard 2 --dim 512 --layers 4 --ffn-dim 1408 --recipe tensorwise
  fp8-harness new --id --tp 2 --recipe rowwise      print the id of a case, write nothing
  fp8-harness new --schema > case.schema.json       the JSON schema of case files, for editors
"""
_SCHEMA = Path(__file__).parents[1] / "schemas" / FILE_NAME


@click.command("new", epilog=_EPILOG)
@click.argument("file", metavar="[FILE.toml]", required=False, type=FILE)
@axis_options()
@click.option("--id", "as_id", is_flag=True, help="Print the id of the case; write nothing.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of case files; write nothing.")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
def new_command(*, file: Path | None, as_id: bool, schema: bool, force: bool, **axes: Any) -> None:
    """Write a commented case file for one case, described by options with the names of the axes."""
    if schema:
        click.echo(to_json(case_file_schema(), indent=2))
        return
    case = checked_case(given_axes(axes), where="new")
    if as_id:
        click.echo(case_id(case))
        return
    if file is None:
        raise HarnessError("there is no file to write to.", where="new", fix="give FILE.toml, or --id.")
    command = write_new_case(file, case, force=force)
    click.echo(f"{file}: {case_id(case)}")
    refusal = expected_refusal(case)
    if refusal is not None:
        click.echo(f"it must be refused: {refusal.reason}")
    click.echo(f"what it needs: {explain_case(case_id(case))}")
    click.echo(f"run it:        {command}")


def write_new_case(file: Path, case: Case, *, force: bool) -> str:
    """Write a commented file of this case. Returns the command that runs it; HarnessError for a file that exists."""
    if file.suffix != ".toml":
        raise HarnessError("there is no file to write to.", where=str(file), fix="give FILE.toml.")
    if file.exists() and not force:
        raise HarnessError("this file exists.", where=str(file), fix="name another one, or give --force.")
    command = shlex.join(["fp8-harness", "run", str(file)])
    write_whole(file, write_case(case, schema=_schema_of(file), command=command).encode())
    return command


def _schema_of(file: Path) -> str:
    """Where an editor finds the schema: relative to a file of this checkout, by its place on this machine elsewhere."""
    folder, checkout = file.resolve().parent, _SCHEMA.parents[2]
    if folder.is_relative_to(checkout):
        return os.path.relpath(_SCHEMA, folder)
    return _SCHEMA.as_uri()
