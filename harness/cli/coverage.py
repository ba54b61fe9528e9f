"""`fp8-harness coverage`."""

from __future__ import annotations

from collections.abc import Mapping

import click

from harness.cli.options import root_option
from harness.jsonform import to_json
from harness.matrix.coverage import FATES, Coverage, coverage
from harness.matrix.tier import Selection
from harness.plural import counted
from harness.project import find_project
from harness.running.selection import Query, select_sources

_EPILOG = """\b
Examples:
  fp8-harness coverage pr                           pairs of tier pr
  fp8-harness coverage nightly --strength 3         triples
  fp8-harness coverage pr --list excluded           every excluded pair with its rule
  fp8-harness coverage pr --json                    all of it, for a program
"""


@click.command("coverage", epilog=_EPILOG)
@click.argument("sources", metavar="[TIER|FILE]...", nargs=-1)
@click.option("--tier", "tiers", metavar="TIER", multiple=True, help="A tier by name; may be repeated.")
@click.option("--strength", type=click.IntRange(1, 3), default=2, show_default=True, help="2: pairs, 3: triples.")
@click.option("--list", "listed", type=click.Choice(list(FATES)), help="List the combinations of this kind.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: counts and every combination.")
@root_option
def coverage_command(
    sources: tuple[str, ...],
    tiers: tuple[str, ...],
    strength: int,
    listed: str | None,
    as_json: bool,
    root: str | None,
) -> None:
    """Account for every combination of axis values: covered, refused, skipped or excluded."""
    selections = select_sources(find_project(root), Query(sources=(*sources, *tiers)))
    accounts = [(selection, coverage(selection, strength)) for selection in selections]
    if as_json:
        document = [
            {
                "name": account.name,
                "strength": strength,
                "cases": len(selection.cases),
                "cells": selection.candidates,
                "counts": account.counts,
                "by_rule": account.by_rule,
                "cells_excluded": selection.excluded,
                "combinations": account.tuples,
            }
            for selection, account in accounts
        ]
        click.echo(to_json(document, indent=2))
        return
    for selection, account in accounts:
        _print(selection, account, listed)


def _print(selection: Selection, account: Coverage, listed: str | None) -> None:
    click.echo(f"{account.name}: {counted(len(selection.cases), 'case')} of {selection.candidates} cells")
    click.echo(f"\n{counted(len(account.tuples), 'combination')} of {account.strength} values")
    for fate, count in account.counts.items():
        click.echo(f"  {count:>7}  {fate:<12} {FATES[fate]}")
    _print_rules("impossible combinations by rule", account.by_rule)
    _print_rules("cells excluded by rule", selection.excluded)
    for found in account.tuples if listed is not None else ():
        if found.fate == listed:
            because = f"  ({', '.join(found.rules)})" if found.rules else ""
            click.echo(f"{found.block}: {' / '.join(found.values)}{because}")


def _print_rules(title: str, counts: Mapping[str, int]) -> None:
    if counts:
        click.echo(f"\n{title}")
        for name, count in counts.items():
            click.echo(f"  {count:>7}  {name}")
