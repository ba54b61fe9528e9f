"""Groups, works, losses that are reduced before `backward`, DDP and FSDP, and calls that raise.

The interface is that of `groupcalls.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.worker.groupcalls import Calls, Made, values, wait
from tests.worker.groupusers import ALL, GROUP, ONE, RANK, WORLD, ring


def _with_group(group: Any) -> Mapping[str, object]:
    """A few collectives over a group of which this rank may be no member."""
    mine, parts = values((2,)), [torch.zeros(2) for _ in range(max(dist.get_world_size(group), 1))]
    members = [] if dist.get_rank(group) < 0 else dist.get_process_group_ranks(group)
    works = [type(dist.all_reduce(mine, group=group, async_op=True)).__mro__[-2].__name__]
    dist.barrier(group=group)
    if members:
        dist.all_gather(parts, mine, group=group)
        dist.broadcast(mine, group_src=len(members) - 1, group=group)
        total = mine.clone()
        dist.reduce(total, dst=members[0], group=group)
        parts += [total] if dist.get_rank(group) == 0 else []
    return {
        "mine": mine,
        "parts": parts,
        "is work": works != ["object"],
        "place": [dist.get_rank(group), dist.get_world_size(group), members],
    }


def _of_subset(ranks: Callable[[], Sequence[int]]) -> Mapping[str, object]:
    return _with_group(dist.new_group(list(ranks())))


def _of_gloo() -> Mapping[str, object]:
    """A group of another backend, with a reduction that NCCL lacks."""
    mine = values((4,), torch.int64)
    dist.all_reduce(mine, ReduceOp.BOR, group=dist.new_group(backend="gloo"))
    return {"mine": mine}


def _destroyed() -> Mapping[str, object]:
    group = dist.new_group(list(range(WORLD())))
    dist.all_reduce(values((2,)), group=group)
    dist.destroy_process_group(group)
    dist.all_reduce(values((2,)), group=group)
    return {}


def _work(start: Callable[[Tensor, Tensor], Any]) -> Mapping[str, object]:
    """All that can be asked of a work."""
    mine, whole = values(ONE()), values(ALL())
    work = start(mine, whole)
    waited, future = work.wait(), work.get_future()
    future.wait()
    value = future.value()
    tensors = [value] if isinstance(value, Tensor) else value
    return {
        "waited": waited,
        "state": [work.is_completed(), future.done(), work.exception()],
        "value": tensors,
        "then": future.then(lambda done: 3).wait(),
        "mine": mine,
        "whole": whole,
    }


WORKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all_reduce": lambda mine, whole: dist.all_reduce(mine, async_op=True),
    "broadcast": lambda mine, whole: dist.broadcast(mine, 0, async_op=True),
    "all_gather_into_tensor": lambda mine, whole: dist.all_gather_into_tensor(whole, mine, async_op=True),
    "reduce_scatter_tensor": lambda mine, whole: dist.reduce_scatter_tensor(mine, whole, async_op=True),
    "all_to_all_single": lambda mine, whole: dist.all_to_all_single(torch.zeros_like(whole), whole, async_op=True),
    "barrier": lambda mine, whole: dist.barrier(async_op=True),
    "reduce": lambda mine, whole: dist.reduce(mine, 0, async_op=True),
}


def _loss(reduce: Callable[[Tensor], Any]) -> Mapping[str, object]:
    """A loss of two linears that is reduced before its backward."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(values(param.shape, first=number) / 4)
    loss = model(values((3, 2))).square().mean()
    reduce(loss)
    loss.backward()
    return {"loss": loss.detach(), "kind": type(loss.grad_fn).__name__, "grads": _grads(model)}


def _grads(model: nn.Module) -> list[Any]:
    return [None if param.grad is None else param.grad.tolist() for param in model.parameters()]


def _saved(write: Callable[[Tensor], Any]) -> Mapping[str, object]:
    """A parameter that autograd has saved, and which is written to before the backward."""
    param = nn.Parameter(values((2, 2)))
    product = (param * param).sum()
    write(param)
    product.backward()
    return {"param": Made(param), "version": param._version}


def _initial() -> Mapping[str, object]:
    """The weights of rank 0, as a trainer hands them round."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(values(param.shape))
    for param in model.parameters():
        dist.broadcast(param, 0)
    model(values((2, 2))).sum().backward()
    for param in model.parameters():
        dist.all_reduce(param.grad, op=ReduceOp.SUM)
    return {"params": [Made(param) for param in model.parameters()]}


def _ddp(**options: Any) -> Mapping[str, object]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(values(param.shape) / 4)
    hook = options.pop("hook", None)
    wrapped = DistributedDataParallel(model, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    losses = []
    for step in range(2):
        loss = wrapped(values((4, 2), first=step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "grads": _grads(model), "buffers": [buffer.tolist() for buffer in model.buffers()]}


def _fsdp() -> Mapping[str, object]:
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    for part in (*model, model):
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(2):
        loss = model(values((4, 2), first=step)).square().mean() / 1024
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parts: Any = list(model.parameters())
    return {"losses": losses, "params": [param.to_local().tolist() for param in parts]}


LOSSES: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "all_reduce, async": lambda t: dist.all_reduce(t, async_op=True).wait(),
    "all_reduce of data": lambda t: dist.all_reduce(t.data),
    "all_reduce of detached": lambda t: dist.all_reduce(t.detach()),
    "broadcast": lambda t: dist.broadcast(t, 0),
    "reduce": lambda t: dist.reduce(t, 0) if RANK() == 0 else dist.reduce(t.detach().clone(), 0),
    "all_reduce_coalesced": lambda t: dist.all_reduce_coalesced([t]),
    "premul": lambda t: dist.all_reduce(t, op=c10d._make_nccl_premul_sum(0.5)),
}


def _from_anyone() -> Mapping[str, object]:
    _, behind = ring()
    received = torch.zeros(2)
    work = dist.isend(torch.full((2,), float(RANK())), behind)
    source = dist.recv(received)
    wait(work)
    return {"received": received, "source": source}


ERRORS: dict[str, Callable[[], Any]] = {
    "all_gather_into_tensor of another size": lambda: dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(2)),
    "all_gather_into_tensor of another dtype": lambda: dist.all_gather_into_tensor(
        torch.zeros(2 * WORLD(), dtype=torch.float64), torch.zeros(2)
    ),
    "reduce_scatter_tensor of another size": lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(3)),
    "reduce_scatter_tensor of another dtype": lambda: dist.reduce_scatter_tensor(
        torch.zeros(2, dtype=torch.float64), torch.zeros(2 * WORLD())
    ),
    "all_gather into too few": lambda: dist.all_gather([torch.zeros(2)], torch.zeros(2)),
    "all_gather into another size": lambda: dist.all_gather([torch.zeros(3)] * WORLD(), torch.zeros(2)),
    "all_gather into another shape": lambda: dist.all_gather([torch.zeros(2, 1)] * WORLD(), torch.zeros(2)),
    "all_gather into another dtype": lambda: dist.all_gather(
        [torch.zeros(2, dtype=torch.float64)] * WORLD(), torch.zeros(2)
    ),
    "reduce_scatter of too few": lambda: dist.reduce_scatter(torch.zeros(2), [torch.zeros(2)]),
    "reduce_scatter of another size": lambda: dist.reduce_scatter(torch.zeros(2), [torch.zeros(3)] * WORLD()),
    "all_to_all_single that does not divide": lambda: dist.all_to_all_single(
        torch.zeros(2 * WORLD() + 1), torch.zeros(2 * WORLD() + 1)
    ),
    "all_to_all_single of another dtype": lambda: dist.all_to_all_single(
        torch.zeros(WORLD(), dtype=torch.float64), torch.zeros(WORLD())
    ),
    "all_to_all_single with splits that do not add up": lambda: dist.all_to_all_single(
        torch.zeros(2 * WORLD()), torch.zeros(2 * WORLD()), [1] * WORLD(), [1] * WORLD()
    ),
    "all_to_all_single with too few splits": lambda: dist.all_to_all_single(torch.zeros(2), torch.zeros(2), [2], [2]),
    "all_to_all of too few": lambda: dist.all_to_all([torch.zeros(2)], [torch.zeros(2)]),
    "coalesced of two dtypes": lambda: dist.all_reduce_coalesced([torch.zeros(2), torch.zeros(2, dtype=torch.int64)]),
    "coalesced of nothing": lambda: dist.all_reduce_coalesced([]),
    "no tensor": lambda: dist.all_reduce([1.0]),
    "sparse": lambda: dist.broadcast(torch.eye(2).to_sparse(), 0),
    "sparse all_reduce": lambda: dist.all_reduce(torch.eye(2).to_sparse()),
    "on meta": lambda: dist.all_reduce(torch.zeros(2, device="meta")),
    "source out of range": lambda: dist.broadcast(torch.zeros(2), 9),
    "target out of range": lambda: dist.reduce(torch.zeros(2), 9),
    "gather to out of range": lambda: dist.gather(torch.zeros(2), None, dst=9),
    "send to oneself": lambda: dist.send(torch.zeros(2), RANK()),
    "send of strided": lambda: dist.send(torch.zeros(2, 2)[:, 0], ring()[1]),
    "send of expanded": lambda: dist.send(torch.zeros(1).expand(2), ring()[1]),
    "receive into strided": lambda: dist.recv(torch.zeros(2, 2)[:, 0], ring()[0]),
    "monitored_barrier": dist.monitored_barrier,
    "barrier": dist.barrier,
    "functional all_reduce by nothing known": lambda: funcol.all_reduce(torch.zeros(2), "median", GROUP.WORLD),
    "functional reduce_scatter that does not divide": lambda: funcol.reduce_scatter_tensor(
        torch.zeros(2 * WORLD() + 1), "sum", 0, GROUP.WORLD
    ),
    "premultiplied maximum of a list": lambda: dist.reduce_scatter(
        torch.zeros(2), [torch.ones(2)] * WORLD(), op=c10d._make_nccl_premul_sum(0.5)
    ),
    "premultiplied whole numbers": lambda: dist.all_reduce(
        torch.ones(2, dtype=torch.int64), op=c10d._make_nccl_premul_sum(0.5)
    ),
}


def _error(call: Callable[[], Any]) -> Mapping[str, object]:
    call()
    return {"error": "none"}


def trainer_calls() -> Calls:
    yield "groups: all", partial(_of_subset, lambda: range(WORLD()))
    yield "groups: reversed", partial(_of_subset, lambda: range(WORLD())[::-1])
    yield "groups: the first", partial(_of_subset, lambda: [0])
    yield "groups: the last", partial(_of_subset, lambda: [WORLD() - 1])
    yield "groups: by one", lambda: _with_group(dist.new_subgroups(1)[0])
    yield "groups: of gloo", _of_gloo
    yield "groups: destroyed", _destroyed
    for name, start in WORKS.items():
        yield f"work: {name}", partial(_work, start)
    for name, reduce in LOSSES.items():
        yield f"loss: {name}", partial(_loss, reduce)
        yield f"saved: {name}", partial(_saved, reduce)
    yield "trainer: weights", _initial
    yield "trainer: DDP", _ddp
    yield "trainer: DDP, views", partial(_ddp, gradient_as_bucket_view=True)
    yield "trainer: DDP, unused", partial(_ddp, find_unused_parameters=True)
    yield "trainer: DDP, hook", partial(_ddp, hook=allreduce_hook)
    yield "trainer: FSDP2", _fsdp
    for name, call in ERRORS.items():
        yield f"error: {name}", partial(_error, call)
    yield "error: receive from anyone", _from_anyone  # the last: where it is refused, a message is left
