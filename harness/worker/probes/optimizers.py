"""The optimizers of a model, wherever its target keeps them."""

from __future__ import annotations

import gc

from torch import nn
from torch.optim.optimizer import Optimizer


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Every optimizer that has a parameter of the model in its groups."""
    mine = {id(param) for param in model.parameters()}
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), Optimizer)
        and any(id(param) in mine for group in each.param_groups for param in group["params"])
    ]
