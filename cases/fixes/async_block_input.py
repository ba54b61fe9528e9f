"""Candidate fix for torch 2.13 to 2.15: a compiled block loses the gradient of an input that is still being gathered.

    fp8-harness run pr --select 'wait_for_embedding=false' --inject cases/fixes/async_block_input.py:apply

AOTAutograd traces an `AsyncCollectiveTensor` argument as a subclass whose gradient it then returns to nobody. Waiting
for it before the compiled code is called costs no overlap, because the first operator of the block waits anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed._functional_collectives import AsyncCollectiveTensor


def apply() -> None:
    """Patch compiled modules in this process."""
    stock: Any = OptimizedModule.__call__

    def waiting(self: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(self, *map(_waited, args), **kwargs)

    OptimizedModule.__call__ = waiting


def _waited(value: Any) -> Any:
    """The value; a differentiable copy that has arrived, for a tensor that is still being gathered."""
    return torch.clone(value) if isinstance(value, AsyncCollectiveTensor) else value
