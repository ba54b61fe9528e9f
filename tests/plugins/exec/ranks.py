"""Runs a script on watched, forked ranks of the virtual device: `python ranks.py FOLDER RANKS SCRIPT [fault:NAME]`.

Every rank leaves its record in the folder, as ranks of `exec` do.
"""

import os
import runpy
import sys
import time
import traceback
from pathlib import Path

import msgspec

from harness.worker.virtual import mxfp8

mxfp8.install_if_possible()

import torch  # noqa: E402  behind what must be installed first

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
    watcher.finish()
    cost = time.process_time() - started
    record = msgspec.structs.replace(watcher.record(ended), rank=number, world_size=ranks)
    (folder / f"record-{os.getpid()}.msgpack").write_bytes(msgspec.msgpack.encode(record))
    (folder / f"cost-{number}").write_text(str(cost))


def main(folder: str, ranks: str, script: str, *injections: str) -> None:
    torch.set_num_threads(1)
    parts = device.install("shared", compiled=False)
    watcher = Watcher(virtual=parts, steps=int(os.environ.get("STEPS", "3")))
    for text in injections:
        inject(Patch(text=text))
    if watcher.steps:
        watcher.install()
    children = []
    for number in range(int(ranks)):
        pid = os.fork()
        if not pid:
            _rank(Path(folder), number, int(ranks), script, watcher)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
