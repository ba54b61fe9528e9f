"""Promises: how far each number that is checked may be off, one row of `promises.toml` for each, with its evidence.

Code names a row, and no number. `Limit` is the number with its name; `keeps` compares, and notes how much of it a run
used. `ci/promises.py` measures again what clean runs use; `tests/unit/test_promises.py` holds rows against that.
"""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import msgspec

# rounding: so many roundings of a named operation explain it. measured: the spread of clean runs. choice: what counts
# as the same, as a factor or as enough.
Kind = Literal["rounding", "measured", "choice"]


class Promise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One limit. `value`: a number, or a product of numbers and powers of two, "3 * 2**-9".

    `floor`: the largest that clean runs had, where `ci/promises.py` cannot see it. `evidence`: of which runs, machines
    and versions, or why nothing was measured. `fault`: the smallest injected one that it is known to find: its name, or
    a test; `no_fault`: why there is none. `wide`: why the limit is wider than four times the floor.
    """

    value: float | str
    unit: str
    kind: Kind
    evidence: str
    of: str = ""  # a rounding: the dtype and the operation
    floor: float | None = None
    fault: str = ""
    no_fault: str = ""
    wide: str = ""

    @property
    def number(self) -> float:
        return math.prod(map(_factor, str(self.value).split(" * ")))


def _factor(text: str) -> float:
    base, power, exponent = text.partition("**")
    return float(base) ** int(exponent) if power else float(text)


PROMISES: Mapping[str, Promise] = {
    f"{table}.{row}": msgspec.convert(fields, Promise)
    for table, rows in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
    for row, fields in rows.items()
}


class Limit(float):
    """What a promise allows; `name` is its row. Of a row with a formula, `times` is what the case makes of it."""

    name: str

    def __new__(cls, name: str, times: float = 1.0) -> Self:
        limit = super().__new__(cls, PROMISES[name].number * times)
        limit.name = name
        return limit

    def plus(self, more: float) -> "Limit":
        return Limit(self.name, (self + more) / Limit(self.name))


_used: dict[str, float] = {}


def keeps(distance: float, allowed: float) -> bool:
    """Return True for a distance that is allowed, which NaN and what is infinite never are."""
    if isinstance(allowed, Limit) and allowed and math.isfinite(distance):
        _used[allowed.name] = max(_used.get(allowed.name, 0.0), distance / allowed)
    return distance <= allowed < math.inf


def used() -> Mapping[str, float]:
    """Return the largest share of every limit that runs used since it was asked for, by row."""
    shares = dict(_used)
    _used.clear()
    return shares
