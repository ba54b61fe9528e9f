"""`fp8-harness list`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from harness.cli.options import json_option, print_sections, project_parameter, query_parameter, run_option, write_json
from harness.matrix.tier import FATES, Fate, coverage
from harness.project import Project
from harness.run_options import QueryOptions, options_of
from harness.text import counted

if TYPE_CHECKING:
    from harness.running.selection import Query

_EPILOG = """\b
Examples:
  fp8-harness list pr --select 'tp=4,8'  cases of tier pr with TP 4 or 8
  fp8-harness list pr --coverage --strength 3 --combinations excluded
      every excluded triple with its rule
"""


@click.command("list", epilog=_EPILOG)
@query_parameter(*options_of(QueryOptions))
@run_option("shard")
@project_parameter
@click.option("--why", is_flag=True, help="Also print the expected cost of each case and why it is in the tier.")
@click.option("--coverage", "as_coverage", is_flag=True, help="Account for every combination of axis values instead.")
@click.option("--strength", type=click.IntRange(1, 3), default=2, show_default=True, help="Combinations: 2 for pairs.")
@click.option("--combinations", type=click.Choice(list(FATES)), help="With --coverage: list combinations of this kind.")
@json_option("the cases or combinations")
def list_command(  # noqa: PLR0913  one parameter per option
    *,
    query: Query,
    shard: str | None,
    project: Project,
    why: bool,
    as_coverage: bool,
    strength: int,
    combinations: Fate | None,
    json_file: Path | None,
) -> None:
    """List cases with world size and id, or the coverage of tiers."""
    from harness.matrix.caseid import case_id
    from harness.matrix.choice import parse_shard
    from harness.running.selection import excluded_cells, select_cases

    if combinations and not as_coverage:
        raise click.UsageError("--combinations is for --coverage.")
    if as_coverage:
        _list_coverage(project, query, strength, combinations, json_file)
        return
    query = msgspec.structs.replace(query, shard=None if shard is None else parse_shard(shard))
    cases = select_cases(project, query)
    reasons = _reasons(project, query) if why else {}
    if json_file is not None:
        rows = [
            {"id": case_id(case), "world_size": case.world_size, **reasons.get(case_id(case), {})} for case in cases
        ]
        write_json(json_file, rows)
        return
    for case in cases:
        click.echo(f"{case.world_size:>3}  {case_id(case)}")
        if case_id(case) in reasons:
            facts = reasons[case_id(case)]
            click.echo(f"     {facts['cost_cpu_s']:.1f} CPU s; {facts['reason']}")
    remarks = (counted(len(cases), "case"), excluded_cells(project, query), *project.replaced_tiers(query.sources))
    click.echo("\n".join(filter(None, remarks)), err=True)


def _reasons(project: Project, query: Query) -> dict[str, dict[str, object]]:
    """Return what the chosen cases of the tiers of a query were expected to cost and what they are there for, by id."""
    from harness.matrix.caseid import case_id
    from harness.matrix.choice import chosen_path, read_chosen
    from harness.running.selection import case_files

    paths = [chosen_path(path) for path in case_files(project, query)]
    return {
        case_id(chosen_case.case): {"cost_cpu_s": chosen_case.cost_cpu_s, "reason": chosen_case.reason}
        for path in paths
        if path.exists()
        for chosen_case in read_chosen(path)
    }


def _list_coverage(
    project: Project, query: Query, strength: int, combinations: Fate | None, json_file: Path | None
) -> None:
    from harness.report.run import coverage_section
    from harness.running.selection import select_sources

    if query.words != msgspec.structs.replace(query, expressions=(), keyword=None, target=None).words:
        raise click.UsageError("--coverage is of whole tiers: leave out --select, -k and --target.")
    selections = select_sources(project, query)
    accounts = [(selection, coverage(selection, strength)) for selection in selections]
    if json_file is not None:
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
        write_json(json_file, document)
        return
    print_sections([coverage_section(accounts, [combinations] if combinations else ())])
