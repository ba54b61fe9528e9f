"""Rows of text as a table with aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """The rows as a table with aligned columns, those in `right` to the right; no trailing spaces."""
    columns = []
    for index, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if index in right else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))
