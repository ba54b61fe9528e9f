"""Candidate fix for torch 2.15: SGD with TP keeps a momentum that no checkpoint can hold.

    fp8-harness run CASE --inject cases/fixes/momentum_of_reduced_gradients.py:apply

The gradient of a bias comes as a partial DTensor, and SGD begins its momentum with a copy of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate


def apply() -> None:
    """Patch SGD in this process: gradients are reduced before its step."""
    stock: Any = torch.optim.SGD.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
                whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
                parameter.grad = gradient.redistribute(placements=whole)
        return stock(self, *args, **kwargs)

    torch.optim.SGD.step = step  # type: ignore[method-assign]
