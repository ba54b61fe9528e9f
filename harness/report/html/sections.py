"""Sections of the page besides the cases: what tiers cover, the kill matrix, the history of a case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.matrix.coverage import FATES, Coverage
from harness.matrix.tier import Selection
from harness.plural import counted
from harness.report.history import MOMENT_COLUMNS, moment_changes, moment_row
from harness.report.power import COLUMNS as POWER_COLUMNS
from harness.report.power import trial_row
from harness.report.sections import Section, Table
from harness.studies.history import History
from harness.studies.kill_matrix import Power, Trial


def coverage_section(accounts: Sequence[tuple[Selection, Coverage]]) -> Section:
    """What became of every combination of axis values of tiers, with the rules that exclude some."""
    return Section(
        name="coverage",
        title="Coverage",
        blocks=(
            *(
                f"{account.name}: {counted(len(selection.cases), 'case')} of {selection.candidates} cells, "
                f"{counted(len(account.tuples), 'combination')} of {account.strength} axis values."
                for selection, account in accounts
            ),
            *(table for selection, account in accounts for table in _coverage(selection, account)),
        ),
    )


def kill_section(power: Power) -> Section:
    """Every trial of the kill matrix."""
    clean = f"{counted(len(power.false_positives), 'clean run')} failed." if power.false_positives else ""
    missed = f"{len(power.undetected)} of {counted(len(power.trials), 'trial')} not detected."
    return Section(
        name="kills",
        title="Kill matrix",
        blocks=(
            *filter(None, (missed, clean)),
            Table(title="not detected", columns=POWER_COLUMNS, rows=_trials(power.undetected)),
            Table(title="all trials", columns=POWER_COLUMNS, rows=_trials(power.trials)),
            Table(title="not planted", columns=("fault", "needs"), rows=tuple(power.not_planted.items())),
        ),
    )


def history_listing(history: History) -> Table:
    """Every run of a case, and what changed with it."""
    rows = tuple((*moment_row(moment), "; ".join(moment_changes(moment))) for moment in history.moments)
    return Table(
        columns=(*MOMENT_COLUMNS, "what changed"),
        rows=rows,
        verdict=MOMENT_COLUMNS.index("verdict"),
    )


def _trials(trials: Iterable[Trial]) -> tuple[tuple[str, ...], ...]:
    return tuple(map(trial_row, trials))


def _coverage(selection: Selection, account: Coverage) -> Iterable[Table]:
    fates = tuple((fate, str(count), FATES[fate]) for fate, count in account.counts.items())
    yield Table(title=f"combinations in {account.name}", columns=("kind", "number", "meaning"), rows=fates)
    names = sorted({*account.by_rule, *selection.excluded})
    if names:
        yield Table(
            title=f"rules that exclude, in {account.name}",
            columns=("rule", "combinations", "cells", "reason"),
            rows=tuple(_rule(name, selection, account) for name in names),
        )
    for fate in FATES:
        found = account.of(fate)
        if found and fate != "covered":
            yield Table(
                title=f"{fate} in {account.name} ({len(found)})",
                columns=("block", "values", "rules"),
                rows=tuple((each.block, " / ".join(each.values), ", ".join(each.rules)) for each in found),
                folded=True,
            )


def _rule(name: str, selection: Selection, account: Coverage) -> tuple[str, str, str, str]:
    cells = selection.excluded.get(name, 0)
    return name, str(account.by_rule.get(name, 0)), str(cells), account.reasons.get(name, "")
