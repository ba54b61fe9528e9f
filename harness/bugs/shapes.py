"""What follows from shapes, meshes and layers that a report shows."""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.bugs.configurations import calls_of
from harness.bugs.report import Report, clean_words
from harness.bugs.statements import Statement
from harness.matrix.layout import MESH_AXES

_SHAPE = re.compile(r"(?:torch\.Size\()?\[(\d{1,7}(?:, ?\d{1,7}){1,2})\]\)?")
_MESH = re.compile(r"device mesh with \[([^\]\n]{1,120})\], \[(\d{1,5}(?:, ?\d{1,5})*)\]")
_AXES = frozenset({*MESH_AXES, "dp", "pp", "cp"})
_MAX_LINES = 20_000


def shown_by_shapes(report: Report) -> Iterator[Statement]:
    """Statements that shapes imply: batch and sequence, degrees of a mesh, features of linears."""
    lines = report.text.split("\n")[:_MAX_LINES]
    yield from _tokens(lines)
    for line in lines:
        for names, sizes in _MESH.findall(line):
            for name, size in zip(re.findall(r"\w+", names), re.findall(r"\d+", sizes), strict=False):
                if name in _AXES:
                    yield _shown(name, int(size), line)
    yield from _linears(report)


def _tokens(lines: list[str]) -> Iterator[Statement]:
    """[batch, sequence, features] next to [batch * sequence, ...] in one line."""
    for line in lines:
        shapes = [tuple(map(int, found.split(","))) for found in _SHAPE.findall(line)[:20]]
        for batch, length, *_ in (shape for shape in shapes if len(shape) == 3):
            flat = next((shape for shape in shapes if len(shape) == 2 and shape[0] == batch * length), None)
            if flat is not None:
                whole = next(shape for shape in shapes if shape[:2] == (batch, length))
                words = f"shapes {list(whole)} and {list(flat)}: {batch} x {length} = {batch * length}"
                yield _shown("local_batch", batch, f"{words}: batch {batch}")
                yield _shown("seq_len", length, f"{words}: sequence {length}")
                return


def _linears(report: Report) -> Iterator[Statement]:
    """The features of the first linear of a snippet that has several sizes."""
    for call in calls_of(report):
        if call.name.rpartition(".")[2] == "Linear" and len(call.arguments) >= 2:
            inputs, outputs = call.arguments[:2]
            if isinstance(inputs, int) and isinstance(outputs, int) and 1 <= inputs <= 10**6 and 1 <= outputs <= 10**6:
                yield _shown("linear", f"{inputs}x{outputs}", call.words)
                return


def _shown(fact: str, value: int | str, words: str) -> Statement:
    return Statement(fact=fact, value=value, words=clean_words(words), source="shape")
