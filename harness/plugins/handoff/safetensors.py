"""Headers of safetensors files, read and checked without the package: each error names the file, tensor and byte.

The package raises one error for all of these and names neither tensor nor byte, and `safe_open` needs torch for float8.
Data stay on disk: an array is mapped, and read where it is compared.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from harness.errors import HarnessError
from harness.plugins.handoff.numbers import STORAGE
from harness.plugins.handoff.tensors import Held, Part

MOST_HEADER = 100 << 20  # bytes, as the format says
_MOST_DIMENSIONS = 32
_SHARDS = "DCP_SHARDING_INFO"  # where torch's HuggingFaceStorageWriter says what part of a tensor a file holds


class Entry(NamedTuple):
    """One tensor of a header: its dtype, its shape, and its bytes, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def broken(path: Path, what: str, *, fix: str = "copy or export the file again.") -> HarnessError:
    """Return the error about a file."""
    return HarnessError(what, where=str(path), fix=fix)


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of JSON. ValueError where a name is in it twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it names {name!r} twice")
        found[name] = value
    return found


def read_json_file(path: Path, *, most: int = MOST_HEADER) -> dict[str, Any]:
    """Return the object in a file of JSON. HarnessError for anything else, and for one that is too large."""
    if path.stat().st_size > most:
        raise broken(path, f"it has {path.stat().st_size:,} bytes, and {most:,} are the most.")
    return _object(path, path.read_bytes(), "the file")


def _object(path: Path, text: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise broken(path, f"{what} is no JSON, or names something twice: {str(error)[:200]}.") from error
    if not isinstance(found, dict):
        raise broken(path, f"{what} is no object of JSON.")
    return found


def read_file(path: Path) -> list[Held]:
    """Return the tensors of a file, by their place in it. HarnessError for one that is truncated or damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(size - 8, MOST_HEADER):
            what = f"its header of {length:,} bytes does not fit: the file has {size:,} bytes."
            raise broken(
                path, f"it is truncated, or no safetensors file: {what if len(first) == 8 else 'it is empty.'}"
            )
        header = _object(path, file.read(length), "its header")
    meta = header.pop("__metadata__", None) or {}
    start = 8 + length
    entries = {name: _entry(path, name, fields) for name, fields in header.items()}
    _check_places(path, entries, start, size)
    offsets = _offsets(path, meta)
    data = np.memmap(path, mode="r", dtype="u1", offset=0) if size else np.zeros(0, "u1")
    return [_held(path, name, entry, start, data, offsets.get(name)) for name, entry in entries.items()]


def _entry(path: Path, name: str, fields: object) -> Entry:
    """Return one entry of the header, checked by itself."""
    known: dict[str, Any] = fields if isinstance(fields, dict) else {}
    dtype, shape, place = known.get("dtype"), known.get("shape"), known.get("data_offsets")
    if not isinstance(dtype, str) or not _whole(shape) or not _whole(place) or len(place) != 2:
        raise broken(path, f"tensor {name} has no dtype, shape and data_offsets of whole numbers.")
    if dtype not in STORAGE:
        fix = f"of these it can be compared: {', '.join(STORAGE)}."
        raise broken(path, f"tensor {name} has dtype {dtype}, which is not known.", fix=fix)
    expected, (begin, end) = math.prod(shape) * np.dtype(STORAGE[dtype]).itemsize, place
    if len(shape) > _MOST_DIMENSIONS or end - begin != expected:
        words = f"tensor {name} of {dtype} {list(shape)[:_MOST_DIMENSIONS]} needs {expected:,} bytes"
        raise broken(path, f"{words}, and its data_offsets {begin}-{end} have {end - begin:,}.")
    return Entry(dtype, tuple(shape), begin, end)


def _whole(numbers: object) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(type(each) is int and 0 <= each < 1 << 62 for each in numbers)


def _check_places(path: Path, entries: Mapping[str, Entry], start: int, size: int) -> None:
    """HarnessError where a tensor lies behind the end of the file, overlaps another one, or leaves a hole."""
    at, before = 0, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if start + entry.end > size:
            what = f"tensor {name} ends at byte {start + entry.end:,}, and the file has {size:,}"
            raise broken(path, f"it is truncated: {what}.")
        if entry.begin != at:
            word = "overlaps" if entry.begin < at else "leaves a hole behind"
            raise broken(
                path, f"tensor {name} at byte {start + entry.begin:,} {word} {before}, which ends at {start + at:,}."
            )
        at, before = entry.end, name
    if start + at != size:
        raise broken(
            path, f"{size - start - at:,} bytes behind the last tensor, from byte {start + at:,} on, are of none."
        )


def _offsets(path: Path, meta: object) -> dict[str, list[int]]:
    """Return which part of a tensor the file holds, where torch wrote one file for each rank."""
    text = meta.get(_SHARDS) if isinstance(meta, dict) else None
    if not isinstance(text, str):
        return {}
    places = {name: found.get("saved_offsets") for name, found in _object(path, text.encode(), _SHARDS).items()}
    return {name: place for name, place in places.items() if _whole(place)}


def _held(path: Path, name: str, entry: Entry, start: int, data: Any, place: list[int] | None) -> Held:
    low, high = start + entry.begin, start + entry.end
    raw = np.frombuffer(data[low:high], STORAGE[entry.dtype]).reshape(entry.shape)
    offsets = tuple(place) if place and len(place) == len(entry.shape) else (0,) * len(entry.shape)
    part = Part(offsets, raw, f"{path} at byte {low}")
    return Held(name, entry.dtype, entry.shape, (part,))
