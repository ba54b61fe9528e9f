"""Curves of one job as a table: a row for each, with the step that is wrong first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from harness.plural import counted
from harness.report.sections import Block, Items, Section, Table
from harness.studies.curves import MARGIN, CurveRow, Distance, Word

_SHOWN = 4  # changes of the word
_MEANS = (
    "equal: every printed digit agrees with another run",
    f"rounding: at most {MARGIN:g} times as far from them as they are from one another, up to this step",
)


def curve_sections(rows: Sequence[CurveRow]) -> list[Block]:
    """Distances are relative, those of the step that is wrong first, or that is closest to its limit."""
    table = Table(
        columns=("curve", "verdict", "steps", "wrong first", "found", "nearest", "off", "allowed"),
        rows=tuple(_cells(row) for row in rows),
        right=(4, 5, 6, 7),
        verdict=1,
    )
    words = {row.word for row in rows}
    return [
        Section(title=f"Judged by {counted(len(rows[0].others), 'other run')} of the job", blocks=(table,)),
        Items(tuple(text for text in _MEANS if text.partition(":")[0] in words)),
    ]


def _cells(row: CurveRow) -> tuple[str, ...]:
    shown = row.first or row.worst
    numbers = (f"{shown.value:.6g}", f"{shown.nearest:.6g}", f"{shown.off:.2g}", f"{shown.allowed:.2g}")
    return (row.name, row.word, _spans(row.steps), _place(row.first), *numbers)


def _place(first: Distance | None) -> str:
    return "-" if first is None else f"{first.kind}, step {first.step}"


def _spans(steps: Sequence[tuple[int, Word]]) -> str:
    """`1 equal, 2-3 rounding, 4-10 wrong`; of many changes the first, for the rest is chance."""
    spans = [[step for step, _ in group] for _, group in groupby(steps, key=lambda pair: pair[1])]
    words = dict(steps)
    texts = [f"{span[0] if len(span) == 1 else f'{span[0]}-{span[-1]}'} {words[span[0]]}" for span in spans[:_SHOWN]]
    return ", ".join((*texts, "…") if len(spans) > _SHOWN else texts)
