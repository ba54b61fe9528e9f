"""`fp8-harness dev mutate`, and the mutation matrix: its trials, totals by class and check, and undetected faults."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import click

from harness.cli import options
from harness.errors import HarnessError
from harness.jsonform import read_json
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.plugins.faults import mutation
from harness.plugins.faults.faults import (
    FAULT_CLASSES,
    MISLEADING,
    Fault,
    FaultClass,
    HostKind,
    all_faults,
    fault_named,
    host_kind,
)
from harness.plugins.faults.kills import read_kills, write_kills
from harness.project import Project
from harness.report.sections import Block, Items, Section, Table
from harness.running.plan import Plan
from harness.running.selection import Query
from harness.text import counted
from harness.verdict import ExitCode

_BASELINES = (
    "Of the faults that reached the target and must be detected; a fault counts if it was detected in every case that "
    f"it reached. Two baselines see the same runs: loss detects |loss - BF16| > {mutation.LOSS_ONLY_NATS} nats, sqnr a "
    f"gradient of step 1 below {mutation.SQNR_DB:.0f} dB against one rank. Both detect a run that does not finish."
)


def mutation_sections(matrix: mutation.MutationMatrix) -> list[Block]:
    runs = f"{counted(len(matrix.trials), 'run')} with a fault and {counted(len(matrix.clean), 'clean run')}"
    not_reached = tuple(f"{trial.fault} in {trial.case_id}: {trial.not_reached}" for trial in matrix.not_reached)
    needs = tuple(f"{name}: {all_faults()[name].title} (needs {need})" for name, need in matrix.not_planted.items())
    scored = counted(len(matrix.scored), "detection")
    lists = {
        f"headlines that misname the fault, of {scored} ({len(matrix.misnamed)})": tuple(
            f"{trial.name}: not the {' and '.join(trial.misnamed or ())}: {trial.message}" for trial in matrix.misnamed
        ),
        f"undetected ({len(matrix.undetected)})": _ended(matrix.undetected),
        f"did not reach the target, so they prove nothing ({len(not_reached)})": not_reached,
        "equivalent, so no check can detect them": tuple(_equivalents(matrix.trials)),
        f"not injected ({len(needs)})": needs,
        f"clean runs that failed, so detections in these cases prove nothing ({len(matrix.false_positives)})": _ended(
            matrix.false_positives
        ),
    }
    return [
        trial_table(matrix.trials),
        Section(title="detected faults", blocks=(_BASELINES, _totals(matrix))),
        Section(title="detected faults by dtype and layout of their cases", blocks=(_by_kind(matrix.trials),)),
        headlines_by_class(matrix.scores),
        Section(title="detections by check (and those that no other check made)", blocks=(_by_check(matrix.trials),)),
        *(Section(title=title, blocks=(Items(lines),)) for title, lines in lists.items()),
        f"{runs} in {matrix.wall_s:.0f} s",
    ]


def mutation_section(matrix: mutation.MutationMatrix) -> Section:
    """Return the part of a page: every trial, those that were not detected first."""
    clean = f"{counted(len(matrix.false_positives), 'clean run')} failed."
    return Section(
        name="kills",
        title="Mutation matrix",
        blocks=(
            f"{len(matrix.undetected)} of {counted(len(matrix.trials), 'trial')} not detected.",
            *([clean] if matrix.false_positives else []),
            trial_table(matrix.undetected, title="not detected"),
            trial_table(matrix.trials, title="all trials"),
            Table(title="not injected", columns=("fault", "needs"), rows=tuple(matrix.not_planted.items())),
        ),
    )


def trial_table(trials: Sequence[mutation.Trial], *, title: str = "") -> Table:
    rows = tuple(
        (
            trial.group or "",
            trial.fault or "",
            trial.case_id,
            trial.verdict.value,
            "" if trial.first_step is None else str(trial.first_step),
            "" if trial.excess is None else f"{trial.excess:.2g}",
            "yes" if trial.baseline.by_loss else "-",
            "yes" if trial.baseline.by_sqnr else "-",
            _detected_by(trial),
        )
        for trial in trials
    )
    columns = ("class", "fault", "case", "verdict", "step", "x limit", "loss", "sqnr", "detected by")
    return Table(title=title, columns=columns, rows=rows)


def _detected_by(trial: mutation.Trial) -> str:
    if trial.not_reached:
        return "DID NOT REACH"
    return " ".join(trial.checks) or ("equivalent" if trial.equivalent else "UNDETECTED")


def _totals(matrix: mutation.MutationMatrix) -> Table:
    required = [trial for trial in matrix.trials if trial.is_proof]
    rows = []
    for group in (*FAULT_CLASSES, None):
        if own := [trial for trial in required if group in (None, trial.group)]:
            name = f"{group} {FAULT_CLASSES[group].title}" if group else "all"
            by_loss = _share(own, lambda trial: trial.baseline.by_loss)
            by_sqnr = _share(own, lambda trial: trial.baseline.by_sqnr)
            rows.append((name, _share(own, lambda trial: trial.detected), by_loss, by_sqnr))
    return Table(columns=("class", "checks", "loss", "sqnr"), rows=tuple(rows), right=(1, 2, 3))


def headlines_by_class(by_class: Mapping[FaultClass, Counter[str]]) -> Section:
    """Return how many headlines name the place and the cause that their class demands, and how many mislead."""
    rows = tuple(
        (
            f"{group} {FAULT_CLASSES[group].title}",
            ", ".join(FAULT_CLASSES[group].names),
            *(f"{score[name]}/{score['headlines']}" for name in ("place", "cause", MISLEADING)),
        )
        for group, score in by_class.items()
        if score["headlines"]
    )
    table = Table(columns=("class", "must name", "place", "cause", MISLEADING), rows=rows, right=(2, 3, 4))
    return Section(title="headlines that are right, and that mislead", blocks=(table,))


def _by_kind(trials: Iterable[mutation.Trial]) -> Table:
    kinds: dict[HostKind, list[mutation.Trial]] = {}
    for trial in trials:
        if trial.is_proof:
            kinds.setdefault(host_kind(parse_case_id(trial.case_id)), []).append(trial)
    rows = tuple(
        (kind.dtype, kind.layout, _share(of_kind, lambda trial: trial.detected))
        for kind, of_kind in sorted(kinds.items(), key=lambda item: (item[0].dtype != "float64", *item[0]))
    )
    return Table(rows=rows, right=(2,))


def _share(trials: Sequence[mutation.Trial], detected: Callable[[mutation.Trial], bool]) -> str:
    """`detected/all` faults; a fault counts if it was detected in every case it was injected into."""
    names = {trial.fault for trial in trials}
    missed = {trial.fault for trial in trials if not detected(trial)}
    return f"{len(names - missed)}/{len(names)}"


def _by_check(trials: Iterable[mutation.Trial]) -> Table:
    required = [trial for trial in trials if trial.is_proof and trial.detected]
    runs = Counter(check for trial in required for check in trial.checks)
    alone = Counter(trial.checks[0] for trial in required if len(trial.checks) == 1)
    rows = tuple((check, str(count), f"({alone[check]})") for check, count in runs.most_common())
    return Table(rows=rows, right=(1, 2))


def _ended(trials: Sequence[mutation.Trial]) -> tuple[str, ...]:
    return tuple(f"{trial.name}: {trial.verdict.value} {trial.message}".rstrip() for trial in trials)


def _equivalents(trials: Iterable[mutation.Trial]) -> Iterable[str]:
    for name in sorted({trial.fault for trial in trials if trial.equivalent and trial.fault is not None}):
        yield f"{name}: {' '.join((all_faults()[name].equivalent or '').split())}"


def read_section(file: Path) -> Section:
    """Return the section of a page, from what `dev mutate --json` wrote. HarnessError for another file."""
    return mutation_section(read_json(file, mutation.MutationMatrix, command="dev mutate --json"))


_EPILOG = """\b
Examples:
  fp8-harness dev mutate                            each in up to two cases
  fp8-harness dev mutate --fault amax_without_abs   one fault
  fp8-harness dev mutate pr --cases-per-fault 1     each in the cheapest case
  fp8-harness dev mutate --target my_pkg.my_target  which reach your target

\b
Exit codes: 0 all faults that reached the target were detected, 1 a fault was
not detected, did not reach the reference target, or a clean run failed, 3 no
fault applies to the cases or reaches the target.
"""


_CASES = "Inject each into up to N cases."


@click.command("mutate", epilog=_EPILOG)
@click.option("--fault", "names", metavar="NAME|CLASS", multiple=True, help="A fault, or a class: J. Repeatable.")
@click.option("--cases-per-fault", type=options.AT_LEAST_1, default=2, show_default=True, help=_CASES)
@click.option("--list", "listed", is_flag=True, help="List faults, their cases and the recorded scores, and exit.")
@click.option("--record", is_flag=True, help="Store which rules found these faults, in golden/evidence/kills.json.")
@options.json_option("the mutation matrix")
@options.query_parameter("expressions", "target")
@options.plan_parameter
@options.project_parameter
def mutate_command(  # noqa: PLR0913  one parameter per option
    *,
    names: tuple[str, ...],
    cases_per_fault: int,
    listed: bool,
    record: bool,
    json_file: Path | None,
    query: Query,
    plan_for: Callable[..., Plan],
    project: Project,
) -> int:
    """Mutation testing: plant faults in passing cases and show which checks detect them.

    Without a tier, file, case or selection, faults are injected into the cases that the list names for them.
    """
    wanted = {name if name in FAULT_CLASSES else fault_named(name).name for name in names}
    faults = [fault for fault in all_faults().values() if not wanted or wanted & {fault.name, fault.group}]
    if record and query != Query():
        what = "the record is of faults in their own cases."
        raise HarnessError(what, where="--record", fix="select faults only, or give it alone.")
    hosts = mutation.hosts_among(project, faults, query, at_most=cases_per_fault)
    if listed:
        for fault in faults:
            click.echo(_line(fault, hosts[fault.name]))
        if recorded := read_kills(project.root):
            options.print_report([headlines_by_class(recorded.scores)], None, None)
        return ExitCode.GOOD
    with options.open_progress() as progress:
        matrix = mutation.run_mutations(project, faults, hosts, plan_for(), progress)
    options.print_report(mutation_sections(matrix), json_file, matrix)
    if record and not matrix.interrupted:
        click.echo(
            f"stored in {write_kills(project.root, mutation.recorded_kills(matrix, read_kills(project.root)))}",
            err=True,
        )
    if matrix.interrupted:
        return ExitCode.INTERRUPTED
    if len(matrix.trials) == len(matrix.not_reached):
        return ExitCode.FAILED if matrix.unplantable else ExitCode.NOTHING_RAN
    return ExitCode.FAILED if matrix.undetected or matrix.unplantable or matrix.false_positives else ExitCode.GOOD


def _line(fault: Fault, hosts: Sequence[Case]) -> str:
    cases = " ".join(map(case_id, hosts)) or "no case"
    mark = " (equivalent)" if fault.equivalent is not None else ""
    return f"{fault.group}  {fault.name}: {fault.title}{mark}\n     {cases}\n     {fault.link}"
