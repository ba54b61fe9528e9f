"""`fp8-harness conformance`: a table for people, a document for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command


def test_the_document_goes_to_stdout_and_the_table_to_stderr(shared: Command) -> None:
    done = shared.call("dev", "conformance", "amax-8x16-f32-m4-R", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert "1 check in " in done.stderr and "1 passed" in done.stderr
    found = json.loads(done.stdout)
    assert found["counts"] == {"passed": 1}
    assert [(check["id"], check["status"]) for check in found["checks"]] == [("amax-8x16-f32-m4-R", "passed")]
