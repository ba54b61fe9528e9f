"""Recorded upstream faults: which cases are known to fail because of torch or torchao, how, and where it is reported.

Owns the format of `cases/known.toml`. Whether a case really failed as recorded is judged elsewhere: a record never
silences a failure that looks different, and a case that passes against its record is a failure too.

    [[fault]]
    name = "..."                  # short, unique
    where = "tp>1 recipe=rowwise" # a selector: the cases it hits
    verdict = "crash"             # how they end
    pattern = "..."               # regular expression found in a finding or crash message
    link = "https://..."          # the report
    torch = ">=2.13,<2.14"        # versions that have the fault
    reason = "..."                # one sentence: the cause
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.errors import HarnessError
from harness.spec.axes import suggestion
from harness.spec.case import Case
from harness.spec.selector import parse_selector
from harness.spec.tomlfile import TomlFile, read_toml_file
from harness.verdict import Verdict

_FAILURES = tuple(verdict.value for verdict in (Verdict.NUMERIC, Verdict.INVARIANT, Verdict.CRASH, Verdict.HANG))
_VERSION = re.compile(r"(==|!=|<=|>=|<|>)\s*(\d+(?:\.\d+)*)")


class KnownFault(msgspec.Struct, frozen=True, kw_only=True):
    """One record. `pattern` is searched in messages; `torch` holds comma-separated version limits, all must hold."""

    name: str
    where: str
    verdict: Verdict
    pattern: str
    link: str
    torch: str
    reason: str

    def hits_torch(self, version: str) -> bool:
        """True when a torch version (`2.13.0+cpu`) is among those recorded."""
        release = _release(version)
        return all(_holds(release, operator, _release(limit)) for operator, limit in _limits(self.torch))


def read_known(path: Path) -> tuple[KnownFault, ...]:
    """The records in a file, in order; HarnessError with the line on anything that is not right."""
    toml = read_toml_file(path)
    toml.check_keys(table=toml.data, known=("fault",))
    faults = tuple(_fault(toml, table, index) for index, table in enumerate(toml.tables("fault")))
    names = [fault.name for fault in faults]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise toml.error("fault", index, "name", what=f"two faults are named '{name}'.", fix="rename one of them.")
    return faults


def match_known(faults: Sequence[KnownFault], case: Case) -> KnownFault | None:
    """The first record that hits a case, or None. Versions are the caller's to filter (`hits_torch`)."""
    return next((fault for fault in faults if parse_selector(fault.where).matches(case)), None)


def _fault(toml: TomlFile, table: object, index: int) -> KnownFault:
    fields = KnownFault.__struct_fields__
    known = toml.check_keys("fault", index, table=table, known=fields)
    for field in fields:
        if not isinstance(known.get(field), str) or not known[field].strip():
            raise toml.error("fault", index, field, what=f"'{field}' must be a text.", fix=f'add {field} = "...".')
    if known["verdict"] not in _FAILURES:
        what = f"verdict '{known['verdict']}' is not a failure."
        raise toml.error("fault", index, "verdict", what=what, fix=suggestion(known["verdict"], _FAILURES))
    try:
        parse_selector(known["where"])
        re.compile(known["pattern"])
        _limits(known["torch"])
    except re.error as error:
        raise toml.error("fault", index, "pattern", what=f"not a regular expression: {error}.") from error
    except HarnessError as error:
        raise toml.error("fault", index, what=error.what, fix=error.fix) from error
    return msgspec.convert(known, KnownFault)


def _limits(text: str) -> list[tuple[str, str]]:
    limits = []
    for part in text.split(","):
        found = _VERSION.fullmatch(part.strip())
        if found is None:
            raise HarnessError(f"'{part.strip()}' is no version limit.", fix='write torch = ">=2.13,<2.14".')
        limits.append((found[1], found[2]))
    return limits


def _release(version: str) -> tuple[int, int, int]:
    """The first three numbers, zero-filled: `2.13` equals `2.13.0`, and local and pre-release tags do not count."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in found[0].split(".")] if found else []
    major, minor, micro = [*numbers, 0, 0, 0][:3]
    return major, minor, micro


def _holds(release: tuple[int, int, int], operator: str, limit: tuple[int, int, int]) -> bool:
    return {
        "==": release == limit,
        "!=": release != limit,
        "<=": release <= limit,
        ">=": release >= limit,
        "<": release < limit,
        ">": release > limit,
    }[operator]
