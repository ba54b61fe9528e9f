"""`fp8-harness version`."""

from __future__ import annotations

import click

from harness.running.machine import installed_version

_SHOWN = ("fp8-harness", "torch", "torchao", "numpy")


@click.command("version")
def version_command() -> None:
    """Print the versions of the harness and its main dependencies."""
    for name in _SHOWN:
        click.echo(f"{name} {installed_version(name) or 'not installed'}")
