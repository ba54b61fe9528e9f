"""JSON for values that hold floats: full precision, and NaN or infinity as the strings "NaN", "Infinity", "-Infinity".

JSON has no such numbers and msgspec writes null for them, which would turn "the loss became NaN" into "there is no
loss". This file is the only place where values cross that boundary. It does not know which values they are.

Public names: `to_json`, `from_json`.
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

Kind = TypeVar("Kind")


def to_json(value: object, *, indent: int = 0) -> bytes:
    """The value as JSON: one line, or indented by so many blanks a level. Struct fields keep their order."""
    flat = msgspec.json.encode(_spelled(msgspec.to_builtins(value)))
    return msgspec.json.format(flat, indent=indent) if indent else flat


def from_json(text: bytes, kind: type[Kind]) -> Kind:
    """The value that `to_json` wrote. Raises `msgspec.DecodeError` when the text is no such value."""
    return msgspec.json.decode(text, type=kind, strict=False)  # not strict: reads "NaN" where a float belongs


def _spelled(plain: object) -> object:
    match plain:
        case dict():
            return {key: _spelled(item) for key, item in plain.items()}
        case list() | tuple():
            return [_spelled(item) for item in plain]
        case float() if not math.isfinite(plain):
            return "NaN" if math.isnan(plain) else "Infinity" if plain > 0 else "-Infinity"
        case _:
            return plain
