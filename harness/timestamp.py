"""Times as results and references have them: UTC, ISO 8601, seconds."""

import datetime


def timestamp() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def to_the_minute(text: str) -> str:
    """A timestamp for people, "2026-11-23 00:45"; "?" where there is none."""
    return text.replace("T", " ")[:16] or "?"
