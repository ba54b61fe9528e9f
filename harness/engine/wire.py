"""The messages between the controller, the warm process and the ranks. Versioned, torch-free, no pickles.

The engine does not know what a rank computes: a job carries an opaque `payload` for the rank program and every rank
that finishes returns opaque bytes. On the wire a message is a 4-byte big-endian length followed by msgpack.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Literal, TypeVar, cast

import msgspec

WIRE_VERSION = 1
MAX_FRAME_BYTES = 1 << 30  # a longer length is not a message but garbage on the wire

JobStatus = Literal["ok", "crash", "hang", "infra"]
RankStatus = Literal["returned", "raised", "exited", "signalled", "stuck", "stopped"]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every message: immutable, keyword-only, unknown keys refused."""


class Job(Message, frozen=True, kw_only=True):
    """One run of `world_size` fresh ranks. `folder` is theirs alone (rendezvous, logs, dumps, TMPDIR)."""

    job_id: str
    world_size: int
    payload: bytes
    deadline_s: float
    folder: str
    devices: tuple[int, ...] = ()  # CUDA device indices, one per rank; empty on CPU


class RankOutcome(Message, frozen=True, kw_only=True):
    """How one rank ended. `payload` is what the program returned; the rest says why there is none."""

    rank: int
    status: RankStatus
    payload: bytes | None = None
    message: str = ""  # one line: exception type and text, exit code, or signal name
    traceback: str = ""  # Python traceback, or the faulthandler dump of all threads
    phase: str = ""  # last phase the program reported
    seconds: float = 0.0  # from start of the job to the end of this rank
    consequence: bool = False  # True when an earlier failure of another rank brought this one down
    log_tail: str = ""  # last lines of its stdout and stderr


class JobOutcome(Message, frozen=True, kw_only=True):
    """How a job ended: `ok` when every rank returned. `message` names the first failure in time."""

    job_id: str
    status: JobStatus
    ranks: tuple[RankOutcome, ...]
    message: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0  # user + system seconds of all ranks
    detected_s: float | None = None  # from start of the job to the detection of the first failure


class Hello(Message, frozen=True, tag="hello", forbid_unknown_fields=False):
    """Warm process to controller, first of all: preloaded and ready. Readable by every version, to be refused."""

    version: int
    pid: int


class Submit(Message, frozen=True, tag="submit"):
    """Controller to warm process: run this job. `ticket` names it until its outcome is back."""

    ticket: int
    job: Job


class Cancel(Message, frozen=True, tag="cancel"):
    """Controller to warm process: kill this job now. Its outcome still comes, as `infra`."""

    ticket: int


class Finished(Message, frozen=True, tag="finished"):
    """Warm process to controller: this job has ended and nothing of it is left."""

    ticket: int
    outcome: JobOutcome


class PhaseReached(Message, frozen=True, tag="phase"):
    """Rank to supervisor: what it does from now on."""

    phase: str


class Returned(Message, frozen=True, tag="returned"):
    """Rank to supervisor: the program returned. `at_s` is time.monotonic() in the rank, here and below."""

    at_s: float
    payload: bytes


class Raised(Message, frozen=True, tag="raised"):
    """Rank to supervisor: the program raised."""

    at_s: float
    message: str
    traceback: str


ToWarm = Submit | Cancel
FromWarm = Hello | Finished
FromRank = PhaseReached | Returned | Raised

M = TypeVar("M")


class WireError(Exception):
    """What came over the wire is not a message of this protocol."""


def encode_frame(message: Message) -> bytes:
    """Returns the message as it travels: length, then msgpack."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


class FrameReader(Generic[M]):
    """Cuts a stream of bytes, arriving in pieces of any size, into messages of one kind."""

    def __init__(self, kind: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Yields the messages completed by `data`, in order. Raises WireError on garbage, after what came before it."""
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if size > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {size} bytes was announced; the largest is {MAX_FRAME_BYTES}")
            if len(self._buffer) < 4 + size:
                return
            body = bytes(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            try:
                yield cast("M", self._decoder.decode(body))
            except msgspec.MsgspecError as error:
                raise WireError(f"a frame could not be read: {error}") from error
