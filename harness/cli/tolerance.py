"""`fp8-harness tolerance measure | show`."""

from __future__ import annotations

from collections.abc import Callable

import click

from harness.cli.options import AT_LEAST_1, plan_parameter, query_parameter, root_option, typed_command
from harness.cli.output import print_sections
from harness.evidence.tolerance import CHECKS, Sample, fit, measured_steps, noise, read_evidence, write_evidence
from harness.hints import explain_case
from harness.matrix.caseid import case_id
from harness.plural import counted
from harness.project import find_project
from harness.report.case import case_section
from harness.running.case_judge import known_here
from harness.running.plan import Plan
from harness.running.progress import open_progress
from harness.running.selection import NothingSelected, Query, select_cases
from harness.studies.noise import environment, measure, measured_cases, over_seeds, recorded_cases
from harness.verdict import ExitCode

_MEASURE_EPILOG = """\b
Examples:
  fp8-harness tolerance measure pr --seeds 8
  fp8-harness tolerance measure pr --seeds 8 --select 'recipe=rowwise'
  ATEN_CPU_CAPABILITY=avx2 fp8-harness tolerance measure pr --against golden
"""


@click.group(epilog="\b\nExample:\n  fp8-harness tolerance show")
def tolerance() -> None:
    """Measure and show the noise that tolerances are derived from."""


@tolerance.command("measure", epilog=_MEASURE_EPILOG)
@query_parameter
@click.option("--seeds", type=AT_LEAST_1, default=8, show_default=True, help="Run with seeds 0 to N-1.")
@click.option(
    "--layouts",
    type=AT_LEAST_1,
    default=4,
    show_default=True,
    help="Layouts to measure per model, recipe and dtype, spread over world sizes.",
)
@click.option(
    "--against",
    type=click.Choice(["fresh", "golden"]),
    default="fresh",
    show_default=True,
    help="fresh: run BF16 references now, with every seed. golden: use the stored ones and the seeds of the cases.",
)
@plan_parameter
@root_option
def measure_command(
    *, query: Query, seeds: int, layouts: int, against: str, plan_for: Callable[..., Plan], root: str | None
) -> int:
    """Run cases over seeds and layouts, and store their distances to BF16 as evidence for tolerances.

    Cases with a recorded fault are named and left out.
    """
    project = find_project(root)
    project.check_writable()
    plan = plan_for()
    fresh = against == "fresh"
    selected, known = select_cases(project, query), known_here(project)
    for name, faults in recorded_cases(selected, known).items():
        reasons = "; ".join(f"known fault {fault.name}: {fault.reason}" for fault in faults)
        click.echo(f"left out: {name}: {reasons}", err=True)
    cases = measured_cases(selected, layouts=layouts, known=known)
    if not cases:
        raise NothingSelected(
            "no case is left to measure: each has a recorded fault, a refusal or a tolerance of its own.",
            where="tolerance measure",
            fix=f"select other cases; `{explain_case(case_id(selected[0]))}` says why of the first.",
        )
    with open_progress() as progress:
        done = measure(
            project,
            over_seeds(cases, seeds) if fresh else cases,
            plan,
            progress,
            command=typed_command(),
            fresh=fresh,
        )
    for result in done.failed:
        click.echo()
        print_sections([case_section(result)])
    if done.interrupted:
        return ExitCode.INTERRUPTED  # a partial measurement must not replace a complete one
    if not done.new_samples:
        raise NothingSelected("no run passed, so there are no samples.", where="tolerance measure")
    for check, evidence in done.evidence.items():
        click.echo(f"\n{check}: {write_evidence(project.root, evidence, check)}")
        _show(evidence.samples)
    samples, failed = counted(done.new_samples, "new sample"), counted(len(done.failed), "run")
    click.echo(f"\n{samples} ({environment()}), {failed} failed")
    return ExitCode.FAILED if done.failed else ExitCode.GOOD


@tolerance.command("show", epilog="\b\nExample:\n  fp8-harness tolerance show --margin 2")
@click.option("--margin", type=click.FloatRange(min=1), default=3.0, show_default=True, help="Factor on the noise.")
@root_option
def show_command(margin: float, root: str | None) -> None:
    """Show the measured noise of every check and key, and the tolerances that a margin on it gives."""
    for check in CHECKS:
        click.echo(f"{check}:")
        _show(read_evidence(find_project(root).root, check).samples, margin=margin)


def _show(samples: tuple[Sample, ...], *, margin: float | None = None) -> None:
    """Print the number of samples and the noise per step of every key."""
    for key in sorted({sample.key for sample in samples}):
        own = [sample for sample in samples if sample.key == key]
        seeds, layouts = {sample.seed for sample in own}, {sample.layout for sample in own}
        counts = ((len(own), "sample"), (len(seeds), "seed"), (len(layouts), "layout"), (measured_steps(own), "step"))
        click.echo(f"{key}: {', '.join(counted(*each) for each in counts)}")
        click.echo(f"  noise    {_numbers(noise(own))}")
        if margin is not None:
            click.echo(f"  allowed  {_numbers(fit(own, margin))}")


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.3g}" for value in values) or "(not enough samples)"
