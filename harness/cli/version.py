"""`fp8-harness version`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import click

_SHOWN = ("fp8-harness", "torch", "torchao", "numpy")


@click.command("version")
def version_command() -> None:
    """Print the version of the harness and of what it runs on; imports none of them."""
    for name in _SHOWN:
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "not installed"
        click.echo(f"{name} {found}")
