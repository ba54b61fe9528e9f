"""Clips gradients to a global norm, as torchtitan does: one norm over all of them, on whatever meshes they are."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    """Scale all gradients of an optimizer down to the norm `max_norm`. Returns their norm before: a scalar.

    The optimizer has a group of parameters for every device mesh. The norm of a group is summed over the axes of its
    mesh, the norms of groups are of other parameters and add up.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    norms = [get_total_norm([param.grad for param in group if param.grad is not None]) for group in groups]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total)
    return total
