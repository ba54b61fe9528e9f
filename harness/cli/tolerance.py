"""`fp8-harness tolerance measure | show`."""

from __future__ import annotations

import shlex
import sys

import click

from harness.cli.options import plan_options, query_options, root_option
from harness.measured.noise import environment, measure, measured_cases, over_seeds
from harness.measured.tolerance import CHECKS, Sample, fit, measured_steps, noise, read_evidence, write_evidence
from harness.project import find_project
from harness.report.text import case_block
from harness.running.plan import EngineKind, make_plan
from harness.running.progress import open_progress
from harness.running.selection import NothingSelected, Query, select_cases
from harness.verdict import ExitCode

_MEASURE_EPILOG = """\b
Examples:
  fp8-harness tolerance measure pr --seeds 8
  fp8-harness tolerance measure pr --seeds 8 --select 'recipe=rowwise'
  ATEN_CPU_CAPABILITY=avx2 fp8-harness tolerance measure pr --against golden
"""


@click.group(epilog="\b\nExample:\n  fp8-harness tolerance show")
def tolerance() -> None:
    """The allowed distances between losses and goldens, and the noise they rest on."""


@tolerance.command("measure", epilog=_MEASURE_EPILOG)
@query_options
@click.option("--seeds", type=click.IntRange(min=1), default=8, show_default=True, help="Seeds 0 to N-1 of every case.")
@click.option(
    "--layouts",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Different layouts of every model, recipe and dtype, spread over world sizes.",
)
@click.option(
    "--against",
    type=click.Choice(["fresh", "golden"]),
    default="fresh",
    show_default=True,
    help="fresh: BF16 references run now, for every seed. golden: the stored ones, with the seeds of the cases.",
)
@plan_options
@root_option
def measure_command(  # noqa: PLR0913  one parameter an option
    *,
    sources: tuple[str, ...],
    tiers: tuple[str, ...],
    case_ids: tuple[str, ...],
    expressions: tuple[str, ...],
    seeds: int,
    layouts: int,
    against: str,
    device: str,
    engine: EngineKind,
    jobs: int,
    slots: int | None,
    timeout_s: float | None,
    root: str | None,
) -> int:
    """Run cases over seeds and layouts and store their distances to BF16 as evidence for tolerances."""
    project = find_project(root)
    plan = make_plan(device=device, engine=engine, jobs=jobs, slots=slots, timeout_s=timeout_s)
    query = Query(sources=(*sources, *tiers), case_ids=case_ids, expressions=expressions)
    fresh = against == "fresh"
    cases = measured_cases(select_cases(project, query), layouts=layouts)
    with open_progress(sys.stderr, quiet=False, verbose=False) as progress:
        done = measure(
            project,
            over_seeds(cases, seeds) if fresh else cases,
            plan,
            progress,
            command=shlex.join(["fp8-harness", *sys.argv[1:]]),
            fresh=fresh,
        )
    for result in done.failed:
        click.echo(f"\n{case_block(result)}")
    if done.interrupted:
        return ExitCode.INTERRUPTED  # half a measurement would replace a whole one
    if not done.new_samples:
        raise NothingSelected("no run gave a sample.", where="tolerance measure")
    for check, evidence in done.evidence.items():
        click.echo(f"\n{check}: {write_evidence(project.root, evidence, check)}")
        _show(evidence.samples)
    click.echo(f"\n{done.new_samples} new samples ({environment()}), {len(done.failed)} runs failed")
    return ExitCode.FAILED if done.failed else ExitCode.GOOD


@tolerance.command("show", epilog="\b\nExample:\n  fp8-harness tolerance show --margin 2")
@click.option(
    "--margin", type=click.FloatRange(min=1), default=3.0, show_default=True, help="For the numbers to allow."
)
@root_option
def show_command(margin: float, root: str | None) -> None:
    """Show the measured noise of every check and key, and the numbers that a margin on it would allow."""
    for check in CHECKS:
        click.echo(f"{check}:")
        _show(read_evidence(find_project(root).root, check).samples, margin=margin)


def _show(samples: tuple[Sample, ...], *, margin: float | None = None) -> None:
    """One block a key: how much was measured, and the noise per step."""
    for key in sorted({sample.key for sample in samples}):
        own = [sample for sample in samples if sample.key == key]
        counts = (len(own), len({sample.seed for sample in own}), len({sample.layout for sample in own}))
        click.echo(f"{key}: {counts[0]} samples, {counts[1]} seeds, {counts[2]} layouts, {measured_steps(own)} steps")
        click.echo(f"  noise    {_numbers(noise(own))}")
        if margin is not None:
            click.echo(f"  allowed  {_numbers(fit(own, margin))}")


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.3g}" for value in values) or "(not enough samples)"
