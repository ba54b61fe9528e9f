"""The code of a forked rank: set up the process, run the program, report the result, wait for release, exit.

Runs only in the child and never returns to the code of the zygote that forked it. `supervisor.py` handles deadlines and
the other ranks.
"""

import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import msgspec

from harness.engine import linux
from harness.engine.folder import JobFolder
from harness.engine.messages import PhaseReached, Raised, Returned, Share, encode_frame
from harness.engine.program import RankContext, RankMain, rank_context

MESSAGE_CHARS = 4000
TRACEBACK_CHARS = 65536
LOST_EXIT_CODE = 70  # the rank could not report its result


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank gets from its supervisor. `keep_fds` were open before the engine opened any."""

    share: Share
    rank: int
    parent_pid: int
    socket: socket.socket
    log_fd: int
    dump_fd: int
    keep_fds: frozenset[int]


def run_rank(rank_main: RankMain, setup: RankSetup) -> NoReturn:
    """Run this rank to the end of the process. Call right after the fork."""
    code = LOST_EXIT_CODE
    try:
        _prepare_process(setup)
        report = _run_with_phases(rank_main, setup)
        flush_streams()
        setup.socket.sendall(encode_frame(report))
        setup.socket.recv(1)  # keep all resources until the supervisor releases every rank
        code = 0
    except BaseException:
        traceback.print_exc()  # to the log of the rank; exceptions of the program were reported above
        flush_streams()
    finally:
        os._exit(code)


def _prepare_process(setup: RankSetup) -> None:
    os.setsid()
    linux.die_with_parent(setup.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the controller
    os.dup2(setup.log_fd, 1)
    os.dup2(setup.log_fd, 2)
    own = {0, 1, 2, setup.socket.fileno(), setup.dump_fd}
    for fd in linux.open_fds() - setup.keep_fds - own:
        os.close(fd)  # inherited from the engine: a copy would keep the sockets of other ranks open
    faulthandler.enable(file=setup.dump_fd)
    faulthandler.register(signal.SIGUSR1, file=setup.dump_fd, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # so that a killed rank loses no output
    os.environ["TMPDIR"] = str(JobFolder(Path(setup.share.folder)).tmp)
    tempfile.tempdir = None


def _run_with_phases(rank_main: RankMain, setup: RankSetup) -> Returned | Raised:
    lock = threading.Lock()

    def report_phase(phase: str) -> None:
        with lock:
            setup.socket.sendall(encode_frame(PhaseReached(phase=phase)))

    return run_program(rank_main, rank_context(setup.share, setup.rank, report_phase))


def run_program(rank_main: RankMain, context: RankContext) -> Returned | Raised:
    """The result of `rank_main`, or the exception that it raised. SystemExit counts as a failure too."""
    try:
        payload = rank_main(context)
        if not isinstance(payload, bytes):
            raise TypeError(f"rank_main returned {type(payload).__name__}, not bytes")
    except BaseException as error:
        at_s = time.monotonic()
        text = "".join(traceback.format_exception(error))[-TRACEBACK_CHARS:]
        return Raised(at_s=at_s, message=one_line(error), traceback=text)
    return Returned(at_s=time.monotonic(), payload=payload)


def one_line(error: BaseException) -> str:
    """Returns the type and text of an exception on one line, at most 4000 characters."""
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # an exception whose __str__ raises
        text = f"<str() raised {type(broken).__name__}>"
    return f"{type(error).__name__}: {text}"[:MESSAGE_CHARS] if text else type(error).__name__


def flush_streams() -> None:
    """Flush stdout and stderr. Errors are ignored: a full disk must not hide the result of the program."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
