"""`fp8-harness cache`."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from harness.cli.options import root_option
from harness.project import find_project

_EPILOG = """\b
Examples:
  fp8-harness cache list    what is stored, where, and how large it is
  fp8-harness cache clear   remove cached witnesses: the next run makes those that it needs
"""


@click.group("cache", epilog=_EPILOG, invoke_without_command=True)
@root_option
@click.pass_context
def cache(context: click.Context, *, root: str | None) -> None:
    """Show what is kept between runs, or clear it. Witnesses from other or edited packages are never used."""
    context.obj = find_project(root)
    if context.invoked_subcommand is None:
        context.invoke(list_command)


@cache.command("list")
@click.pass_context
def list_command(context: click.Context) -> None:
    """List the cached witnesses and the results of runs."""
    for name, folder in (("witnesses", context.obj.witness_folder()), ("runs", context.obj.runs)):
        files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
        megabytes = sum(map(_size, files)) / 1e6
        count = len(files) if name == "witnesses" else len(context.obj.stored_runs())
        click.echo(f"{name:<10} {count:>6} {megabytes:>9.1f} MB  {folder}")


@cache.command("clear")
@click.pass_context
def clear_command(context: click.Context) -> None:
    """Remove the cached witnesses. Results of runs stay."""
    folder: Path = context.obj.witness_folder()
    count = sum(1 for _ in folder.glob("*.msgpack")) if folder.is_dir() else 0
    if folder.is_dir():
        shutil.rmtree(folder)
    click.echo(f"witnesses removed: {count}, from {folder}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # removed by another run meanwhile
        return 0
