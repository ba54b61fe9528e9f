"""The messages between the controller, the warm process and the ranks. Versioned, torch-free, no pickles.

The engine does not know what a rank computes: a job carries an opaque `payload` for the rank program and every rank
that finishes returns opaque bytes. On the wire a message is a 4-byte big-endian length followed by msgpack.
"""

from __future__ import annotations

from typing import Literal

import msgspec

WIRE_VERSION = 1

JobStatus = Literal["ok", "crash", "hang", "infra"]
RankStatus = Literal["returned", "raised", "exited", "signalled", "stuck", "stopped"]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every message: immutable, keyword-only, unknown keys refused."""


class Job(Message, frozen=True):
    """One run of `world_size` fresh ranks. `folder` is theirs alone (rendezvous, logs, dumps, TMPDIR)."""

    job_id: str
    world_size: int
    payload: bytes
    deadline_s: float
    folder: str
    devices: tuple[int, ...] = ()  # CUDA device indices, one per rank; empty on CPU


class RankOutcome(Message, frozen=True):
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


class JobOutcome(Message, frozen=True):
    """How a job ended: `ok` when every rank returned. `message` names the first failure in time."""

    job_id: str
    status: JobStatus
    ranks: tuple[RankOutcome, ...]
    message: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0  # user + system seconds of all ranks
    detected_s: float | None = None  # from start of the job to the detection of the first failure
