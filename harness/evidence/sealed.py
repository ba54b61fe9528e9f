"""Sealed files: JSON that only the tool writes, with a digest of its own content.

Reading detects edits by hand, truncation and bad merges. The digest protects against accidents and shortcuts, not
against an attacker.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from harness.durable import write_whole
from harness.errors import HarnessError

SCHEMA = 1  # of every kind of document, until one changes


class Missing(HarnessError):
    """There is no such document."""


class Damaged(HarnessError):
    """A document was edited by hand, truncated, moved, or written by another version, or cannot be read."""


class Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every sealed document. `digest` is the sha256 of all other fields in canonical form."""

    schema: int = SCHEMA
    digest: str = ""


Document = TypeVar("Document", bound=Sealed)


def write_sealed(path: Path, document: Sealed) -> Path:
    """Write the document with a new digest, atomically, and return the path."""
    sealed = msgspec.structs.replace(document, digest=_digest(document))
    write_whole(path, msgspec.json.format(msgspec.json.encode(sealed), indent=2) + b"\n")
    return path


def read_sealed(path: Path, kind: type[Document], *, remake: str, missing: str = "is not there.") -> Document:
    """Return the document in `path`. Raises `Missing` with `missing`, or `Damaged`; `remake`: how to get a new one."""

    def broken(what: str) -> HarnessError:
        return Damaged(what, where=str(path), fix=f"restore it or {remake}")

    try:
        text = path.read_bytes()
        schema = msgspec.json.decode(text, type=_Header).schema
        if schema != SCHEMA:
            raise broken(f"has schema {schema}, this version reads schema {SCHEMA}.")
        document = msgspec.json.decode(text, type=kind)
    except FileNotFoundError as error:
        raise Missing(missing, where=str(path), fix=remake) from error
    except OSError as error:
        raise broken(f"cannot be read: {error.strerror}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise broken(f"is not readable ({error}).") from error
    if document.digest != _digest(document):
        raise broken("was changed after the tool wrote it: the content does not match its digest.")
    return document


def stored_or_why(read: Callable[[], Document]) -> tuple[Document | None, str]:
    """Return what is stored; None if nothing is, and where it cannot be read, with the reason."""
    try:
        return read(), ""
    except Missing:
        return None, ""
    except Damaged as error:
        return None, error.text


class _Header(msgspec.Struct):
    schema: int


def _digest(document: Sealed) -> str:
    content = msgspec.json.encode(msgspec.structs.replace(document, digest=""), order="deterministic")
    return hashlib.sha256(content).hexdigest()


def own_root() -> Path:
    """Return the project of the harness itself, in an installed package or in a checkout."""
    package = Path(__file__).parents[1]
    return package / "_project" if (package / "_project").is_dir() else package.parent


def holder(root: Path, path_of: Callable[[Path], Path]) -> Path:
    """The root whose file `path_of(root)` is read: the project's where it is there, else the package's if that is."""
    return next((place for place in (root, own_root()) if path_of(place).exists()), root)
