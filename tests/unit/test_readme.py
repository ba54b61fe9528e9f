"""What README and the page of concepts show: a case file is valid, words are those of the table, commands exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import jsonschema

from harness.matrix.casefile import case_file_schema, parse_case_file
from harness.matrix.caseid import case_id, id_words
from harness.matrix.tier import select
from harness.matrix.words import meaning_of
from tests.commands import understood

ROOT = Path(__file__).parents[2]
README, CONCEPTS = (ROOT / "README.md").read_text(), (ROOT / "docs" / "concepts.md").read_text()
TOML = re.findall(r"^```toml\n(.*?)^```", CONCEPTS, flags=re.MULTILINE | re.DOTALL)[0]


def test_the_case_file_is_valid() -> None:
    jsonschema.validate(tomllib.loads(TOML), case_file_schema())
    file = parse_case_file(TOML, where="concepts.toml")
    assert case_id(file.cases[0]) == "tp4-rowwise-ac.full-v2256-f32"
    assert len(select(file, known=()).cases) > 4


def test_the_words_of_the_id_are_explained_as_the_tool_does() -> None:
    shown = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", CONCEPTS, flags=re.MULTILINE))
    assert all(shown[word] == meaning_of(word) for word in id_words("tp4-rowwise-ac.full-v2256-f32"))


def test_the_commands_exist_with_these_options() -> None:
    lines = re.findall(r"^(?:\$ )?fp8-harness ([^#\n]*)", README, flags=re.MULTILINE)
    assert len(lines) > 5 and len(README.splitlines()) <= 90
    for line in lines:
        understood(f"fp8-harness {line}")
