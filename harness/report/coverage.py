"""What became of the combinations of axis values in tiers, as a part of a page."""

from collections.abc import Collection, Iterable, Sequence

from harness.matrix.tier import FATES, Coverage, Fate, Selection
from harness.report.sections import Section, Table
from harness.text import counted

_NOT_COVERED: tuple[Fate, ...] = ("known", "refused", "skipped", "excluded")


def coverage_section(
    accounts: Sequence[tuple[Selection, Coverage]], listed: Collection[Fate] = _NOT_COVERED
) -> Section:
    """What became of every combination of axis values of tiers, with the rules that exclude some; each of `listed`."""
    counts = (
        f"{account.name}: {counted(len(selection.cases), 'case')} of {selection.candidates} cells, "
        f"{counted(len(account.tuples), 'combination')} of {account.strength} axis values."
        for selection, account in accounts
    )
    tables = (table for selection, account in accounts for table in _tables(selection, account, listed))
    return Section(name="coverage", title="Coverage", blocks=(*counts, *tables))


def _tables(selection: Selection, account: Coverage, listed: Collection[Fate]) -> Iterable[Table]:
    fates = tuple((fate, str(count), FATES[fate]) for fate, count in account.counts.items())
    yield Table(title=f"combinations in {account.name}", columns=("kind", "number", "meaning"), rows=fates)
    yield Table(
        title=f"rules that exclude, in {account.name}",
        columns=("rule", "combinations", "cells", "reason"),
        rows=tuple(
            (
                name,
                str(account.by_rule.get(name, 0)),
                str(selection.excluded.get(name, 0)),
                account.reasons.get(name, ""),
            )
            for name in sorted({*account.by_rule, *selection.excluded})
        ),
    )
    for fate in listed:
        combinations = account.of(fate)
        if combinations:
            yield Table(
                title=f"{fate} in {account.name} ({len(combinations)})",
                columns=("block", "values", "rules"),
                rows=tuple(
                    (combination.block, " / ".join(combination.values), ", ".join(combination.rules))
                    for combination in combinations
                ),
                folded=True,
            )
