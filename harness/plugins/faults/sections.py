"""The mutation matrix: a table of its trials, totals by fault class and check, and the faults that went undetected."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from harness.jsonform import read_json
from harness.matrix.caseid import parse_case_id
from harness.plugins.faults.faults import FAULT_CLASSES, FaultClass, HostKind, all_faults, host_kind
from harness.plugins.faults.mutation import LOSS_ONLY_NATS, SQNR_DB, MutationMatrix, Trial
from harness.report.sections import Block, Items, Section, Table
from harness.text import counted

_BASELINES = (
    "Of the faults that reached the target and must be detected; a fault counts if it was detected in every case that "
    f"it reached. Two baselines judge the same runs: loss detects |loss - BF16| > {LOSS_ONLY_NATS} nats, sqnr a "
    f"gradient of step 1 below {SQNR_DB:.0f} dB against one rank. Both detect a run that does not finish."
)


def mutation_sections(matrix: MutationMatrix) -> list[Block]:
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
        f"not planted ({len(needs)})": needs,
        f"clean runs that failed, so detections in these cases prove nothing ({len(matrix.false_positives)})": _ended(
            matrix.false_positives
        ),
    }
    return [
        trial_table(matrix.trials),
        Section(title="detected faults", blocks=(_BASELINES, _totals(matrix))),
        Section(title="detected faults by dtype and layout of their cases", blocks=(_by_kind(matrix.trials),)),
        Section(title="detections by check (and those that no other check made)", blocks=(_by_check(matrix.trials),)),
        *(Section(title=title, blocks=(Items(lines),)) for title, lines in lists.items()),
        f"{runs} in {matrix.wall_s:.0f} s",
    ]


def mutation_section(matrix: MutationMatrix) -> Section:
    """The part of a page: every trial, those that were not detected first."""
    clean = f"{counted(len(matrix.false_positives), 'clean run')} failed."
    return Section(
        name="kills",
        title="Mutation matrix",
        blocks=(
            f"{len(matrix.undetected)} of {counted(len(matrix.trials), 'trial')} not detected.",
            *([clean] if matrix.false_positives else []),
            trial_table(matrix.undetected, title="not detected"),
            trial_table(matrix.trials, title="all trials"),
            Table(title="not planted", columns=("fault", "needs"), rows=tuple(matrix.not_planted.items())),
        ),
    )


def trial_table(trials: Sequence[Trial], *, title: str = "") -> Table:
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


def _detected_by(trial: Trial) -> str:
    if trial.not_reached:
        return "DID NOT REACH"
    return " ".join(trial.checks) or ("equivalent" if trial.equivalent else "UNDETECTED")


def _totals(matrix: MutationMatrix) -> Table:
    required = [trial for trial in matrix.trials if trial.is_proof]
    rows = []
    groups: list[FaultClass | None] = [*FAULT_CLASSES, None]
    for group in groups:
        own = [trial for trial in required if group in (None, trial.group)]
        if own:
            name = f"{group} {FAULT_CLASSES[group]}" if group else "all"
            by_loss = _share(own, lambda trial: trial.baseline.by_loss)
            by_sqnr = _share(own, lambda trial: trial.baseline.by_sqnr)
            rows.append((name, _share(own, lambda trial: trial.detected), by_loss, by_sqnr))
    return Table(columns=("class", "checks", "loss", "sqnr"), rows=tuple(rows), right=(1, 2, 3))


def _by_kind(trials: Iterable[Trial]) -> Table:
    kinds: dict[HostKind, list[Trial]] = {}
    for trial in trials:
        if trial.is_proof:
            kinds.setdefault(host_kind(parse_case_id(trial.case_id)), []).append(trial)
    rows = tuple(
        (kind.dtype, kind.layout, _share(of_kind, lambda trial: trial.detected))
        for kind, of_kind in sorted(kinds.items(), key=lambda item: (item[0].dtype != "float64", *item[0]))
    )
    return Table(rows=rows, right=(2,))


def _share(trials: Sequence[Trial], detected: Callable[[Trial], bool]) -> str:
    """`detected/all` faults; a fault counts if it was detected in every case it was planted in."""
    names = {trial.fault for trial in trials}
    missed = {trial.fault for trial in trials if not detected(trial)}
    return f"{len(names - missed)}/{len(names)}"


def _by_check(trials: Iterable[Trial]) -> Table:
    required = [trial for trial in trials if trial.is_proof and trial.detected]
    runs = Counter(check for trial in required for check in trial.checks)
    alone = Counter(trial.checks[0] for trial in required if len(trial.checks) == 1)
    rows = tuple((check, str(count), f"({alone[check]})") for check, count in runs.most_common())
    return Table(rows=rows, right=(1, 2))


def _ended(trials: Sequence[Trial]) -> tuple[str, ...]:
    return tuple(f"{trial.name}: {trial.verdict.value} {trial.message}".rstrip() for trial in trials)


def _equivalents(trials: Iterable[Trial]) -> Iterable[str]:
    for name in sorted({trial.fault for trial in trials if trial.equivalent and trial.fault is not None}):
        yield f"{name}: {' '.join((all_faults()[name].equivalent or '').split())}"


def read_section(file: Path) -> Section:
    """The section of a page, from what `dev mutate --json` wrote. HarnessError for another file."""
    return mutation_section(read_json(file, MutationMatrix, command="dev mutate --json"))
