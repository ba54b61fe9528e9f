"""How many kernels an eager converted linear launches more than one in BF16: what `predict speedup` counts with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from harness.matrix.recipes import Recipe
from harness.performance.roofline import EAGER_KERNELS

_ALLOCATES = ("detach", "alias", "empty", "empty_like", "empty_strided", "_unsafe_view")


class Kernels(TorchDispatchMode):
    """Counts operators on plain tensors that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        self.count += not operator.is_view and operator._schema.name.partition("::")[2] not in _ALLOCATES
        return operator(*args, **(kwargs or {}))


def kernels(recipe: Recipe) -> int:
    """Of forward and backward of one linear."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).bfloat16()
    if recipe != "bf16":
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    given, gradient = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True), torch.ones(32, 64).bfloat16()
    with Kernels() as counted:
        model(given).backward(gradient)
    return counted.count


@pytest.mark.parametrize("recipe", EAGER_KERNELS)
def test_kernels_of_an_eager_linear(recipe: Recipe) -> None:
    assert kernels(recipe) - kernels("bf16") == EAGER_KERNELS[recipe]
