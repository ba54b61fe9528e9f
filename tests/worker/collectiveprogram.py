"""A rank program that runs every collective the virtual device touches and reports which results are right.

The hooks must have reported each.
"""

import json
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from harness.engine.program import RankContext
from harness.request import Backend
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.process_group import join
from harness.worker.virtual import device
from tests.worker import fabricwitness

MESSAGES = (torch.float32, torch.bfloat16)
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.bfloat16)


def preload(options: Mapping[str, str]) -> None:
    torch.set_num_threads(1)
    device.install()


def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(1, 9) * (rank + 1)).float().to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.float(), expected.float())


def _functional_gather(mine: torch.Tensor, everyone: torch.Tensor) -> bool:
    group = dist.group.WORLD.group_name
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(mine, dist.get_world_size(), group)
    return same(torch.ops._c10d_functional.wait_tensor(gathered), everyone)


def _gather_into(mine: torch.Tensor, everyone: torch.Tensor) -> bool:
    out = torch.empty_like(everyone)
    dist.all_gather_into_tensor(out, mine)
    return same(out, everyone)


def _gather_list(mine: torch.Tensor, everyone: torch.Tensor) -> bool:
    outs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(outs, mine)
    return same(torch.cat(outs), everyone)


def _alltoall(mine: torch.Tensor, everyone: torch.Tensor) -> bool:
    out, world, rank = torch.empty_like(mine), dist.get_world_size(), dist.get_rank()
    dist.all_to_all_single(out, mine)
    part = len(mine) // world
    return same(out, torch.cat([values(other, mine.dtype)[rank * part : (rank + 1) * part] for other in range(world)]))


def _broadcast(mine: torch.Tensor, everyone: torch.Tensor) -> bool:
    out = mine.clone()
    dist.broadcast(out, src=1)
    return same(out, values(1, mine.dtype))


def _scatter(mine: torch.Tensor, everyone: torch.Tensor) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.empty_like(mine)
    dist.scatter(out, [values(other, mine.dtype) for other in range(world)] if rank == 0 else None, src=0)
    return same(out, mine)


def _gather(mine: torch.Tensor, everyone: torch.Tensor) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    outs = [torch.empty_like(mine) for _ in range(world)] if rank == 0 else None
    dist.gather(mine, outs, dst=0)
    return outs is None or same(torch.cat(outs), everyone)


MOVES: dict[str, Callable[[torch.Tensor, torch.Tensor], bool]] = {
    "functional all-gather": _functional_gather,
    "all_gather_into_tensor": _gather_into,
    "all_gather": _gather_list,
    "all_to_all_single": _alltoall,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "gather": _gather,
}


def _reductions() -> dict[str, bool]:
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = values(rank, torch.float32)
    total = torch.stack([values(other, torch.float32) for other in range(world)]).sum(0)
    part = slice(rank * len(mine) // world, (rank + 1) * len(mine) // world)
    results = {}
    for name, op, factor in (
        ("SUM", ReduceOp.SUM, 1.0),
        ("AVG", ReduceOp.AVG, 1 / world),
        ("PREMUL_SUM", c10d._make_nccl_premul_sum(0.25), 0.25),
    ):
        out = torch.empty_like(mine[part])
        dist.reduce_scatter_tensor(out, mine.clone(), op=op)
        results[f"reduce_scatter {name}"] = same(out, (total * factor)[part])
        everywhere = mine.clone()
        dist.all_reduce(everywhere, op=op)
        results[f"all_reduce {name}"] = same(everywhere, total * factor)
    kept = mine.clone()
    dist.reduce_scatter_tensor(torch.empty_like(mine[part]), kept, op=c10d._make_nccl_premul_sum(0.25))
    for name, op, expected in (
        ("MAX", ReduceOp.MAX, values(world - 1, torch.float32)),
        ("MIN", ReduceOp.MIN, values(0, torch.float32)),
    ):
        everywhere = mine.clone()
        dist.all_reduce(everywhere, op=op)
        results[f"all_reduce {name}"] = same(everywhere, expected)
    reduced = mine.clone()
    dist.reduce(reduced, dst=1)
    results["reduce"] = same(reduced, total if rank == 1 else mine)
    halves = torch.full((8,), 1.0 + 2**-8 * rank, dtype=torch.bfloat16)
    dist.all_reduce(halves)
    rounded_once = sum(torch.full((8,), 1.0 + 2**-8 * other).bfloat16().float() for other in range(world))
    results["bfloat16 sums are rounded once"] = same(halves, rounded_once.bfloat16())
    results["float8 is not reduced"] = _is_refused(lambda: dist.all_reduce(values(rank, torch.float8_e4m3fn)))
    lists = [torch.empty(4) for _ in range(world)]
    dist.all_to_all(lists, [torch.full((4,), 10.0 * rank + other) for other in range(world)])
    results["all_to_all"] = all(same(got, torch.full((4,), 10.0 * other + rank)) for other, got in enumerate(lists))
    dist.barrier()
    results["PREMUL_SUM leaves its input alone"] = same(kept, mine)
    return results


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        with unobserved():  # hooks are told of a call before it is refused
            call()
    except TypeError as error:
        return "cannot be reduced" in str(error)
    return False


def _mismatch() -> None:
    size = 4 if dist.get_rank() == 0 else 3
    dist.all_gather_into_tensor(torch.empty(size * dist.get_world_size()), torch.zeros(size))


def _messages() -> dict[str, bool]:
    """Rings of messages: receives are posted first, and waited for in another order."""
    rank, world = dist.get_rank(), dist.get_world_size()
    before, behind = (rank - 1) % world, (rank + 1) % world
    received = [torch.zeros(8, dtype=dtype) for dtype in MESSAGES for _ in range(2)]
    posted = [dist.irecv(tensor, before) for tensor in received]
    for number, dtype in enumerate(MESSAGES):
        dist.isend(values(rank, dtype), behind)
        dist.isend(values(rank + number + 1, dtype), behind)
    for work in reversed(posted):
        assert work is not None, "a posted receive"
        work.wait()
    expected = [values(before + more, dtype) for number, dtype in enumerate(MESSAGES) for more in (0, number + 1)]
    single = torch.zeros(3)
    if rank % 2:
        dist.recv(single, before)
    else:
        dist.send(torch.full((3,), float(rank)), behind)
    return {
        "messages": all(same(*pair) for pair in zip(received, expected, strict=True)),
        "one message": rank % 2 == 0 or same(single, torch.full((3,), float(before))),
    }


def _misfit() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.zeros(4, dtype=torch.bfloat16), 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.zeros(4), 0)


def rank_main(context: RankContext) -> bytes:
    backend: Backend = "gloo" if context.payload == b"gloo" else "shared"
    device.install(backend)
    join(context, backend)
    if backend == "shared":
        fabricwitness.watch()
    if context.payload == b"mismatch":
        _mismatch()
    if context.payload == b"misfit":
        _misfit()
    results = {}
    for dtype in DTYPES:
        mine = values(context.rank, dtype)
        everyone = torch.cat([values(rank, dtype) for rank in range(context.world_size)])
        for name, move in MOVES.items():
            results[f"{name} {dtype}"] = move(mine, everyone)
    results |= _reductions()
    if backend == "shared":  # what gloo does with messages is torch's own
        results |= _messages()
    if backend == "shared":
        fabricwitness.compare()
    return json.dumps(results).encode()
