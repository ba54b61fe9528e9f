"""A rank, from its first instruction after the fork to its last: settle, run the program, report, hold, leave.

Runs in the forked child only and never returns to the code of the warm process above it. Knows the rank program and
its own end of the socket; it does not know other ranks, deadlines or verdicts.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from typing import NoReturn

import msgspec

from harness.engine import linux
from harness.engine.folder import JobFolder
from harness.engine.program import RankContext, RankProgram
from harness.engine.wire import Job, PhaseReached, Raised, Returned, encode_frame

MESSAGE_CHARS = 4000
TRACEBACK_CHARS = 65536
LOST_EXIT_CODE = 70  # the rank could not even report


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one rank gets from its supervisor. `keep_fds` were open before the engine opened its own."""

    job: Job
    folder: JobFolder
    rank: int
    parent_pid: int
    socket: socket.socket
    log_fd: int
    dump_fd: int
    keep_fds: frozenset[int]


def be_rank(program: RankProgram, seat: Seat) -> NoReturn:
    """Be this rank until the end of the process. Called directly after the fork."""
    code = LOST_EXIT_CODE
    try:
        _settle(seat)
        report = _work(program, seat)
        flush_streams()
        seat.socket.sendall(encode_frame(report))
        seat.socket.recv(1)  # hold every resource until the supervisor releases all ranks together
        code = 0
    except BaseException:
        traceback.print_exc()  # into the log of the rank; the program's own exceptions were reported above
        flush_streams()
    finally:
        os._exit(code)


def _settle(seat: Seat) -> None:
    os.setsid()
    linux.die_with_parent(seat.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides what Ctrl-C means
    os.dup2(seat.log_fd, 1)
    os.dup2(seat.log_fd, 2)
    own = {0, 1, 2, seat.socket.fileno(), seat.dump_fd}
    for fd in linux.open_fds() - seat.keep_fds - own:
        os.close(fd)  # the engine's own and those of other ranks: a copy would keep their sockets open
    faulthandler.enable(file=seat.dump_fd)
    faulthandler.register(signal.SIGUSR1, file=seat.dump_fd, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a killed rank loses no line
    os.environ["TMPDIR"] = str(seat.folder.tmp)
    tempfile.tempdir = None


def _work(program: RankProgram, seat: Seat) -> Returned | Raised:
    lock = threading.Lock()

    def report_phase(phase: str) -> None:
        with lock:
            seat.socket.sendall(encode_frame(PhaseReached(phase=phase)))

    job = seat.job
    context = RankContext(
        rank=seat.rank,
        world_size=job.world_size,
        payload=job.payload,
        folder=seat.folder.path,
        device=job.devices[seat.rank] if job.devices else None,
        report_phase=report_phase,
    )
    return run_program(program, context)


def run_program(program: RankProgram, context: RankContext) -> Returned | Raised:
    """Returns what came of `rank_main`. SystemExit is a failure too: a rank has a result or it has failed."""
    try:
        payload = program.rank_main(context)
        if not isinstance(payload, bytes):
            raise TypeError(f"rank_main returned {type(payload).__name__}, not bytes")
    except BaseException as error:
        at_s = time.monotonic()
        text = "".join(traceback.format_exception(error))[-TRACEBACK_CHARS:]
        return Raised(at_s=at_s, message=one_line(error), traceback=text)
    return Returned(at_s=time.monotonic(), payload=payload)


def one_line(error: BaseException) -> str:
    """Returns type and whole text of an exception with all white space folded, at most 4000 characters."""
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # an exception whose __str__ raises
        text = f"<its text cannot be made: {type(broken).__name__}>"
    return f"{type(error).__name__}: {text}"[:MESSAGE_CHARS] if text else type(error).__name__


def flush_streams() -> None:
    """Write out what the program printed; a full disk here must not hide its result."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
