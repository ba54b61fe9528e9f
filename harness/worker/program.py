"""What a rank does with a request to train a case: request in, trace out. Preloaded once, called in every rank.

The warm-up trains once on a loopback backend, so that lazy imports and first-call costs are paid before the fork. It
clears the caches that ranks must not inherit: DTensor's sharding and redistribution caches are keyed by meshes, whose
equality ignores process groups, so every rank would reuse the plans of rank 0.
"""

import functools
import gc
import importlib
import importlib.util
import os
import platform
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # documented, but not listed as exported
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from harness.engine.program import FORK_BLOCKERS, RankContext
from harness.internals import read_parts
from harness.matrix.case import Case, Float8, Layout, Train
from harness.registry import REFERENCE, injections, load, module_of
from harness.request import RunRequest
from harness.sources import module_digest
from harness.trace.record import Patch
from harness.worker.probes.probe import PROBES
from harness.worker.process import internals
from harness.worker.process.process import PROCESS
from harness.worker.process_group import join
from harness.worker.tensors.places import mesh_axes
from harness.worker.training.train import train
from harness.worker.virtual import collectives
from harness.worker.virtual import device as virtual_device

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
    if not internals.gaps(internals.METAS):
        from harness.worker.process.shared_metas import SharedMetas

        PROCESS.share_metas = SharedMetas().share
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
    """Raise RuntimeError where the module has another source than on the machine that runs the controller."""
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
        request.backend, device=request.device, arithmetic=request.arithmetic, compiled=compiled
    )
    device = join(context, request.backend)
    if not request.injections:
        PROCESS.share_metas()
    for patch in request.injections:
        PROCESS.phase.begin(f"injection {patch.text}")
        inject(patch)
    if request.replayed:
        from harness.worker.training.replay import replay

        return msgspec.msgpack.encode(replay(request, device))
    if request.noise is not None and len(request.noise.draws) > 1:
        from harness.worker.training.draws import train_draws

        return msgspec.msgpack.encode(train_draws(request, device, PROCESS.phase.begin, virtual))
    trace = train(request, device, PROCESS.phase.begin, virtual, context.folder)
    if request.solo and request.case.train.packing != "none":
        from harness.worker.training.unpacked import documents_alone

        PROCESS.phase.begin("documents alone")
        trace = msgspec.structs.replace(trace, documents_alone=documents_alone(request.case, device))
    return msgspec.msgpack.encode(trace)


def _parts_of(request: RunRequest) -> tuple[str, ...]:
    """Return the private names that this request needs. A lost record does not prevent a run."""
    layout = request.case.layout
    needed = {
        internals.COMPILED: request.case.compile != "none",
        internals.ASYNC_TP: layout.async_tp,
        internals.GLOO: request.device == "cpu" and request.backend == "gloo",
        internals.MODULE_TENSORS: bool(request.replayed),
    }
    return tuple(part for part, is_needed in needed.items() if is_needed)


class InjectionError(Exception):
    """An injection raised, so the run says nothing about the target."""


def inject(patch: Patch) -> None:
    """Apply a patch. Raises InjectionError, which names it."""
    try:
        if patch.source:
            _call(patch)
        else:
            prefix, separator, name = patch.text.partition(":")
            load(injections()[prefix + separator].plant)(name)
    except Exception as error:
        raise InjectionError(f"injection {patch.text} raised {type(error).__name__}: {error}") from error


class Source(SourceLoader):
    """Runs a text as Python runs a file, of which tracebacks show lines too: it may be on another machine."""

    def __init__(self, file: str, text: bytes) -> None:
        self._file, self._text = file, text

    def get_filename(self, fullname: str) -> str:
        return self._file

    def get_data(self, path: str | bytes) -> bytes:
        return self._text


def _call(patch: Patch) -> None:
    path, _, function = patch.text.rpartition(":")
    spec = spec_from_loader(f"injection_{Path(path).stem}", Source(path, patch.source))
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # a compiler imports what compiled code calls
    spec.loader.exec_module(module)
    getattr(module, function)()


# It saves every rank 0.4 s. A second case, with TP, another recipe or compiled blocks, takes longer than ranks save by
# it: see docs/architecture.md.
WARMUP_CASE = Case(
    layout=Layout(dp_replicate=2, dp_shard=2),
    float8=Float8(recipe="tensorwise", fp8_all_gather=True, precompute_scale=True),
    train=Train(steps=1, global_batch=4, seq_len=16),
)

_OF_GRAPHS = {part.record for name, part in read_parts().items() if internals.is_of_compiled_runs(name)}
_EAGER_PROBES = tuple(name for name in PROBES if name not in _OF_GRAPHS)


def without_progress_thread() -> None:
    """Keep tqdm, where it is installed, from starting a thread with its first progress bar, which inductor shows.

    A process with threads cannot be forked safely.
    """
    if importlib.util.find_spec("tqdm") is not None:
        importlib.import_module("tqdm").tqdm.monitor_interval = 0
        PROCESS.keep("no progress thread")


def warm_up() -> None:
    """Train the warm-up case with all probes of eager runs, as rank 0 of a loopback group, then clear the caches.

    If it raises, nothing is warm: a rank that trains like it raises too, and then it is the result of a case.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collectives.FABRIC.connect(None)
        dist.init_process_group(collectives.BACKEND, store=HashStore(), rank=0, world_size=WARMUP_CASE.world_size)
        try:
            with suppress(Exception):
                train(RunRequest(case=WARMUP_CASE, probes=_EAGER_PROBES), torch.device("cpu"), lambda _: None)
        finally:
            dist.destroy_process_group()
            collectives.FABRIC.disconnect()
    clear_mesh_caches()
    mesh_axes.cache_clear()


def clear_mesh_caches() -> None:
    """Clear all caches of torch.distributed that may hold a mesh, a redistribution plan or a process group."""
    _clear_sharding_prop_cache()
    for candidate in gc.get_objects():
        if type(candidate) is _CACHED and (candidate.__module__ or "").startswith("torch.distributed"):
            candidate.cache_clear()


_CACHED = functools._lru_cache_wrapper
