"""The file of a run: JSON Lines, a `RunStart`, then the result of every case, then a `RunEnd`.

It is what is stored while a run goes on, and what `run --json` writes. Every line is on disk before the next case is
reported, so an interrupted run keeps the results of all finished cases. The first line, which lists the cases, is there
before the first rank starts: a case in it without a result was never reached by a run that was killed, or its line is
damaged. Numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity". Every line ends with a checksum
(`jsonform.py`); one that is damaged is never read as results.

Fields may be added; any other change increments `SCHEMA`. `show --schema` prints `schemas/result.schema.json`.
"""

import contextlib
import inspect
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_type_hints

import msgspec
from msgspec.structs import replace

from harness.durable import WriteFailed, append_line, take_lock
from harness.errors import HarnessError
from harness.jsonform import CHECKSUM, CHECKSUM_MEANING, check_line, from_json, to_json, with_checksum
from harness.matrix.caseid import case_id, parse_case_id
from harness.result import SCHEMA, CaseNumbers, CaseResult, RunEnd, RunResult, RunStart
from harness.run_options import RunOptions, options_of
from harness.verdict import Verdict

# Properties that lines have besides the fields, for programs that read them; nothing here does.
CASE_FACTS = ("good", "headline", "three_lines", "seconds", "cpu_s")
RUN_FACTS = ("exit_code", "cpu_s", "all_cpu_s", "totals", "check_totals")
_TRIES, _PAUSE_S = 5, 0.02
_START = re.compile(rb'\{"line":"start","schema":(\d+)')
_CASE = re.compile(rb'\{"line":"case","id":"([\w.+-]+)"')
_END = b'{"line":"end"'
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# Not strict: "NaN" is a float.
_LINE: msgspec.json.Decoder[RunStart | CaseResult | RunEnd] = msgspec.json.Decoder(
    RunStart | CaseResult | RunEnd, strict=False
)
_NUMBERS = msgspec.json.Decoder(CaseNumbers, strict=False)
Line = TypeVar("Line", CaseResult, RunEnd)
Read = TypeVar("Read")


def run_lines(run: RunResult) -> bytes:
    start = replace(run.start, cases=tuple(result.case_id for result in run.results))
    return b"".join(line + b"\n" for line in (_start_line(start), *map(_case_line, run.results), _end_line(run)))


def _start_line(start: RunStart) -> bytes:
    return with_checksum(to_json(start))


def _case_line(result: CaseResult) -> bytes:
    line = msgspec.to_builtins(replace(result, run=None))
    del line["run"]
    return with_checksum(to_json({**line, **{name: getattr(result, name) for name in CASE_FACTS}}))


def _end_line(run: RunResult) -> bytes:
    return with_checksum(to_json({**msgspec.to_builtins(run.end), **{name: getattr(run, name) for name in RUN_FACTS}}))


class RunStore:
    """The file of one run. Thread-safe. What cannot be written is noted: a full disk must not end a run."""

    def __init__(self, path: Path, note: Callable[[str], None] | None = None) -> None:
        self.path = path  # may not exist yet
        self._note = note  # None: raises `WriteFailed` instead
        self._lock = threading.Lock()

    def begin(self, start: RunStart) -> None:
        self._append("list of cases", _start_line(start))

    def append(self, result: CaseResult) -> None:
        self._append("result", _case_line(result))

    def finish(self, run: RunResult) -> None:
        self._append("end of the run", _end_line(run))

    def _append(self, part: str, line: bytes) -> None:
        try:
            with self._lock:
                append_line(self.path, line)
        except WriteFailed as error:
            if self._note is None:
                raise
            self._note(f"{part} not stored: {error.text}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Lock the file: no other process runs into it until the context ends. Yields False if one does already.

        The kernel releases the lock with its holder. On file systems without locks any process may run.
        """
        with contextlib.ExitStack() as until_end:
            yield self._take(until_end)

    def _take(self, until_end: contextlib.ExitStack) -> bool:
        try:
            file = until_end.enter_context(self.path.open("ab"))
            for _ in range(_TRIES):  # `is_running` of another process holds it for a moment
                with contextlib.suppress(BlockingIOError):
                    take_lock(file)
                    return True
                time.sleep(_PAUSE_S)
        except OSError:
            return True
        return False

    @property
    def is_running(self) -> bool:
        try:
            with self.path.open("rb") as file:
                take_lock(file, shared=True)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def read(self) -> RunResult:
        """Return the run so far, in the order of its list of cases; the last result of a case counts.

        Cases without a result are `not_run`: those of the list, and those that damaged lines name. Without an end the
        run is interrupted. Raises `HarnessError` if the file cannot be read.
        """
        start, end = RunStart(), None
        results: dict[str, CaseResult] = {}
        damaged: dict[str, str | None] = {}
        for line, record, damage in self._each(_decoded):
            if damage:
                damaged[damage] = _named_case(line)
            elif isinstance(record, RunStart):
                start = record
            elif isinstance(record, CaseResult):
                results[record.case_id] = record
            elif record is not None:
                end = record
        ids = dict.fromkeys((*start.cases, *results, *filter(None, damaged.values())))
        wall_s = sum(result.seconds for result in results.values())
        return RunResult(
            results=tuple(results.get(name) or _not_run(name) for name in ids),
            start=start,
            end=end or RunEnd(wall_s=wall_s, interrupted=True),
            damaged=damaged,
        )

    def read_damage(self) -> tuple[str, ...]:
        """Return the lines that are not as they were written, each with its number. Cheap: no line is decoded."""
        return tuple(damage for _, _, damage in self._each(_check) if damage)

    def read_start(self) -> RunStart | None:
        """Return the first line; None if it cannot be read. Cheap: no other line is read."""
        with contextlib.suppress(OSError, *_UNREADABLE), self.path.open("rb") as file:
            record = _decoded(file.readline().removesuffix(b"\n"))
            return record if isinstance(record, RunStart) else None
        return None

    def read_end(self) -> RunEnd | None:
        """Return how the run ended; None if it was killed or still runs. Cheap: no result is decoded."""
        return self._last(RunEnd, _END)

    def result_of(self, case_id: str) -> CaseResult | None:
        """Return the last result of one case; None if none can be read. Cheap: other lines are not decoded."""
        return self._last(CaseResult, b'{"line":"case","id":"%s"' % case_id.encode())

    def _last(self, kind: type[Line], begin: bytes) -> Line | None:
        for _, line in reversed(self._lines()):
            if line.startswith(begin):
                with contextlib.suppress(*_UNREADABLE):
                    check_line(line)
                    return from_json(line, kind)
        return None

    def numbers(self, wanted: Callable[[str], bool]) -> dict[str, CaseNumbers]:
        """Return the last readable line of every wanted case that was run, by id, as far as `history` follows it."""
        cases: dict[str, CaseNumbers] = {}
        for _, line in self._lines():
            named = _CASE.match(line)
            if named and wanted(name := named[1].decode()):
                with contextlib.suppress(*_UNREADABLE):
                    check_line(line)
                    cases[name] = _NUMBERS.decode(line)
        return {name: case for name, case in cases.items() if case.verdict is not Verdict.NOT_RUN}

    def _each(self, read: Callable[[bytes], Read]) -> Iterator[tuple[bytes, Read | None, str]]:
        """Yield every line with what is read of it, or how it is damaged; nothing after one of another schema."""
        for number, line in self._lines():
            try:
                yield line, read(line), ""
            except _UNREADABLE as error:
                yield line, None, f"{self.path}:{number}: not a line of results: {error}"
                if _other_schema(line):
                    return

    def _lines(self) -> list[tuple[int, bytes]]:
        """Return the lines that are not empty, with their numbers; none where there is no file."""
        try:
            return [(number, line) for number, line in enumerate(self.path.read_bytes().split(b"\n"), 1) if line]
        except FileNotFoundError:
            return []
        except OSError as error:
            what = f"cannot be read: {error.strerror}."
            raise HarnessError(what, where=str(self.path), fix="check its permissions.") from error


def _decoded(line: bytes) -> RunStart | CaseResult | RunEnd:
    _check(line)
    return _LINE.decode(line)


def _check(line: bytes) -> None:
    """Raise one of `_UNREADABLE` for a line of another schema, and one that is not as it was written."""
    if other := _other_schema(line):
        raise msgspec.ValidationError(f"it has schema {other}, this version reads schema {SCHEMA}")
    check_line(line)


def _other_schema(line: bytes) -> int | None:
    match = _START.match(line)
    return int(match[1]) if match and int(match[1]) != SCHEMA else None


def _named_case(line: bytes) -> str | None:
    """Return the id that a damaged line names; None if it names none."""
    match = _CASE.match(line)
    if match is None:
        return None
    try:
        return case_id(parse_case_id(match[1].decode()))
    except (HarnessError, UnicodeDecodeError):
        return None


def _not_run(name: str) -> CaseResult:
    ranks = parse_case_id(name).world_size
    return CaseResult(case_id=name, verdict=Verdict.NOT_RUN, findings=(), attempts=(), world_size=ranks)


_FLOAT = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}


def line_schema() -> dict[str, Any]:
    """Return the schema of a line: every field of the structs but live traces, and the facts that are added.

    Structs are described by their docstrings, facts by those of their properties, options by their help.
    """
    kinds = (
        _written(RunStart, RunStart, ()),
        _written(CaseResult, CaseResult, CASE_FACTS),
        _written(RunEnd, RunResult, RUN_FACTS),
    )
    schema = _with_nan(msgspec.json.schema(Union[kinds]))  # noqa: UP007  the types are known at run time only
    for name, part in schema["$defs"].items():
        part["description"] = inspect.cleandoc(part["description"])
        if "properties" in part:  # of the options, those that were given are listed alone
            required = [] if name == RunOptions.__name__ else list(part["properties"])
            part |= {"additionalProperties": False, "required": required}
    of_options = schema["$defs"][RunOptions.__name__]["properties"]
    for name, option in options_of(RunOptions).items():
        of_options[name]["description"] = option.help
    title = "A line of a run as `run --json FILE` writes it. Times are seconds, losses are nats."
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **schema}


def _written(kind: type[msgspec.Struct], facts_of: type, facts: tuple[str, ...]) -> type[msgspec.Struct]:
    fields: list[Any] = [(field.name, field.type) for field in msgspec.structs.fields(kind) if field.name != "run"]
    for name in facts:
        fact = getattr(facts_of, name)
        returned, described = get_type_hints(fact.fget)["return"], msgspec.Meta(description=inspect.getdoc(fact))
        fields.append((name, Annotated[returned, described]))
    fields.append((CHECKSUM, Annotated[str, msgspec.Meta(description=CHECKSUM_MEANING)]))
    config = kind.__struct_config__
    rename = {field.name: field.encode_name for field in msgspec.structs.fields(kind)}
    made = msgspec.defstruct(kind.__name__, fields, tag_field=config.tag_field, tag=config.tag, rename=rename.get)
    made.__doc__ = kind.__doc__
    return made


def _with_nan(schema: Any) -> Any:
    """Return the schema with floats as they are written, and without defaults: everything is written."""
    if isinstance(schema, list):
        return [_with_nan(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "number" and schema.keys() <= {"type", "default", "description"}:
        return {**_FLOAT, **{name: text for name, text in schema.items() if name == "description"}}
    return {
        name: _with_nan(value)
        for name, value in schema.items()
        if name != "default" or (value and isinstance(value, dict))
    }
