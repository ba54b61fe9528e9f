"""`fp8-harness power`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click
import msgspec

from harness.cli.options import json_option, plan_parameter, query_parameter, root_option, write_output
from harness.cli.output import print_sections
from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.faults import FAULT_CLASSES, Fault, all_faults, fault_named
from harness.project import find_project
from harness.running.plan import Plan
from harness.running.progress import open_progress
from harness.running.selection import Query
from harness.verdict import ExitCode

_EPILOG = """\b
Examples:
  fp8-harness power                                    all faults, each in up to two cases
  fp8-harness power --fault amax_without_abs           one fault
  fp8-harness power --class B --carriers 1             one class of faults, each in one case
  fp8-harness power --list                             list the faults and their cases
  fp8-harness power --record                           store what docs/checks.md says of every check
  fp8-harness power pr --carriers 1                    all faults, each in the cheapest case of tier pr
  fp8-harness power pr --select dtype=bfloat16         in bfloat16 cases only
  fp8-harness power --target my_pkg.my_target          which of them reach your own target
  fp8-harness run pr --inject fault:amax_without_abs   plant a fault in every case of a tier

\b
Exit codes: 0 all faults that reached the target were detected, 1 a fault was not detected, did not reach the reference
target, or a clean run failed, 2 usage error or bad input, 3 no fault applies to the cases or reaches the target,
130 interrupted.
"""


@click.command("power", epilog=_EPILOG)
@click.option("--fault", "names", metavar="NAME", multiple=True, help="A fault by name. Repeatable, like --class.")
@click.option("--class", "groups", type=click.Choice(list(FAULT_CLASSES)), multiple=True, help="A class of faults.")
@click.option("--carriers", type=click.IntRange(min=1), default=2, show_default=True, help="Cases per fault.")
@click.option("--list", "listed", is_flag=True, help="List the faults and the cases they are planted in, and exit.")
@click.option("--record", is_flag=True, help="Store which rules found every fault, in golden/evidence/kills.json.")
@json_option("the mutation matrix")
@query_parameter
@plan_parameter
@root_option
def power_command(  # noqa: PLR0913  one parameter per option
    *,
    names: tuple[str, ...],
    groups: tuple[str, ...],
    carriers: int,
    listed: bool,
    record: bool,
    json_file: Path | None,
    query: Query,
    plan_for: Callable[..., Plan],
    root: str | None,
) -> int:
    """Plant faults in passing cases and show which checks detect them.

    Without a tier, file, case or selection, faults are planted in the cases that the list names for them.
    """
    from harness.evidence.kills import write_kills
    from harness.report.mutation import mutation_sections
    from harness.studies.mutation import hosts_among, recorded_kills, run_mutations

    faults, project = _chosen(names, groups), find_project(root)
    if record and (names or groups or query != Query()):
        raise HarnessError("the record is of every fault in its own cases.", where="--record", fix="give it alone.")
    found = hosts_among(project, faults, query, at_most=carriers)
    if listed:
        for fault in faults:
            click.echo(_line(fault, found[fault.name]))
        return ExitCode.GOOD
    plan = msgspec.structs.replace(plan_for(), root_option=root)
    with open_progress() as progress:
        power = run_mutations(project, faults, found, plan, progress)
    print_sections(mutation_sections(power), err=str(json_file) == "-")
    write_output(json_file, lambda: to_json(power, indent=2))
    if record and not power.interrupted:
        click.echo(f"stored in {write_kills(project.root, recorded_kills(power))}", err=True)
    if power.interrupted:
        return ExitCode.INTERRUPTED
    if len(power.trials) == len(power.not_reached):
        return ExitCode.FAILED if power.unplantable else ExitCode.NOTHING_RAN
    return ExitCode.FAILED if power.undetected or power.unplantable or power.false_positives else ExitCode.GOOD


def _chosen(names: Sequence[str], groups: Sequence[str]) -> tuple[Fault, ...]:
    """The faults of these names and classes, in the order of the list; all faults if neither is given."""
    faults = tuple(all_faults().values())
    named = {fault_named(name).name for name in names}
    chosen = tuple(fault for fault in faults if fault.name in named or fault.group in groups)
    return chosen or faults


def _line(fault: Fault, carriers: Sequence[Case]) -> str:
    cases = " ".join(map(case_id, carriers)) or "no case"
    mark = " (equivalent)" if fault.equivalent is not None else ""
    return f"{fault.group}  {fault.name}: {fault.title}{mark}\n     {cases}\n     {fault.link}"
