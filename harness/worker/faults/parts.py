"""Parts of a model that faults change, found by structure instead of names, so that they work for any model.

Where a model lacks the part, AssertionError says so, and the fault counts as one that did not reach it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from harness.worker.discovery import linears

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks as they are wrapped: the children of the container with most parameters; without one, the model."""
    containers = [module for module in model.modules() if isinstance(module, _CONTAINERS) and len(module)]
    return list(max(containers, key=_parameter_count).children()) if containers else [model]


def _parameter_count(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def last_block(model: nn.Module) -> nn.Module:
    """The last block, inside of what checkpointing and compilation wrap around it."""
    block = blocks(model)[-1]
    for wrapped in ("_orig_mod", "_checkpoint_wrapped_module"):
        block = getattr(block, wrapped, block)
    return block


def first_weight(model: nn.Module) -> torch.Tensor:
    """The weight of the first linear that is trained."""
    found = [linear.weight for linear in linears(model).values() if linear.weight.requires_grad]
    assert found, "no linear of the model is trained"
    return found[0]


def narrowing_linear(found: Mapping[str, nn.Linear]) -> str:
    """The name of the last of these linears that has fewer outputs than inputs, as the second of an MLP has."""
    names = [fqn for fqn, linear in found.items() if linear.out_features < linear.in_features]
    assert names, "no linear has fewer outputs than inputs"
    return names[-1]


def widening_weight(model: nn.Module) -> torch.Tensor:
    """The weight of the first linear of the last block with more outputs than inputs, as the first of an MLP has."""
    among = linears(last_block(model)).values()
    found = [linear.weight for linear in among if linear.out_features > linear.in_features]
    assert found, "no linear of the last block has more outputs than inputs"
    return found[0]


def last_weight_like_the_first(model: nn.Module) -> torch.Tensor:
    """The last weight of a linear with the shape of the first one's, as the projections of attention have."""
    shape = first_weight(model).shape
    return [linear.weight for linear in linears(model).values() if linear.weight.shape == shape][-1]


def two_alike(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of the last two linears that have the same shape."""
    weights = [linear.weight for linear in reversed(linears(model).values())]
    alike = [
        (one, other)
        for one, other in itertools.combinations(weights, 2)
        if one.shape == other.shape and one is not other
    ]
    assert alike, "no two linears have the same shape"
    return alike[0]


def norms(model: nn.Module) -> list[Any]:
    """The modules with a vector of their own, but for linears: norms, of whatever class."""
    found = [module for module in model.modules() if not isinstance(module, nn.Linear) and _vectors(module)]
    assert found, "the model has no norm with a weight"
    return found


def norm_weights(model: nn.Module) -> list[nn.Parameter]:
    """The vectors of norms."""
    return [param for norm in norms(model) for param in _vectors(norm)]


def _vectors(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters(recurse=False) if param.dim() == 1]
