"""`fp8-harness version`."""

from __future__ import annotations

import click

from harness.engine.hardware import cpu_name
from harness.sources import installed_source, installed_version

_SHOWN = ("fp8-harness", "torch", "torchao", "numpy")
_IMPORTED = {"fp8-harness": "harness"}  # where the name to import is another one


@click.command("version")
@click.option("-v", "--verbose", is_flag=True, help="Also print the folder and a digest of the Python files of each.")
def version_command(*, verbose: bool) -> None:
    """Print the versions of the harness and its main dependencies."""
    for name in _SHOWN:
        version = installed_version(name) or "not installed"
        source = installed_source(_IMPORTED.get(name, name)) if verbose else None
        click.echo(f"{name} {version}" if source is None else f"{name} {version} {source.digest[:12]} {source.folder}")
    if verbose:
        click.echo(f"cpu {cpu_name()}")
