"""Tables: what the ranks of a run recorded, as columns, in one npz file per case.

`numpy.load(file)["casts.amax"]` is a column; every column of a table has the same length. Strings are unicode arrays,
and nothing is pickled. Rows of `casts` and `matmuls` are in execution order on each rank.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from harness.checks.assembly import assemble
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.hints import save_trace
from harness.trace import Run

if TYPE_CHECKING:
    import numpy as np

Value = int | float | str
Rows = list[dict[str, Value]]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """One table: the columns that say which row it is, and the columns with what was recorded."""

    name: str
    keys: tuple[str, ...]
    values: tuple[str, ...]


CASTS = Table(
    name="casts",
    keys=("step", "rank", "fqn", "role", "phase"),
    values=("amax", "scale_min", "scale_max", "saturated", "flushed", "nonfinite", "mismatched", "data_digest"),
)
MATMULS = Table(
    name="matmuls",
    keys=("step", "rank", "fqn", "gemm"),
    values=("m", "k", "n", "a_scale", "b_scale", "a_digest", "b_digest"),
)
TRAFFIC = Table(name="traffic", keys=("step", "rank", "axis", "kind", "op", "dtype"), values=("calls", "payload_bytes"))
MEMORY = Table(name="memory", keys=("step", "rank"), values=("saved_bytes", "float8_bytes"))
TENSORS = Table(
    name="tensors", keys=("step", "kind", "fqn"), values=("norm",)
)  # initial weights, gradients, and parameters at the end
STEPS = Table(name="steps", keys=("step", "rank"), values=("loss", "grad_norm"))

_TEXTS = frozenset(
    ("fqn", "role", "phase", "gemm", "axis", "kind", "op", "dtype", "data_digest", "a_digest", "b_digest")
)

# In the order of causes: a wrong scale comes before the gradient that it makes wrong.
TABLES = (CASTS, MATMULS, TRAFFIC, MEMORY, TENSORS, STEPS)


def rows_of(run: Run) -> dict[str, Rows]:
    """The rows of every table of a run; a table that no rank recorded is empty."""
    traces = sorted(run.traces, key=lambda trace: trace.rank)
    operands = [(trace.rank, trace.operands) for trace in traces if trace.operands is not None]
    return {
        CASTS.name: [
            _row(CASTS, cast, rank=rank, scale_min=cast.scale.minimum, scale_max=cast.scale.maximum)
            for rank, recorded in operands
            for cast in recorded.casts
        ],
        MATMULS.name: [
            _row(MATMULS, matmul, rank=rank, a_scale=matmul.a_scale.maximum, b_scale=matmul.b_scale.maximum)
            for rank, recorded in operands
            for matmul in recorded.matmuls
        ],
        TRAFFIC.name: [
            _row(TRAFFIC, record, rank=trace.rank, calls=sum(record.sizes.values()))
            for trace in traces
            for record in trace.traffic or ()
        ],
        MEMORY.name: [_row(MEMORY, record, rank=trace.rank) for trace in traces for record in trace.saved_memory or ()],
        TENSORS.name: [_row(TENSORS, key, norm=tensor.norm) for key, tensor in assemble(traces).items()],
        STEPS.name: [_row(STEPS, record, rank=trace.rank) for trace in traces for record in trace.steps],
    }


def _row(table: Table, record: object, **others: Value) -> dict[str, Value]:
    """The columns of the table: `others`, and the fields of the record that have their names."""
    names = (*table.keys, *table.values)
    return {name: others[name] if name in others else getattr(record, name) for name in names}


def save_tables(path: Path, run: Run) -> None:
    """Write the tables of a run as npz. Raises `WriteFailed`."""
    import numpy as np

    rows = rows_of(run)
    columns = {
        f"{table.name}.{name}": np.array([row[name] for row in rows[table.name]])
        for table in TABLES
        for name in (*table.keys, *table.values)
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **columns)  # type: ignore[arg-type]  # the names are no keywords of its own
    write_whole(path, buffer.getvalue())


def load_tables(path: Path) -> dict[str, Rows]:
    """The rows of every table of a file that `save_tables` wrote. Raises `HarnessError` for any other file."""
    import numpy as np

    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as columns:
            return {table.name: _rows(table, columns) for table in TABLES}
    except Exception as error:  # whatever zipfile, zlib and numpy raise for bytes that are none of theirs
        again = f"write it again by `{save_trace(path.stem, path.parent)}`."
        fix = again if path.suffix == ".npz" else "give a folder of saved traces."
        raise HarnessError("is no trace that `run --save-trace DIR` wrote.", where=str(path), fix=fix) from error


def _rows(table: Table, columns: Mapping[str, np.ndarray]) -> Rows:
    names = (*table.keys, *table.values)
    rows = zip(*(_column(name, columns[f"{table.name}.{name}"]) for name in names), strict=True)
    return [dict(zip(names, values, strict=True)) for values in rows]


def _column(name: str, values: np.ndarray) -> list[Value]:
    """Raises ValueError for what is no column of this name."""
    if values.ndim != 1 or (values.size and values.dtype.kind not in ("U" if name in _TEXTS else "biuf")):
        raise ValueError(f"{name} is no column of {'texts' if name in _TEXTS else 'numbers'}")
    column: list[Value] = values.tolist()
    return column
