"""The reports of conformance: a table of operators by placements for the terminal, and the JSON document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from harness.studies.conformance.judge import Conclusion
from harness.studies.conformance.known import KNOWN
from harness.trace.operator_checks import OperatorCheck, shard_kind

COLUMNS = ("R", "S0", "S1", "S2", "uneven", "empty", "Psum", "Pavg", "Pmax", "Pmin", "2-D", "strided")
LEGEND = """\
Rows: operators; .d0 is the dim, k means keepdim. Columns: placements of the inputs (R is replicated, S0 Shard(0), Psum
Partial(sum)), uneven or empty shards, 2-D meshes, strided shards. Cells count checks: 12 passed, 2k show a known
deviation, 1F failed, 1U passed although a known deviation should show; - means no check."""
_MARKS = {"passed": "", "known": "k", "failed": "F", "unexpected_pass": "U"}


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
    cells: dict[str, dict[str, Counter[str]]] = {}
    for each in conclusions:
        cells.setdefault(row(each.check), {}).setdefault(column(each.check), Counter())[each.status] += 1
    shown = [name for name in COLUMNS if any(name in found for found in cells.values())]
    width = max((len(name) for name in cells), default=0)
    yield f"{'operator':<{width}} " + " ".join(f"{name:>8}" for name in shown)
    for name, found in cells.items():
        yield f"{name:<{width}} " + " ".join(f"{_cell(found.get(column_name)):>8}" for column_name in shown)


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
