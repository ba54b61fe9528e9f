"""The process that runs a command: `python -m harness.plugins.exec.worker.root FOLDER`.

It imports torch and torchao once, installs what a CPU lacks, and becomes the command: a script runs in it, and
ranks are its forks. Its output is the command's.
"""

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.errors import HarnessError
from harness.plugins.exec.request import REFUSED, REQUEST, ExecRequest
from harness.plugins.exec.worker import script
from harness.plugins.exec.worker.imports import has_interpreter

STACKS = signal.SIGRTMAX  # asks a process for its stacks: no script uses it
_OF_MANY = 4  # GPUs that are shown to tests, which say themselves how many ranks they start


def run(folder: Path, command: Sequence[str] = ()) -> None:
    """Become the command of the request in this folder, or another one that it starts."""
    request = msgspec.msgpack.decode((folder / REQUEST).read_bytes(), type=ExecRequest)
    main = script.main_of(command or request.command)
    _install(request, folder)
    _write_stacks_to(folder)
    script.install(folder)
    script.end(main)


def _install(request: ExecRequest, folder: Path) -> None:
    os.environ["TRITON_INTERPRET"] = str(int(has_interpreter()))  # Triton asks it when it is imported
    logging.disable(logging.WARNING)  # of kernels that torchao cannot load here
    import torch
    import torchao.float8  # noqa: F401  before it is shown a GPU, at which it would look for kernels

    logging.disable(logging.NOTSET)

    from harness.plugins.exec.worker import gpu, groups, kernels, launch
    from harness.worker.virtual import device

    torch.set_num_threads(1)  # ranks are forks, and a process with threads cannot be forked
    virtual = device.install(compiled=False)
    shown = gpu.install(request.gpu, _count(request))
    kernels.install(request.gpu.capability)
    groups.install(folder)
    launch.install(request, folder, lambda count: setattr(shown, "count", count))
    from harness.plugins.exec.worker.watch import Watcher

    watcher = Watcher(steps=request.steps, virtual=virtual)
    for patch in request.injections:
        from harness.worker.program import inject

        inject(patch)
    from harness.plugins.exec.worker import lineup

    lineup.install(request)
    if request.watch:
        watcher.install()
        script.ENDING.contributors.append(watcher.contribute)


def _count(request: ExecRequest) -> int:
    if request.inputs:
        return _OF_MANY  # of which a launcher starts one rank
    if request.ranks:
        return max(request.ranks // request.nodes, 1)
    tests = any(Path(word).name in ("pytest", "py.test") for word in request.command[:3])
    return _OF_MANY if tests else 1


def _write_stacks_to(folder: Path) -> None:
    """Write the stacks of all threads to a file of this process when it is asked for them; forks have their own.

    The first file is the sign that the command begins.
    """

    def register() -> None:
        file = (folder / f"stacks-{os.getpid()}.txt").open("w")
        faulthandler.register(STACKS, file=file, all_threads=True)
        faulthandler.enable(file=file)  # where a segmentation fault was

    register()
    os.register_at_fork(after_in_child=register)


if __name__ == "__main__":
    try:
        run(Path(sys.argv[1]), sys.argv[2:])
    except HarnessError as error:
        (Path(sys.argv[1]) / REFUSED).write_text(error.text)
        raise SystemExit(2) from None
