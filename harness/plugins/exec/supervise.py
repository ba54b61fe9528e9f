"""Starts the process of a command, bounds it, and collects what its processes recorded.

The command keeps this terminal: its input, its output and Ctrl-C are its own. Every process of it carries a mark in its
environment, by which all of them are found at the end, also those that it started in sessions of their own.
"""

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from harness.engine import linux
from harness.engine.node import Scratch
from harness.engine.processes import module_command
from harness.errors import HarnessError
from harness.plugins.exec.request import RECORDS, REFUSED, REQUEST, ExecRequest, ProcessRecord

MARK = "FP8_HARNESS_EXEC"
PROGRAM = "harness.plugins.exec.worker.root"
# `worker/root.py` registers it; Windows, where nothing runs, lacks it.
_STACKS = getattr(signal, "SIGRTMAX", signal.SIGTERM)
_POLL_S = 0.1
_LOOK_S = 1.0  # at the memory of every process
_DUMP_S = 2.0  # that processes have to write their stacks
_END_S = 5.0  # that they have to end by themselves after Ctrl-C
_RANK_GIB = 0.5  # that a rank takes at least, with torch in it


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What a command may take: seconds from its first line, and GiB of each process. 0: as much as it needs."""

    timeout_s: float = 0.0
    memory_gib: float = 0.0


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process was when it was ended: the innermost line of the script, and what that called."""

    pid: int
    rank: int | None
    line: str
    call: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended. `ended_for`: why it was ended from outside; empty where it ended by itself."""

    exit_code: int
    seconds: float
    ended_for: str = ""
    records: tuple[ProcessRecord, ...] = ()
    stacks: tuple[Stack, ...] = ()


def run(request: ExecRequest, bounds: Bounds, *, quiet: bool = False) -> Outcome:
    """Run a command to its end, `quiet`: without its output. Raises OSError where it cannot be started."""
    scratch = Scratch()
    try:
        return _Running(request, bounds, scratch.path).run(subprocess.DEVNULL if quiet else None)
    finally:
        scratch.close()


class _Running:
    def __init__(self, request: ExecRequest, bounds: Bounds, folder: Path) -> None:
        self._bounds, self._folder = bounds, folder
        self._mark = uuid.uuid4().hex
        (folder / REQUEST).write_bytes(msgspec.msgpack.encode(request))

    def run(self, output: int | None = None) -> Outcome:
        started_s = time.monotonic()
        environ = {**os.environ, **_SETTINGS, MARK: self._mark}
        process = subprocess.Popen(
            module_command(PROGRAM, [str(self._folder)]), env=environ, stdout=output, stderr=output
        )
        ended_for, stacks = "", list[Stack]()
        try:
            ended_for = self._wait(process)
            if ended_for:
                stacks = self._stacks()
        except KeyboardInterrupt:
            ended_for = "interrupted"
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(_END_S)
        finally:
            linux.kill_marked(MARK, self._mark, _END_S)
        code = process.wait()
        if refused := linux.read_text(self._folder / REFUSED):
            raise HarnessError(refused)
        return Outcome(
            exit_code=128 - code if code < 0 else code,
            seconds=time.monotonic() - started_s,
            ended_for=ended_for,
            records=tuple(self._records()),
            stacks=tuple(stacks),
        )

    def _wait(self, process: "subprocess.Popen[bytes]") -> str:
        """Wait for the end of the command; return why it has to be ended, where it has not ended by itself."""
        began_s, look_at_s = 0.0, 0.0
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
                return ""
            now_s = time.monotonic()
            began_s = began_s or (now_s if any(self._folder.glob("stacks-*.txt")) else 0.0)
            if self._bounds.timeout_s and began_s and now_s - began_s > self._bounds.timeout_s:
                return f"it ran for more than {self._bounds.timeout_s:g} s (--timeout)"
            if self._bounds.memory_gib and now_s > look_at_s:
                look_at_s = now_s + _LOOK_S
                if reason := self._too_large():
                    return reason

    def _too_large(self) -> str:
        for pid in linux.marked(MARK, self._mark):
            gib = _gib("RssAnon", f"{pid}/status")  # without files that it shares
            if gib > self._bounds.memory_gib:
                rank = _rank_of(pid)
                who = f"process {pid}" if rank is None else f"rank {rank}"
                return f"{who} held {gib:.1f} GiB, more than {self._bounds.memory_gib:g} (--memory-per-rank)"
        return ""

    def _stacks(self) -> list[Stack]:
        """Ask every process for its stacks, and return where each is."""
        pids = [pid for pid in linux.marked(MARK, self._mark) if (self._folder / f"stacks-{pid}.txt").exists()]
        ranks = {pid: _rank_of(pid) for pid in pids}
        for pid in pids:
            linux.signal_marked(pid, _STACKS, MARK, self._mark)
        give_up_s = time.monotonic() + _DUMP_S
        files = [self._folder / f"stacks-{pid}.txt" for pid in pids]
        while time.monotonic() < give_up_s and not all(file.stat().st_size for file in files):
            time.sleep(_POLL_S)
        return [stack_of(pid, ranks[pid], linux.read_text(file)) for pid, file in zip(pids, files, strict=True)]

    def _records(self) -> Iterator[ProcessRecord]:
        for path in sorted(self._folder.glob(RECORDS)):
            with suppress(msgspec.DecodeError):  # it was killed while it wrote
                yield msgspec.msgpack.decode(path.read_bytes(), type=ProcessRecord)


# As the engine sets them for ranks: one thread each, and no GPU that is there by chance.
_SETTINGS = {"CUDA_VISIBLE_DEVICES": "", **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")}


def _rank_of(pid: int) -> int | None:
    """Return the rank of a process by what it wrote to its name; None for one that is no rank."""
    match = re.match(r"rank(\d+)$", linux.read_text(Path(f"/proc/{pid}/comm")).strip())
    return int(match[1]) if match else None


_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_BETWEEN = re.compile(r"/harness/|/torch/_ops\.py$")  # a call and what it calls
_PACKAGES = re.compile(r"site-packages|/lib/python3|^<|/harness/(?:plugins|worker|engine)/")


def stack_of(pid: int, rank: int | None, text: str) -> Stack:
    """Return where the main thread of a process was, which is the last one of a dump."""
    main = text.rpartition("\n\n")[2] if "Current thread" not in text else text.rpartition("Current thread")[2]
    frames = list(_FRAME.finditer(main))
    own = next((frame for frame in frames if not _PACKAGES.search(frame["file"])), None)
    where = f"{_relative(own['file'])}:{own['line']}" if own else ""
    called = next((frame for frame in frames if not _BETWEEN.search(frame["file"])), None)
    return Stack(pid=pid, rank=rank, line=where, call=f"{called['name']}" if called and called is not own else "")


def _relative(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def check_room(ranks: int) -> None:
    """HarnessError for more ranks than this machine can hold."""
    gib = _gib("MemAvailable", "meminfo")
    if ranks > 1 and ranks * _RANK_GIB > gib:
        raise HarnessError(
            f"{ranks} ranks need {ranks * _RANK_GIB:.0f} GiB or more, and this machine has {gib:.0f} GiB left.",
            where="-n",
            fix=f"ask for at most {max(1, int(gib / _RANK_GIB))}, and give the script a smaller layout.",
        )


def _gib(name: str, file: str) -> float:
    """Return a number of a file below /proc that has it in kB; 0 where it has none, or is gone."""
    match = re.search(rf"^{name}:\s+(\d+) kB", linux.read_text(Path("/proc", file)), flags=re.MULTILINE)
    return int(match[1]) / (1 << 20) if match else 0.0
