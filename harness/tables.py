"""Tables: what the ranks of a run recorded, as columns, in one npz file per case.

`numpy.load(file)["casts.amax"]` is a column; every column of a table has the same length. Strings are unicode arrays,
and nothing is pickled. Rows of `casts` and `matmuls` are in execution order on each rank.

Public names: `Table`, `TABLES`, `Rows`, `rows_of`, `save_tables`, `load_tables`.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from harness.checks.assembly import assemble
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.hints import save_trace
from harness.trace import RankTrace, Run
from harness.trace.operands import CastRecord, MatmulRecord

if TYPE_CHECKING:
    import numpy as np

Value = int | float | str
Rows = list[dict[str, Value]]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """One table: the columns that say which row it is, and the columns with what was recorded."""

    name: str
    keys: tuple[str, ...]
    values: tuple[str, ...]


# In the order of causes: a wrong scale comes before the gradient that it makes wrong.
TABLES = (
    Table(
        name="casts",
        keys=("step", "rank", "fqn", "role", "phase"),
        values=("amax", "scale_min", "scale_max", "saturated", "flushed", "nonfinite", "mismatched", "data_digest"),
    ),
    Table(
        name="matmuls",
        keys=("step", "rank", "fqn", "gemm"),
        values=("m", "k", "n", "a_scale", "b_scale", "a_digest", "b_digest"),
    ),
    Table(name="traffic", keys=("step", "rank", "axis", "kind", "op", "dtype"), values=("calls", "payload_bytes")),
    Table(name="memory", keys=("step", "rank"), values=("saved_bytes", "float8_bytes")),
    Table(name="tensors", keys=("step", "kind", "fqn"), values=("norm",)),  # gradients, and parameters at the end
    Table(name="steps", keys=("step", "rank"), values=("loss", "grad_norm")),
)


def rows_of(run: Run) -> dict[str, Rows]:
    """The rows of every table of a run; a table that no rank recorded is empty."""
    traces = sorted(run.traces, key=lambda trace: trace.rank)
    found: dict[str, Rows] = {
        "casts": [_cast(trace.rank, cast) for trace in traces if trace.operands for cast in trace.operands.casts],
        "matmuls": [_matmul(trace.rank, each) for trace in traces if trace.operands for each in trace.operands.matmuls],
        "traffic": [row for trace in traces for row in _traffic(trace)],
        "memory": [row for trace in traces for row in _memory(trace)],
        "tensors": [
            {"step": key.step, "kind": key.kind, "fqn": key.fqn, "norm": tensor.norm}
            for key, tensor in assemble(traces).items()
        ],
        "steps": [
            {"step": step.step, "rank": trace.rank, "loss": step.loss, "grad_norm": step.grad_norm}
            for trace in traces
            for step in trace.steps
        ],
    }
    return found


def _cast(rank: int, cast: CastRecord) -> dict[str, Value]:
    return {
        "step": cast.step,
        "rank": rank,
        "fqn": cast.fqn,
        "role": cast.role,
        "phase": cast.phase,
        "amax": cast.amax,
        "scale_min": cast.scale.minimum,
        "scale_max": cast.scale.maximum,
        "saturated": cast.saturated,
        "flushed": cast.flushed,
        "nonfinite": cast.nonfinite,
        "mismatched": cast.mismatched,
        "data_digest": cast.data_digest,
    }


def _matmul(rank: int, matmul: MatmulRecord) -> dict[str, Value]:
    return {
        "step": matmul.step,
        "rank": rank,
        "fqn": matmul.fqn,
        "gemm": matmul.gemm,
        "m": matmul.m,
        "k": matmul.k,
        "n": matmul.n,
        "a_scale": matmul.a_scale.maximum,
        "b_scale": matmul.b_scale.maximum,
        "a_digest": matmul.a_digest,
        "b_digest": matmul.b_digest,
    }


def _traffic(trace: RankTrace) -> Iterator[dict[str, Value]]:
    for record in trace.traffic or ():
        yield {
            "step": record.step,
            "rank": trace.rank,
            "axis": record.axis,
            "kind": record.kind,
            "op": record.op,
            "dtype": record.dtype,
            "calls": sum(record.sizes.values()),
            "payload_bytes": record.payload_bytes,
        }


def _memory(trace: RankTrace) -> Iterator[dict[str, Value]]:
    for record in trace.saved_memory or ():
        yield {
            "step": record.step,
            "rank": trace.rank,
            "saved_bytes": record.saved_bytes,
            "float8_bytes": record.float8_bytes,
        }


def save_tables(path: Path, run: Run) -> None:
    """Write the tables of a run as npz. Raises `WriteFailed`."""
    import numpy as np

    found = rows_of(run)
    columns = {
        f"{table.name}.{name}": np.array([row[name] for row in found[table.name]])
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
            return {table.name: list(_rows(table, columns)) for table in TABLES}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        fix = f"write it again by `{save_trace(path.stem, path.parent)}`."
        raise HarnessError(f"is no saved trace ({error}).", where=str(path), fix=fix) from error


def _rows(table: Table, columns: Mapping[str, np.ndarray]) -> Iterable[dict[str, Value]]:
    names = (*table.keys, *table.values)
    for values in zip(*(columns[f"{table.name}.{name}"].tolist() for name in names), strict=True):
        yield dict(zip(names, values, strict=True))
