"""The base of everything that ranks record, what an injection asks of them, and what torch reports about devices."""

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every recorded value. Fields are plain numbers, strings and other records."""


class Patch(Record, frozen=True, kw_only=True):
    """A function that a rank calls before the target is built: `FILE.py:FUNCTION` or `fault:NAME`.

    `source` is the content of the file, empty for an injected fault. The path is for messages alone.
    """

    text: str
    source: bytes = b""


class DeviceFacts(Record, frozen=True, kw_only=True):
    """One CUDA device. `free_bytes` is what no process holds."""

    index: int
    name: str
    capability: tuple[int, int]  # (9, 0)
    total_bytes: int
    free_bytes: int


class TorchFacts(Record, frozen=True, kw_only=True):
    """The build of torch and its devices. `cuda` and `nccl` are versions; empty if torch was built without."""

    torch: str
    cuda: str = ""
    nccl: str = ""
    devices: tuple[DeviceFacts, ...] = ()
    error: str = ""  # why torch shows no devices, in its own words
