"""`docs/reading-a-report.md`: its commands are run, and its marks are those of the page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from harness.verdict import Verdict
from tests.acceptance.conftest import REPOSITORY
from tests.acceptance.documents import steps

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

DOCUMENT = (REPOSITORY / "docs" / "reading-a-report.md").read_text()
SCRIPT = (REPOSITORY / "harness" / "report" / "html" / "assets" / "page.js").read_text()
SAYS = {
    "fp8-harness show": "4 cases: 4 passed",
    "fp8-harness show single-tensorwise": "passed; 1 rank",
    "fp8-harness show first single-tensorwise": "passed; 1 rank",
}


def test_the_document_is_what_happens(project: Command) -> None:
    said = set()
    for _, text in steps(DOCUMENT):
        done = project.printed(text)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        if text in SAYS:
            assert SAYS[text] in done.stdout, text
            said.add(text)
    assert said == set(SAYS)
    assert all((project.folder / name).stat().st_size for name in ("report.html", "summary.md", "junit.xml"))


def test_the_marks_are_those_of_the_page() -> None:
    rows = re.findall(r"^\| (\S) \| (\w+) \| (.+) \|$", DOCUMENT, flags=re.MULTILINE)
    assert {name: phrase for _, name, phrase in rows} == {each.value: each.phrase for each in Verdict}
    assert all(f'{name}: "{mark}"' in SCRIPT for mark, name, _ in rows)
