"""What was tried so far, on disk, so that a search that was stopped goes on and nothing is run twice."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from harness.durable import WriteFailed, append_line

Kept = TypeVar("Kept")


class Journal(Generic[Kept]):
    """Values of a kind by name, a line of JSON each."""

    def __init__(self, path: Path, kind: type[Kept], name: Callable[[Kept], str]) -> None:
        self._path = path
        self._name = name
        self._known: dict[str, Kept] = {}
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(msgspec.DecodeError):  # a crash cut it in two
                found = msgspec.json.decode(line, type=kind)
                self._known[name(found)] = found

    def get(self, name: str) -> Kept | None:
        """The stored value of this name; None if there is none."""
        return self._known.get(name)

    def keep(self, found: Kept) -> None:
        """Remember a value under its name."""
        self._known[self._name(found)] = found
        with contextlib.suppress(WriteFailed):  # a full disk costs time, not correctness
            append_line(self._path, msgspec.json.encode(found))


def key_of(parts: Sequence[str]) -> str:
    """A name for files about these parts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
