"""`fp8-harness golden list | show | check | update`."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from harness.cli.options import plan_parameter, query_parameter, root_option
from harness.errors import HarnessError
from harness.evidence.golden import (
    Golden,
    Provenance,
    changed_files,
    compare_goldens,
    list_goldens,
    load_golden,
    write_golden,
)
from harness.hints import list_goldens as stored_goldens
from harness.matrix.case import Case
from harness.matrix.caseid import family_id
from harness.plural import counted
from harness.project import Project, find_project
from harness.report.text import case_block
from harness.running.case_judge import prepare_judge
from harness.running.machine import hardware, resolve_device
from harness.running.plan import Plan
from harness.running.progress import open_progress
from harness.running.selection import NothingSelected, Query, select_cases
from harness.studies.references import GoldenChange, LargestChange, largest_change, make_goldens, needed_references
from harness.verdict import ExitCode

_NAMED_FILES = 5  # of those that differ from the commit

_UPDATE_EPILOG = """\b
Examples:
  fp8-harness golden update pr --missing --reason "first goldens of tier pr"
  fp8-harness golden update pr --family tiny-v2048-s5-gb8-sl32-lr0.001-seed0 --reason "torch 2.14 changed AdamW"
  fp8-harness golden update --case single-bf16-v2048-b16 --reason "torch 2.14 changed AdamW"
  fp8-harness golden update smoke --dry-run --reason "compare only"
"""


@click.group(epilog="\b\nExamples:\n  fp8-harness golden list\n  fp8-harness golden check pr")
def golden() -> None:
    """Manage the stored BF16 references that losses are compared with."""


@golden.command("list", epilog="\b\nExample:\n  fp8-harness golden list")
@root_option
def list_command(root: str | None) -> None:
    """List the hardware class and family of all stored goldens."""
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
        "cpu": source.cpu or "not recorded",
        "limits": source.limits or "none",
        **source.software,
    }
    for name, value in facts.items():
        click.echo(f"{name:<9} {value}")
    click.echo("\nstep  loss                    grad norm")
    for step, (loss, norm) in enumerate(zip(shown.losses, shown.grad_norms, strict=True), 1):
        click.echo(f"{step:>4}  {loss!r:<22}  {norm!r}")


@golden.command("check", epilog="\b\nExamples:\n  fp8-harness golden check\n  fp8-harness golden check pr nightly")
@query_parameter
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@root_option
def check_command(*, query: Query, device: str, root: str | None) -> int:
    """Check that no stored golden is damaged, and that none is missing for the given tiers (default: all tiers)."""
    project = find_project(root)
    errors = _damage(project)
    for text in errors:
        click.echo(text)
    cases = asked_cases(project, query)
    missing = () if errors else prepare_judge(project, cases, hardware=hardware(resolve_device(device))).missing_goldens
    for family in missing:
        click.echo(f"missing: {family}")
    stored = counted(len(list_goldens(project.root)), "golden")
    click.echo(f"{stored}, {len(errors)} damaged, {len(missing)} missing")
    return ExitCode.FAILED if errors or missing else ExitCode.GOOD


@golden.command("update", epilog=_UPDATE_EPILOG)
@query_parameter
@click.option("--family", "families", metavar="FAMILY", multiple=True, help="Only this family. Repeatable.")
@click.option("--missing", is_flag=True, help="Only families without a golden.")
@click.option("--reason", metavar="TEXT", help="Why the goldens change; stored with them. Required.")
@click.option("--dry-run", is_flag=True, help="Run and compare, but store nothing.")
@plan_parameter
@root_option
def update_command(  # noqa: PLR0913  one parameter per option
    *,
    query: Query,
    families: tuple[str, ...],
    missing: bool,
    reason: str | None,
    dry_run: bool,
    plan_for: Callable[..., Plan],
    root: str | None,
) -> int:
    """Run the BF16 reference of every family, show old and new values, and store the new ones."""
    if not reason or not reason.strip():
        raise HarnessError(
            "--reason is missing.",
            where="golden update",
            fix='add --reason "why the goldens change".',
        )
    project = find_project(root)
    if not dry_run:
        project.check_writable()
    plan = plan_for()
    references = needed_references(asked_cases(project, query))
    references = _chosen(project, references, families, hardware(plan.device), missing=missing)
    if not dry_run:
        warn_of_changed_files(project, "goldens")
    with open_progress(sys.stderr, quiet=False, verbose=False) as progress:
        made = make_goldens(
            project, references, plan, progress, reason=reason, command=shlex.join(["fp8-harness", *sys.argv[1:]])
        )
    for change in made.changes:
        _show_change(change, project.root)
        if not dry_run:
            click.echo(f"  stored in {write_golden(project.root, change.new)}")
    for result in made.failed:
        click.echo(f"\n{case_block(result)}")
    stored = "not stored (--dry-run)" if dry_run else "stored"
    failed = counted(len(made.failed), "reference")
    click.echo(f"\n{counted(len(made.changes), 'golden')} {stored}, {failed} failed")
    if made.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED if made.failed else ExitCode.GOOD


def warn_of_changed_files(project: Project, made: str) -> None:
    """Say before the run that nobody will be able to check out what the goldens were made from."""
    changed = changed_files(project.root)
    if not changed:
        return
    more = f" and {len(changed) - _NAMED_FILES} more" if len(changed) > _NAMED_FILES else ""
    names = ", ".join(changed[:_NAMED_FILES]) + more
    differ = "differs" if len(changed) == 1 else "differ"
    click.echo(
        f"fp8-harness: warning: {project.root}: {counted(len(changed), 'tracked file')} {differ} from the commit: "
        f'{names}. The provenance of these {made} will end in "-dirty", and nobody can check out what made them. '
        f"Fix: press Ctrl-C, commit the changes or put them aside by `{_stash(project)}`, and run this again.",
        err=True,
    )


def _stash(project: Project) -> str:
    return shlex.join(["git", "-C", str(project.root), "stash"])


def asked_cases(project: Project, query: Query) -> tuple[Case, ...]:
    """The cases of a query; those of all tiers if it names none."""
    if not query.sources and not query.case_ids:
        query = msgspec.structs.replace(query, sources=project.tiers)
    return select_cases(project, query)


def _chosen(
    project: Project, references: tuple[Case, ...], families: tuple[str, ...], hardware_name: str, *, missing: bool
) -> tuple[Case, ...]:
    """The references of the given families, or of all; with `missing`, only those without a golden."""
    by_family = {family_id(case): case for case in references}
    unknown = [family for family in families if family not in by_family]
    if unknown:
        raise HarnessError(
            "no selected case belongs to this family.",
            where=f"--family {unknown[0]}",
            fix=f"add the tier or file of its cases; `{stored_goldens()}` shows the stored families.",
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


def _damage(project: Project) -> list[str]:
    """What is wrong with each damaged golden."""
    errors = []
    for key in list_goldens(project.root):
        try:
            load_golden(project.root, key.hardware, key.family)
        except HarnessError as error:
            errors.append(error.text)
    return errors


def _show_change(change: GoldenChange, root: Path) -> None:
    """Print the old and new losses of one family, and whether noise explains their distance."""
    summary = _summary(change.old, change.new)
    noise = _noise(largest_change(change, root)) if summary == "changed" else ""
    click.echo(f"\n{change.new.family} on {change.new.hardware}: {summary}{noise}")
    if change.old is not None and summary != "unchanged":
        _show_machines(change.old.provenance, change.new.provenance)
    if change.old_error:
        click.echo(f"  replaces a damaged golden: {change.old_error}")
    click.echo("  step     old loss     new loss       change     old norm     new norm")
    for row in compare_goldens(change.old, change.new):
        numbers = (row.old_loss, row.new_loss, row.loss_change, row.old_grad_norm, row.new_grad_norm)
        click.echo(f"  {row.step:>4} " + " ".join(_number(value) for value in numbers))


def _noise(found: LargestChange | None) -> str:
    if found is None:
        return ", and no noise was measured for it"
    words = "within noise" if found.explains else "beyond noise"
    return f", {words}: {found.change:.1e} of {found.allowed:.1e} nats allowed at step {found.step}"


def _show_machines(old: Provenance, new: Provenance) -> None:
    """Print what computed the old and the new one, where it is known and differs."""
    unknown = "none" if old.cpu else "not recorded"
    for name, before, now in (("CPU", old.cpu, new.cpu), ("limits", old.limits, new.limits)):
        if before != now:
            click.echo(f"  {name}: {before or unknown} -> {now or 'none'}")


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
