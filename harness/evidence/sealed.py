"""Sealed files: JSON that only the tool writes, with a digest of its own content.

Reading detects edits by hand, truncation and bad merges. The digest protects against accidents and shortcuts, not
against an attacker.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeVar

import msgspec

from harness.durable import write_whole
from harness.errors import HarnessError


class Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every sealed document. `digest` is the sha256 of all other fields in canonical form."""

    schema: int
    digest: str = ""


Document = TypeVar("Document", bound=Sealed)


def write_sealed(path: Path, document: Document) -> Document:
    """Write the document with a new digest, atomically, and return it as written."""
    sealed = msgspec.structs.replace(document, digest=_digest(document))
    write_whole(path, msgspec.json.format(msgspec.json.encode(sealed), indent=2) + b"\n")
    return sealed


def read_sealed(path: Path, kind: type[Document], *, schema: int, damaged: type[HarnessError], fix: str) -> Document:
    """The document in `path`. Raises `damaged` when it was changed after writing, OSError when it cannot be read."""
    text = path.read_bytes()

    def broken(what: str) -> HarnessError:
        return damaged(what, where=str(path), fix=fix)

    try:
        found = msgspec.json.decode(text, type=_Header).schema
        if found != schema:
            raise broken(f"has schema {found}, this version reads schema {schema}.")
        document = msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise broken(f"is not readable ({error}).") from error
    if document.digest != _digest(document):
        raise broken("was changed after the tool wrote it: the content does not match its digest.")
    return document


class _Header(msgspec.Struct):
    schema: int


def _digest(document: Sealed) -> str:
    content = msgspec.json.encode(msgspec.structs.replace(document, digest=""), order="deterministic")
    return hashlib.sha256(content).hexdigest()


def own_root() -> Path:
    """The project of the harness itself, in an installed package or in a checkout."""
    package = Path(__file__).parents[1]
    return package / "_project" if (package / "_project").is_dir() else package.parent
