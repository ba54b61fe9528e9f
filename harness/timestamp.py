"""Times as results and references have them: UTC, ISO 8601, seconds."""

from __future__ import annotations

import datetime


def timestamp(seconds: float | None = None) -> str:
    """A time in `seconds` since the epoch, by default now."""
    moment = datetime.datetime.now(datetime.UTC)
    if seconds is not None:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="seconds")


def to_the_minute(text: str) -> str:
    """A timestamp for people, "2026-11-23 00:45"; "?" where there is none."""
    return text.replace("T", " ")[:16] or "?"
