"""A post: a kernel before the kernels of an operator, which tells observers of its calls.

It stands at the dispatch key BackendSelect: below autograd, tensor subclasses and modes, above the kernels of every
device. So what is executed is seen once, eager or compiled, on a CPU, over gloo or on CUDA. A post replaces no kernel
and hands on the arguments that it got. An operator has one: a second registration would put the first one out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

_KERNELS = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
_LIBRARIES: list[torch.library.Library] = []  # torch drops a registration when its Library object is collected
_paused = [0]


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """For what the harness itself sends and multiplies to measure a run: it is not what the target does."""
    _paused[0] += 1
    try:
        yield
    finally:
        _paused[0] -= 1


def _nothing(*_: Any, **__: Any) -> None:
    pass


# What a post tells of an operator, for a mode that stands where no kernel runs.
POSTS: dict[torch._ops.OpOverload, Callable[..., None]] = {}


def observed() -> bool:
    """False inside of `unobserved`."""
    return not _paused[0]


def put_post(
    operator: torch._ops.OpOverload, *, before: Callable[..., None], after: Callable[..., None] = _nothing
) -> None:
    """From now on, `before` gets the arguments of every call of `operator`, and `after` its result and the arguments.

    The arguments are positional unless the schema has them for keywords only. What runs on meta tensors, such as those
    inside of fake tensors, is no execution and is not told.
    """

    def post(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if _paused[0] or keyset.has(DispatchKey.Meta):
            return operator.redispatch(keyset & _KERNELS, *args, **kwargs)
        before(*args, **kwargs)
        result = operator.redispatch(keyset & _KERNELS, *args, **kwargs)
        after(result, *args, **kwargs)
        return result

    POSTS[operator] = before
    library = torch.library.Library(operator.namespace, "IMPL")
    _LIBRARIES.append(library)
    library.impl(operator, post, "BackendSelect", with_keyset=True, allow_override=False)
