"""Calls that end in collectives: functional ones and those with a gradient, coalesced ones, messages, objects.

The interface is that of `groupcalls.py`.
"""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.worker.groupcalls import FORMS, Calls, Made, values, wait

WORLD = dist.get_world_size
RANK = dist.get_rank


def _rows(count: int = 1) -> tuple[int, int]:
    return (2 * count, 2)


def _uneven() -> tuple[list[int], list[int]]:
    """Rows that this rank receives from every rank, and sends to every rank; rank r sends r + 1, to the last none."""
    last, rank = WORLD() - 1, RANK()
    return [0 if rank == last else other + 1 for other in range(last + 1)], [*[rank + 1] * last, 0]


def _all_to_all_rows() -> tuple[int, int]:
    return (sum(_uneven()[1]), 2)


# The shape of the input, and the call, which returns one tensor or several.
Function = tuple[Callable[[], tuple[int, ...]], Callable[[Tensor], Any]]
GROUP = dist.group
ONE, ALL = _rows, lambda: _rows(WORLD())
FUNCTIONAL: dict[str, Function] = {
    "all_reduce": (ONE, lambda t: funcol.all_reduce(t, "sum", GROUP.WORLD)),
    "all_reduce, max": (ONE, lambda t: funcol.all_reduce(t, "max", GROUP.WORLD)),
    "all_reduce, avg": (ONE, lambda t: funcol.all_reduce(t, "avg", GROUP.WORLD)),
    "broadcast": (ONE, lambda t: funcol.broadcast(t, 1, GROUP.WORLD)),
    "all_gather_tensor": (ONE, lambda t: funcol.all_gather_tensor(t, 0, GROUP.WORLD)),
    "all_gather_tensor, dim 1": (ONE, lambda t: funcol.all_gather_tensor(t, 1, GROUP.WORLD)),
    "all_gather_tensor_autograd": (ONE, lambda t: funcol.all_gather_tensor_autograd(t, 0, GROUP.WORLD)),
    "reduce_scatter_tensor": (ALL, lambda t: funcol.reduce_scatter_tensor(t, "sum", 0, GROUP.WORLD)),
    "reduce_scatter_tensor, avg": (ALL, lambda t: funcol.reduce_scatter_tensor(t, "avg", 0, GROUP.WORLD)),
    "reduce_scatter_tensor_autograd": (ALL, lambda t: funcol.reduce_scatter_tensor_autograd(t, "sum", 0, GROUP.WORLD)),
    "all_to_all_single": (_all_to_all_rows, lambda t: funcol.all_to_all_single(t, *_uneven(), GROUP.WORLD)),
    "all_to_all_single_autograd": (
        _all_to_all_rows,
        lambda t: funcol.all_to_all_single_autograd(t, *_uneven(), GROUP.WORLD),
    ),
    "permute_tensor": (ONE, lambda t: funcol.permute_tensor(t.flatten(), [*range(1, WORLD()), 0], GROUP.WORLD)),
    "all_reduce_coalesced": (ONE, lambda t: funcol.all_reduce_coalesced([t, t[:1]], "sum", GROUP.WORLD)),
    "all_gather_into_tensor_coalesced": (
        ONE,
        lambda t: funcol.all_gather_into_tensor_coalesced([t, t[:1]], GROUP.WORLD),
    ),
    "reduce_scatter_tensor_coalesced": (
        ALL,
        lambda t: funcol.reduce_scatter_tensor_coalesced([t, t], "sum", [0, 0], GROUP.WORLD),
    ),
}
DIFFERENTIABLE: dict[str, Function] = {
    "broadcast": (ONE, lambda t: differentiable.broadcast(t, 1)),
    "gather": (ONE, lambda t: differentiable.gather(t, 1)),
    "scatter": (ONE, lambda t: differentiable.scatter([t * (n + 1) for n in range(WORLD())], 0)),
    "reduce": (ONE, lambda t: differentiable.reduce(t, 1)),
    "reduce_scatter": (
        ONE,
        lambda t: differentiable.reduce_scatter(torch.empty(2, 2), [t * (n + 1) for n in range(WORLD())]),
    ),
    "all_gather": (ONE, differentiable.all_gather),
    "_all_gather_base": (ONE, lambda t: differentiable._all_gather_base(torch.empty(_rows(WORLD())), t)),
    "all_to_all": (
        ONE,
        lambda t: differentiable.all_to_all(
            [torch.empty(2, 2) for _ in range(WORLD())], [t * (n + 1) for n in range(WORLD())]
        ),
    ),
    "all_to_all_single": (
        _all_to_all_rows,
        lambda t: differentiable.all_to_all_single(torch.empty(sum(_uneven()[0]), 2), t, *_uneven()),
    ),
    "all_reduce": (ONE, differentiable.all_reduce),
    "all_reduce, max": (ONE, lambda t: differentiable.all_reduce(t, ReduceOp.MAX)),
}


def _function(function: Function, form: str) -> Mapping[str, object]:
    """What comes out, and the gradient that goes in. All outputs count in one backward, on every rank."""
    shape, call = function
    made = FORMS[form](values(shape()))
    returned = call(made.tensor)
    outs = [funcol.wait_tensor(out) if isinstance(out, Tensor) else out for out in _listed(returned)]
    if any(out.requires_grad for out in outs):
        torch.stack([(out * (n + 2)).square().sum() for n, out in enumerate(outs)]).sum().backward()
    source = made.leaf if made.leaf is not None else made.tensor
    grad = None if source.grad is None else source.grad.tolist()
    kinds = [[type(out).__name__, out.requires_grad, out.is_leaf, type(out.grad_fn).__name__] for out in outs]
    return {"out": [Made(out.detach()) for out in outs], "kinds": kinds, "in": made.tensor.detach(), "grad": grad}


def _listed(returned: Any) -> list[Any]:
    return [returned] if isinstance(returned, Tensor) else list(returned)


def _coalesced(what: str, form: str, *, later: bool) -> Mapping[str, object]:
    one = [FORMS[form](values(_rows())) for _ in range(2)]
    whole = [FORMS[form](values(_rows(WORLD()))) for _ in range(2)]
    with _coalescing_manager(async_ops=later) as manager:
        for small, large in zip(one, whole, strict=True):
            if what == "all_reduce":
                dist.all_reduce(small.tensor)
            elif what == "all_gather":
                dist.all_gather_into_tensor(large.tensor, small.tensor)
            else:
                dist.reduce_scatter_tensor(small.tensor, large.tensor)
    if later:
        manager.wait()
    return {"one": one, "whole": whole}


def _premul(call: Callable[..., Any], form: str, shape: Callable[[], tuple[int, ...]]) -> Mapping[str, object]:
    made = FORMS[form](values(shape()))
    return {"tensor": made, **(call(made.tensor, c10d._make_nccl_premul_sum(0.5)) or {})}


def _premul_scatter(tensor: Tensor, op: Any) -> Mapping[str, object]:
    out = torch.zeros(_rows())
    dist.reduce_scatter_tensor(out, tensor, op=op)
    return {"out": out}


def ring() -> tuple[int, int]:
    return (RANK() - 1) % WORLD(), (RANK() + 1) % WORLD()


def _send_and_receive(form: str, into: str) -> Mapping[str, object]:
    """Even ranks send before they receive."""
    before, behind = ring()
    sent, received = FORMS[form](values(_rows())), FORMS[into](values(_rows()))
    if RANK() % 2:
        dist.recv(received.tensor, before)
        dist.send(sent.tensor, behind)
    else:
        dist.send(sent.tensor, behind)
        dist.recv(received.tensor, before)
    return {"sent": sent, "received": received}


def _posted(form: str, into: str) -> Mapping[str, object]:
    before, behind = ring()
    sent, received = FORMS[form](values(_rows())), FORMS[into](values(_rows()))
    works = [dist.isend(sent.tensor, behind), dist.irecv(received.tensor, before)]
    for work in works:
        wait(work)
    return {"sent": sent, "received": received, "done": [work is not None and work.is_completed() for work in works]}


def _batch(form: str, into: str) -> Mapping[str, object]:
    before, behind = ring()
    sent, received = FORMS[form](values(_rows())), FORMS[into](values(_rows()))
    batch = [dist.P2POp(dist.irecv, received.tensor, before), dist.P2POp(dist.isend, sent.tensor, behind)]
    for work in dist.batch_isend_irecv(batch):
        wait(work)
    return {"sent": sent, "received": received}


def _tagged() -> Mapping[str, object]:
    """Two messages, which are received in the other order of their tags."""
    before, behind = ring()
    received = [torch.zeros(2) for _ in range(2)]
    works = [dist.isend(torch.full((2,), float(tag)), behind, tag=tag) for tag in (1, 2)]
    works += [dist.irecv(received[2 - tag], before, tag=tag) for tag in (2, 1)]
    for work in works:
        wait(work)
    return {"received": received}


def _objects(root: int) -> Mapping[str, object]:
    mine: Any = {"rank": RANK(), "text": "x" * (7 * RANK() + 1), "tensor": torch.full((RANK() + 1,), 2.0)}
    everyone: list[Any] = [None] * WORLD()
    dist.all_gather_object(everyone, mine)
    told = [mine, RANK()] if RANK() == root else [None, None]
    dist.broadcast_object_list(told, src=root)
    gathered: list[Any] | None = [None] * WORLD() if RANK() == root else None
    dist.gather_object(mine, gathered, dst=root)
    given: list[Any] = [None]
    dist.scatter_object_list(given, [f"for {n}" for n in range(WORLD())] if RANK() == root else None, src=root)
    passed: list[Any] = [None, None]
    if RANK() == 0:
        dist.send_object_list(["to", mine], 1)
    elif RANK() == 1:
        dist.recv_object_list(passed, 0)
    return {"all": str(everyone), "told": str(told), "gathered": str(gathered), "given": given, "passed": str(passed)}


MESSAGES = {"send": _send_and_receive, "isend": _posted, "batch": _batch}
SENT = (
    "plain",
    "Parameter",
    "result",
    "view of a Parameter",
    "view of a result",
    "detached Parameter",
    "data of a Parameter",
    "inference tensor",
)
OF_ROWS = ("transposed", "transposed result", "expanded")  # contiguous where a rank has one row
FEW = ("plain", "Parameter", "result", "strided")


def user_calls(*, everything: bool) -> Calls:
    forms, sent = (FORMS, SENT) if everything else (FEW, SENT[:3])
    for kind, functions in (("functional", FUNCTIONAL), ("differentiable", DIFFERENTIABLE)):
        for (name, function), form in itertools.product(functions.items(), forms):
            if function[0] is not _all_to_all_rows or form not in OF_ROWS:
                yield f"{kind} {name}: {form}", partial(_function, function, form)
    for name, form, later in itertools.product(("all_reduce", "all_gather", "reduce_scatter"), forms, (False, True)):
        yield f"coalesced {name}: {form}{', async' * later}", partial(_coalesced, name, form, later=later)
    for form in forms:
        yield f"premul all_reduce: {form}", partial(_premul, dist.all_reduce, form, ONE)
        yield f"premul reduce_scatter: {form}", partial(_premul, _premul_scatter, form, ALL)
    for (name, message), *pair in itertools.product(MESSAGES.items(), sent, sent):
        yield f"{name}: {' -> '.join(pair)}", partial(message, *pair)
    yield "tags: two", _tagged
    for root in (0, 1):
        yield f"objects: root {root}", partial(_objects, root)
