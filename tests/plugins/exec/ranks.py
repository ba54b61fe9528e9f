"""Runs a script on watched, forked ranks of the virtual device: `python ranks.py FOLDER SCRIPT "NAME|RANKS|A=B C=D"`.

Every rank leaves its record in FOLDER/NAME, as ranks of `exec` do. A job may end in "|fault:NAME".
"""

import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from harness.worker.virtual import casts

casts.install_if_possible()

import torch  # noqa: E402  behind what must be installed first

from harness.plugins.exec.request import ProcessRecord  # noqa: E402
from harness.plugins.exec.worker.watch import Watcher  # noqa: E402
from harness.trace.record import Patch  # noqa: E402
from harness.worker.program import inject  # noqa: E402
from harness.worker.virtual import device  # noqa: E402
from harness.worker.virtual.collectives import FABRIC  # noqa: E402


def _rank(folder: Path, number: int, ranks: int, script: str, watcher: Watcher) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks)}
    os.environ["INIT_METHOD"] = f"file://{folder}/store?rank={number}&world_size={ranks}"
    FABRIC.connect(folder)
    ended, sys.argv = "", [script]
    started = time.process_time()
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    cost = time.process_time() - started
    record = watcher.contribute(ProcessRecord(pid=os.getpid(), rank=number, world_size=ranks, ended=ended))
    (folder / f"record-{os.getpid()}.msgpack").write_bytes(msgspec.msgpack.encode(record))
    (folder / f"cost-{number}").write_text(str(cost))


def _job(folder: Path, ranks: int, script: str, options: str, *injections: str) -> None:
    os.environ |= dict(option.split("=") for option in options.split())
    watcher = Watcher(virtual=device.install("shared", compiled=False), steps=int(os.environ.get("STEPS", "3")))
    for text in injections:
        inject(Patch(text=text))
    if watcher.steps:
        watcher.install()
    _forked(*(partial(_rank, folder, number, ranks, script, watcher) for number in range(ranks)))


def _forked(*calls: Callable[[], None]) -> None:
    """Make every call in a process of its own, all at once, and wait for them."""
    children = []
    for call in calls:
        pid = os.fork()
        if not pid:
            call()
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


def main(folder: str, script: str, *jobs: str) -> None:
    torch.set_num_threads(1)
    device.install("shared", compiled=False)
    for job in jobs:
        name, ranks, options, *injections = job.split("|")
        (place := Path(folder) / name).mkdir()
        _forked(partial(_job, place, int(ranks), script, options, *injections))


if __name__ == "__main__":
    main(*sys.argv[1:])
