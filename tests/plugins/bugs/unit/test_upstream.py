"""The pages and tests of docs/upstream are whole, and docs/versions.md has the changes that are declared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.expect.upstream import CHANGES
from harness.plugins.bugs.bugfile import BugFile, read_bugs
from harness.plugins.bugs.export import constants, exported_case
from harness.plugins.bugs.pytest_file import models, pytest_file
from tests.plugins.bugs.unit.test_export import CRASH, MISMATCH, SCALES, SCATTERED

ROOT = Path(__file__).parents[4]
PAGES = ROOT / "docs" / "upstream"
BUGS = {f"test_{bug.id.replace('-', '_')}": bug for bug in read_bugs(ROOT / "cases" / "bugs")}
SIGNATURES = {"engine/raised": (MISMATCH, CRASH), "graphs/rows": (SCATTERED,)}  # of numbers: SCALES


def test_the_page_of_versions_has_every_named_change_of_torch() -> None:
    text = (ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| `([\w/.]+)` \|", text, flags=re.MULTILINE)
    assert rows == [(change.name, change.since, change.probe.file) for change in CHANGES]


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.md")), ids=lambda path: path.stem)
def test_a_page_has_all_its_parts_and_is_in_the_index(path: Path) -> None:
    if path.stem == "index":
        return
    parts = ("Symptom", "Versions", "Reproduce", "The fix we tried")
    assert all(f"\n## {part}\n" in path.read_text() for part in parts)
    assert f"({path.name})" in (PAGES / "index.md").read_text()


@pytest.mark.parametrize("path", sorted(PAGES.glob("test_*.py")), ids=lambda path: path.stem)
def test_a_test_is_that_of_its_case(path: Path) -> None:
    bug: BugFile = BUGS[path.stem]
    text = path.read_text()
    head = text[: text.index('"""', 3) + 3]
    signatures = SIGNATURES.get(bug.bug.detected_by[0], (SCALES,))
    values = (constants(exported_case(bug.runnable()), signature) for signature in signatures)
    made = (pytest_file(chosen, head=head) for of_signature in values for _, chosen in models(of_signature))
    assert text in made, f"run `fp8-harness bug export {bug.id} --pytest --output docs/upstream`"
