"""The report of the kill matrix: a table, totals by class and check, and what escaped. Text and JSON, no printing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from harness.jsonform import to_json
from harness.planted.faults import FAULT_CLASSES, FaultClass, all_faults
from harness.planted.killmatrix import LOSS_ONLY_NATS, SQNR_DB, Power, Trial

_COLUMNS = ("", "fault", "case", "verdict", "step", "x limit", "loss", "sqnr", "seen by")
_YES, _NO = "yes", "-"
_TOTALS = f"""\
Faults seen in every carrier, of those that must be seen. A run that does not finish is seen by everybody; besides,
loss: |loss - BF16| > {LOSS_ONLY_NATS} nats; sqnr: worst gradient of step 1 below {SQNR_DB:.0f} dB to one rank."""


def power_text(power: Power) -> str:
    """The whole report as plain text."""
    parts = [
        _table(power.trials),
        _totals(power),
        _by_check(power.trials),
        _listed("escaped", power.escaped),
        _equivalents(power.trials),
        _listed("clean runs that were not good: what their carriers catch is worth nothing", power.false_findings),
        f"{len(power.trials)} planted and {len(power.clean)} clean runs in {power.wall_s:.0f} s",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def power_json(power: Power) -> bytes:
    """The kill matrix as JSON; numbers that are not finite are strings."""
    return to_json(power, indent=2)


def _table(trials: Sequence[Trial]) -> str:
    rows = [_COLUMNS, *map(_row, trials)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join(_aligned(row, widths) for row in rows)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()


def _row(trial: Trial) -> tuple[str, ...]:
    return (
        trial.group or "",
        trial.fault or "",
        trial.case_id,
        trial.verdict.value,
        "" if trial.first_step is None else str(trial.first_step),
        "" if trial.excess is None else f"{trial.excess:.2g}",
        _mark(trial.sight.by_loss),
        _mark(trial.sight.by_sqnr),
        " ".join(trial.checks) or ("equivalent" if trial.equivalent else "ESCAPED"),
    )


def _mark(seen: bool) -> str:
    return _YES if seen else _NO


def _totals(power: Power) -> str:
    lines = [_TOTALS]
    wanted = [trial for trial in power.trials if not trial.equivalent]
    groups: list[FaultClass | None] = [*FAULT_CLASSES, None]
    for group in groups:
        own = [trial for trial in wanted if group in (None, trial.group)]
        if own:
            name = f"{group} {FAULT_CLASSES[group]}" if group else "all"
            lines.append(
                f"  {name:<52} {_share(own, lambda trial: trial.caught):>9}"
                f"   loss {_share(own, lambda trial: trial.sight.by_loss):>9}"
                f"   sqnr {_share(own, lambda trial: trial.sight.by_sqnr):>9}"
            )
    return "\n".join(lines)


def _share(trials: Sequence[Trial], seen: Callable[[Trial], bool]) -> str:
    """`caught/applicable` faults; a fault counts when it is seen in every carrier it was planted in."""
    names = {trial.fault for trial in trials}
    missed = {trial.fault for trial in trials if not seen(trial)}
    return f"{len(names - missed)}/{len(names)}"


def _by_check(trials: Iterable[Trial]) -> str:
    wanted = [trial for trial in trials if not trial.equivalent and trial.caught]
    seen = Counter(check for trial in wanted for check in trial.checks)
    alone = Counter(trial.checks[0] for trial in wanted if len(trial.checks) == 1)
    lines = [f"  {check:<20} {count:>4} runs, {alone[check]} of them alone" for check, count in seen.most_common()]
    return "\n".join(["seen by check", *lines]) if lines else ""


def _listed(title: str, trials: Sequence[Trial]) -> str:
    lines = [f"  {trial.fault or 'clean'} in {trial.case_id}: {_reason(trial)}" for trial in trials]
    return "\n".join([f"{title} ({len(trials)})", *lines]) if trials else ""


def _reason(trial: Trial) -> str:
    return f"{trial.verdict.value} {trial.message}".rstrip()


def _equivalents(trials: Iterable[Trial]) -> str:
    names = sorted({trial.fault for trial in trials if trial.equivalent and trial.fault is not None})
    lines = [f"  {name}: {' '.join((all_faults()[name].equivalent or '').split())}" for name in names]
    return "\n".join(["equivalent: nothing to be seen", *lines]) if lines else ""
