"""The report of the kill matrix: a table, totals by fault class and check, and undetected faults. As text or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from harness.matrix.caseid import parse_case_id
from harness.matrix.faults import FAULT_CLASSES, CarrierKind, FaultClass, all_faults, carrier_kind
from harness.plural import counted
from harness.report.wording import aligned
from harness.studies.kill_matrix import LOSS_ONLY_NATS, SQNR_DB, Power, Trial

COLUMNS = ("class", "fault", "case", "verdict", "step", "x limit", "loss", "sqnr", "detected by")
_TOTALS = f"""\
Detected faults, of those that reached the target and must be detected. A fault counts if it was detected in every case
that it reached. Two baselines judge the same runs: loss detects |loss - BF16| > {LOSS_ONLY_NATS} nats, sqnr a gradient
of step 1 below {SQNR_DB:.0f} dB against one rank. Both detect a run that does not finish."""


def power_text(power: Power) -> str:
    """The whole report as plain text."""
    runs = f"{counted(len(power.trials), 'run')} with a fault and {counted(len(power.clean), 'clean run')}"
    parts = [
        aligned([("", *COLUMNS[1:]), *map(trial_row, power.trials)]),
        _totals(power),
        _by_kind(power.trials),
        _by_check(power.trials),
        _listed("undetected", power.undetected),
        _not_reached(power.not_reached),
        _equivalents(power.trials),
        _not_planted(power),
        _listed("clean runs that failed, so detections in these cases prove nothing", power.false_positives),
        f"{runs} in {power.wall_s:.0f} s",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def trial_row(trial: Trial) -> tuple[str, ...]:
    """The cells of a trial, in the order of `COLUMNS`."""
    return (
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


def _detected_by(trial: Trial) -> str:
    if trial.not_reached:
        return "DID NOT REACH"
    return " ".join(trial.checks) or ("equivalent" if trial.equivalent else "UNDETECTED")


def _totals(power: Power) -> str:
    lines = [_TOTALS]
    required = [trial for trial in power.trials if trial.is_proof]
    groups: list[FaultClass | None] = [*FAULT_CLASSES, None]
    for group in groups:
        own = [trial for trial in required if group in (None, trial.group)]
        if own:
            name = f"{group} {FAULT_CLASSES[group]}" if group else "all"
            lines.append(
                f"  {name:<52} {_share(own, lambda trial: trial.detected):>9}"
                f"   loss {_share(own, lambda trial: trial.baseline.by_loss):>9}"
                f"   sqnr {_share(own, lambda trial: trial.baseline.by_sqnr):>9}"
            )
    return "\n".join(lines)


def _by_kind(trials: Iterable[Trial]) -> str:
    """Detected faults for every dtype and kind of layout of their carriers."""
    kinds: dict[CarrierKind, list[Trial]] = {}
    for trial in trials:
        if trial.is_proof:
            kinds.setdefault(carrier_kind(parse_case_id(trial.case_id)), []).append(trial)
    rows = [
        (f"  {kind.dtype}", kind.layout, _share(found, lambda trial: trial.detected))
        for kind, found in sorted(kinds.items(), key=lambda item: (item[0].dtype != "float64", *item[0]))
    ]
    return f"detected faults by dtype and layout of their cases\n{aligned(rows, right=(2,))}" if rows else ""


def _share(trials: Sequence[Trial], detected: Callable[[Trial], bool]) -> str:
    """`detected/all` faults; a fault counts if it was detected in every case it was planted in."""
    names = {trial.fault for trial in trials}
    missed = {trial.fault for trial in trials if not detected(trial)}
    return f"{len(names - missed)}/{len(names)}"


def _by_check(trials: Iterable[Trial]) -> str:
    required = [trial for trial in trials if trial.is_proof and trial.detected]
    runs = Counter(check for trial in required for check in trial.checks)
    alone = Counter(trial.checks[0] for trial in required if len(trial.checks) == 1)
    rows = [(f"  {check}", str(count), f"({alone[check]})") for check, count in runs.most_common()]
    title = "detections by check (and those that no other check made)"
    return f"{title}\n{aligned(rows, right=(1, 2))}" if rows else ""


def _listed(title: str, trials: Sequence[Trial]) -> str:
    lines = [
        f"  {trial.fault or 'clean'} in {trial.case_id}: {trial.verdict.value} {trial.message}".rstrip()
        for trial in trials
    ]
    return "\n".join([f"{title} ({len(trials)})", *lines]) if trials else ""


def _not_reached(trials: Sequence[Trial]) -> str:
    lines = [f"  {trial.fault} in {trial.case_id}: {trial.not_reached}" for trial in trials]
    return "\n".join([f"did not reach the target, so they prove nothing ({len(lines)})", *lines]) if lines else ""


def _not_planted(power: Power) -> str:
    lines = [f"  {name}: {all_faults()[name].title} (needs {need})" for name, need in power.not_planted.items()]
    return "\n".join([f"not planted ({len(lines)})", *lines]) if lines else ""


def _equivalents(trials: Iterable[Trial]) -> str:
    names = sorted({trial.fault for trial in trials if trial.equivalent and trial.fault is not None})
    lines = [f"  {name}: {' '.join((all_faults()[name].equivalent or '').split())}" for name in names]
    return "\n".join(["equivalent, so no check can detect them", *lines]) if lines else ""
