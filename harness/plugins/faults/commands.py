"""`fp8-harness dev mutate`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from harness.cli.options import (
    AT_LEAST_1,
    json_option,
    plan_parameter,
    print_report,
    project_parameter,
    query_parameter,
)
from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.plugins.faults.faults import FAULT_CLASSES, Fault, all_faults, fault_named
from harness.plugins.faults.kills import read_kills, write_kills
from harness.plugins.faults.mutation import hosts_among, recorded_kills, run_mutations
from harness.plugins.faults.sections import mutation_sections
from harness.project import Project
from harness.running.plan import Plan
from harness.running.progress import open_progress
from harness.running.selection import Query
from harness.verdict import ExitCode

_EPILOG = """\b
Examples:
  fp8-harness dev mutate                            each in up to two cases
  fp8-harness dev mutate --fault amax_without_abs   one fault
  fp8-harness dev mutate pr --cases-per-fault 1     each in the cheapest case
  fp8-harness dev mutate --target my_pkg.my_target  which reach your target

\b
Exit codes: 0 all faults that reached the target were detected, 1 a fault was
not detected, did not reach the reference target, or a clean run failed, 3 no
fault applies to the cases or reaches the target.
"""


@click.command("mutate", epilog=_EPILOG)
@click.option("--fault", "names", metavar="NAME", multiple=True, help="A fault by name. Repeatable, like --class.")
@click.option("--class", "groups", type=click.Choice(list(FAULT_CLASSES)), multiple=True, help="A class of faults.")
@click.option("--cases-per-fault", type=AT_LEAST_1, default=2, show_default=True, help="Plant each in up to N cases.")
@click.option("--list", "listed", is_flag=True, help="List the faults and the cases they are planted in, and exit.")
@click.option("--record", is_flag=True, help="Store which rules found these faults, in golden/evidence/kills.json.")
@json_option("the mutation matrix")
@query_parameter
@plan_parameter
@project_parameter
def mutate_command(  # noqa: PLR0913  one parameter per option
    *,
    names: tuple[str, ...],
    groups: tuple[str, ...],
    cases_per_fault: int,
    listed: bool,
    record: bool,
    json_file: Path | None,
    query: Query,
    plan_for: Callable[..., Plan],
    project: Project,
) -> int:
    """Mutation testing: plant faults in passing cases and show which checks detect them.

    Without a tier, file, case or selection, faults are planted in the cases that the list names for them.
    """
    faults = tuple(all_faults().values())
    named = {fault_named(name).name for name in names}
    faults = tuple(fault for fault in faults if fault.name in named or fault.group in groups) or faults
    if record and query != Query():
        what = "the record is of faults in their own cases."
        raise HarnessError(what, where="--record", fix="select faults only, or give it alone.")
    hosts = hosts_among(project, faults, query, at_most=cases_per_fault)
    if listed:
        for fault in faults:
            click.echo(_line(fault, hosts[fault.name]))
        return ExitCode.GOOD
    with open_progress() as progress:
        matrix = run_mutations(project, faults, hosts, plan_for(), progress)
    print_report(mutation_sections(matrix), json_file, matrix)
    if record and not matrix.interrupted:
        click.echo(f"stored in {write_kills(project.root, recorded_kills(matrix, read_kills(project.root)))}", err=True)
    if matrix.interrupted:
        return ExitCode.INTERRUPTED
    if len(matrix.trials) == len(matrix.not_reached):
        return ExitCode.FAILED if matrix.unplantable else ExitCode.NOTHING_RAN
    return ExitCode.FAILED if matrix.undetected or matrix.unplantable or matrix.false_positives else ExitCode.GOOD


def _line(fault: Fault, hosts: Sequence[Case]) -> str:
    cases = " ".join(map(case_id, hosts)) or "no case"
    mark = " (equivalent)" if fault.equivalent is not None else ""
    return f"{fault.group}  {fault.name}: {fault.title}{mark}\n     {cases}\n     {fault.link}"
