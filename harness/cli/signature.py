"""`fp8-harness signature list | check | update`."""

from __future__ import annotations

from collections.abc import Callable

import click

from harness.cli.golden import asked_cases, check_committed, require_reason
from harness.cli.options import allow_dirty_option, plan_parameter, query_parameter, root_option, typed_command
from harness.cli.output import print_sections
from harness.errors import HarnessError
from harness.evidence.signature import (
    Signature,
    compare_signatures,
    list_signatures,
    load_signature,
    needs_signature,
    write_signature,
)
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.plural import counted
from harness.project import Project, find_project
from harness.report.case import case_section
from harness.running.plan import Plan
from harness.running.progress import open_progress
from harness.running.selection import NothingSelected, Query
from harness.sentence import format_ranks
from harness.sources import installed_version
from harness.studies.records import SignatureChange, record_signatures
from harness.verdict import ExitCode

_SHOWN_CHANGES = 40  # of one signature: more are in the file

_UPDATE_EPILOG = """\b
Examples:
  fp8-harness signature update my.toml --missing --reason "first signatures"
  fp8-harness signature update my.toml --select tp=4 --reason "the norms are gathered once"
  fp8-harness signature update pr --target my_pkg.my_target --dry-run --reason "compare only"
"""


@click.group(epilog="\b\nExamples:\n  fp8-harness signature list\n  fp8-harness signature check my.toml")
def signature() -> None:
    """Manage records of what runs of your own targets send, multiply, keep and fuse.

    The built-in Llamas have formulas for these. Runs of any other model are compared with the signature of their case.
    """


@signature.command("list", epilog="\b\nExample:\n  fp8-harness signature list")
@root_option
def list_command(root: str | None) -> None:
    """List the cases of all recorded signatures, when and with which torch each was recorded, and why."""
    project = find_project(root)
    for name in list_signatures(project.root):
        source = load_signature(project.root, name).provenance
        click.echo(f"{name}  {source.created[:10]}  torch {source.software.get('torch', '?')}  {source.reason}")


@signature.command(
    "check", epilog="\b\nExamples:\n  fp8-harness signature check\n  fp8-harness signature check my.toml"
)
@query_parameter
@root_option
def check_command(*, query: Query, root: str | None) -> int:
    """Check that no signature is damaged, and that each given case has one for these versions (default: all tiers)."""
    project = find_project(root)
    sound, errors = _stored(project)
    software = {name: version for name in ("torch", "torchao") if (version := installed_version(name)) is not None}
    names = [case_id(case) for case in asked_cases(project, query) if needs_signature(case)]
    missing = [name for name in names if name not in list_signatures(project.root)]
    old = {name: gap for name in names if name in sound and (gap := sound[name].version_gap(software)) is not None}
    lines = (*errors, *(f"missing: {name}" for name in missing), *(f"{name}: {gap}" for name, gap in old.items()))
    for line in lines:
        click.echo(line)
    stored = counted(len(sound) + len(errors), "signature")
    click.echo(f"{stored}, {len(errors)} damaged, {len(missing)} missing, {len(old)} of other versions")
    return ExitCode.FAILED if lines else ExitCode.GOOD


@signature.command("update", epilog=_UPDATE_EPILOG)
@query_parameter
@click.option("--missing", is_flag=True, help="Only cases without a signature.")
@click.option("--reason", metavar="TEXT", help="Why the signatures change; stored with them. Required.")
@click.option("--dry-run", is_flag=True, help="Run and compare, but store nothing.")
@allow_dirty_option
@plan_parameter
@root_option
def update_command(  # noqa: PLR0913  one parameter an option
    *,
    query: Query,
    missing: bool,
    reason: str | None,
    dry_run: bool,
    allow_dirty: bool,
    plan_for: Callable[..., Plan],
    root: str | None,
) -> int:
    """Run the cases, show what changed, and store their signatures. A case that fails a check is not stored."""
    reason = require_reason(reason, "signature update", "signatures")
    project, plan = find_project(root), plan_for()
    if plan.device != "cpu":
        fix = "add --device cpu."
        raise HarnessError("signatures are recorded on the virtual device.", where=f"device {plan.device}", fix=fix)
    cases = _chosen(project, query, missing=missing)
    if not dry_run:
        project.check_writable()
        check_committed(project, "signatures", allowed=allow_dirty)
    with open_progress() as progress:
        made = record_signatures(project, cases, plan, progress, reason=reason, command=typed_command())
    for change in made.changes:
        _show_change(change)
        if not dry_run:
            click.echo(f"  stored in {write_signature(project.root, change.new)}")
    for result in made.failed:
        click.echo()
        print_sections([case_section(result)])
    stored = "not stored (--dry-run)" if dry_run else "stored"
    click.echo(f"\n{counted(len(made.changes), 'signature')} {stored}, {counted(len(made.failed), 'case')} failed")
    if made.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED if made.failed else ExitCode.GOOD


def _chosen(project: Project, query: Query, *, missing: bool) -> tuple[Case, ...]:
    """The given cases that need a signature; with `missing`, only those without one."""
    cases = [case for case in asked_cases(project, query) if needs_signature(case)]
    if not cases:
        fix = "select cases with a target of your own, or add --target my_pkg.my_target."
        raise NothingSelected("formulas describe the models of all these cases.", where="signature update", fix=fix)
    stored = list_signatures(project.root) if missing else ()
    chosen = tuple(case for case in cases if case_id(case) not in stored)
    if not chosen:
        raise NothingSelected("no signature is missing.", where="signature update --missing")
    return chosen


def _stored(project: Project) -> tuple[dict[str, Signature], list[str]]:
    """The signatures by case, and what is wrong with each damaged one."""
    sound, errors = {}, []
    for name in list_signatures(project.root):
        try:
            sound[name] = load_signature(project.root, name)
        except HarnessError as error:
            errors.append(error.text)
    return sound, errors


def _show_change(change: SignatureChange) -> None:
    """Print what ranks do otherwise than the stored signature says."""
    changed = () if change.old is None else compare_signatures(change.old, change.new)
    summary = "new" if change.old is None else "changed" if changed else "unchanged"
    click.echo(f"\n{change.new.case_id}: {summary}")
    if change.old_error:
        click.echo(f"  replaces a damaged signature: {change.old_error}")
    for each in changed[:_SHOWN_CHANGES]:
        values = f"{each.old or 'none'} -> {each.new or 'none'}"
        click.echo(f"  {each.step}, {format_ranks(each.ranks)}: {each.what}: {values}")
    if len(changed) > _SHOWN_CHANGES:
        click.echo(f"  and {len(changed) - _SHOWN_CHANGES} more")
