"""The file of a run for tests: its lines as one tree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from harness.jsonform import with_checksum

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
    """The inverse of `tree`, with checksums of its own: what belongs to neither line is ignored by readers."""
    document = {name: value for name, value in document.items() if name != "crc32"}
    document["cases"] = [{name: value for name, value in case.items() if name != "crc32"} for case in document["cases"]]
    rest = {name: value for name, value in document.items() if name not in ("line", "cases")}
    start = {"line": "start", "schema": document["schema"], "cases": [case["id"] for case in document["cases"]], **rest}
    return "".join(
        with_checksum(json.dumps(line).encode()).decode() + "\n"
        for line in (start, *document["cases"], {"line": "end", **rest})
    )
