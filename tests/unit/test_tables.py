"""Saved traces: what is written is what is read, and what differs between two runs is found, causes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.report.difference import TableDifference, difference, difference_blocks
from harness.report.sections import Section, text_of
from harness.tables import TABLES, load_tables, rows_of, save_tables
from harness.trace import Run
from harness.trace.counts import SavedMemory, TrafficRecord
from harness.trace.operands import OperandTrace
from tests.builders import make_cast, make_matmul, make_sketch, make_trace, run_of

CASTS = (make_cast(step=1, index=0), make_cast(step=1, index=1), make_cast(step=2, index=3))
TRAFFIC = TrafficRecord(step=1, axis="tp", kind="all_reduce", op="max", dtype="float32", payload_bytes=8, sizes={1: 2})
MEMORY = SavedMemory(step=1, saved_bytes=64, float8_bytes=16, by_dtype={})


def difference_text(differences: tuple[TableDifference, ...]) -> str:
    return text_of([Section(blocks=difference_blocks(differences))])


def recorded(*casts: object, losses: tuple[float, ...] = (2.0, 1.0)) -> Run:
    operands = OperandTrace(casts=casts or CASTS, matmuls=(make_matmul(CASTS[0], CASTS[1], index=2),))  # type: ignore[arg-type]
    sketches = (make_sketch("w", 1, value=3.0), make_sketch("w", 2, value=4.0))
    trace = make_trace(losses=losses, operands=operands, sketches=sketches, traffic=(TRAFFIC,), saved_memory=(MEMORY,))
    return run_of(trace)


def test_a_saved_trace_is_read_back_and_loads_with_numpy_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "case.npz"
    save_tables(path, recorded())
    assert load_tables(path) == rows_of(recorded())
    with np.load(path) as columns:
        assert columns["casts.amax"].tolist() == [cast.amax for cast in CASTS]
        assert columns["tensors.norm"].tolist() == [3.0, 4.0]
        assert columns["traffic.calls"].tolist() == [2]


def test_what_was_not_recorded_is_an_empty_table(tmp_path: Path) -> None:
    path = tmp_path / "case.npz"
    save_tables(path, run_of(make_trace()))
    tables = load_tables(path)
    assert [name for name, rows in tables.items() if rows] == ["steps"]


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04"])
def test_another_file_is_refused_with_the_command_that_writes_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "case.npz"
    path.write_bytes(content)
    with pytest.raises(HarnessError) as raised:
        load_tables(path)
    assert "--save-trace" in raised.value.text


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("saved") / "case.npz"
    save_tables(path, recorded())
    return path, path.read_bytes()


@given(st.data())
def test_a_damaged_file_is_one_error_or_the_same_rows(saved: tuple[Path, bytes], data: st.DataObject) -> None:
    path, whole = saved
    at = data.draw(st.integers(0, len(whole) - 1))
    length = data.draw(st.sampled_from([0, 1, 2, 40]))
    path.write_bytes(whole[:at] + data.draw(st.binary(max_size=8)) + whole[at + length :])
    try:
        assert repr(load_tables(path)) == repr(rows_of(recorded()))
    except HarnessError as error:
        assert "--save-trace" in error.text


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("casts.step", np.array(["a", "b", "c"])),
        ("casts.fqn", np.array([1, 2, 3])),
        ("casts.amax", np.ones((3, 2))),
        ("casts.amax", np.ones(2)),
        ("casts.amax", np.ones(3, dtype=complex)),
    ],
)
def test_columns_of_another_kind_are_refused(tmp_path: Path, name: str, column: Any) -> None:
    path = tmp_path / "case.npz"
    save_tables(path, recorded())
    with np.load(path) as columns:
        np.savez(path, **{**columns, name: column})
    with pytest.raises(HarnessError, match="is no trace"):
        load_tables(path)


def test_equal_runs_are_equal_even_with_losses_that_are_no_numbers() -> None:
    differences = difference(
        rows_of(recorded(losses=(2.0, float("nan")))), rows_of(recorded(losses=(2.0, float("nan"))))
    )
    assert all(table_difference.equal for table_difference in differences)
    assert [table_difference.table for table_difference in differences] == [table.name for table in TABLES]


def test_the_first_row_that_differs_is_named_in_every_table_causes_first() -> None:
    wrong = replace(CASTS[1], amax=1.5, data_digest="other")
    differences = difference(rows_of(recorded()), rows_of(recorded(CASTS[0], wrong, CASTS[2], losses=(2.0, 1.5))))
    text = difference_text(differences)
    assert text.index("casts: 1 of 3 rows differ") < text.index("steps: 1 of 2 rows differ")
    casts = differences[0]
    assert {change.column: change.second for change in casts.changes} == {"amax": 1.5, "data_digest": "other"}
    assert casts.where["step"] == 1
    assert "loss  1 -> 1.5  (0.5 of it)" in text
    assert "equal: matmuls (1 row), traffic (1 row), memory (1 row), tensors (2 rows)" in text


def test_rows_of_one_run_alone_are_counted() -> None:
    (casts, *_) = difference(rows_of(recorded()), rows_of(recorded(CASTS[0])))
    assert (casts.only_first, casts.only_second, casts.different) == (2, 0, 0)
    assert "2 rows only in the first run" in difference_text((casts,))
