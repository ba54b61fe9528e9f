"""`fp8-harness baseline show | check | update | tolerance`: what later runs are checked by."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from harness.cli import options
from harness.cli.options import Group
from harness.errors import HarnessError
from harness.evidence.golden import Golden, changes_between, curve_text, goldens_of, list_goldens, load_golden, unsound
from harness.evidence.profile import Profile, list_profiles, load_profile, needs_profile
from harness.evidence.tolerance import CHECKS, Sample, fit, measured_steps, noise, read_evidence, write_evidence
from harness.hints import explain_case
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.plugins.baseline.review import golden_section, review_sections
from harness.plugins.baseline.update_command import asked_cases, ended, update_command
from harness.project import Project
from harness.report.sections import Entry, Facts, Section, Table
from harness.run_options import PlanOptions
from harness.running.case_judge import known_here, prepare_judge
from harness.running.plan import Plan, plan_without_ranks
from harness.running.selection import NothingSelected, Query, select_cases
from harness.sources import installed_version
from harness.studies.noise import environment, measure, measured_cases, over_seeds, recorded_cases
from harness.text import counted
from harness.verdict import ExitCode

Name = TypeVar("Name", str, tuple[str, str])
Loaded = TypeVar("Loaded")

_SHOW_EPILOG = """\b
Examples:
  fp8-harness baseline show                        goldens and profiles
  fp8-harness baseline show tiny-v2048-s5-gb8-sl32-lr0.001-seed0
  fp8-harness baseline show tiny-v2048-s5-gb8-sl32-lr0.001-seed0 \\
      --curve golden.txt
  fp8-harness baseline show --against origin/main  changes of a branch
"""
_TOLERANCE_EPILOG = """\b
Examples:
  fp8-harness baseline tolerance --margin 2
  fp8-harness baseline tolerance --measure pr --seeds 8 \\
      --select 'recipe=rowwise'
  ATEN_CPU_CAPABILITY=avx2 fp8-harness baseline tolerance --measure pr \\
      --references golden
"""


@click.group(cls=Group, epilog="\b\nExamples:\n  fp8-harness baseline show\n  fp8-harness baseline check pr")
def baseline() -> None:
    """Manage goldens, profiles and tolerances.

    A golden is a BF16 reference that losses are compared with. A profile records what runs of your own target send,
    multiply, keep and fuse; the built-in Llamas have formulas for these. Tolerances are derived from measured noise.
    """


baseline.add_command(update_command)


@baseline.command("show", epilog=_SHOW_EPILOG)
@click.argument("family", metavar="[[CLASS/]FAMILY]", required=False)
@click.option("--against", metavar="REV|ROOT", help="Show how the goldens differ from a git revision or project root.")
@options.curve_option
@options.project_parameter
def show_command(*, family: str | None, against: str | None, curve_file: Path | None, project: Project) -> None:
    """List the stored goldens and profiles; or show one golden, or how the goldens differ from others."""
    if family is not None and against is not None:
        raise click.UsageError("give a FAMILY or --against, not both.")
    if family is None and curve_file is not None:
        raise click.UsageError("--curve needs a golden: add its FAMILY.")
    if against is not None:
        _show_changes(project, against)
    elif family is not None:
        hardware, _, name = family.rpartition("/")
        golden = load_golden(project.root, hardware or "cpu", name)
        if curve_file is None:
            _show_golden(golden)
        curve = curve_text(golden.case_id, golden.losses, golden.grad_norms)
        options.write_output(curve_file, curve.encode)
    else:
        _list(project)


def _list(project: Project) -> None:
    """Goldens by hardware class and family, then profiles by case."""
    sound, errors = _sound(list_profiles(project.root), lambda name: load_profile(project.root, name))
    facts = [(key.hardware, key.family) for key in list_goldens(project.root)]
    for name, profile in sound.items():
        made = profile.provenance
        facts.append(("profile", f"{name}  {made.created[:10]}  torch {made.software.get('torch')}  {made.reason}"))
    options.print_sections([Facts((*facts, *(("damaged", error) for error in errors)))])


def _show_golden(shown: Golden) -> None:
    source = shown.provenance
    facts = {
        "family": shown.family,
        "hardware": shown.hardware,
        "case": shown.case_id,
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
    steps = enumerate(zip(shown.losses, shown.grad_norms, strict=True), 1)
    rows = tuple((str(step), repr(loss), repr(norm)) for step, (loss, norm) in steps)
    table = Table(columns=("step", "loss", "grad norm"), rows=rows, right=(0,))
    options.print_sections([Facts(tuple(facts.items())), table])


def _show_changes(project: Project, against: str) -> None:
    with goldens_of(project.root, against) as other:
        changes, gone = changes_between(other, project.root)
    for change in changes:
        if change.kind != "unchanged":
            options.print_sections([golden_section(change, project.root)])
            click.echo()
    options.print_sections(review_sections(changes, project.root, gone=gone))
    same = sum(change.kind == "unchanged" for change in changes)
    click.echo(f"{counted(same, 'golden')} unchanged against {against}")


@baseline.command("check", epilog="\b\nExample:\n  fp8-harness baseline check pr")
@options.query_parameter("expressions")
@options.run_option("device")
@options.project_parameter
def check_command(*, query: Query, device: str, project: Project) -> int:
    """Check that stored goldens and profiles are sound, and none is missing for these cases (default: all tiers).

    Sound: digest, schema, name and numbers are right, and the provenance says where they come from. Profiles must be
    of the installed versions.
    """
    cases = asked_cases(project, query)
    names = [(key.hardware, key.family) for key in list_goldens(project.root)]
    commits, errors = _sound(names, lambda name: _commit(project, *name))
    profiles, damaged = _sound(list_profiles(project.root), lambda name: load_profile(project.root, name))
    here = plan_without_ranks(msgspec.convert({"device": device}, PlanOptions))
    missing = () if errors or damaged else prepare_judge(project, cases, here).missing_goldens
    for line in (*errors, *(f"missing: {family}" for family in missing)):
        click.echo(line)
    if changed := sum(commit.endswith("-dirty") for commit in commits.values()):
        click.echo(f"made from trees that differed from their commit: {changed}")
    click.echo(f"{counted(len(names), 'golden')}, {len(errors)} damaged, {len(missing)} missing")
    signed = _check_profiles(project, cases, profiles, damaged)
    return ExitCode.GOOD if signed and not (errors or missing) else ExitCode.FAILED


def _commit(project: Project, hardware: str, family: str) -> str:
    """Return the commit that a golden was made from. HarnessError for one that is not sound."""
    golden = load_golden(project.root, hardware, family)
    if problem := unsound(golden):
        raise HarnessError(f"{family} on {hardware}: {problem}")
    return golden.provenance.commit


def _check_profiles(
    project: Project, cases: tuple[Case, ...], sound: Mapping[str, Profile], errors: Sequence[str]
) -> bool:
    """Print what is wrong with the profiles. Returns whether nothing is."""
    software = {name: version for name in ("torch", "torchao") if (version := installed_version(name)) is not None}
    names = [case_id(case) for case in cases if needs_profile(case)]
    missing = [name for name in names if name not in list_profiles(project.root)]
    old = {name: gap for name in names if name in sound and (gap := sound[name].version_gap(software)) is not None}
    for line in (*errors, *(f"missing: {name}" for name in missing), *(f"{name}: {gap}" for name, gap in old.items())):
        click.echo(line)
    if sound or errors or names:
        counts = f"{len(errors)} damaged, {len(missing)} missing, {len(old)} of other versions"
        click.echo(f"{counted(len(sound) + len(errors), 'profile')}, {counts}")
    return not (errors or missing or old)


def _sound(names: Iterable[Name], load: Callable[[Name], Loaded]) -> tuple[dict[Name, Loaded], list[str]]:
    sound, errors = {}, []
    for name in names:
        try:
            sound[name] = load(name)
        except HarnessError as error:
            errors.append(error.text)
    return sound, errors


@baseline.command("tolerance", epilog=_TOLERANCE_EPILOG)
@options.query_parameter("expressions", "target")
@click.option("--margin", type=click.FloatRange(min=1), default=3.0, show_default=True, help="Factor on the noise.")
@click.option("--measure", "measure_it", is_flag=True, help="Run the cases, and store their distances to BF16.")
@click.option("--seeds", type=options.AT_LEAST_1, default=8, show_default=True, help="Run with seeds 0 to N-1.")
@click.option(
    "--layouts",
    type=options.AT_LEAST_1,
    default=4,
    show_default=True,
    help="Layouts to measure per model, recipe and dtype, spread over world sizes.",
)
@click.option(
    "--references",
    type=click.Choice(["fresh", "golden"]),
    default="fresh",
    show_default=True,
    help="fresh: run BF16 references now, with every seed. golden: use the stored ones and the seeds of the cases.",
)
@options.plan_parameter
@options.project_parameter
def tolerance_command(  # noqa: PLR0913  one parameter per option
    *,
    query: Query,
    margin: float,
    measure_it: bool,
    seeds: int,
    layouts: int,
    references: str,
    plan_for: Callable[..., Plan],
    project: Project,
) -> int:
    """Show the measured noise of every check and key, and the tolerances that a margin on it gives; or measure it.

    --measure runs cases over seeds and layouts. Cases with a recorded fault are named and left out.
    """
    if measure_it:
        return _measure(project, query, plan_for, seeds if references == "fresh" else None, layouts)
    if query != Query():
        raise click.UsageError("cases are for --measure.")
    for check in CHECKS:
        options.print_sections([_noise_section(check, read_evidence(project.root, check).samples, margin=margin)])
    return ExitCode.GOOD


def _measure(
    project: Project, query: Query, plan_for: Callable[..., Plan], seeds: int | None, layouts: int
) -> ExitCode:
    """Measure, store and print the noise; without `seeds`, the noise of the stored goldens."""
    project.check_writable()
    plan = plan_for()
    selected, known = select_cases(project, query), known_here(project)
    for name, faults in recorded_cases(selected, known).items():
        reasons = "; ".join(f"known issue {fault.name}: {fault.reason}" for fault in faults)
        click.echo(f"left out: {name}: {reasons}", err=True)
    cases = measured_cases(selected, layouts=layouts, known=known)
    if not cases:
        raise NothingSelected(
            "no case is left to measure: each has a known issue, an expected error or its own tolerance.",
            where="baseline tolerance",
            fix=f"select other cases; `{explain_case(case_id(selected[0]))}` says why of the first.",
        )
    if seeds is not None:
        cases = over_seeds(cases, seeds)
    with options.open_progress() as progress:
        done = measure(project, cases, plan, progress, command=options.typed_command(), fresh=seeds is not None)
    code = ended(done.failed, interrupted=done.interrupted)
    if done.interrupted:
        return code  # a partial measurement must not replace a complete one
    if not done.new_samples:
        raise NothingSelected("no run passed, so there are no samples.", where="baseline tolerance")
    for check, evidence in done.evidence.items():
        click.echo()
        stored = write_evidence(project.root, evidence, check)
        options.print_sections([_noise_section(check, evidence.samples, stored=f": {stored}")])
    samples, failed = counted(done.new_samples, "new sample"), counted(len(done.failed), "run")
    click.echo(f"\n{samples} ({environment()}), {failed} failed")
    return code


def _noise_section(
    check: str, samples: tuple[Sample, ...], *, margin: float | None = None, stored: str = ""
) -> Section:
    """Return the number of samples and the noise per step of every key."""
    entries = []
    for key in sorted({sample.key for sample in samples}):
        own = [sample for sample in samples if sample.key == key]
        seeds, layouts = {sample.seed for sample in own}, {sample.layout for sample in own}
        counts = ((len(own), "sample"), (len(seeds), "seed"), (len(layouts), "layout"), (measured_steps(own), "step"))
        allowed = () if margin is None else (f"allowed  {_numbers(fit(check, own, margin))}",)
        lines = (f"noise    {_numbers(noise(check, own))}", *allowed)
        entries.append(Entry(title=f"{key}: {', '.join(counted(*count) for count in counts)}", lines=lines))
    return Section(title=f"{check}{stored}", blocks=tuple(entries))


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.3g}" for value in values) or "(not enough samples)"
