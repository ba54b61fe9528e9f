"""`fp8-harness dev evidence formulas | kernel | proof | native | all`."""

from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from harness.cli import options
from harness.cli.recording import check_committed, require_reason
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.evidence.golden import provenance_of, source_commit
from harness.evidence.verified import LEVELS, Level, VerifiedWith, add_verified, read_verified
from harness.matrix.choice import PlantedFault, catalogue_of_faults
from harness.plugins.gpu import record
from harness.plugins.gpu.formulas import formulas_sections, verified_line
from harness.plugins.gpu.levels import Interrupted, Work, ask_torch, collect, obstacle
from harness.project import Project
from harness.report.sections import Items, markdown
from harness.result import RunResult
from harness.running.plan import Plan
from harness.running.selection import NothingSelected, Query
from harness.sources import evidence_key
from harness.studies.records import verification
from harness.studies.surviving import RanksFailed
from harness.verdict import ExitCode
from harness.workflow import run

_EPILOG = """\b
Examples:
  fp8-harness dev evidence formulas --reason "torch 2.15.0 is released"
  fp8-harness dev evidence proof smoke --device cpu -o backend=gloo \\
      --fault amax_without_abs
  fp8-harness dev evidence all --device cuda
      all that these GPUs support; lists the rest

\b
Exit codes: 0 all good, 1 something is not as it must be, 2 also devices that
cannot prove this.
"""
_NAMES = ("formulas", *LEVELS, "all")


@click.command("evidence", epilog=_EPILOG)
@click.argument("level", metavar=f"[{'|'.join(_NAMES)}]", type=click.Choice(_NAMES), required=False)
@options.query_parameter("expressions")
@click.option("--list", "listed", is_flag=True, help="List the stored evidence.")
@click.option("--fault", "faults", metavar="NAME", multiple=True, help="For proof: only this fault. Repeatable.")
@click.option(
    "--seeds", type=click.IntRange(min=0), default=4, show_default=True, help="For native: seeds of the noise."
)
@click.option("--reason", metavar="TEXT", help="For formulas: why these versions are verified; stored. Required.")
@click.option("--dry-run", is_flag=True, help="For formulas: run and compare, but store nothing.")
@options.json_option("the results of the GPU levels")
@options.allow_dirty_option
@options.plan_parameter
@options.project_parameter
def evidence_command(  # noqa: PLR0913  one parameter per option
    *,
    level: str | None,
    query: Query,
    listed: bool,
    faults: tuple[str, ...],
    seeds: int,
    reason: str | None,
    dry_run: bool,
    json_file: Path | None,
    allow_dirty: bool,
    plan_for: Callable[..., Plan],
    project: Project,
) -> int:
    """Verify assumptions about torch, torchao and GPUs, and store the evidence with the goldens.

    formulas: traffic, casts, matmuls and memory of the installed torch and torchao; needs no GPU, and runs
    tier pr by default. Later runs with these versions take a disagreement for a fault; with other versions it is
    `changed`.

    kernel: the float8 matmul of one GPU beside the exact one, for all inputs that a GPU accepts. proof: the exact
    matmul with real collectives, clean and with every injected fault. native: the real kernels in bfloat16, checked;
    their goldens and noise are stored. all: these three, as far as the devices support them. On a CPU each is a
    rehearsal.
    """
    if (level is None) != listed:
        raise click.UsageError(f"give one of {', '.join(_NAMES)}, or --list.")
    if level is None:
        return _list(project)
    if level == "formulas":
        return _verify_formulas(project, query, plan_for().on_cpu, reason, dry_run=dry_run, allow_dirty=allow_dirty)
    if reason or dry_run:
        raise click.UsageError("--reason and --dry-run are for formulas.")
    if options.given_run_options().arithmetic:
        raise HarnessError("each level has its own.", where="-o arithmetic", fix="leave it out.")
    project.check_writable()
    check_committed(project, "goldens", allowed=allow_dirty)
    levels = LEVELS if level == "all" else tuple(name for name in LEVELS if name == level)
    plan = plan_for().on_gpus
    if plan.unused and plan.usual is None:
        click.echo(f"fp8-harness: note: a rehearsal on the CPU: {plan.unused}.", err=True)
    facts = ask_torch() if plan.device == "cuda" else None
    possible = possible_levels(levels, facts, plan.capacity.largest)
    with options.open_progress() as progress:
        work = Work(project, plan, progress, facts, _planted(faults), seeds, options.typed_command())
        reports, code = _collect(possible, work, query, to_stderr=str(json_file) == "-")
    options.write_json(json_file, {"schema": 1, "good": all(report.good for report in reports), "levels": reports})
    left = [level for level in levels if level not in [report.level for report in reports]]
    if left:
        click.echo(f"left: {', '.join(left)}", err=str(json_file) == "-")
    return code


def _planted(names: tuple[str, ...]) -> tuple[PlantedFault, ...]:
    if not names:
        return ()
    catalogue = catalogue_of_faults(f"--fault {names[0]}")
    return tuple(map(catalogue.fault_named, names))


def possible_levels(levels: tuple[Level, ...], facts: record.TorchFacts | None, visible: int) -> list[Level]:
    """Return the levels that the devices can prove. Of several the others are named; HarnessError if none is left."""
    against = {level: None if facts is None else obstacle(level, facts, visible) for level in levels}
    possible = [level for level, error in against.items() if error is None]
    errors = [error for error in against.values() if error is not None]
    if not possible:
        raise errors[0]
    for error in errors:
        click.echo(f"fp8-harness: note: {error.text}", err=True)
    return possible


def _collect(levels: list[Level], work: Work, query: Query, *, to_stderr: bool) -> tuple[list[record.LevelReport], int]:
    made: list[record.LevelReport] = []
    for level in levels:
        try:
            report = collect(level, work, query)
        except Interrupted:
            return made, ExitCode.INTERRUPTED
        except NothingSelected as error:
            if len(levels) == 1:
                raise
            click.echo(f"fp8-harness: note: {error.text}", err=True)
            continue
        except RanksFailed as error:
            click.echo(f"fp8-harness: error: {error.text}", err=True)
            return made, ExitCode.INFRA
        click.echo(_stored(work.project, report), err=to_stderr)
        made.append(report)
    return made, ExitCode.GOOD if all(report.good for report in made) else ExitCode.FAILED


def _stored(project: Project, report: record.LevelReport) -> str:
    before = record.read_level(project.root, report.hardware, report.level)
    text = markdown([record.level_section(report, None if before is None else record.changes(before, report))], level=1)
    path = record.write_level(project.root, report)
    write_whole(path.with_suffix(".md"), text.encode())
    return f"{text}stored in {path} and {path.with_suffix('.md').name}\n"


def _verify_formulas(
    project: Project, query: Query, plan: Plan, reason: str | None, *, dry_run: bool, allow_dirty: bool
) -> int:
    """Run cases and record with which versions of torch and torchao every formula agrees."""
    reason = require_reason(reason, "dev evidence formulas", "records")
    if not query.sources:
        query = msgspec.structs.replace(query, sources=("pr",))
    if not dry_run:
        project.check_writable()
        check_committed(project, "records", allowed=allow_dirty)
    with options.open_progress() as progress:
        result, _ = run(project, query, plan, progress)
    agreement = verification(result)
    options.print_sections(formulas_sections(agreement))
    if result.end.interrupted:
        return ExitCode.INTERRUPTED
    if agreement.verified and not dry_run:
        new = _verified_with(project, result, reason=reason, command=options.typed_command())
        click.echo(f"stored in {add_verified(project.root, new)}")
    return ExitCode.GOOD if agreement.complete else ExitCode.FAILED


def _verified_with(project: Project, run: RunResult, *, reason: str, command: str) -> VerifiedWith:
    """Return the record of what a run verified, with the versions that its ranks reported."""
    traces = (trace for result in run.results if result.run is not None for trace in result.run.traces)
    provenance = provenance_of(next(traces), command=command, reason=reason, commit=source_commit(project.root))
    return VerifiedWith(
        torch=evidence_key(provenance.software["torch"]),
        torchao=evidence_key(provenance.software["torchao"]),
        cases=verification(run).verified,
        provenance=provenance,
    )


def _list(project: Project) -> int:
    """Print the stored evidence: versions with verified formulas, and the GPU levels by hardware class."""
    reports = [record.read_level(project.root, hardware, level) for hardware, level in record.list_levels(project.root)]
    lines = [
        f"{record.level_line(report)}; torch {report.environment.packages.get('torch', 'unknown')}, {report.created}"
        for report in reports
        if report is not None
    ]
    lines += map(verified_line, read_verified((project.shipped, project.root)))
    options.print_sections([Items(tuple(lines or ["no evidence is stored."]))])
    return ExitCode.GOOD if lines else ExitCode.NOTHING_RAN
