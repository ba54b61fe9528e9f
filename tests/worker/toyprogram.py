"""A rank program without torch that ends in every way a rank can end. The payload names the way for each rank.

`{"0": "raise", "*": "sleep"}`: rank 0 raises, all others block in C. Used by the tests and by ci/bench/containment.py.
"""

import ctypes
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from harness.engine.program import RankContext


def preload(options: Mapping[str, str]) -> None:
    if "raise" in options:
        raise ImportError(options["raise"])
    if "thread" in options:
        threading.Thread(target=time.sleep, args=(60,), name="unwanted", daemon=True).start()
    if "device" in options:
        _kept.append(os.open(options["device"], os.O_RDWR | os.O_CREAT))
    if "files" in options:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(options["files"]), int(options["files"])))
    if "ready" in options:
        Path(options["ready"]).touch()
    if "sleep_s" in options:
        time.sleep(float(options["sleep_s"]))


def rank_main(context: RankContext) -> bytes:
    ways = json.loads(context.payload)
    way = ways.get(str(context.rank), ways.get("*", "return"))
    context.report_phase(f"doing {way}")
    return _WAYS[way](context)


def _return(context: RankContext) -> bytes:
    return f"{context.rank}/{context.world_size}/{context.device}".encode()


def _tell_place(context: RankContext) -> bytes:
    return f"{context.local_rank} {context.rendezvous}".encode()


def _write_pid(context: RankContext) -> bytes:
    Path(json.loads(context.payload)["file"]).write_text(str(os.getpid()))
    return b""


def _is_peer_alive(context: RankContext) -> bytes:
    """Whether a rank that has long returned still lives."""
    file = Path(json.loads(context.payload)["file"])
    time.sleep(0.4)
    return str(Path(f"/proc/{file.read_text()}/exe").exists()).encode()


def _return_big(context: RankContext) -> bytes:
    return bytes([context.rank]) * (5 << 20)


def _print(context: RankContext) -> bytes:
    sys.stdout.write("to stdout\n")
    sys.stderr.write("to stderr\n")
    os.write(1, b"from below Python\n")
    return b""


def _print_much(context: RankContext) -> bytes:
    """A little more than a log may have, then a moment in which its size is seen."""
    os.write(1, b"first\n")
    for _ in range(66):
        os.write(1, (b"x" * 1023 + b"\n") * 1024)
    time.sleep(0.7)
    os.write(1, b"last\n")
    return b""


def _surroundings(context: RankContext) -> bytes:
    import tempfile

    facts = {
        "stdin": sys.stdin.read(),
        "tempdir": tempfile.gettempdir(),
        "pid": os.getpid(),
        "session": os.getsid(0),
        "fds": sorted(target.partition(":")[0] for target in open_files().values()),
        "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "threads": os.environ["OMP_NUM_THREADS"],
    }
    return json.dumps(facts).encode()


def open_files() -> dict[int, str]:
    """What each file descriptor is: a path, `socket:[...]`, `anon_inode:[...]`."""
    files = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own is gone by now
            files[int(entry.name)] = str(entry.readlink())
    return files


def _raise(context: RankContext) -> bytes:
    raise ValueError(f"rank {context.rank}\nhas a\n  problem")


def _raise_later(context: RankContext) -> bytes:
    time.sleep(0.15)
    raise RuntimeError("connection closed by peer")


def _sys_exit(context: RankContext) -> bytes:
    sys.exit(3)


def _wrong_type(context: RankContext) -> bytes:
    return "text"  # type: ignore[return-value]


def _exit(code: int) -> Callable[[RankContext], bytes]:
    def leave(context: RankContext) -> bytes:
        sys.stdout.write("last words\n")
        os._exit(code)

    return leave


def _signal_self(number: signal.Signals) -> Callable[[RankContext], bytes]:
    def kill(context: RankContext) -> bytes:
        os.kill(os.getpid(), number)
        time.sleep(60)
        return b""

    return kill


def _segfault(context: RankContext) -> bytes:
    ctypes.string_at(0)
    return b""


def _spin(context: RankContext) -> bytes:
    while True:
        pass


def _sleep(context: RankContext) -> bytes:
    time.sleep(60)
    return b""


def _wait_for_file(context: RankContext) -> bytes:
    file = Path(json.loads(context.payload)["file"])
    while not file.exists():
        time.sleep(0.01)
    return b""


def _lock(context: RankContext) -> bytes:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
    return b""


def _block_with_gil(context: RankContext) -> bytes:
    """A C call that never gives the interpreter lock back: no Python signal handler can run."""
    ctypes.PyDLL(None).sleep(60)
    ctypes.PyDLL(None).sleep(60)
    return b""


def _children(context: RankContext) -> bytes:
    """A child in our group, one in a session of its own, a forked daemon, and a grandchild of the second."""
    program = [sys.executable, "-c", "import time; time.sleep(60)"]
    parent = [sys.executable, "-c", f"import subprocess, time; subprocess.Popen({program!r}); time.sleep(60)"]
    subprocess.Popen(program)
    subprocess.Popen(parent, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
    time.sleep(0.1)
    return b""


def _children_then_sleep(context: RankContext) -> bytes:
    _children(context)
    return _sleep(context)


def _shared_memory(context: RankContext) -> bytes:
    """Made and mapped, removed by nobody: os._exit comes before the atexit handlers that would."""
    name = f"/fp8-harness-test-{os.getpid()}"
    fd = os.open(f"/dev/shm{name}", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, 4096)
    _kept.append(mmap.mmap(fd, 4096))
    os.close(fd)
    return b""


_kept: list[object] = []


def _shared_memory_then_sleep(context: RankContext) -> bytes:
    _shared_memory(context)
    return _sleep(context)


def _garbage(context: RankContext) -> bytes:
    for fd, target in open_files().items():
        if target.startswith("socket"):
            os.write(fd, b"\x00\x00\x00\x04oops")
    return _sleep(context)


_WAYS: dict[str, Callable[[RankContext], bytes]] = {
    "return": _return,
    "tell_place": _tell_place,
    "write_pid": _write_pid,
    "is_peer_alive": _is_peer_alive,
    "return_big": _return_big,
    "print": _print,
    "print_much": _print_much,
    "surroundings": _surroundings,
    "raise": _raise,
    "raise_later": _raise_later,
    "sys_exit": _sys_exit,
    "wrong_type": _wrong_type,
    "exit7": _exit(7),
    "exit0": _exit(0),
    "sigkill": _signal_self(signal.SIGKILL),
    "sigabrt": _signal_self(signal.SIGABRT),
    "sigstop": _signal_self(signal.SIGSTOP),
    "segfault": _segfault,
    "spin": _spin,
    "sleep": _sleep,
    "wait_for_file": _wait_for_file,
    "lock": _lock,
    "block_with_gil": _block_with_gil,
    "children": _children,
    "children_then_sleep": _children_then_sleep,
    "shared_memory": _shared_memory,
    "shared_memory_then_sleep": _shared_memory_then_sleep,
    "garbage": _garbage,
}
