"""The warm-up: trains once on a loopback fabric, so that lazy imports and first-call costs are paid before the fork.

Clears the caches that ranks must not inherit: DTensor's sharding and redistribution caches are keyed by meshes, whose
equality ignores process groups, so every rank would reuse the plans of rank 0.
"""

import functools
import gc
import importlib
import importlib.util
import warnings
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # documented, but not listed as exported
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from harness.internals import read_parts
from harness.matrix.case import Case, Float8, Layout, Train
from harness.request import RunRequest
from harness.worker.probes.probe import PROBES
from harness.worker.process import internals
from harness.worker.process.process import PROCESS
from harness.worker.tensors.places import mesh_axes
from harness.worker.training.train import train
from harness.worker.virtual import collectives

# It saves every rank 0.4 s. A second case, with TP, another recipe or compiled blocks, takes longer than ranks save by
# it: see docs/decisions/ranks.md.
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
    gc.collect()


_CACHED = functools._lru_cache_wrapper
