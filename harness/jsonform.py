"""JSON of results: NaN and infinity as the strings "NaN", "Infinity" and "-Infinity", and the checksum of a line.

JSON has no such numbers, and msgspec encodes them as null, which would turn a loss of NaN into no loss.

The checksum is the CRC-32 of the bytes before it, as the last property of the line: `…,"crc32":"9ae0daaf"}`. It finds
every change of up to four neighboring bytes, and of other changes all but one in four billion. It is no signature:
whoever wants to forge a line can compute it. What writes the line anew breaks it, as `jq -c` does, which spells numbers
its own way; what keeps or drops whole lines does not.
"""

import json
import math
import re
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from harness.errors import HarnessError

Kind = TypeVar("Kind")


def to_json(value: object, *, indent: int = 0) -> bytes:
    """Return the value as JSON: on one line, or indented by `indent` spaces a level. Struct fields keep their order."""
    flat = msgspec.json.encode(_without_nan(msgspec.to_builtins(value)))
    return msgspec.json.format(flat, indent=indent) if indent else flat


def compact(value: object, *, depth: int = 0, before: int = 0) -> str:
    """Plain JSON, indented by one space per level, with what fits into 120 characters on one line.

    `before`: characters of the line before the value.
    """
    line = _one_line(value)
    if not isinstance(value, dict | list) or before + len(line) < 120:
        return line
    inner = " " * (depth + 1)
    if isinstance(value, dict):
        named = ((f"{inner}{json.dumps(name)}: ", item) for name, item in value.items())
        body = ",\n".join(name + compact(item, depth=depth + 1, before=len(name)) for name, item in named)
    elif any(isinstance(item, dict | list) for item in value):
        body = ",\n".join(inner + compact(item, depth=depth + 1, before=depth + 1) for item in value)
    else:
        rows = [inner]
        for text in map(_one_line, value):
            if len(rows[-1]) + len(text) > 118:
                rows.append(inner)
            rows[-1] += f"{text}, "
        body = "\n".join(rows).replace(", \n", ",\n")[:-2]
    start, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return f"{start}\n{body}\n{inner[1:]}{end}"


def _one_line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def from_json(text: bytes, kind: type[Kind]) -> Kind:
    """Decode the output of `to_json`. Raises `msgspec.DecodeError` if it is not a value of this type."""
    return msgspec.json.decode(text, type=kind, strict=False)  # not strict: accepts "NaN" for a float


def read_json(path: Path, kind: type[Kind], *, command: str) -> Kind:
    """Return what a command wrote of this type. HarnessError for anything else."""
    try:
        return from_json(path.read_bytes(), kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HarnessError(f"not written by `{command}`: {error}.", where=str(path)) from error


def _without_nan(plain: object) -> object:
    match plain:
        case dict():
            return {key: _without_nan(item) for key, item in plain.items()}
        case list() | tuple():
            return [_without_nan(item) for item in plain]
        case float() if not math.isfinite(plain):
            return "NaN" if math.isnan(plain) else "Infinity" if plain > 0 else "-Infinity"
        case _:
            return plain


CHECKSUM = "crc32"
CHECKSUM_MEANING = "CRC-32 of the bytes of the line before this property."
_END = re.compile(rb',"crc32":"([0-9a-f]{8})"}')


def with_checksum(line: bytes) -> bytes:
    """Return the line, a JSON object with some property, with its checksum."""
    body = line.removesuffix(b"}")
    return b'%s,"crc32":"%08x"}' % (body, zlib.crc32(body))


def check_line(line: bytes) -> None:
    """Raise `msgspec.ValidationError` where the line is not as it was written."""
    end = _END.fullmatch(line, max(0, len(line) - 20))
    if end is None:
        raise msgspec.ValidationError("it does not end with a checksum: it was cut short, or not written by `run`")
    if zlib.crc32(memoryview(line)[: end.start()]) != int(end[1], 16):
        raise msgspec.ValidationError("its checksum is another one: it was damaged, or changed after it was written")
