"""The table: operators by placements, in words that fit a terminal, and the rows of the JSON file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from harness.conformance.check import Check, shard_kind
from harness.conformance.judge import Conclusion
from harness.conformance.known import KNOWN

COLUMNS = ("R", "S0", "S1", "S2", "uneven", "empty", "Psum", "Pavg", "Pmax", "Pmin", "2-D", "strided")
_MARKS = {"passed": "", "known": "k", "failed": "F", "unexpected_pass": "U"}


def column(check: Check) -> str:
    """The column of a check: what is special about the placements of its inputs."""
    words = [word for placements in check.inputs for word in placements]
    if len(check.axes) > 1:
        return "strided" if any(word[0] == "T" for word in words) else "2-D"
    pending = [word for word in words if word[0] == "P"]
    if pending:
        return pending[0]
    kind = shard_kind(check)
    if kind != "even":
        return kind
    return next((word for word in words if word != "R"), "R")


def row(check: Check) -> str:
    """The row of a check: its operator, rowwise and keepdim variants apart."""
    argument = "" if check.dim is None else f".d{check.dim}{'k' if check.keepdim else ''}"
    return check.op + argument


def lines(conclusions: Sequence[Conclusion]) -> Iterator[str]:
    """The table. A cell counts checks: `12`, `10 2k` (known deviations), `11 1F` (failed), `1U` (unexpected pass)."""
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
    """Every known deviation that was seen, with how many checks show it, why, and where it is reported."""
    counts = Counter(name for each in conclusions if each.status == "known" for name in each.deviations)
    for deviation in KNOWN:
        if counts[deviation.name]:
            yield f"{counts[deviation.name]:>4}  {deviation.name}: {deviation.reason} ({deviation.link})"


def document(conclusions: Sequence[Conclusion], software: dict[str, str | None]) -> dict[str, object]:
    """Everything, for a program."""
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
