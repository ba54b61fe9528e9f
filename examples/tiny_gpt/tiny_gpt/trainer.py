"""The training step: gradients of several microbatches, clipping, update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

from tiny_gpt.config import Config
from tiny_gpt.model import GPT
from tiny_gpt.parallel import distribute


class Trainer:
    """A model with its optimizer on this rank. The process group must be initialized."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        with device:
            self.model = GPT(config)
        if config.dtype == "float64":
            self.model.double()
        distribute(self.model, config, device)
        # The fused kernels of the optimizer and of clipping take parameters of one mesh at a time.
        self._by_mesh = by_mesh(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [{"params": parameters} for parameters in self._by_mesh], lr=config.lr, betas=(0.9, 0.95), eps=1e-5
        )

    def step(self, microbatches: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """One update. Every microbatch is int64 [sequences, seq_len + 1], of equal size on all ranks.

        Returns the mean loss over all ranks, and the norm of the gradients before clipping.
        """
        losses = []
        for index, batch in enumerate(microbatches):
            if isinstance(self.model, FSDPModule):  # gradients are reduced once, after the last microbatch
                self.model.set_requires_gradient_sync(index == len(microbatches) - 1)
            loss = self._loss(batch) / len(microbatches)
            loss.backward()
            losses.append(loss.detach())
        norm = self._clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.config.float8 is not None and self.config.float8.precompute_scale:
            precompute_float8_dynamic_scale_for_fsdp(self.model)
        return mean_over_ranks(torch.stack(losses).sum()), norm

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.model(batch[:, :-1])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), batch[:, 1:].flatten())

    def _clip_gradients(self) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before that."""
        norms = [
            whole(nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))
            for parameters in self._by_mesh
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        for parameters in self._by_mesh:
            nn.utils.clip_grads_with_norm_(parameters, self.config.max_norm, norm)
        return norm


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in groups of the same device mesh; those that are not distributed are a group too."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def whole(value: torch.Tensor) -> torch.Tensor:
    """A number of all ranks of its mesh."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def mean_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    """The mean of a loss over all ranks; ranks that differ in their part of a tensor only have the same."""
    total = loss.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()
