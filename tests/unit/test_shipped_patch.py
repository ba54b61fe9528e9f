"""A patch runs from the source that the request carries: the file of the user may be on another machine."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest

from harness.running.injection import parse_injection
from harness.worker.injection import InjectionError, inject

CODE = "# käse\nimport os\ndef apply():\n    os.environ['FP8_TEST_PATCH'] = __file__\ndef fails():\n    int('x')\n"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_the_file_is_not_needed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    file = tmp_path / "patch.py"
    file.write_bytes(f"# coding: {encoding}\n{CODE}".encode(encoding))
    applied, fails = (parse_injection(f"{file}:{name}") for name in ("apply", "fails"))
    content = applied.content
    file.unlink()
    monkeypatch.setenv("FP8_TEST_PATCH", "")
    inject(applied.patch)
    assert os.environ["FP8_TEST_PATCH"] == str(file)
    with pytest.raises(InjectionError, match=f"injection {file}:fails raised ValueError") as raised:
        inject(fails.patch)
    assert "int('x')" in "".join(traceback.format_exception(raised.value)), "tracebacks show lines of the source"
    assert applied.content == content
    file.write_text("def apply(): pass\n")
    assert parse_injection(f"{file}:apply").content != content
