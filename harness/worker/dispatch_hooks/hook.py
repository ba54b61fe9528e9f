"""A dispatcher hook: a kernel at the dispatch key BackendSelect that calls observers and then redispatches.

That key is below autograd, tensor subclasses and dispatch modes, and above the kernels of every device. So every call
is seen once: eager or compiled, on a CPU, over gloo or on CUDA. A hook replaces no kernel and passes its arguments on
unchanged. An operator has one hook: a second registration would override the first.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import DispatchKey, DispatchKeySet

from harness.internals import RUN
from harness.worker.process import internals
from harness.worker.process.process import PROCESS

_KERNELS = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """While active, hooks call no observer: what the harness itself sends and multiplies is not the target's."""
    PROCESS.unobserved += 1
    try:
        yield
    finally:
        PROCESS.unobserved -= 1


def _nothing(*_: Any, **__: Any) -> None:
    pass


# The `before` of every hooked operator, for a dispatch mode under which no kernel runs.
HOOKS: dict[torch._ops.OpOverload, Callable[..., None]] = {}


def observed() -> bool:
    return not PROCESS.unobserved


def install_hook(
    operator: torch._ops.OpOverload, *, before: Callable[..., None], after: Callable[..., None] = _nothing
) -> torch.library.Library:
    """Call `before(arguments)` before and `after(result, arguments)` after every call of `operator` from now on.

    Arguments are positional unless the schema makes them keyword-only. Calls on meta tensors, such as those inside
    fake tensors, execute nothing and are skipped. Returns what must be kept, or torch drops the hook.
    """

    def hook(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if PROCESS.unobserved or keyset.has(DispatchKey.Meta):
            return operator.redispatch(keyset & _KERNELS, *args, **kwargs)
        before(*args, **kwargs)
        result = operator.redispatch(keyset & _KERNELS, *args, **kwargs)
        after(result, *args, **kwargs)
        return result

    library = torch.library.Library(operator.namespace, "IMPL")
    library.impl(operator, hook, "BackendSelect", with_keyset=True, allow_override=False)
    HOOKS[operator] = before
    return library


# The modules of this package with hooks, and the private parts that each uses.
_MODULES = {"collectives": RUN, "matmuls": RUN, "products": "flops", "fused": internals.ASYNC_TP}


def install_hooks(*, compiled: bool = True) -> None:
    """Install every hook whose private parts are as declared; `compiled`: those of compiled runs too."""
    for name, part in _MODULES.items():
        entry = f"hooks of {name}"
        unused = not compiled and internals.is_of_compiled_runs(part)  # to look at its parts imports inductor
        if PROCESS.has(entry) or unused or internals.gaps(part):
            continue
        PROCESS.keep(entry, *importlib.import_module(f"{__package__}.{name}").install())
