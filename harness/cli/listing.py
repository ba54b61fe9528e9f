"""`fp8-harness list`."""

from __future__ import annotations

import click

from harness.cli.options import query_options, root_option
from harness.project import find_project

_EPILOG = """\b
Examples:
  fp8-harness list                        the smoke tier
  fp8-harness list pr --select 'tp=4,8'   cases of tier pr with TP 4 or 8
  fp8-harness list my/cases.toml --json   a file of your own, for a program
"""


@click.command("list", epilog=_EPILOG)
@query_options
@root_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_command(
    sources: tuple[str, ...],
    tiers: tuple[str, ...],
    case_ids: tuple[str, ...],
    expressions: tuple[str, ...],
    root: str | None,
    as_json: bool,
) -> None:
    """List the cases of tiers or files: world size and id."""
    from harness.running.selection import Query, select_cases
    from harness.spec.caseid import case_id

    query = Query(sources=(*sources, *tiers), case_ids=case_ids, expressions=expressions)
    cases = select_cases(find_project(root), query)
    if as_json:
        import msgspec

        rows = [{"id": case_id(case), "world_size": case.world_size} for case in cases]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)))
        return
    for case in cases:
        click.echo(f"{case.world_size:>3}  {case_id(case)}")
    click.echo(f"{len(cases)} cases", err=True)
