"""`fp8-harness golden list | show | check | diff | update`."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import click
import msgspec

from harness.checks import loss_vs_golden
from harness.cli.options import allow_dirty_option, plan_parameter, query_parameter, root_option, typed_command
from harness.cli.output import print_sections
from harness.engine.hardware import Capacity, capacity_here
from harness.errors import HarnessError
from harness.evidence.golden import (
    Golden,
    GoldenChange,
    changes_between,
    list_goldens,
    load_golden,
    replaced,
    unsound,
    write_golden,
)
from harness.evidence.tree import changed_files, goldens_of
from harness.hints import list_goldens as stored_goldens
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, family_id
from harness.plural import counted
from harness.project import Project, find_project
from harness.report.case import case_section
from harness.report.evidence import golden_section, review_sections
from harness.running.case_judge import prepare_judge
from harness.running.machine import resolve_device
from harness.running.plan import Plan
from harness.running.progress import open_progress
from harness.running.selection import NothingSelected, Query, select_cases
from harness.running.stored import results_of
from harness.studies.records import make_goldens, needed_references
from harness.verdict import ExitCode

_NAMED_FILES = 5  # of those that differ from the commit

_UPDATE_EPILOG = """\b
Examples:
  fp8-harness golden update pr --missing --reason "first goldens of tier pr"
  fp8-harness golden update pr --family tiny-v2048-s5-gb8-sl32-lr0.001-seed0 --reason "torch 2.14 changed AdamW"
  fp8-harness golden update --case single-bf16-v2048-b16 --reason "torch 2.14 changed AdamW"
  fp8-harness golden update smoke --dry-run --reason "compare only"
  fp8-harness golden update --only-failing --reason "torch 2.14 changed AdamW"
"""

_DIFF_EPILOG = """\b
Examples:
  fp8-harness golden diff                          what is not committed yet
  fp8-harness golden diff --against origin/main    what a branch changes
  fp8-harness golden diff --against ../release-1   what another project has
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
    """Check that every stored golden is sound, and that none is missing for the given tiers (default: all tiers).

    Sound: its digest, schema, name and numbers are right, and its provenance says where it comes from. `verify` is
    another name of this command.
    """
    project = find_project(root)
    sound, errors = _stored(project)
    for text in errors:
        click.echo(text)
    cases = asked_cases(project, query)
    here = Plan(capacity=Capacity(nodes=(capacity_here(resolve_device(device)),)))
    missing = () if errors else prepare_judge(project, cases, here).missing_goldens
    for family in missing:
        click.echo(f"missing: {family}")
    changed = sum(each.provenance.commit.endswith("-dirty") for each in sound)
    if changed:
        click.echo(f"made from trees that differed from their commit: {changed}")
    stored = counted(len(sound) + len(errors), "golden")
    click.echo(f"{stored}, {len(errors)} damaged, {len(missing)} missing")
    return ExitCode.FAILED if errors or missing else ExitCode.GOOD


golden.add_command(check_command, "verify")


@golden.command("diff", epilog=_DIFF_EPILOG)
@click.option(
    "--against",
    default="HEAD",
    show_default=True,
    metavar="REV|ROOT",
    help="The git revision or project root to compare with.",
)
@root_option
def diff_command(against: str, root: str | None) -> None:
    """Show how the stored goldens differ from those of a git revision or of another project root."""
    project = find_project(root)
    with goldens_of(project.root, against) as other:
        changes, gone = changes_between(other, project.root)
    for change in changes:
        if change.kind != "unchanged":
            print_sections([golden_section(change, project.root)])
            click.echo()
    print_sections(review_sections(changes, project.root, gone=gone))
    same = sum(change.kind == "unchanged" for change in changes)
    click.echo(f"{counted(same, 'golden')} unchanged against {against}")


@golden.command("update", epilog=_UPDATE_EPILOG)
@query_parameter
@click.option("--family", "families", metavar="FAMILY", multiple=True, help="Only this family. Repeatable.")
@click.option("--missing", is_flag=True, help="Only families without a golden.")
@click.option("--only-failing", is_flag=True, help="Only families of cases whose loss failed in the last run.")
@click.option("--hardware", "hardware_name", metavar="CLASS", help="Store for this class of hardware, such as sm90.")
@click.option("--reason", metavar="TEXT", help="Why the goldens change; stored with them. Required.")
@click.option("--dry-run", is_flag=True, help="Run and compare, but store nothing.")
@allow_dirty_option
@plan_parameter
@root_option
def update_command(  # noqa: PLR0913  one parameter per option
    *,
    query: Query,
    families: tuple[str, ...],
    missing: bool,
    only_failing: bool,
    hardware_name: str | None,
    reason: str | None,
    dry_run: bool,
    allow_dirty: bool,
    plan_for: Callable[..., Plan],
    root: str | None,
) -> int:
    """Run the BF16 reference of every family, show old and new values, and store the new ones."""
    reason = require_reason(reason, "golden update", "goldens")
    project = find_project(root)
    if not dry_run:
        project.check_writable()
        check_committed(project, "goldens", allowed=allow_dirty)
    plan = plan_for()
    classes = _classes(plan, hardware_name)
    if only_failing:
        query = failing_losses(project, query)
    references = needed_references(asked_cases(project, query))
    references = _chosen(project, references, families, classes, missing=missing)
    with open_progress() as progress:
        made = make_goldens(project, references, plan, progress, reason=reason, command=typed_command())
    as_named = {} if hardware_name is None else {"hardware": hardware_name}
    changes = [replaced(project.root, msgspec.structs.replace(each, **as_named)) for each in made.goldens]
    for change in changes:
        click.echo()
        print_sections([golden_section(change, project.root)])
        if not dry_run:
            click.echo(f"  {_store(project, change, only_changed=only_failing)}")
    for result in made.failed:
        click.echo()
        print_sections([case_section(result)])
    review = review_sections(changes, project.root)
    if review and not dry_run:
        click.echo("\nFor the message of the commit:\n")
        print_sections(review)
    stored = "not stored (--dry-run)" if dry_run else "stored"
    failed = counted(len(made.failed), "reference")
    click.echo(f"\n{counted(len(changes), 'golden')} {stored}, {failed} failed")
    if made.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED if made.failed else ExitCode.GOOD


def _store(project: Project, change: GoldenChange, *, only_changed: bool) -> str:
    """Store the new golden, and say where; or say that it is the stored one."""
    if only_changed and change.kind == "unchanged":
        return "kept: this golden is not why a loss is off"
    return f"stored in {write_golden(project.root, change.new)}"


def require_reason(reason: str | None, where: str, made: str) -> str:
    """The given reason. Raises `HarnessError` before the run where there is none."""
    if not reason or not reason.strip():
        raise HarnessError("--reason is missing.", where=where, fix=f'add --reason "why the {made} change".')
    return reason


def check_committed(project: Project, made: str, *, allowed: bool) -> None:
    """Raise `HarnessError` before the run if the tree differs from its commit; only warn if `allowed`."""
    changed = changed_files(project.root)
    if not changed:
        return
    more = f" and {len(changed) - _NAMED_FILES} more" if len(changed) > _NAMED_FILES else ""
    names = ", ".join(changed[:_NAMED_FILES]) + more
    differ = "differs" if len(changed) == 1 else "differ"
    what = f"{counted(len(changed), 'tracked file')} {differ} from the commit: {names}."
    why = f"nobody can check out what made these {made}"
    if not allowed:
        stash = shlex.join(["git", "-C", str(project.root), "stash"])
        fix = f"commit the changes, put them aside by `{stash}`, or give --allow-dirty."
        raise HarnessError(f"{what} So {why}.", where=str(project.root), fix=fix)
    click.echo(f'fp8-harness: warning: {project.root}: {what} The provenance ends in "-dirty": {why}.', err=True)


def failing_losses(project: Project, query: Query) -> Query:
    """The query, narrowed to the cases whose loss was off in the last run. Raises `NothingSelected` without any."""
    cases = results_of(project, "last").results
    failing = {
        case.case_id
        for case in cases
        if not case.good and any(finding.check == loss_vs_golden.NAME for finding in case.findings)
    }
    if query.sources or query.case_ids:
        failing &= {case_id(case) for case in select_cases(project, query)}
    if not failing:
        raise NothingSelected("no loss was off in the last run.", where="golden update --only-failing")
    return Query(case_ids=tuple(sorted(failing)), expressions=query.expressions)


def asked_cases(project: Project, query: Query) -> tuple[Case, ...]:
    """The cases of a query; those of all tiers if it names none."""
    if not query.sources and not query.case_ids:
        query = msgspec.structs.replace(query, sources=project.tiers)
    return select_cases(project, query)


def _classes(plan: Plan, name: str | None) -> tuple[str, ...]:
    """The hardware classes of this device from the one on that goldens are to be stored for."""
    classes = plan.hardware
    if name is not None and name not in classes:
        fix = f"give one of {', '.join(classes)}."
        raise HarnessError("no class of this device.", where=f"--hardware {name}", fix=fix)
    return classes if name is None else classes[classes.index(name) :]


def _chosen(
    project: Project,
    references: tuple[Case, ...],
    families: tuple[str, ...],
    classes: tuple[str, ...],
    *,
    missing: bool,
) -> tuple[Case, ...]:
    """The references of the given families, or of all; with `missing`, only those without a golden in these classes."""
    by_family = {family_id(case): case for case in references}
    unknown = [family for family in families if family not in by_family]
    if unknown:
        raise HarnessError(
            "no selected case belongs to this family.",
            where=f"--family {unknown[0]}",
            fix=f"add the tier or file of its cases; `{stored_goldens()}` shows the stored families.",
        )
    stored = {key.family for key in list_goldens(project.root) if key.hardware in classes}
    chosen = tuple(
        case
        for family, case in by_family.items()
        if (not families or family in families) and not (missing and family in stored)
    )
    if not chosen:
        raise NothingSelected("no golden is missing.", where="golden update --missing")
    return chosen


def _stored(project: Project) -> tuple[list[Golden], list[str]]:
    """The goldens that are sound, and what is wrong with each of the others."""
    sound, errors = [], []
    for key in list_goldens(project.root):
        try:
            found = load_golden(project.root, key.hardware, key.family)
        except HarnessError as error:
            errors.append(error.text)
            continue
        problem = unsound(found)
        if problem:
            errors.append(f"{key.family} on {key.hardware}: {problem}")
        else:
            sound.append(found)
    return sound, errors
