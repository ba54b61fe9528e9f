"""The warm-up: trains once on a loopback fabric, so that lazy imports and first-call costs are paid before the fork.

Clears the caches that ranks must not inherit: DTensor's sharding and redistribution caches are keyed by meshes, whose
equality ignores process groups, so every rank would reuse the plans of rank 0.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import warnings
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # documented, but not listed as exported
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from harness.internals import read_parts
from harness.matrix.case import Case, Checkpointing, Float8, Layout, Train
from harness.request import RunRequest
from harness.worker import internals
from harness.worker.probes.places import mesh_axes
from harness.worker.probes.probe import PROBES
from harness.worker.train import train
from harness.worker.virtual import collectives

_TRAIN = Train(steps=1, global_batch=4, seq_len=16)

# By the mesh axis that they are there for. Together these cover the code paths of the matrix, in about two seconds.
WARMUP_CASES: Mapping[str, tuple[Case, ...]] = {
    "dp": (
        Case(
            layout=Layout(dp_replicate=2, dp_shard=2),
            float8=Float8(recipe="tensorwise", fp8_all_gather=True, precompute_scale=True),
            train=_TRAIN,
        ),
    ),
    "tp": (
        Case(
            layout=Layout(dp_shard=2, tp=2),
            float8=Float8(recipe="rowwise"),
            checkpointing=Checkpointing(mode="selective_op"),
            train=Train(steps=1, global_batch=4, seq_len=16, dtype="bfloat16"),
        ),
        Case(layout=Layout(tp=2), float8=Float8(recipe="tensorwise", tp_styles="float8"), train=_TRAIN),
    ),
}

COMPILED_CASE = Case(
    layout=Layout(tp=2, async_tp=True, symm_mem="fallback"),
    float8=Float8(recipe="tensorwise", tp_styles="float8"),
    checkpointing=Checkpointing(mode="full"),
    compile="graph",
    train=Train(steps=1, global_batch=4, seq_len=16, dtype="bfloat16"),
)

_OF_GRAPHS = {part.record for name, part in read_parts().items() if internals.is_of_compiled_runs(name)}
_EAGER_PROBES = tuple(name for name in PROBES if name not in _OF_GRAPHS)


def without_progress_thread() -> None:
    """Keep tqdm, where it is installed, from starting a thread with its first progress bar, which inductor shows.

    A process with threads cannot be forked safely.
    """
    if importlib.util.find_spec("tqdm") is not None:
        importlib.import_module("tqdm").tqdm.monitor_interval = 0


def warm_up(axes: Iterable[str], *, compiled: bool = False) -> None:
    """Train the warm-up cases of these axes with all probes, as rank 0 of a loopback group, then clear the caches.

    A warm-up case that raises is left out: a rank that trains like it raises too, and then it is the result of a case.
    `compiled`: also a case with compiled blocks, which takes as long as all others together.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = [case for axis in axes for case in WARMUP_CASES.get(axis, ())]
        for case in (*eager, *([COMPILED_CASE] if compiled else [])):
            collectives.FABRIC.connect(None)
            dist.init_process_group(collectives.BACKEND, store=HashStore(), rank=0, world_size=case.world_size)
            probes = _EAGER_PROBES if case.compile == "none" else ()  # the graph probe compares ranks
            try:
                train(RunRequest(case=case, probes=probes), torch.device("cpu"), lambda _: None)
            except Exception:
                continue  # the cases that run into it fail with it, the others pass
            finally:
                dist.destroy_process_group()
                collectives.FABRIC.disconnect()
    if compiled:
        _forget_compiled_blocks()
    clear_mesh_caches()
    mesh_axes.cache_clear()


def _forget_compiled_blocks() -> None:
    if not internals.gaps(internals.COMPILED):
        from harness.worker.targets.reference import compiled as compiled_blocks

        compiled_blocks.forget()
    if not internals.gaps(internals.ASYNC_TP):
        from harness.worker.targets.reference import async_tp

        async_tp.forget()


def clear_mesh_caches() -> None:
    """Clear all caches of torch.distributed that may hold a mesh, a redistribution plan or a process group."""
    _clear_sharding_prop_cache()
    for found in gc.get_objects():
        if type(found) is _CACHED and (found.__module__ or "").startswith("torch.distributed"):
            found.cache_clear()
    gc.collect()


_CACHED = functools._lru_cache_wrapper
