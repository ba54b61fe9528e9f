"""`fp8-harness power`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from harness.cli.options import plan_options, root_option
from harness.durable import write_whole
from harness.planted.faults import FAULT_CLASSES, Fault, all_faults, carriers_of, fault_named
from harness.project import find_project
from harness.running.plan import EngineKind, make_plan
from harness.running.progress import open_progress
from harness.running.selection import NothingSelected
from harness.spec.caseid import case_id
from harness.verdict import ExitCode

_EPILOG = """\b
Examples:
  fp8-harness power                                    every planted fault, each in up to two cases
  fp8-harness power --fault amax_without_abs           one of them
  fp8-harness power --class B --carriers 1             one class, each fault in one case
  fp8-harness power --list                             what there is and where it applies
  fp8-harness run pr --inject fault:amax_without_abs   a fault in every case of a tier

\b
Exit codes: 0 every fault was caught in sound carriers, 1 one escaped or a clean run failed, 2 usage or bad input,
3 nothing ran, 130 interrupted.
"""


@click.command("power", epilog=_EPILOG)
@click.option("--fault", "names", metavar="NAME", multiple=True, help="A fault by name; may be repeated.")
@click.option(
    "--class",
    "groups",
    type=click.Choice(list(FAULT_CLASSES)),
    multiple=True,
    help="All faults of a class.",
)
@click.option(
    "--carriers", type=click.IntRange(min=1), default=2, show_default=True, help="Cases that each fault is planted in."
)
@click.option("--list", "listed", is_flag=True, help="List the faults and their carriers; run nothing.")
@click.option("--json", "json_file", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@plan_options
@root_option
def power_command(  # noqa: PLR0913  one parameter an option
    *,
    names: tuple[str, ...],
    groups: tuple[str, ...],
    carriers: int,
    listed: bool,
    json_file: Path | None,
    device: str,
    engine: EngineKind,
    jobs: int,
    slots: int | None,
    timeout_s: float | None,
    root: str | None,
) -> int:
    """Plant faults in sound cases and show which checks see them."""
    faults = _chosen(names, groups)
    if listed:
        for fault in faults:
            click.echo(_line(fault, carriers))
        return ExitCode.GOOD
    from harness.planted.power import run_power
    from harness.report.power import power_json, power_text

    plan = make_plan(device=device, engine=engine, jobs=jobs, slots=slots, timeout_s=timeout_s)
    plan = msgspec.structs.replace(plan, root_option=root)
    with open_progress(sys.stderr, quiet=False, verbose=False) as progress:
        power = run_power(find_project(root), faults, plan, progress, carriers=carriers)
    click.echo(power_text(power), nl=False)
    if json_file is not None:
        write_whole(json_file, power_json(power))
    if power.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED if power.escaped or power.false_findings else ExitCode.GOOD


def _chosen(names: Sequence[str], groups: Sequence[str]) -> tuple[Fault, ...]:
    """The faults that are asked for, in the order of the list; all of them when nothing is."""
    wanted = {fault_named(name).name for name in names}
    faults = tuple(
        fault
        for fault in all_faults().values()
        if not (names or groups) or fault.name in wanted or (fault.group in groups)
    )
    if not faults:
        raise NothingSelected("there is no such fault.", where="power", fix="see `fp8-harness power --list`.")
    return faults


def _line(fault: Fault, carriers: int) -> str:
    cases = " ".join(case_id(case) for case in carriers_of(fault, at_most=carriers))
    mark = " (equivalent)" if fault.equivalent is not None else ""
    return f"{fault.group}  {fault.name}: {fault.title}{mark}\n     {cases}\n     {fault.link}"
