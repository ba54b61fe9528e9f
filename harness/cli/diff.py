"""`fp8-harness diff`."""

from __future__ import annotations

from pathlib import Path

import click

from harness.cli.output import print_sections
from harness.errors import HarnessError
from harness.report.difference import difference, difference_blocks
from harness.report.sections import Section
from harness.tables import load_tables
from harness.verdict import ExitCode

_EPILOG = """\b
Examples:
  fp8-harness run --case ID --save-trace good
  fp8-harness run --case ID --save-trace bad --inject fix.py:apply
  fp8-harness diff good bad
  fp8-harness diff good/ID.npz other/OTHER-ID.npz

\b
Exit codes: 0 equal, 1 different, 2 usage or bad input.
"""

_PATH = click.Path(path_type=Path, exists=True)


@click.command("diff", epilog=_EPILOG)
@click.argument("first", type=_PATH)
@click.argument("second", type=_PATH)
def diff_command(first: Path, second: Path) -> int:
    """Show what the ranks of two runs recorded differently: scales, matmuls, collectives, memory, gradients, losses.

    FIRST and SECOND are folders that `run --save-trace` wrote, or two files of them. Causes come first.
    """
    pairs = _pairs(first, second)
    code = ExitCode.GOOD
    for name, (left, right) in pairs.items():
        found = difference(load_tables(left), load_tables(right))
        equal = all(each.equal for each in found)
        print_sections([Section(title=f"{name}: {'equal' if equal else 'different'}", blocks=difference_blocks(found))])
        click.echo()
        code = code if equal else ExitCode.FAILED
    return code


def _pairs(first: Path, second: Path) -> dict[str, tuple[Path, Path]]:
    """The files to compare, by case id."""
    if first.is_file() and second.is_file():
        return {first.stem if first.stem == second.stem else f"{first.stem} and {second.stem}": (first, second)}
    if not (first.is_dir() and second.is_dir()):
        raise HarnessError("a folder cannot be compared with a file.", where=str(second), fix="give two of one kind.")
    left, right = ({path.stem: path for path in folder.glob("*.npz")} for folder in (first, second))
    both = {name: (left[name], right[name]) for name in left if name in right}
    if not both:
        fix = "name two folders that --save-trace wrote, or two files of them."
        raise HarnessError("no case has a saved trace in both folders.", where=f"{first}, {second}", fix=fix)
    for name in sorted(left.keys() ^ right.keys()):
        click.echo(f"only in {first if name in left else second}: {name}", err=True)
    return both
