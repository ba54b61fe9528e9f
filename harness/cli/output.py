"""Printing of reports: as wide as the terminal and in colours; in a pipe or a file, one line for every row."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from harness.report.sections import Block


def print_sections(sections: Iterable[Block], *, file: TextIO | None = None, err: bool = False) -> None:
    from harness.report.sections import terminal, text_of

    file = file or (sys.stderr if err else sys.stdout)
    if not file.isatty():
        click.echo(text_of(sections), nl=False, file=file)
        return
    from rich.console import Console

    console = Console(file=file)
    console.print(terminal(sections, width=console.width), end="", soft_wrap=True)
