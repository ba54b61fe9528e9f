"""The tables of docs/comparison.md are those of the stored measurement."""

import importlib
from pathlib import Path

import pytest

from harness.plugins.faults.faults import all_faults

ROOT = Path(__file__).parents[4]


def test_the_page_has_the_tables_of_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci/bench"))
    study = importlib.import_module("comparison")
    record = study.read()
    assert {row.fault for row in record.rows} <= set(all_faults())
    assert all("checks" in row.found for row in record.rows)
    page = (ROOT / "docs/comparison.md").read_text()
    assert study.tables(record) in page, "run `python ci/bench/comparison.py` and put it into the page"
