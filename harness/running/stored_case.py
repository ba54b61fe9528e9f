"""What a stored run says of some of its cases, as far as `history` follows it. No other line is decoded."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import msgspec

from harness.measured import Numbers
from harness.running.stored import Stored
from harness.store import SCHEMA, RunStore
from harness.verdict import Verdict


class StoredCase(msgspec.Struct, frozen=True, kw_only=True):
    """How a case ended in one run, in how many wall seconds of all attempts, and what it measured."""

    verdict: Verdict
    seconds: float
    numbers: Numbers | None = None


class _Attempt(msgspec.Struct):
    wall_s: float


class _Result(msgspec.Struct):
    verdict: Verdict
    attempts: tuple[_Attempt, ...]
    measured: Numbers | None = None


class _StoredLine(msgspec.Struct):
    result: _Result

    @property
    def case(self) -> StoredCase:
        seconds = sum(attempt.wall_s for attempt in self.result.attempts)
        return StoredCase(verdict=self.result.verdict, seconds=seconds, numbers=self.result.measured)


class _ImportedLine(msgspec.Struct):
    verdict: Verdict
    seconds: float
    measured: Numbers | None = None

    @property
    def case(self) -> StoredCase:
        return StoredCase(verdict=self.verdict, seconds=self.seconds, numbers=self.measured)


# How a line begins that `store.py` or `imported.py` wrote.
_STORED = re.compile(rb'\{"schema":%d,"result":\{"case_id":"([\w.+-]+)"' % SCHEMA)
_IMPORTED = re.compile(rb'\{"id":"([\w.+-]+)"')
_STORED_LINE = msgspec.json.Decoder(_StoredLine, strict=False)  # not strict: "NaN" is a float
_IMPORTED_LINE = msgspec.json.Decoder(_ImportedLine, strict=False)


def stored_cases(run: Stored, wanted: Callable[[str], bool]) -> dict[str, StoredCase]:
    """The last readable line of every wanted case, by id. A case that was not run has none."""
    path = run.path if run.is_imported else RunStore(run.path).path
    beginning, decoder = (_IMPORTED, _IMPORTED_LINE) if run.is_imported else (_STORED, _STORED_LINE)
    found: dict[str, StoredCase] = {}
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            named = beginning.match(line)
            if named is None or not wanted(case_id := named[1].decode()):
                continue
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                found[case_id] = decoder.decode(line).case
    return {case_id: case for case_id, case in found.items() if case.verdict is not Verdict.NOT_RUN}
