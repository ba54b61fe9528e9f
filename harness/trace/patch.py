"""A patch: what an injection asks of a rank, with its source, because the rank may be on another machine."""

from __future__ import annotations

from harness.trace.record import Record


class Patch(Record, frozen=True, kw_only=True):
    """A function that a rank calls before the target is built: `FILE.py:FUNCTION` or `fault:NAME`.

    `source` is the content of the file, empty for a planted fault. The path is for messages alone.
    """

    text: str
    source: bytes = b""
