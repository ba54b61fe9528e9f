"""The base of everything recorded: immutable, keyword-only, unknown keys refused. Plain numbers and strings."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every recorded value."""
