"""Sections of the page besides the cases: tables under a title. Whatever has rows can be one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from harness.matrix.coverage import FATES, Coverage
from harness.matrix.tier import Selection
from harness.plural import counted
from harness.report.history import MOMENT_COLUMNS, moment_changes, moment_row
from harness.report.power import COLUMNS as POWER_COLUMNS
from harness.report.power import trial_row
from harness.report.wording import printable
from harness.studies.conformance.table import LEGEND, ConformanceDocument, grid
from harness.studies.history import History
from harness.studies.kill_matrix import Power, Trial


class Listing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A table of texts. A row is drawn in the colour of the verdict that it has in column `verdict`, if that is one."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    verdict: int | None = None
    folded: bool = False  # shown when it is opened


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of text, and a command that shows more. `case` is a case id of the page, which it links to."""

    title: str = ""
    case: str = ""
    lines: tuple[str, ...] = ()
    command: str = ""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Entries under a title that folds them."""

    title: str
    entries: tuple[Entry, ...]
    folded: bool = False  # shown when it is opened


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the page with an entry of its own in its menu. `name` is in its links: letters only."""

    name: str
    title: str
    notes: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    listings: tuple[Listing, ...] = ()


class Front(msgspec.Struct, frozen=True, kw_only=True):
    """What the page says first: its title, an answer, a line; and the section that comes before the cases, if any."""

    title: str
    state: str
    good: bool
    line: str
    section: Section | None = None


def coverage_section(accounts: Sequence[tuple[Selection, Coverage]]) -> Section:
    """What became of every combination of axis values of tiers, with the rules that exclude some."""
    return Section(
        name="coverage",
        title="Coverage",
        notes=tuple(
            f"{account.name}: {counted(len(selection.cases), 'case')} of {selection.candidates} cells, "
            f"{counted(len(account.tuples), 'combination')} of {account.strength} axis values."
            for selection, account in accounts
        ),
        listings=tuple(listing for selection, account in accounts for listing in _coverage(selection, account)),
    )


def kill_section(power: Power) -> Section:
    """Every trial of the kill matrix."""
    clean = f"{counted(len(power.false_positives), 'clean run')} failed." if power.false_positives else ""
    missed = f"{len(power.undetected)} of {counted(len(power.trials), 'trial')} not detected."
    needs = tuple((name, printable(need)) for name, need in power.not_planted.items())
    missing = _trials(power.undetected)
    return Section(
        name="kills",
        title="Kill matrix",
        notes=tuple(filter(None, (missed, clean))),
        listings=(
            *([Listing(title="not detected", columns=POWER_COLUMNS, rows=missing)] if missing else ()),
            Listing(title="all trials", columns=POWER_COLUMNS, rows=_trials(power.trials)),
            *([Listing(title="not planted", columns=("fault", "needs"), rows=needs)] if needs else ()),
        ),
    )


def conformance_section(document: ConformanceDocument) -> Section:
    """The table of DTensor's sharding strategies, by operator and placement."""
    columns, *rows = grid(document.checks)
    counts = ", ".join(f"{count} {status}" for status, count in sorted(document.counts.items()))
    software = ", ".join(f"{name} {version or 'missing'}" for name, version in document.software.items())
    return Section(
        name="conformance",
        title="Conformance",
        notes=(f"{counted(len(document.checks), 'check')} ({software}): {counts}.", " ".join(LEGEND.split())),
        listings=(Listing(columns=columns, rows=tuple(rows)),),
    )


def history_listing(history: History) -> Listing:
    """Every run of a case, and what changed with it."""
    rows = tuple((*moment_row(moment), "; ".join(moment_changes(moment))) for moment in history.moments)
    return Listing(
        columns=(*MOMENT_COLUMNS, "what changed"),
        rows=tuple(tuple(map(printable, row)) for row in rows),
        verdict=MOMENT_COLUMNS.index("verdict"),
    )


def _trials(trials: Iterable[Trial]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(map(printable, trial_row(trial))) for trial in trials)


def _coverage(selection: Selection, account: Coverage) -> Iterable[Listing]:
    fates = tuple((fate, str(count), FATES[fate]) for fate, count in account.counts.items())
    yield Listing(title=f"combinations in {account.name}", columns=("kind", "number", "meaning"), rows=fates)
    names = sorted({*account.by_rule, *selection.excluded})
    if names:
        yield Listing(
            title=f"rules that exclude, in {account.name}",
            columns=("rule", "combinations", "cells", "reason"),
            rows=tuple(_rule(name, selection, account) for name in names),
        )
    for fate in FATES:
        found = account.of(fate)
        if found and fate != "covered":
            yield Listing(
                title=f"{fate} in {account.name} ({len(found)})",
                columns=("block", "values", "rules"),
                rows=tuple((each.block, " / ".join(each.values), ", ".join(each.rules)) for each in found),
                folded=True,
            )


def _rule(name: str, selection: Selection, account: Coverage) -> tuple[str, str, str, str]:
    cells = selection.excluded.get(name, 0)
    return name, str(account.by_rule.get(name, 0)), str(cells), printable(account.reasons.get(name, ""))
