"""The base of everything that ranks record and what an injection asks of them."""

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every recorded value. Fields are plain numbers, strings and other records."""


class Patch(Record, frozen=True, kw_only=True):
    """A function that a rank calls before the target is built: `FILE.py:FUNCTION` or `fault:NAME`.

    `source` is the content of the file, empty for an injected fault. The path is for messages alone.
    """

    text: str
    source: bytes = b""
