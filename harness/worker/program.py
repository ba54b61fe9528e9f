"""What a rank does with a request to train a case: request in, trace out. Preloaded once, called in every rank."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import torch

from harness.engine.program import FORK_BLOCKERS
from harness.registry import REFERENCE, module_of
from harness.request import RunRequest
from harness.sources import module_digest
from harness.worker.process import internals
from harness.worker.process.process import PROCESS
from harness.worker.process_group import join
from harness.worker.training.injection import inject
from harness.worker.training.train import train
from harness.worker.training.warmup import warm_up, without_progress_thread
from harness.worker.virtual import device as virtual_device

if TYPE_CHECKING:
    from harness.engine.program import RankContext


# Threads per rank. One is right for several ranks per core; more are for measuring their effect on the numbers.
THREADS_VARIABLE = "FP8_HARNESS_RANK_THREADS"


def preload(options: Mapping[str, str]) -> None:
    """Do once what every rank needs: imports, the virtual device, and the slow first run of the code.

    Leaves the process single-threaded and without a CUDA context, so that it can be forked. A target that cannot be
    imported, or that differs from the controller's, raises before the warm-up.
    """
    torch.set_num_threads(1)
    without_progress_thread()
    compiled = options.get("compile", "off") == "on"
    internals.import_parts(compiled=compiled)
    sys.path += [folder for folder in options.get("path", "").split(os.pathsep) if folder and folder not in sys.path]
    on_cpu = options.get("device", "cpu") == "cpu"
    if on_cpu:
        kernel = options.get("arithmetic") == "kernel"
        virtual_device.install(arithmetic="kernel" if kernel else "exact", compiled=compiled)
    PROCESS.settings.restart()
    name = module_of(options.get("target", REFERENCE))
    target = importlib.import_module(name)
    _check_source(name, options)
    FORK_BLOCKERS.record_new(f"the import of {name}")
    PROCESS.settings.record_changes("import")
    if on_cpu:
        torch.set_num_threads(1)  # whatever the target has set: threads that have run stay until the fork
        warm_up()
    PROCESS.settings.restart()
    FORK_BLOCKERS.record_new("the warm-up")
    if hasattr(target, "preload"):
        target.preload()
        FORK_BLOCKERS.record_new(f"preload() of {name}")
    PROCESS.settings.record_changes("import")


def _check_source(name: str, options: Mapping[str, str]) -> None:
    """Raises RuntimeError where the module has another source than on the machine that runs the controller."""
    asked = options.get("source")
    if asked and module_digest(name, options.get("path", "").split(os.pathsep)) != asked:
        raise RuntimeError(
            f"the source of {name} on node {platform.node()} differs from that on the machine that started the run. "
            "Fix: put the same files on every node, such as in a shared folder or one image."
        )


def rank_main(context: RankContext) -> bytes:
    request = msgspec.msgpack.decode(context.payload, type=RunRequest)
    torch.set_num_threads(int(os.environ.get(THREADS_VARIABLE, "1")))
    PROCESS.phase.report = context.report_phase
    PROCESS.phase.begin("start")
    internals.require(*_parts_of(request))
    # The ranks of a job share generated code, and no other job does: a rank killed while writing a library would break
    # every later run that loads it.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(context.folder / "inductor")
    compiled = request.case.compile != "none"
    virtual = virtual_device.install(
        request.fabric, device=request.device, arithmetic=request.arithmetic, compiled=compiled
    )
    device = join(context, request.fabric)
    for patch in request.injections:
        PROCESS.phase.begin(f"injection {patch.text}")
        inject(patch)
    if request.replayed:
        from harness.worker.training.replay import replay

        return msgspec.msgpack.encode(replay(request, device))
    return msgspec.msgpack.encode(train(request, device, PROCESS.phase.begin, virtual, context.folder))


def _parts_of(request: RunRequest) -> tuple[str, ...]:
    """The private parts without which this request cannot be met. A record that is lost is no reason not to run."""
    layout = request.case.layout
    needed = {
        internals.COMPILED: request.case.compile != "none",
        internals.ASYNC_TP: layout.async_tp,
        internals.GLOO: request.device == "cpu" and request.fabric == "gloo",
        internals.MODULE_TENSORS: bool(request.replayed),
    }
    return tuple(part for part, is_needed in needed.items() if is_needed)
