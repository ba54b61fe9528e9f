"""The reports of conformance: a table of operators by placements for the terminal, and the JSON document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from harness.studies.conformance.judge import Conclusion
from harness.studies.conformance.known import KNOWN
from harness.trace.operator_checks import OperatorCheck, shard_kind

COLUMNS = ("R", "S0", "S1", "S2", "uneven", "empty", "Psum", "Pavg", "Pmax", "Pmin", "2-D", "strided")
LEGEND = """\
Rows: operators; .d0 is the dim, k means keepdim. Columns: placements of the inputs (R is replicated, S0 Shard(0), Psum
Partial(sum)), uneven or empty shards, 2-D meshes, strided shards. Cells count checks: 12 passed, 2k show a known
deviation, 1F failed, 1U passed although a known deviation should show; - means no check."""
_MARKS = {"passed": "", "known": "k", "failed": "F", "unexpected_pass": "U"}


class ShownCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A check in the JSON document, as far as the table shows it."""

    op: str  # its row
    placement: str  # its column
    status: str


class ConformanceDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of the JSON document."""

    software: dict[str, str | None]
    counts: dict[str, int]
    checks: tuple[ShownCheck, ...]


def column(check: OperatorCheck) -> str:
    """The column of a check: the most specific of `COLUMNS` that its inputs have."""
    placements = [placement for each in check.inputs for placement in each]
    if len(check.axes) > 1:
        return "strided" if any(placement[0] == "T" for placement in placements) else "2-D"
    partial = [placement for placement in placements if placement[0] == "P"]
    if partial:
        return partial[0]
    kind = shard_kind(check)
    if kind != "even":
        return kind
    return next((placement for placement in placements if placement != "R"), "R")


def row(check: OperatorCheck) -> str:
    """The row of a check: its operator with dim and keepdim."""
    argument = "" if check.dim is None else f".d{check.dim}{'k' if check.keepdim else ''}"
    return check.op + argument


def lines(conclusions: Sequence[Conclusion]) -> Iterator[str]:
    """The table; `LEGEND` explains it."""
    told = (ShownCheck(op=row(each.check), placement=column(each.check), status=each.status) for each in conclusions)
    (head, *names), *rows = grid(told)
    width = max((len(name) for name, *_ in rows), default=0)
    yield f"{head:<{width}} " + " ".join(f"{name:>8}" for name in names)
    for name, *found in rows:
        yield f"{name:<{width}} " + " ".join(f"{cell:>8}" for cell in found)


def grid(checks: Iterable[ShownCheck]) -> list[tuple[str, ...]]:
    """The rows of the table, the first one with the names of the columns."""
    counts: dict[str, dict[str, Counter[str]]] = {}
    for each in checks:
        counts.setdefault(each.op, {}).setdefault(each.placement, Counter())[each.status] += 1
    shown = [name for name in COLUMNS if any(name in found for found in counts.values())]
    rows = [(name, *(_cell(found.get(column_name)) for column_name in shown)) for name, found in counts.items()]
    return [("operator", *shown), *rows]


def _cell(counts: Counter[str] | None) -> str:
    if counts is None:
        return "-"
    return " ".join(f"{counts[status]}{mark}" for status, mark in _MARKS.items() if counts[status])


def deviation_lines(conclusions: Sequence[Conclusion]) -> Iterator[str]:
    """Every known deviation that occurred, with the number of checks that show it, its reason and its report."""
    counts = Counter(name for each in conclusions if each.status == "known" for name in each.deviations)
    for deviation in KNOWN:
        if counts[deviation.name]:
            yield f"{counts[deviation.name]:>4}  {deviation.name}: {deviation.reason} ({deviation.link})"


def document(conclusions: Sequence[Conclusion], software: dict[str, str | None]) -> dict[str, object]:
    """The JSON document: all checks with their problems."""
    return {
        "software": software,
        "counts": dict(Counter(each.status for each in conclusions)),
        "checks": [
            {
                "id": each.check.id,
                "op": row(each.check),
                "placement": column(each.check),
                "status": each.status,
                "wire_bytes": each.wire_bytes,
                "cheapest_bytes": each.cheapest_bytes,
                "deviations": each.deviations,
                "problems": [str(problem) for problem in each.problems],
            }
            for each in conclusions
        ],
    }
