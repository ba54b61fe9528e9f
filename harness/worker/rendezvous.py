"""The rendezvous of a job: the store of its ranks, and the server of a TCP store for jobs on several nodes.

`python -m harness.worker.rendezvous FD` serves, sends its port to the socket FD, and exits when that is closed.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from torch.distributed import (  # type: ignore[attr-defined]  # documented, but not listed as exported
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

if TYPE_CHECKING:
    from harness.engine.program import RankContext


def open_store(context: RankContext) -> Store:
    """The store of all ranks of a job: a file on one node, or a prefix in the TCP store of the run."""
    url = urlsplit(context.rendezvous)
    if not url.scheme:
        return FileStore(str(Path(context.folder) / "rendezvous"), context.world_size)
    assert url.hostname and url.port, f"{context.rendezvous} is not tcp://HOST:PORT/PREFIX"
    return PrefixStore(url.path, TCPStore(url.hostname, url.port, is_master=False))


def main(fd: int) -> None:
    """Serve until the controller closes its end or dies."""
    controller = socket.socket(fileno=fd)
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    controller.sendall(str(store.port).encode())
    controller.recv(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
