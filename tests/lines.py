"""The file of a run for tests: its lines as one tree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

SCHEMA = json.loads((Path(__file__).parents[1] / "harness/schemas/result.schema.json").read_text())


def tree(lines: str) -> Any:
    """The start and the end of a run in one mapping, in which `cases` are the lines of its cases. All are valid."""
    start, *cases, end = map(json.loads, lines.splitlines())
    for line in (start, *cases, end):
        jsonschema.validate(line, SCHEMA)
    return {**start, **end, "cases": cases}


def read_run(path: Path) -> Any:
    return tree(path.read_text())


def lines_of(document: Any) -> str:
    """The inverse of `tree`: what belongs to neither line is ignored by readers."""
    rest = {name: value for name, value in document.items() if name not in ("line", "cases")}
    start = {"line": "start", "schema": document["schema"], "cases": [case["id"] for case in document["cases"]], **rest}
    return "".join(json.dumps(line) + "\n" for line in (start, *document["cases"], {"line": "end", **rest}))
