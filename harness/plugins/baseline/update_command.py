"""`fp8-harness baseline update`: goldens, or the profiles of runs of the user's own targets."""

from collections.abc import Callable, Collection, Sequence

import click
import msgspec

from harness.checks.loss_vs_golden import check_loss_vs_golden
from harness.cli import options
from harness.cli.recording import check_committed, require_reason
from harness.errors import HarnessError
from harness.evidence.golden import GoldenChange, replaced, stored_families, write_golden
from harness.evidence.profile import compare_profiles, list_profiles, needs_profile, write_profile
from harness.hints import LIST_BASELINES
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, family_id
from harness.plugins.baseline.review import golden_section, review_sections
from harness.project import Project
from harness.report.case import case_section
from harness.result import CaseResult
from harness.running.identity import check_targets
from harness.running.plan import Plan
from harness.running.selection import NothingSelected, Query, select_cases
from harness.running.stored import results_of
from harness.studies.records import ProfileChange, References, make_goldens, needed_references, record_profiles
from harness.text import counted, format_ranks
from harness.verdict import ExitCode

_SHOWN_CHANGES = 40  # of one profile: more are in the file

_EPILOG = """\b
Examples:
  fp8-harness baseline update pr --missing --reason "first goldens of tier pr"
  fp8-harness baseline update pr \\
      --family tiny-v2048-s5-gb8-sl32-lr0.001-seed0 \\
      --reason "torch 2.14 changed AdamW"
  fp8-harness baseline update --only-failing \\
      --reason "torch 2.14 changed AdamW"
  fp8-harness baseline update my.toml --profiles --missing \\
      --reason "first profiles"
"""


@click.command("update", epilog=_EPILOG)
@options.query_parameter("expressions", "target")
@click.option("--profiles", is_flag=True, help="Record profiles of your own targets in place of goldens.")
@click.option("--family", "families", metavar="FAMILY", multiple=True, help="Only this family. Repeatable.")
@click.option("--missing", is_flag=True, help="Only what is not stored.")
@click.option("--only-failing", is_flag=True, help="Only families of cases whose loss failed in the last run.")
@click.option("--hardware", "hardware_name", metavar="CLASS", help="Store for this class of hardware, such as sm90.")
@click.option("--reason", metavar="TEXT", help="Why they change; stored with them. Required.")
@click.option("--dry-run", is_flag=True, help="Run and compare, but store nothing.")
@options.allow_dirty_option
@options.plan_parameter
@options.project_parameter
def update_command(  # noqa: PLR0913  one parameter per option
    *,
    query: Query,
    profiles: bool,
    families: tuple[str, ...],
    missing: bool,
    only_failing: bool,
    hardware_name: str | None,
    reason: str | None,
    dry_run: bool,
    allow_dirty: bool,
    plan_for: Callable[..., Plan],
    project: Project,
) -> int:
    """Run the BF16 reference of every family, show old and new values, and store the new ones.

    With --profiles: run the cases, show what changed, and store their profiles. A case that fails a check is not
    stored.
    """
    baselines = "profiles" if profiles else "goldens"
    reason = require_reason(reason, "baseline update", baselines)
    if profiles and (families or only_failing or hardware_name):
        raise click.UsageError("--family, --only-failing and --hardware are for goldens.")
    if not dry_run:
        project.check_writable()
        check_committed(project, baselines, allowed=allow_dirty)
    plan = plan_for()
    if profiles:
        return _update_profiles(project, query, plan, reason, missing=missing, dry_run=dry_run)
    if only_failing:
        query = failing_losses(project, query)
    wanted = _wanted(project, plan, asked_cases(project, query), families, hardware_name, missing=missing)
    every = [reference for _, references in wanted for reference in references]
    here = with_target_here(project, every, named=bool(query.sources or families))
    made = References()
    with options.open_progress() as progress:
        for own, references in wanted:
            able = [reference for reference in references if reference in here]
            if able and not made.interrupted:
                more = make_goldens(project, able, own, progress, reason=reason, command=options.typed_command())
                made = made.and_also(more)
    as_named = {} if hardware_name is None else {"hardware": hardware_name}
    changes = [replaced(project.root, msgspec.structs.replace(golden, **as_named)) for golden in made.goldens]
    for change in changes:
        click.echo()
        _store(project, change, dry_run=dry_run, kept=only_failing and change.kind == "unchanged")
    code = ended(made.failed, interrupted=made.interrupted)
    review = review_sections(changes, project.root)
    if review and not dry_run:
        click.echo("\nFor the message of the commit:\n")
        options.print_sections(review)
    failed = counted(len(made.failed), "reference")
    click.echo(f"\n{counted(len(changes), 'golden')} {_stored_or_not(dry_run=dry_run)}, {failed} failed")
    return code


def _store(project: Project, change: GoldenChange, *, dry_run: bool, kept: bool = False) -> None:
    """Print how a golden changes, and store it."""
    options.print_sections([golden_section(change, project.root)])
    if not dry_run:
        done = "kept: this golden is not why a loss is off" if kept else None
        click.echo(f"  {done or f'stored in {write_golden(project.root, change.new)}'}")


def with_target_here(project: Project, references: Sequence[Case], *, named: bool) -> tuple[Case, ...]:
    """Return the references whose target is installed. Others are left out; a `named` one raises HarnessError."""
    absent = set[str]()
    for target in dict.fromkeys(case.target for case in references):
        try:
            check_targets([target], project.root)
        except HarnessError as error:
            if named:
                raise
            absent.add(target)
            left_out = counted(sum(case.target == target for case in references), "golden")
            click.echo(f"fp8-harness: {left_out} left out: {error}", err=True)
    if references and all(case.target in absent for case in references):
        raise NothingSelected("no golden is missing that can be made here.", where="baseline update")
    return tuple(case for case in references if case.target not in absent)


def _update_profiles(
    project: Project, query: Query, plan: Plan, reason: str, *, missing: bool, dry_run: bool
) -> ExitCode:
    plan = plan.on_cpu
    if plan.device != "cpu":
        fix = "add --device cpu."
        raise HarnessError("profiles are recorded on the virtual device.", where=f"device {plan.device}", fix=fix)
    cases = [case for case in asked_cases(project, query) if needs_profile(case)]
    if not cases:
        fix = "select cases with a target of your own, or add --target my_pkg.my_target."
        raise NothingSelected("formulas describe the models of all these cases.", where="baseline update", fix=fix)
    stored = {*list_profiles(project.root), *list_profiles(project.shipped)} if missing else set()
    cases = [case for case in cases if case_id(case) not in stored]
    if not cases:
        raise NothingSelected("no profile is missing.", where="baseline update --missing")
    with options.open_progress() as progress:
        made = record_profiles(project, tuple(cases), plan, progress, reason=reason, command=options.typed_command())
    for change in made.changes:
        _show_change(change)
        if not dry_run:
            click.echo(f"  stored in {write_profile(project.root, change.new)}")
    code = ended(made.failed, interrupted=made.interrupted)
    failed = counted(len(made.failed), "case")
    click.echo(f"\n{counted(len(made.changes), 'profile')} {_stored_or_not(dry_run=dry_run)}, {failed} failed")
    return code


def ended(failed: Sequence[CaseResult], *, interrupted: bool) -> ExitCode:
    """Print what failed. Returns the exit code."""
    for result in failed:
        click.echo()
        options.print_sections([case_section(result)])
    return ExitCode.INTERRUPTED if interrupted else ExitCode.FAILED if failed else ExitCode.GOOD


def _stored_or_not(*, dry_run: bool) -> str:
    return "not stored (--dry-run)" if dry_run else "stored"


def _show_change(change: ProfileChange) -> None:
    """Print what ranks do otherwise than the stored profile says."""
    changed = () if change.old is None else compare_profiles(change.old, change.new)
    summary = "new" if change.old is None else "changed" if changed else "unchanged"
    click.echo(f"\n{change.new.case_id}: {summary}")
    if change.old_error:
        click.echo(f"  replaces a damaged profile: {change.old_error}")
    for difference in changed[:_SHOWN_CHANGES]:
        values = f"{difference.old or 'none'} -> {difference.new or 'none'}"
        click.echo(f"  {difference.step}, {format_ranks(difference.ranks)}: {difference.what}: {values}")
    if len(changed) > _SHOWN_CHANGES:
        click.echo(f"  and {len(changed) - _SHOWN_CHANGES} more")


def failing_losses(project: Project, query: Query) -> Query:
    """Return the query, narrowed to cases whose loss was off in the last run. Raises `NothingSelected` without any."""
    cases = results_of(project, "last").results
    failing = {
        case.case_id
        for case in cases
        if not case.good and any(finding.check == check_loss_vs_golden.name for finding in case.findings)
    }
    if query.sources:
        failing &= {case_id(case) for case in select_cases(project, query)}
    if not failing:
        raise NothingSelected("no loss was off in the last run.", where="baseline update --only-failing")
    return msgspec.structs.replace(query, sources=tuple(sorted(failing)))


def asked_cases(project: Project, query: Query) -> tuple[Case, ...]:
    return select_cases(project, query if query.sources else msgspec.structs.replace(query, sources=project.own_tiers))


def _classes(plan: Plan, name: str | None) -> tuple[str, ...]:
    classes = plan.hardware
    if name is not None and name not in classes:
        fix = f"give one of {', '.join(classes)}."
        raise HarnessError("no class of this device.", where=f"--hardware {name}", fix=fix)
    return classes if name is None else classes[classes.index(name) :]


def _wanted(
    project: Project,
    plan: Plan,
    cases: Sequence[Case],
    families: Collection[str],
    hardware_name: str | None,
    *,
    missing: bool,
) -> list[tuple[Plan, list[Case]]]:
    """Return the references of the given families, or of all, on every device that their cases run on.

    With `missing`, those without a golden of its class. A class by name is one of the GPUs where there are two devices.
    """
    known = {family_id(case) for case in needed_references(cases)}
    for family in families:
        if family not in known:
            fix = f"add the tier or file of its cases; `{LIST_BASELINES}` shows the stored families."
            raise HarnessError("no selected case belongs to this family.", where=f"--family {family}", fix=fix)
    wanted: list[tuple[Plan, list[Case]]] = []
    for own, its in plan.by_device(cases) if hardware_name is None else [(plan.on_gpus, cases)]:
        classes = _classes(own, hardware_name)
        stored = stored_families(project.root, classes) if missing else set()
        by_family = {family_id(case): case for case in needed_references(its)}
        wanted.append((own, [by_family[name] for name in by_family if name in ({*families} or known) - stored]))
    if not any(references for _, references in wanted):
        raise NothingSelected("no golden is missing.", where="baseline update --missing")
    return wanted
