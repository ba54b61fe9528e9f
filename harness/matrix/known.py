"""Known upstream faults: cases that fail because of torch or torchao, how they fail, and where it is reported.

Owns the format of `cases/known.toml`. `checks/judge.py` compares failures with it: a record never hides a failure that
looks different, and a case that passes although a fault is recorded for it fails.

    [[fault]]
    name = "..."                  # short, unique
    where = "tp>1 recipe=rowwise" # a selector: the affected cases
    verdict = "crash"             # how they end
    pattern = "..."               # regular expression found in a finding or crash message
    link = "https://..."          # the report
    torch = ">=2.13,<2.14"        # the affected versions
    reason = "..."                # one sentence: the cause
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from harness.errors import HarnessError
from harness.matrix.axes import suggestion
from harness.matrix.case import Case
from harness.matrix.rules import Rule
from harness.matrix.selector import axes_read, parse_selector
from harness.matrix.tomlfile import TomlFile, read_toml_file
from harness.verdict import Verdict

_FAILURES = tuple(verdict.value for verdict in (Verdict.NUMERIC, Verdict.INVARIANT, Verdict.CRASH, Verdict.HANG))


class KnownFault(msgspec.Struct, frozen=True, kw_only=True):
    """One record. `pattern` is searched in messages; `torch` is a version specifier as for pip."""

    name: str
    where: str
    verdict: Verdict
    pattern: str
    link: str
    torch: str
    reason: str

    def affects(self, torch: str) -> bool:
        """True when this version of torch has the fault. A source build `2.13.0a0+git12` counts as 2.13.0."""
        return SpecifierSet(self.torch).contains(Version(torch).base_version)


def read_known(path: Path) -> tuple[KnownFault, ...]:
    """The records of a file, in order. Raises HarnessError with the line for anything invalid."""
    toml = read_toml_file(path)
    toml.check_keys(table=toml.data, known=("fault",))
    faults = tuple(_fault(toml, table, index) for index, table in enumerate(toml.tables("fault")))
    names = [fault.name for fault in faults]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise toml.error("fault", index, "name", what=f"two faults are named '{name}'.", fix="rename one of them.")
    return faults


def match_known(faults: Sequence[KnownFault], case: Case) -> KnownFault | None:
    """The first record that affects a case, or None. The caller filters by version (`affects`)."""
    return next((fault for fault in faults if parse_selector(fault.where).matches(case)), None)


class KnownRule(Rule, frozen=True):
    """The cases that a record hits, as a rule of the matrix: they run, and their numbers prove nothing new."""


def known_rule(fault: KnownFault) -> KnownRule:
    """The rule of a record. HarnessError when its selector asks for ids instead of axis values."""
    selector = parse_selector(fault.where)
    return KnownRule(
        name=fault.name, reason=fault.reason, source=fault.link, axes=axes_read(selector), applies=selector.matches
    )


def _fault(toml: TomlFile, table: object, index: int) -> KnownFault:
    fields = KnownFault.__struct_fields__
    known = toml.check_keys("fault", index, table=table, known=fields)
    for field in fields:
        if not isinstance(known.get(field), str) or not known[field].strip():
            raise toml.error(
                "fault", index, field, what=f"'{field}' must be a non-empty string.", fix=f'add {field} = "...".'
            )
    if known["verdict"] not in _FAILURES:
        what = f"verdict '{known['verdict']}' is not a failure."
        raise toml.error("fault", index, "verdict", what=what, fix=suggestion(known["verdict"], _FAILURES))
    try:
        parse_selector(known["where"])
        re.compile(known["pattern"])
        SpecifierSet(known["torch"])
    except re.error as error:
        raise toml.error("fault", index, "pattern", what=f"not a regular expression: {error}.") from error
    except InvalidSpecifier as error:
        what = f"'{known['torch']}' is not a version specifier."
        raise toml.error("fault", index, "torch", what=what, fix='write torch = ">=2.13,<2.14".') from error
    except HarnessError as error:
        raise toml.error("fault", index, what=error.what, fix=error.fix) from error
    return msgspec.convert(known, KnownFault)
