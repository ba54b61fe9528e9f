"""The rank program of `stages.py`: the real one, with its CPU time sampled by stage.

A timer interrupts a rank every few milliseconds of CPU time. The time since the last interrupt is added to the stage
of the innermost Python frame whose file is known. Every rank writes its sums into `FOLDER_VARIABLE`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import torch
from kinds import FOLDER_VARIABLE

from harness.matrix.caseid import case_id
from harness.request import RunRequest
from harness.worker import main

if TYPE_CHECKING:
    from harness.engine.program import RankContext

_INTERVAL_S = 0.004

# The first entry that is part of a file's path decides. "" is everything else: operators called by the model itself.
STAGES = {
    "harness/worker/probes/": "probes",
    "harness/worker/virtual/fabric.py": "collectives",
    "harness/worker/virtual/collectives.py": "collectives",
    "harness/worker/virtual/scaled_mm.py": "scaled matmul",
    "harness/worker/virtual/graph_backend.py": "compile: graph passes",
    "torch/_functorch/partitioners.py": "compile: partitioner",
    "torch/_inductor/": "compile: graph passes",
    "torch/_functorch/": "compile: AOTAutograd",
    "torch/fx/": "compile: tracing and graphs",
    "torch/_subclasses/": "compile: tracing and graphs",
    "torch/_dynamo/": "compile: dynamo",
    "torch/distributed/tensor/": "DTensor dispatch",
    "torch/distributed/_functional_collectives.py": "DTensor dispatch",
    "torch/distributed/fsdp/": "FSDP2",
    "torchao/": "torchao",
    "torch/optim/": "optimizer",
    "torch/utils/checkpoint.py": "checkpointing",
    "torch/autograd/": "autograd",
    "harness/worker/targets/": "model and build",
    "harness/worker/targets/data.py": "model and build",
}
OTHER = "other"
_ENTRY = "torch/_dynamo/eval_frame.py"  # calls compiled code as well: its callees decide


class _Sampler:
    def __init__(self) -> None:
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self._last_s = time.process_time()
        self._stages: dict[str, str | None] = {}

    def start(self) -> None:
        signal.signal(signal.SIGPROF, torch._dynamo.disable(self._sample))  # type: ignore[no-untyped-call]
        signal.setitimer(signal.ITIMER_PROF, _INTERVAL_S, _INTERVAL_S)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._sample(0, None)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        now_s = time.process_time()
        stage = None
        while frame is not None and stage is None:
            stage = self._stage(frame.f_code.co_filename)
            frame = frame.f_back
        self.cpu_s[stage or OTHER] += now_s - self._last_s
        self._last_s = now_s

    def _stage(self, file: str) -> str | None:
        if file not in self._stages:
            path = file.replace(os.sep, "/")
            stages = (stage for part, stage in STAGES.items() if part in path and _ENTRY not in path)
            self._stages[file] = next(stages, None)
        return self._stages[file]


preload = main.preload


def rank_main(context: RankContext) -> bytes:
    """The real program, sampled."""
    request = msgspec.msgpack.decode(context.payload, type=RunRequest)
    before = {"fork and set-up": time.process_time()}
    sampler = _Sampler()
    sampler.start()
    try:
        return main.rank_main(context)
    finally:
        sampler.stop()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        record = {
            "case": case_id(request.case),
            "witness": request.solo or not request.probes or request.probes == ("sketches",),
            "stages": {**before, **sampler.cpu_s},
            "user_s": usage.ru_utime,
            "system_s": usage.ru_stime,
        }
        name = f"{os.getpid()}-{time.monotonic_ns()}.json"
        Path(os.environ[FOLDER_VARIABLE], name).write_text(json.dumps(record))
