"""docs/upstream is what the tool makes of the records today, and docs/versions.md has the changes that are declared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from harness.expect.upstream import CHANGES
from harness.matrix.known import read_known
from harness.plugins.bugs.bugfile import BugFile, read_bugs
from harness.plugins.bugs.export import constants, exported_case
from harness.plugins.bugs.pytest_file import models, pytest_file
from harness.plugins.bugs.upstream import upstream_pages
from tests.unit.test_export import CRASH, MISMATCH, SCALES, SCATTERED

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "upstream"
BUGS = {f"test_{bug.id.replace('-', '_')}": bug for bug in read_bugs(ROOT / "cases" / "bugs")}
SIGNATURES = {"engine/raised": (MISMATCH, CRASH), "graphs/rows": (SCATTERED,)}  # of numbers: SCALES


def pages() -> dict[str, str]:
    return dict(upstream_pages(read_known(ROOT / "cases" / "known.toml"), tuple(BUGS.values()), ROOT))


def test_the_page_of_versions_has_every_named_change_of_torch() -> None:
    text = (ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| `([\w/.]+)` \|", text, flags=re.MULTILINE)
    assert rows == [(change.name, change.since, change.probe.file) for change in CHANGES]


def test_the_pages_are_those_of_the_records() -> None:
    written = {path.stem: path.read_text() for path in PAGES.glob("*.md")}
    assert written == pages(), "run `fp8-harness bug list --pages docs/upstream`, and remove what it does not write"


def test_a_page_has_all_its_parts_and_is_short() -> None:
    for name, text in pages().items():
        assert len(text.splitlines()) <= 60
        if name != "index":
            parts = ("Symptom", "Versions", "Reproduce", "The fix we tried")
            assert all(f"\n## {part}\n" in text for part in parts), name


@pytest.mark.parametrize(
    ("where", "tier"),
    [
        ("tp>1 target=torchtitan_0_3", "torchtitan_0_3"),
        ("target=reference,torchtitan_0_3 tp>1", "nightly"),
        ("target!=torchtitan_0_3 tp>1", "nightly"),
    ],
)
def test_a_record_is_reproduced_in_a_tier_that_has_its_cases(where: str, tier: str) -> None:
    record = replace(read_known(ROOT / "cases" / "known.toml")[0], where=where)
    page = upstream_pages([record], (), ROOT)[record.name]
    assert f"fp8-harness run {tier} --select" in page


def test_every_record_without_a_report_has_a_title() -> None:
    for name, text in pages().items():
        assert text.splitlines()[0] != f"# {name}", "give it a title in known.toml"


@pytest.mark.parametrize("path", sorted(PAGES.glob("test_*.py")), ids=lambda path: path.stem)
def test_a_test_is_that_of_its_case(path: Path) -> None:
    bug: BugFile = BUGS[path.stem]
    text = path.read_text()
    head = text[: text.index('"""', 3) + 3]
    signatures = SIGNATURES.get(bug.bug.detected_by[0], (SCALES,))
    values = (constants(exported_case(bug.runnable()), signature) for signature in signatures)
    made = (pytest_file(chosen, head=head) for of_signature in values for _, chosen in models(of_signature))
    assert text in made, f"run `fp8-harness bug export {bug.id} --pytest --output docs/upstream`"
