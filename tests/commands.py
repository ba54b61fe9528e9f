"""Commands in documents and pipelines: whether the real command line would take them."""

from __future__ import annotations

import shlex

import click
import pytest

from harness.cli.main import app
from harness.errors import HarnessError


def understood(line: str) -> click.Context:
    """A command that begins with `fp8-harness`, parsed and not run. Raises click's error for one that is wrong.

    A test that asks for a command of a plug-in that was removed is skipped.
    """
    _, *words = shlex.split(line, comments=True)
    words = words[: words.index(">")] if ">" in words else words
    command: click.Command = app
    context = click.Context(app, info_name="fp8-harness")
    while isinstance(command, click.Group):
        _, (name, *words), _ = command.make_parser(context).parse_args(words)
        try:
            subcommand = command.get_command(context, name)
        except HarnessError as error:
            if error.what.startswith("it needs the plug-in "):
                pytest.skip(str(error))
            raise
        if subcommand is None:
            raise click.UsageError(f"no such command: {name}")
        command = subcommand
        context = click.Context(command, parent=context, info_name=name)
    return command.make_context(command.name, words, parent=context.parent)
