"""The schema of case files accepts what the tool reads, and rejects what an editor can see is wrong."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given

from harness.matrix.axes import AXES, DECLARED
from harness.matrix.case import Case
from harness.matrix.casefile import FILE_NAME, case_file_schema, write_case
from harness.project import is_case_file
from tests.strategies import CASES

ROOT = Path(__file__).parents[2]
SCHEMA = case_file_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
FILES = sorted(path for path in (ROOT / "cases").glob("*.toml") if is_case_file(path))


def test_the_stored_schema_is_the_one_that_the_axes_give() -> None:
    stored = json.loads((ROOT / "harness" / "schemas" / FILE_NAME).read_text())
    assert stored == json.loads(json.dumps(SCHEMA)), (
        f"run `fp8-harness new --schema > harness/schemas/{FILE_NAME}`: an axis has changed"
    )
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_axis_has_a_meaning() -> None:
    assert DECLARED.keys() == AXES.keys()
    assert all(SCHEMA["$defs"][name]["description"] == DECLARED[name].meaning for name in AXES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_files_of_this_project_are_valid(path: Path) -> None:
    VALIDATOR.validate(tomllib.loads(path.read_text()))


@given(CASES)
def test_a_written_case_is_valid(case: Case) -> None:
    VALIDATOR.validate(tomllib.loads(write_case(case, schema="s", command="c")))


@pytest.mark.parametrize(
    "text",
    [
        '[[case]]\naxes = {recipee = "rowwise"}',
        '[[case]]\naxes = {recipe = "rowwize"}',
        "[[case]]\naxes = {tp = 0}",
        "[[case]]\naxes = {tp = 2.5}",
        "[[case]]\naxes = {dim = 'x'}",
        "[[case]]",
        '[[case]]\nid = "a"\naxes = {tp = 2}',
        "[[matrix]]\nname = 'm'",
        "[[matrix]]\nname = 'm'\n[matrix.axes]\ntp = []",
        "[[matrix]]\nname = 'm'\n[matrix.axes]\ntp = [0]",
        "[[matrix]]\nname = 'm'\n[matrix.axes]\nboth = [{tpp = 2}]",
        "[select]\nstrength = 4",
        "[base]\ncompile = true",
        "axes = 2",
    ],
)
def test_mistakes_are_rejected(text: str) -> None:
    found: dict[str, Any] = tomllib.loads(text)
    assert not VALIDATOR.is_valid(found)
