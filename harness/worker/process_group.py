"""How a rank joins the others of its job."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from harness.worker.rendezvous import open_store
from harness.worker.virtual import collectives

if TYPE_CHECKING:
    from harness.engine.program import RankContext

# The engine ends a job at its deadline and collects stacks: a collective that gives up before leaves none.
AFTER_DEADLINE_S = 60.0
# Of the deadline. Stacks do not show what a GPU waits for; NCCL's watchdog names the collective and who is missing.
NCCL_GIVES_UP_AFTER = 0.5

_BACKENDS = {"cpu": collectives.BACKEND, "cuda": "nccl"}


def join(context: RankContext, kind: str) -> torch.device:
    """Join the process group of this job, whose ranks are on this kind of device; returns the device of this rank."""
    device = torch.device("cpu")
    if kind == "cuda":
        assert context.device is not None, "NCCL needs a device for every rank"
        device = torch.device("cuda", context.device)
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_NCCL_DESYNC_DEBUG", "1")
    else:
        collectives.FABRIC.connect(context.folder)
    dist.init_process_group(
        _BACKENDS[kind],
        store=open_store(context),
        rank=context.rank,
        world_size=context.world_size,
        timeout=timedelta(seconds=_timeout_s(context.deadline_s, kind)),
        device_id=device if kind == "cuda" else None,
    )
    return device


def _timeout_s(deadline_s: float, kind: str) -> float:
    """Seconds after which a collective that waits gives up."""
    return deadline_s * NCCL_GIVES_UP_AFTER if kind == "cuda" else deadline_s + AFTER_DEADLINE_S
