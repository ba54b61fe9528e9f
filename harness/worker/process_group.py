"""The process group of a job, joined in the same way over every backend, and the store where its ranks meet.

`python -m harness.worker.process_group FD HOST` serves a TCP store for jobs on several nodes at this address of the
machine: it sends its port to the socket FD, and exits when that is closed.
"""

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # documented, but not listed as exported

from harness.engine.messages import IN_FOLDER
from harness.engine.program import RankContext
from harness.request import Backend
from harness.worker.virtual import collectives

# The engine ends a job at its deadline and collects stacks: a gloo that gives up before leaves none.
AFTER_DEADLINE_S = 60.0
# Of the deadline. Stacks do not show what a GPU waits for; NCCL's watchdog names the collective and who is missing.
NCCL_GIVES_UP_AFTER = 0.5

_BACKENDS: dict[Backend, str] = {"shared": collectives.BACKEND, "gloo": "gloo", "nccl": "nccl"}


def join(context: RankContext, backend: Backend) -> torch.device:
    device = torch.device("cpu")
    if backend == "nccl":
        assert context.device is not None, "NCCL needs a device for every rank"
        device = torch.device("cuda", context.device)
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_NCCL_DESYNC_DEBUG", "1")
    elif backend == "shared":
        collectives.FABRIC.connect(context.folder)
    elif context.rendezvous == IN_FOLDER:
        # All ranks are on this node. gloo would take the interface that the name of the machine resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout_s = context.deadline_s * NCCL_GIVES_UP_AFTER if backend == "nccl" else context.deadline_s + AFTER_DEADLINE_S
    dist.init_process_group(
        _BACKENDS[backend],
        store=open_store(context),
        rank=context.rank,
        world_size=context.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    return device


def open_store(context: RankContext) -> Store:
    """Return the store of all ranks of a job: a file on one node, or a prefix in the TCP store of the run."""
    url = urlsplit(context.rendezvous)
    if not url.scheme:
        return FileStore(str(Path(context.folder) / "rendezvous"), context.world_size)
    assert url.hostname and url.port, f"{context.rendezvous} is not tcp://HOST:PORT/PREFIX"
    return PrefixStore(url.path, TCPStore(url.hostname, url.port, is_master=False))


def serve(fd: int, host: str) -> None:
    """Serve until the controller closes its end or dies.

    On a socket of our own: torch's would listen at every address of the machine, whatever `host` it is given.
    """
    controller = socket.socket(fileno=fd)
    listening = socket.create_server((host, 0))
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    controller.sendall(str(store.port).encode())
    controller.recv(1)


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
