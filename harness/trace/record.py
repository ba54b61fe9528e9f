"""The base of everything that ranks record: immutable, keyword-only, unknown keys rejected."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every recorded value. Fields are plain numbers, strings and other records."""
