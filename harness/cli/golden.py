"""`fp8-harness golden list | show | check | update`."""

from __future__ import annotations

import math
import shlex
import sys

import click

from harness.cli.options import plan_options, query_options, root_option
from harness.errors import HarnessError
from harness.measured.golden import Golden, compare_goldens, list_goldens, load_golden, write_golden
from harness.measured.references import GoldenChange, make_goldens, needed_references
from harness.project import Project, find_project
from harness.report.text import case_block
from harness.running.briefs import make_briefs
from harness.running.machine import hardware, resolve_device
from harness.running.plan import EngineKind, make_plan
from harness.running.progress import open_progress
from harness.running.selection import NothingSelected, Query, select_cases
from harness.spec.case import Case
from harness.spec.caseid import family_id
from harness.verdict import ExitCode

_UPDATE_EPILOG = """\b
Examples:
  fp8-harness golden update pr --missing --reason "first goldens of tier pr"
  fp8-harness golden update --family tiny-v2048-s5-gb8-sl32-lr0.001-seed0 --reason "torch 2.14 changed AdamW"
  fp8-harness golden update smoke --dry-run --reason "only looking"
"""


@click.group(epilog="\b\nExamples:\n  fp8-harness golden list\n  fp8-harness golden check pr")
def golden() -> None:
    """The stored BF16 references that losses are compared with."""


@golden.command("list", epilog="\b\nExample:\n  fp8-harness golden list")
@root_option
def list_command(root: str | None) -> None:
    """List the stored goldens: hardware class and family."""
    for key in list_goldens(find_project(root).root):
        click.echo(f"{key.hardware:<12}  {key.family}")


@golden.command("show", epilog="\b\nExample:\n  fp8-harness golden show tiny-v2048-s5-gb8-sl32-lr0.001-seed0")
@click.argument("family")
@click.option("--hardware", "hardware_name", default="cpu", show_default=True, help="Hardware class.")
@root_option
def show_command(family: str, hardware_name: str, root: str | None) -> None:
    """Show one golden with its provenance."""
    shown = load_golden(find_project(root).root, hardware_name, family)
    click.echo(f"family    {shown.family}\nhardware  {shown.hardware}\ncase      {shown.case_id}")
    source = shown.provenance
    facts = {
        "device": source.device,
        "commit": source.commit,
        "command": source.command,
        "reason": source.reason,
        "created": source.created,
        "data": shown.data_digest,
        **source.software,
    }
    for name, value in facts.items():
        click.echo(f"{name:<9} {value}")
    click.echo("\nstep  loss                    grad norm")
    for step, (loss, norm) in enumerate(zip(shown.losses, shown.grad_norms, strict=True), 1):
        click.echo(f"{step:>4}  {loss!r:<22}  {norm!r}")


@golden.command("check", epilog="\b\nExamples:\n  fp8-harness golden check\n  fp8-harness golden check pr nightly")
@query_options
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@root_option
def check_command(
    *,
    sources: tuple[str, ...],
    tiers: tuple[str, ...],
    case_ids: tuple[str, ...],
    expressions: tuple[str, ...],
    device: str,
    root: str | None,
) -> int:
    """Check that every stored golden is intact and that none is missing for the given tiers (all by default)."""
    project = find_project(root)
    troubles = _damaged(project)
    for text in troubles:
        click.echo(text)
    cases = _cases(project, Query(sources=(*sources, *tiers), case_ids=case_ids, expressions=expressions))
    missing = () if troubles else make_briefs(project, cases, hardware=hardware(resolve_device(device))).missing_goldens
    for family in missing:
        click.echo(f"missing: {family}")
    click.echo(f"{len(list_goldens(project.root))} goldens, {len(troubles)} damaged, {len(missing)} missing")
    return ExitCode.FAILED if troubles or missing else ExitCode.GOOD


@golden.command("update", epilog=_UPDATE_EPILOG)
@query_options
@click.option("--family", "families", metavar="FAMILY", multiple=True, help="Only this family; may be repeated.")
@click.option("--missing", is_flag=True, help="Only families that have no golden yet.")
@click.option("--reason", metavar="TEXT", help="Why the goldens change; stored with them. Required.")
@click.option("--dry-run", is_flag=True, help="Run and compare, store nothing.")
@plan_options
@root_option
def update_command(  # noqa: PLR0913  one parameter an option
    *,
    sources: tuple[str, ...],
    tiers: tuple[str, ...],
    case_ids: tuple[str, ...],
    expressions: tuple[str, ...],
    families: tuple[str, ...],
    missing: bool,
    reason: str | None,
    dry_run: bool,
    device: str,
    engine: EngineKind,
    jobs: int,
    slots: int | None,
    timeout_s: float | None,
    root: str | None,
) -> int:
    """Run the BF16 reference of each family and store it; shows old and new values. Needs a reason."""
    if not reason or not reason.strip():
        raise HarnessError(
            "goldens are not changed without a reason.",
            where="golden update",
            fix='add --reason "why they change".',
        )
    project = find_project(root)
    plan = make_plan(device=device, engine=engine, jobs=jobs, slots=slots, timeout_s=timeout_s)
    cases = _cases(project, Query(sources=(*sources, *tiers), case_ids=case_ids, expressions=expressions))
    references = _wanted(project, needed_references(cases), families, hardware(plan.device), missing=missing)
    with open_progress(sys.stderr, quiet=False, verbose=False) as progress:
        made = make_goldens(
            project, references, plan, progress, reason=reason, command=shlex.join(["fp8-harness", *sys.argv[1:]])
        )
    for change in made.changes:
        _show_change(change)
        if not dry_run:
            write_golden(project.root, change.new)
    for result in made.failed:
        click.echo(f"\n{case_block(result)}")
    stored = "not stored (--dry-run)" if dry_run else "stored"
    click.echo(f"\n{len(made.changes)} goldens {stored}, {len(made.failed)} references failed")
    if made.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED if made.failed else ExitCode.GOOD


def _cases(project: Project, query: Query) -> tuple[Case, ...]:
    """The cases of a query; those of every tier when it names none."""
    if not query.sources and not query.case_ids:
        query = Query(sources=project.tiers, expressions=query.expressions)
    return select_cases(project, query)


def _wanted(
    project: Project, references: tuple[Case, ...], families: tuple[str, ...], hardware_name: str, *, missing: bool
) -> tuple[Case, ...]:
    """The references of the named families, or of all; with `missing` those without a golden."""
    by_family = {family_id(case): case for case in references}
    unknown = [family for family in families if family not in by_family]
    if unknown:
        raise HarnessError(
            "no case of the given tiers belongs to this family.",
            where=f"--family {unknown[0]}",
            fix="name the tier or file of its cases, or see `fp8-harness explain CASE` for a family.",
        )
    stored = {key.family for key in list_goldens(project.root) if key.hardware == hardware_name}
    chosen = tuple(
        case
        for family, case in by_family.items()
        if (not families or family in families) and not (missing and family in stored)
    )
    if not chosen:
        raise NothingSelected("no golden is missing.", where="golden update --missing")
    return chosen


def _damaged(project: Project) -> list[str]:
    troubles = []
    for key in list_goldens(project.root):
        try:
            load_golden(project.root, key.hardware, key.family)
        except HarnessError as error:
            troubles.append(error.text)
    return troubles


def _show_change(change: GoldenChange) -> None:
    """The table of old and new losses of one family."""
    click.echo(f"\n{change.new.family} on {change.new.hardware}: {_summary(change.old, change.new)}")
    if change.old_trouble:
        click.echo(f"  replaces a damaged golden: {change.old_trouble}")
    click.echo("  step     old loss     new loss       change     old norm     new norm")
    for row in compare_goldens(change.old, change.new):
        numbers = (row.old_loss, row.new_loss, row.loss_change, row.old_grad_norm, row.new_grad_norm)
        click.echo(f"  {row.step:>4} " + " ".join(_number(value) for value in numbers))


def _summary(old: Golden | None, new: Golden) -> str:
    if old is None:
        return "new"
    same = (old.losses, old.grad_norms, old.data_digest) == (new.losses, new.grad_norms, new.data_digest)
    data = "" if old.data_digest == new.data_digest else ", other data"
    return "unchanged" if same else f"changed{data}"


def _number(value: float | None) -> str:
    if value is None:
        return f"{'-':>12}"
    return f"{value:>12.6f}" if math.isfinite(value) else f"{value!s:>12}"
