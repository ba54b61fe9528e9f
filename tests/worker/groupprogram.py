"""A rank program that makes the calls of `groupcalls.py` and of its neighbors over one backend, and reports each.

Its options are JSON: `backend`, "stock" for torch's gloo alone; `everything`, for the nightly calls too; `calls`, a
pattern of names; `fault`, a function of this file that spoils the shared-memory backend.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork

from harness.engine.program import RankContext
from harness.worker import process_group
from harness.worker.virtual import collectives, device
from tests.worker import groupcalls, grouptrainers, groupusers

Tensor = torch.Tensor


def preload(options: Mapping[str, str]) -> None:
    torch.set_num_threads(1)


def writes_under_autograd() -> None:
    def write(target: Tensor, values: Tensor, **_: Any) -> None:
        target.copy_(values.view(target.shape))

    spoiled: Any = collectives
    spoiled.write = write


def counts_versions() -> None:
    def write(target: Tensor, values: Tensor, **_: Any) -> None:
        target.detach().copy_(values.view(target.shape))

    spoiled: Any = collectives
    spoiled.write = write


def takes_any_strides() -> None:
    def write(target: Tensor, values: Tensor, **_: Any) -> None:
        target.data.copy_(values.view(target.shape))

    spoiled: Any = collectives
    read = collectives.read
    spoiled.read = lambda tensor, **_: read(tensor.contiguous())
    spoiled.write = write


def without_futures() -> None:
    def done(written: Sequence[Tensor] = ()) -> Any:
        return dist.Work.boxed(FakeWork())

    spoiled: Any = collectives
    spoiled._done = done


FAULTS = {
    fault.__name__: fault for fault in (writes_under_autograd, counts_versions, takes_any_strides, without_futures)
}


def rank_main(context: RankContext) -> bytes:
    options = json.loads(context.payload)
    backend, wanted = options["backend"], re.compile(options.get("calls", ".*"))
    if backend != "stock":
        device.install(backend, compiled=False)
    if "fault" in options:
        FAULTS[options["fault"]]()
    process_group.join(context, "gloo" if backend == "stock" else backend)
    everything = options.get("everything", False)
    calls = itertools.chain(
        groupcalls.plain_calls(everything=everything),
        groupusers.user_calls(everything=everything),
        grouptrainers.trainer_calls(),
    )
    report = {}
    for name, call in calls:
        if wanted.fullmatch(name):
            context.report_phase(name)
            report[name] = groupcalls.outcome(call)
    return json.dumps(report).encode()
