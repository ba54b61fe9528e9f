"""Candidate fix for torch 2.13: layer_norm on a CPU adds up the gradients of weight and bias in bfloat16.

Each row is added to a buffer of the dtype of the input. Here the layer is computed in float32, and its gradients are
rounded once.
"""

from __future__ import annotations

from typing import Any

import torch


def apply() -> None:
    """Patch the function in this process."""
    functions: Any = torch.nn.functional
    stock = functions.layer_norm

    def layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> torch.Tensor:
        wide = [None if value is None else value.float() for value in (weight, bias)]
        result: torch.Tensor = stock(x.float(), shape, *wide, eps)
        return result.to(x.dtype)

    functions.layer_norm = layer_norm
