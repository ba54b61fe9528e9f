"""Every call of `torch.distributed` that moves tensors, on tensors of many forms, and what can be seen of it after.

A call is a name and a function that makes its tensors, calls, and returns what is to be looked at. All ranks make the
same calls in the same order, and an error of one is an error of all, or comes after the ranks have met: the next call
needs the group.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
DTYPES = (*FLOATS, *FLOAT8, *WHOLE, torch.complex64)
OF_EACH_KIND = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int16,
    torch.bool,
    torch.complex64,
)
OPS = {name: getattr(ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}

Seen = dict[str, object]
Calls = Iterator[tuple[str, Callable[[], Mapping[str, object]]]]


class Made:
    """A tensor of a call, and the leaf behind it where it has another one."""

    def __init__(self, tensor: Tensor, leaf: Tensor | None = None) -> None:
        self.tensor = tensor
        self.leaf = leaf
        self.before = self.state

    @property
    def state(self) -> dict[str, object]:
        """What autograd knows of the tensor."""
        tensor = self.tensor
        return {
            "autograd": [tensor.requires_grad, tensor.is_leaf, type(tensor.grad_fn).__name__],
            "version": None if tensor.is_inference() else tensor._version,
        }

    @property
    def kept(self) -> bool:
        """Neither version nor history has changed, but for torch's warning that no gradient passes an operator."""
        now, before = self.state, self.before
        warned = type(self.tensor.grad_fn).__name__ == "CppFunction"
        return now["version"] == before["version"] and (warned or now["autograd"] == before["autograd"])


def values(shape: Sequence[int], dtype: torch.dtype = torch.float32, first: int = 0) -> Tensor:
    """Small whole numbers that differ by rank, so that any order of sums gives the same."""
    rank, count = dist.get_rank(), int(torch.tensor(shape).prod())
    numbers = (torch.arange(first, first + count) * (2 * rank + 1) + rank) % 7 + 1
    return numbers.view(shape).to(dtype)


def _leaf(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Made]:
    def made(tensor: Tensor) -> Made:
        leaf = nn.Parameter(tensor)
        return Made(make(leaf), leaf)

    return made


def _strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def _in_inference_mode(tensor: Tensor) -> Made:
    with torch.inference_mode():
        return Made(tensor.clone())


FORMS: dict[str, Callable[[Tensor], Made]] = {
    "plain": Made,
    "Parameter": lambda tensor: Made(nn.Parameter(tensor)),
    "result": _leaf(lambda leaf: leaf * 1),
    "view of a Parameter": _leaf(lambda leaf: leaf[:]),
    "view of a result": _leaf(lambda leaf: (leaf * 1)[:]),
    "detached Parameter": _leaf(lambda leaf: leaf.detach()),
    "data of a Parameter": _leaf(lambda leaf: leaf.data),
    "strided": lambda tensor: Made(_strided(tensor)),
    "transposed": lambda tensor: Made(_transposed(tensor)),
    "transposed result": _leaf(_transposed),
    "expanded": lambda tensor: Made(tensor[:1].expand_as(tensor)),
    "inference tensor": _in_inference_mode,
}


def seen(made: Made) -> Seen:
    """What can be seen of a tensor, and of the gradient that reaches its leaf, if one does."""
    tensor, leaf = made.tensor, made.leaf
    found: Seen = {
        "values": _numbers(tensor),
        "kind": [str(tensor.dtype), list(tensor.shape), list(tensor.stride())],
        **made.state,
        "kept": made.kept,
    }
    if tensor.requires_grad:
        factors = torch.arange(1, tensor.numel() + 1, dtype=tensor.dtype).view(tensor.shape)
        (tensor * factors).sum().backward(retain_graph=True)
        source = tensor if tensor.is_leaf else leaf
        found["grad"] = None if source is None or source.grad is None else source.grad.tolist()
    if leaf is not None:
        found["values_of_the_leaf"] = _numbers(leaf)
    return found


def _numbers(tensor: Tensor) -> list[Any]:
    numbers: list[Any] = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().double().tolist()
    return numbers


def looked_at(result: object) -> object:
    if isinstance(result, Made):
        return seen(result)
    if isinstance(result, Tensor):
        return seen(Made(result))
    if isinstance(result, Mapping):
        return {name: looked_at(part) for name, part in result.items()}
    if isinstance(result, list | tuple):
        return [looked_at(part) for part in result]
    return result if isinstance(result, bool | int | float | str | None) else str(result)


def outcome(call: Callable[[], Mapping[str, object]]) -> Seen:
    """What can be seen after a call, or its error."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            result = call()
            found: Any = looked_at(result)
        except Exception as error:
            return {"error": type(error).__name__, "message": str(error).splitlines()[0]}
    return {**found, "warnings": sorted({str(warning.message)[:70] for warning in told})}


def wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _only(root: int, tensors: list[Tensor]) -> list[Tensor] | None:
    return tensors if dist.get_rank() == root else None


# How many tensors go out and come in: one for every rank, one, or one of the size of all; and the call.
EACH, ONE, WHOLE = "each", "one", "whole"
MOVES: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "all_gather": (EACH, ONE, lambda outs, ins, **given: dist.all_gather(outs, ins[0], **given)),
    "all_gather_into_tensor": (WHOLE, ONE, lambda o, i, **given: dist.all_gather_into_tensor(o[0], i[0], **given)),
    "gather": (EACH, ONE, lambda outs, ins, **given: dist.gather(ins[0], _only(0, outs), dst=0, **given)),
    "scatter": (ONE, EACH, lambda outs, ins, **given: dist.scatter(outs[0], _only(0, ins), src=0, **given)),
    "reduce_scatter": (ONE, EACH, lambda outs, ins, **given: dist.reduce_scatter(outs[0], ins, **given)),
    "reduce_scatter_tensor": (ONE, WHOLE, lambda o, i, **given: dist.reduce_scatter_tensor(o[0], i[0], **given)),
    "all_to_all": (EACH, EACH, dist.all_to_all),
    "all_to_all_single": (WHOLE, WHOLE, lambda o, i, **given: dist.all_to_all_single(o[0], i[0], **given)),
}
IN_PLACE: dict[str, Callable[..., Any]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda tensor, **given: dist.broadcast(tensor, src=1, **given),
    "reduce": lambda tensor, **given: dist.reduce(tensor, dst=0, **given),
    "all_reduce_coalesced": lambda tensor, **given: dist.all_reduce_coalesced([tensor], **given),
}
REDUCTIONS = ("all_reduce", "reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor")
SHAPES: dict[str, tuple[int, ...]] = {
    "0-dim": (),
    "empty": (0,),
    "no columns": (2, 0),
    "1-dim": (5,),
    "3-dim": (2, 1, 2),
}
SHAPE = (2, 2)


def _made(form: str, count: str, shape: Sequence[int], dtype: torch.dtype) -> list[Made]:
    world = dist.get_world_size()
    if count == WHOLE:
        shape = (world * shape[0], *shape[1:]) if shape else (world,)
    numbers = range(world if count == EACH else 1)
    return [FORMS[form](values(shape, dtype, first=3 * number)) for number in numbers]


Result = Mapping[str, object]
Context = Callable[[], AbstractContextManager[object]]


def _call(
    name: str,
    forms: Sequence[str],
    dtype: torch.dtype = torch.float32,
    shape: Sequence[int] = SHAPE,
    within: Context = nullcontext,
    **given: Any,
) -> Result:
    """A call on tensors of these forms: those that go out, and those that come in if these are others."""
    if name in IN_PLACE:
        (made,) = _made(forms[0], ONE, shape, dtype)
        with within():
            wait(IN_PLACE[name](made.tensor, **given))
        return {"tensor": made}
    *counts, call = MOVES[name]
    outs, ins = (_made(form, count, shape, dtype) for form, count in zip(forms, counts, strict=True))
    with within():
        wait(call([made.tensor for made in outs], [made.tensor for made in ins], **given))
    return {"out": outs, "in": ins}


NOT_DENSE = ("strided", "expanded")
NEEDING_GRAD = ("Parameter", "result", "view of a Parameter")


def _pairs(name: str, *, everything: bool) -> Iterator[tuple[str, ...]]:
    """Forms of what goes out and what comes in. The root alone would refuse a list, and the others wait."""
    if name in IN_PLACE:
        yield from ((form,) for form in FORMS)
        return
    of_root = {"gather": 0, "scatter": 1}.get(name)
    for pair in itertools.product(FORMS, FORMS):
        if (everything or "plain" in pair) and (of_root is None or pair[of_root] not in NOT_DENSE):
            yield pair


def plain_calls(*, everything: bool) -> Calls:
    """`everything`: each form into each, asynchronously too, and all reductions of all dtypes."""
    dtypes, needing_grad = (DTYPES, NEEDING_GRAD) if everything else (OF_EACH_KIND, NEEDING_GRAD[:1])
    for name in (*IN_PLACE, *MOVES):
        count = 1 if name in IN_PLACE else 2
        for forms in _pairs(name, everything=everything):
            yield f"{name}: {' <- '.join(forms)}", partial(_call, name, forms)
            if everything or set(forms) == {"plain"}:
                yield f"{name}: {' <- '.join(forms)}, async", partial(_call, name, forms, async_op=True)
        for form, within in itertools.product(needing_grad, (torch.no_grad, torch.inference_mode)):
            yield f"{name}: {form}, {within.__name__}", partial(_call, name, (form,) * count, within=within)
        plain = ("plain",) * count
        for dtype in dtypes:
            yield f"{name}: {dtype}", partial(_call, name, plain, dtype)
        for words, shape in SHAPES.items():
            if name != "reduce_scatter_tensor" or shape:  # gloo ends the process
                yield f"{name}: {words}", partial(_call, name, plain, shape=shape)
        if name in REDUCTIONS and (everything or name == "all_reduce"):
            for op, dtype in itertools.product(OPS, dtypes):
                yield f"{name}: {op} of {dtype}", partial(_call, name, plain, dtype, op=OPS[op])
