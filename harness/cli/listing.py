"""`fp8-harness list`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from harness.cli.options import query_parameter, root_option, run_option
from harness.jsonform import to_json
from harness.project import Project, find_project

if TYPE_CHECKING:
    from harness.running.selection import Query

_EPILOG = """\b
Examples:
  fp8-harness list                        the smoke tier
  fp8-harness list pr --select 'tp=4,8'   cases of tier pr with TP 4 or 8
  fp8-harness list pr --shard 1/4         the first of four shards of about equal duration
  fp8-harness list pr --why               why each case is in a chosen tier
  fp8-harness list my/cases.toml --json   a file of your own, for a program
"""


@click.command("list", epilog=_EPILOG)
@query_parameter
@run_option("shard")
@root_option
@click.option("--why", is_flag=True, help="Also print the expected cost of each case and why it is in the tier.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_command(*, query: Query, shard: str | None, root: str | None, why: bool, as_json: bool) -> None:
    """List the cases of tiers or files: world size and id."""
    from harness.matrix.caseid import case_id
    from harness.matrix.parts import parse_shard
    from harness.plural import counted
    from harness.running.selection import select_cases

    query = msgspec.structs.replace(query, shard=None if shard is None else parse_shard(shard))
    project = find_project(root)
    cases = select_cases(project, query)
    reasons = _reasons(project, query) if why else {}
    if as_json:
        rows = [
            {"id": case_id(case), "world_size": case.world_size, **reasons.get(case_id(case), {})} for case in cases
        ]
        click.echo(to_json(rows, indent=2))
        return
    for case in cases:
        click.echo(f"{case.world_size:>3}  {case_id(case)}")
        if case_id(case) in reasons:
            found = reasons[case_id(case)]
            click.echo(f"     {found['cost_cpu_s']:.1f} CPU s; {found['reason']}")
    click.echo(counted(len(cases), "case"), err=True)


def _reasons(project: Project, query: Query) -> dict[str, dict[str, object]]:
    """What the chosen cases of the tiers of a query were expected to cost and what they are there for, by id."""
    from harness.matrix.caseid import case_id
    from harness.matrix.choice import chosen_path, read_chosen

    paths = [chosen_path(project.case_file(source)) for source in query.effective_sources]
    return {
        case_id(each.case): {"cost_cpu_s": each.cost_cpu_s, "reason": each.reason}
        for path in paths
        if path.exists()
        for each in read_chosen(path)
    }
