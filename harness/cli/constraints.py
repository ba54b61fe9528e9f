"""`fp8-harness constraints`."""

from pathlib import Path

import click
from packaging.utils import canonicalize_name

from harness.errors import HarnessError
from harness.evidence.sealed import own_root
from harness.matrix.axes import suggestion

_EPILOG = """\b
Examples:
  fp8-harness constraints > c.txt && pip install -c c.txt 'fp8-harness[train]'
  fp8-harness constraints --for torch-2.15 > c.txt
"""


@click.command("constraints", epilog=_EPILOG)
@click.option("--for", "variant", metavar="NAME", help="Pins for other versions, such as torch-2.15 or transformers.")
def constraints_command(*, variant: str | None) -> None:
    """Print the versions verified together, for `pip install -c`."""
    click.echo(constraints(own_root() / "ci", variant), nl=False)


def constraints(folder: Path, variant: str | None) -> str:
    """The pins of `constraints.txt` in a folder; those of `constraints-<variant>.txt` replace them by package.

    Raises HarnessError where the folder has no such variant.
    """
    variants = {path.stem.partition("-")[2]: path for path in sorted(folder.glob("constraints-*.txt"))}
    if variant is not None and variant not in variants:
        fix = suggestion(variant, tuple(variants))
        raise HarnessError("no versions of this name were verified.", where=f"--for {variant}", fix=fix)
    pins = _pins(folder / "constraints.txt") | (_pins(variants[variant]) if variant is not None else {})
    named = "" if variant is None else f" --for {variant}"
    return "".join(f"{line}\n" for line in (f"# fp8-harness constraints{named}", *pins.values()))


def _pins(path: Path) -> dict[str, str]:
    """By the canonical name of the package, the line that pins it."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return {canonicalize_name(line.partition("==")[0]): line for line in lines if line and not line.startswith("#")}
