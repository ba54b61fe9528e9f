"""Bug files: one reported bug each, `cases/bugs/<id>.toml`. Owns their format and its errors.

    [bug]
    title = "..."
    link = "https://..."             # the report, or "unreported"
    reported = 2024-07-16            # optional
    status = "fixed"                 # open, live, fixed or refused
    symptom = "crash"                # what the reporter saw
    message = "..."                  # the error as reported; optional
    report = "..."                   # the words of the report, without its code; optional
    first_bad_step = 3               # optional
    hardware = "8 x H100"            # optional
    cause = "..."                    # optional, like `fix`: what is known today
    fix = "..."
    detected_by = ["scales"]         # the checks that find it, or "engine"
    planted = ["amax_without_abs"]   # injected faults that bring a fixed bug back
    signature = {kind = "scales", what = "...", where = ["..."], first_step = 1}  # of the failure; optional
    [bug.versions]                   # as reported
    torch = "2.6.0.dev20241101"
    [case]                           # as in case files: an id, or axes
    axes = {tp = 2, recipe = "rowwise"}
    [stated]                         # by axis, the words it came from
    [derived]                        # by axis, the arithmetic
    [assumed]                        # by axis, from which default of which date
    [missing]                        # by axis, the question to answer; until this table is empty nothing runs
    [refused]                        # by feature, what it would need
    [full_size]                      # by axis, its value before the model was made smaller

Of an `open` bug a field is missing. A `live` one still fails with a version that cases/known.toml names, a `fixed` one
passes and fails again with its injected faults. A `refused` one has no case: no case can have what it needs.
"""

import datetime
import itertools
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.errors import HarnessError
from harness.matrix.axes import AXES, own_axes
from harness.matrix.case import Case
from harness.matrix.casefile import CaseFile, case_of_table
from harness.matrix.tomlfile import TomlFile, parse_toml, read_toml_text
from harness.registry import answers
from harness.verdict import FailureSignature

FOLDER = "bugs"  # in cases/, and the name of the tier of all bugs that have a case
UNREPORTED = "unreported"
_DESCRIPTION = "Bugs: every reported bug that has a case."

Status = Literal["open", "live", "fixed", "refused"]
Symptom = Literal[
    "crash", "hang", "nan", "wrong_numbers", "diverges", "memory", "traffic", "slow", "metric", "not_converted",
    "unknown",
]  # fmt: skip
_WORDS = ("stated", "derived", "assumed", "missing", "refused")


class Bug(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    link: str
    status: Status
    symptom: Symptom
    reported: datetime.date | None = None
    message: str = ""
    report: str = ""
    first_bad_step: int | None = None
    hardware: str = ""
    versions: Mapping[str, str] = {}
    cause: str = ""
    fix: str = ""
    detected_by: tuple[str, ...] = ()
    planted: tuple[str, ...] = ()
    signature: FailureSignature | None = None


class Origins(msgspec.Struct, frozen=True, kw_only=True):
    """Where the values of a case come from, by axis, and what was not made of the job.

    `missing`: questions, by axis or by the line that nobody understands; they must be answered before it runs.
    `refused`: what the job asks for and no case has. `full_size`: values that the case has smaller.
    """

    stated: Mapping[str, str] = {}
    derived: Mapping[str, str] = {}
    assumed: Mapping[str, str] = {}
    missing: Mapping[str, str] = {}
    refused: Mapping[str, str] = {}
    full_size: Mapping[str, object] = {}


class BugFile(Origins, frozen=True, kw_only=True):
    """A bug with its case, and where each value of the case comes from. `id` is the name of the file."""

    id: str
    where: str
    bug: Bug
    case: Case | None = None

    @property
    def runs(self) -> bool:
        return self.case is not None and not self.missing

    def runnable(self) -> Case:
        """Return the case. HarnessError saying what to fill in, or why there is none."""
        if self.case is None:
            reasons = "; ".join(f"{name}: {text}" for name, text in self.refused.items())
            raise HarnessError(f"no case has this bug: {reasons}.", where=self.where)
        if self.missing:
            questions = "; ".join(f"{name}: {text}" for name, text in self.missing.items())
            fix = "answer in [case.axes], and remove the line from [missing]."
            raise HarnessError(f"open fields: {questions}.", where=self.where, fix=fix)
        return self.case


def holds_bugs(path: Path) -> bool:
    return path.name == FOLDER if path.is_dir() else path.parent.name == FOLDER


def cases_of_bugs(path: Path) -> CaseFile | None:
    """Return the cases of a bug file, or of all in a folder that run; None for another file.

    Raises HarnessError for one file whose case does not run.
    """
    if not holds_bugs(path):
        return None
    if path.is_dir():
        cases = tuple(bug.case for bug in read_bugs(path) if bug.runs and bug.case is not None)
    else:
        cases = (read_bug_file(path).runnable(),)
    return CaseFile(name=path.stem, where=str(path), description=_DESCRIPTION, cases=cases)


def read_bugs(folder: Path) -> tuple[BugFile, ...]:
    return tuple(read_bug_file(path) for path in sorted(folder.glob("*.toml")))


def read_bug_file(path: Path) -> BugFile:
    """Return the bug file at `path`. HarnessError with file and line for anything invalid."""
    return _bug_file(read_toml_text(path), path)


@lru_cache(maxsize=256)  # one command reads all of them for several reasons
def _bug_file(text: str, path: Path) -> BugFile:
    toml = parse_toml(text, where=str(path))
    toml.check_keys(table=toml.data, known=("bug", "case", *Origins.__struct_fields__))
    if "bug" not in toml.data:
        raise toml.error(what="there is no [bug].", fix="add [bug] with title, link, status and symptom.")
    bug = toml.record(Bug, toml.data["bug"], "bug")
    # Without a plug-in that knows faults, none of them is planted here.
    for name, catalogue in itertools.product(bug.planted, answers("injected faults")):
        try:
            catalogue.fault_named(name)
        except HarnessError as error:
            raise toml.error("bug", "planted", what=error.what, fix=error.fix) from error
    case = case_of_table(toml, toml.data["case"], {}, path=("case",)) if "case" in toml.data else None
    words = {name: _words(toml, name) for name in _WORDS}
    sizes = toml.check_keys("full_size", table=toml.data.get("full_size", {}), known=AXES)
    _check_status(toml, bug, case, words)
    return BugFile(id=path.stem, where=str(path), bug=bug, case=case, full_size=sizes, **words)


def write_bug_file(bug: BugFile) -> str:
    """Return the text of a bug file, which reads back as the same bug."""
    import tomli_w

    tree: dict[str, Any] = {"bug": _table(bug.bug)}
    if bug.case is not None:
        tree["case"] = {"axes": {name: _plain(value) for name, value in own_axes(bug.case).items()}}
    tree |= {name: dict(table) for name in Origins.__struct_fields__ if (table := getattr(bug, name))}
    on_one_line = tomli_w.dumps(tree)
    # A parser reads "\r\n" as "\n" in a string of several lines.
    return on_one_line if r"\r" in on_one_line else tomli_w.dumps(tree, multiline_strings=True)


def _table(value: Bug | FailureSignature) -> dict[str, Any]:
    given = msgspec.structs.asdict(value)
    return {name: _plain(value) for name, value in given.items() if value not in (None, "", (), {})}


def _plain(value: object) -> object:
    if isinstance(value, FailureSignature):
        return _table(value)
    return list(value) if isinstance(value, tuple) else value


def _words(toml: TomlFile, name: str) -> dict[str, str]:
    table = toml.check_keys(name, table=toml.data.get(name, {}), known=toml.data.get(name, {}))
    for key, text in table.items():
        if not isinstance(text, str):
            raise toml.error(name, key, what=f"{text!r} is no text.", fix=f'write {key} = "...".')
    return table


def _check_status(toml: TomlFile, bug: Bug, case: Case | None, words: Mapping[str, Mapping[str, str]]) -> None:
    """HarnessError where the status says something else than the tables do."""
    if bug.status == "refused" and (case is not None or not words["refused"]):
        raise toml.error("bug", "status", what="a refused bug has a [refused] table and no case.")
    if bug.status != "refused" and case is None:
        raise toml.error("bug", "status", what="there is no [case].", fix='add one, or write status = "refused".')
    if words["missing"] and bug.status != "open":
        what = f"fields are open in a bug that is {bug.status}."
        raise toml.error("missing", what=what, fix='write status = "open".')
    if bug.status in ("live", "fixed") and not bug.detected_by:
        raise toml.error("bug", what=f"a {bug.status} bug needs detected_by.", fix='write detected_by = ["scales"].')
    if bug.planted and bug.status != "fixed":
        raise toml.error("bug", "planted", what=f"a {bug.status} bug needs no injected fault: torch or torchao has it.")
