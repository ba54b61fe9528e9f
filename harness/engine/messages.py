"""The messages between controller, nodes, fork servers and ranks. Torch-free, no pickles.

The engine does not interpret the work: a job carries an opaque `payload` for the rank program, and every rank returns
opaque bytes. On the wire, a message is a 4-byte big-endian length followed by msgpack.
"""

from collections.abc import Iterator, Mapping
from typing import Generic, Literal, TypeVar, cast

import msgspec

MAX_FRAME_BYTES = 1 << 30  # a longer length is garbage, not a message

JobStatus = Literal["ok", "crash", "hang", "infra"]
RankStatus = Literal["returned", "raised", "exited", "signaled", "stuck", "stopped"]
ShareEvent = Literal["returned", "failed"]  # all ranks of a share have returned, or the first of them has failed
IN_FOLDER = "file"  # the rendezvous of a job on one node


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of all messages: immutable, keyword-only, unknown keys are errors."""


class Job(Message, frozen=True, kw_only=True):
    """One run of `world_size` fresh ranks, as it is asked of an engine.

    `preload`: the options its rank program is preloaded with. Jobs of equal options share a fork server on a node.
    """

    job_id: str
    world_size: int
    payload: bytes
    deadline_s: float  # seconds from the start of its ranks
    preload: Mapping[str, str] = {}
    one_node: bool = False  # its ranks share memory: never split over nodes


class Share(Message, frozen=True, kw_only=True):
    """One node's part of a job: `count` ranks from `first_rank` on.

    `folder` is on this node and private to the share (logs, dumps, TMPDIR). `rendezvous` is "file" (a file store in the
    folder, on one node), or "tcp://HOST:PORT/PREFIX" (a TCP store of all nodes, under a prefix of this job).
    """

    job: Job
    first_rank: int = 0
    count: int
    devices: tuple[int, ...] = ()  # CUDA device indices of its ranks; empty on CPU
    folder: str
    rendezvous: str = IN_FOLDER

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.count)

    @property
    def is_whole(self) -> bool:
        """Return True if no other node has ranks of the job."""
        return self.count == self.job.world_size


class RankOutcome(Message, frozen=True, kw_only=True):
    """How one rank ended. `payload` is what the program returned; the other fields say why it returned nothing."""

    rank: int
    status: RankStatus
    payload: bytes | None = None
    message: str = ""  # one line: exception type and text, exit code, or signal name
    traceback: str = ""  # Python traceback, or the faulthandler dump of all threads
    phase: str = ""  # the last phase that the program reported
    seconds: float = 0.0  # from start of the job to the end of this rank
    consequence: bool = False  # True if the failure of another rank brought this one down
    signal: int = 0  # that ended its process; 0 where none did
    log_tail: str = ""  # last lines of its stdout and stderr


class Ended(Message, frozen=True, kw_only=True):
    """What a share of a job, and a whole job, record about their end.

    `fork_server_lost`: because its fork server died or fell silent, for which any share that ran on it may be to blame.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0  # user + system seconds of its ranks
    detected_s: float | None = None  # from its start to the detection of its first failure
    fork_server_lost: bool = False
    out_of_memory: bool = False  # the kernel's OOM killer was at work when the fork server was lost


class ShareOutcome(Ended, frozen=True, kw_only=True):
    """What a node recorded about its share of a job. `infra` says why the harness itself failed; else empty."""

    ranks: tuple[RankOutcome, ...] = ()
    hung: bool = False
    infra: str = ""


class JobOutcome(Ended, frozen=True, kw_only=True):
    """How a job ended: `ok` when every rank returned. `message` names the first failure in time.

    `earlier` are the attempts before this one, which the machine ended, without their ranks (`outcome.py`).
    """

    job_id: str
    status: JobStatus
    ranks: tuple[RankOutcome, ...]
    message: str = ""
    nodes: tuple[str, ...] = ()  # on which it ran, where there are several
    earlier: "tuple[JobOutcome, ...]" = ()

    @property
    def attempts(self) -> "tuple[JobOutcome, ...]":
        return (*self.earlier, self)


class Hello(Message, frozen=True, tag="hello"):
    """Fork server to controller, the first message: preloaded and ready."""

    notes: tuple[str, ...] = ()  # the program's remarks about this environment


class Submit(Message, frozen=True, tag="submit"):
    """Controller to fork server: run this share. `ticket` identifies it until its outcome is returned."""

    ticket: int
    share: Share


class Control(Message, frozen=True, tag="control"):
    """Controller to fork server, of a share that runs.

    cancel: kill it now; its outcome still arrives, as `infra`. end: a rank on another node failed: collect stacks, then
    kill it. release: all ranks of the job have returned, on all nodes, and may exit.
    """

    ticket: int
    what: Literal["cancel", "end", "release"]


class Reached(Message, frozen=True, tag="reached"):
    """Fork server to controller: an event of its share of a job on several nodes."""

    ticket: int
    event: ShareEvent


class Finished(Message, frozen=True, tag="finished"):
    """Fork server to controller: this share has ended and left no processes."""

    ticket: int
    outcome: ShareOutcome


class PhaseReached(Message, frozen=True, tag="phase"):
    phase: str


class Returned(Message, frozen=True, tag="returned"):
    """Rank to supervisor: the program returned. `at_s`, here and below, is time.monotonic() in the rank."""

    at_s: float
    payload: bytes


class Raised(Message, frozen=True, tag="raised"):
    """Rank to supervisor: the program raised."""

    at_s: float
    message: str
    traceback: str


ToForkServer = Submit | Control
FromForkServer = Hello | Reached | Finished
FromRank = PhaseReached | Returned | Raised

M = TypeVar("M")


class ProtocolError(Exception):
    """The received bytes are not a message of this protocol."""


_ENCODER = msgspec.msgpack.Encoder()


def encode_frame(message: Message) -> bytearray:
    """Return the message as it goes over the wire: length, then msgpack."""
    frame = bytearray(4)
    _ENCODER.encode_into(message, frame, 4)
    frame[:4] = (len(frame) - 4).to_bytes(4, "big")
    return frame


class FrameReader(Generic[M]):
    """Splits a stream of bytes, which may arrive in chunks of any size, into messages of one type."""

    def __init__(self, kind: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Yield the messages that `data` completes, in order; raises ProtocolError when garbage follows them."""
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"got a frame of {size} bytes; the limit is {MAX_FRAME_BYTES}")
            if len(self._buffer) < 4 + size:
                return
            try:
                with memoryview(self._buffer) as received:  # a payload has megabytes: it is copied once
                    message = cast("M", self._decoder.decode(received[4 : 4 + size]))
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"cannot decode a frame: {error}") from error
            del self._buffer[: 4 + size]
            yield message
