"""The comparison of checks, as `judges.py` measured it, and the tables of docs/comparison.md that are made of it.

python ci/bench/comparison.py        prints them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from harness.durable import write_whole
from harness.evidence.sealed import Sealed, read_sealed, write_sealed
from harness.jsonform import compact

RECORD = Path(__file__).with_name("judges.json")
OF_ALL = {"loss": "loss, 0.01 nats", "sqnr": "SQNR, 20 dB", "checks": "our checks"}  # known of every fault
OF_SAMPLE = {"comm": "CommDebugMode counts", "hashes": "DebugMode hashes", "strategies": "strategy validation"}


CLEAN = "clean, against one rank or BF16"


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One fault in one host. `found`: which checks of `OF_ALL` found it.

    `asked`: of torch's checks, whether they did; None if the run, or the clean one, failed under the judge.
    """

    fault: str
    case_id: str
    found: tuple[str, ...]
    asked: Mapping[str, bool | None] = {}

    def says(self, judge: str) -> bool | None:
        """None: it was not asked, or could not watch."""
        return judge in self.found if judge in OF_ALL else self.asked.get(judge)


class Alarms(msgspec.Struct, frozen=True, kw_only=True):
    """The clean cases that a judge calls wrong, of so many that it could watch."""

    wrong: tuple[str, ...]
    of: int


class Comparison(Sealed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that was measured. `alarms`: by what is repeated and by judge.

    `cpu_s`: by judge, of all ranks, for a clean case; "" without any.
    """

    rows: tuple[Row, ...] = ()
    alarms: Mapping[str, Mapping[str, Alarms]] = {}
    cpu_s: Mapping[str, float] = {}
    software: Mapping[str, str] = {}


def share(judge: str, rows: Sequence[Row]) -> str:
    said = [answer for row in rows if (answer := row.says(judge)) is not None]
    return f"{sum(said)} of {len(said)}" if said else "-"


def tables(record: Comparison) -> str:
    """Markdown: how many faults were found, and what was called wrong without a fault."""
    asked = [row for row in record.rows if row.asked]
    names = {**OF_ALL, **(OF_SAMPLE if asked else {})}
    rule = _line(*["---"] * (1 + len(names)))
    lines = [_line("faults", *names.values()), rule]
    for title, rows in {"all": record.rows, "of the sample": asked}.items():
        if rows:
            lines.append(_line(title, *(share(judge, rows) for judge in names)))
    if asked:
        lost = {judge: sum(row.says(judge) is None for row in asked) for judge in names}
        lines.append(_line("of it: cannot watch", *(f"{count} of {len(asked)}" for count in lost.values())))
    lines += ["", _line("clean runs called wrong", *names.values()), rule]
    for row_title, by in record.alarms.items():
        counted = (f"{len(by[name].wrong)} of {by[name].of}" if name in by else "-" for name in names)
        lines.append(_line(row_title, *counted))
    return "\n".join(lines) + "\n"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def write(record: Comparison, path: Path) -> None:
    """Sealed, one row a line."""
    write_sealed(path, record)
    write_whole(path, f"{compact(msgspec.json.decode(path.read_bytes()))}\n".encode())


def read(path: Path = RECORD) -> Comparison:
    return read_sealed(path, Comparison, remake="run `python ci/bench/judges.py`.")


if __name__ == "__main__":
    print(tables(read()), end="")
