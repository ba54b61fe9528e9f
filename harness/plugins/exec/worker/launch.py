"""Launchers: torchrun, accelerate and `mp.spawn` parse their command lines themselves; ranks are forks of this process.

What starts ranks in torch, `launch_agent`, is replaced. A rank gets the variables that torchrun sets, and the store of
its launcher. If one fails, the others are ended, as torchrun ends them.
"""

import multiprocessing.context
import multiprocessing.process
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is not in __all__

from harness.engine.linux import die_with_parent, oom_kills, read_text
from harness.engine.processes import module_command
from harness.engine.rank import flush_streams
from harness.plugins.exec.request import ExecRequest, ProcessRecord
from harness.plugins.exec.supervise import check_room, stack_of
from harness.plugins.exec.worker import script

_GRACE_S = 2.0  # between SIGTERM and SIGKILL, where torchrun gives 30 s: nothing is worth a wait here
_POLL_S = 0.02
_DEFAULT_PORT = 29500  # torchrun's, which two runs on one machine cannot share


def install(request: ExecRequest, folder: Path, count: Callable[[int], None]) -> None:
    """Replace what starts processes. `count` shows so many GPUs to the ranks of a node."""
    _fork_instead_of_spawn()
    _python_as_here(folder)
    from torch.distributed.launcher import api

    def launch_agent(config: Any, entrypoint: Any, args: Sequence[Any], **_: Any) -> dict[int, Any]:
        nodes = max(request.nodes, config.max_nodes)
        local = max(request.ranks // nodes, 1) if request.ranks else config.nproc_per_node
        check_room(nodes * local)
        count(local)
        return _Launch(config, entrypoint, list(args), nodes, local).run()

    module: Any = api
    module.launch_agent = launch_agent


def _fork_instead_of_spawn() -> None:
    """A spawned process would import torch without GPUs. A fork has what a script shares with it, and more."""
    contexts: Any = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    for method in ("spawn", "forkserver"):

        class AsFork(multiprocessing.context.ForkContext):
            _name = method

        contexts[method] = AsFork()
    process: Any = multiprocessing.process.BaseProcess
    stock = process.run

    def run(self: Any) -> None:
        try:
            stock(self)
        except BaseException as error:
            script.ENDING.failed(error)
            raise

    process.run = run


def _python_as_here(folder: Path) -> None:
    """A Python that a script starts by itself gets the same GPUs: accelerate starts a single process so."""
    popen: Any = subprocess.Popen
    stock = popen.__init__

    def start(self: Any, args: Any, *more: Any, **given: Any) -> None:
        words = [str(word) for word in args] if isinstance(args, list | tuple) else []
        python = words and words[0] in (sys.executable, "python", "python3") and not given.get("shell")
        if python and not given.get("executable") and _runs_torch(words[1:]):
            args = module_command("harness.plugins.exec.worker.root", [str(folder), *words])
        stock(self, args, *more, **given)

    popen.__init__ = start


def _runs_torch(words: Sequence[str]) -> bool:
    """Return True for a script or a module: what a library runs by `-c` asks Python itself."""
    first = next((word for word in words if not word.startswith("-") or word in ("-m", "-c")), "-c")
    return first == "-m" or first.endswith(".py")


class _Launch:
    """The ranks of one call of `launch_agent`."""

    def __init__(self, config: Any, entrypoint: Any, args: list[Any], nodes: int, local: int) -> None:
        self.config, self.entrypoint, self.args = config, entrypoint, args
        self.nodes, self.local = nodes, local
        self.port = _port(config.rdzv_endpoint)
        self.run_id = config.run_id or uuid.uuid4().hex

    def run(self) -> dict[int, Any]:
        """Return what the ranks return, by rank. Raises ChildFailedError, as torchrun does, where one fails."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

        flush_streams()
        ranks = range(self.nodes * self.local)
        open_file = tempfile.TemporaryFile  # each is closed where its result is read
        results = {rank: open_file() for rank in ranks} if callable(self.entrypoint) else {}
        killed_before = oom_kills()
        pids = {self._fork(rank, results.get(rank)): rank for rank in ranks}
        # That of the agent, as torchrun has it: rank 0 may end before others have asked it. It has a thread.
        store = TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)
        failures = {}
        for rank, pid, code in _wait(pids):
            if code < 0:
                self._tell(rank, pid, -code, for_memory=oom_kills() > killed_before)
            failures[rank] = ProcessFailure(local_rank=rank % self.local, pid=pid, exitcode=code, error_file="<N/A>")
        del store
        if failures:
            raise ChildFailedError(str(self.entrypoint), failures)
        return {rank: _kept(file) for rank, file in results.items()}

    def _tell(self, rank: int, pid: int, number: int, *, for_memory: bool) -> None:
        """Record which signal ended a rank, and where it was if it could say so."""
        folder, by = script.ENDING.folder, signal.Signals(number).name
        line = stack_of(pid, rank, read_text(folder / f"stacks-{pid}.txt")).line
        what = f"{by} ended it{', and the kernel was out of memory' if for_memory else ''}"
        record = ProcessRecord(
            pid=pid,
            rank=rank,
            world_size=self.nodes * self.local,
            ended=f"{line}: {what}" if line else what,
            exit_code=128 + number,
        )
        (folder / f"record-{pid}.msgpack").write_bytes(msgspec.msgpack.encode(record))

    def _fork(self, rank: int, file: IO[bytes] | None) -> int:
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            self._become(rank, parent, file)
        return pid

    def _become(self, rank: int, parent: int, file: IO[bytes] | None) -> NoReturn:
        die_with_parent(parent)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.update(self._variables(rank))
        Path("/proc/self/comm").write_text(f"rank{rank}")  # by which the controller knows it
        _begin(self.entrypoint, [str(arg) if file is None else arg for arg in self.args], file)

    def _variables(self, rank: int) -> dict[str, str]:
        world = self.nodes * self.local
        given = {
            "RANK": rank,
            "LOCAL_RANK": rank % self.local,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": self.local,
            "GROUP_RANK": rank // self.local,
            "GROUP_WORLD_SIZE": self.nodes,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": world,
            "ROLE_NAME": self.config.role,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self.port,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": self.config.max_restarts,
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
        }
        return {name: str(value) for name, value in given.items()}


def _begin(entrypoint: Any, args: list[Any], file: IO[bytes] | None) -> NoReturn:
    """Run a rank to the end of its process: a function, or a command."""
    if callable(entrypoint):
        script.end(lambda: _keep(file, entrypoint(*args)))
    script.end(lambda: script.main_of([entrypoint, *args])())  # noqa: PLW0108  a bad command ends this process


def _keep(file: IO[bytes] | None, result: Any) -> None:
    if file is not None:
        torch.save(result, file)


def _kept(file: IO[bytes]) -> Any:
    with file:
        file.seek(0)
        return torch.load(file, weights_only=False)


def _port(endpoint: str) -> int:
    """Return the port that was asked for, or a free one where it is the default that every run would take."""
    _, _, text = endpoint.rpartition(":")
    if text.isdigit() and int(text) not in (0, _DEFAULT_PORT):
        return int(text)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(pids: dict[int, int]) -> Iterator[tuple[int, int, int]]:
    """Wait for all ranks; yield rank, pid and code of those that fail by themselves. The others are ended then."""
    alive, kill_at_s = dict(pids), 0.0
    try:
        while alive:
            for pid in list(alive):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                code = os.waitstatus_to_exitcode(status)
                rank = alive.pop(pid)
                if code and not kill_at_s:
                    yield rank, pid, code
                    kill_at_s = time.monotonic() + _GRACE_S
                    _signal(alive, signal.SIGTERM)
            if kill_at_s and time.monotonic() > kill_at_s:
                _signal(alive, signal.SIGKILL)
            time.sleep(_POLL_S)
    finally:
        _signal(alive, signal.SIGKILL)


def _signal(pids: dict[int, int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
