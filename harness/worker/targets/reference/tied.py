"""Tied ends of a pipeline: the first stage has the weights of the embedding, the last a copy for the output layer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness.matrix.case import Case
from harness.worker.targets.reference.model import Llama
from harness.worker.targets.target import World
from harness.worker.tensors.places import local_shard
from harness.worker.tensors.reduction import reduced_gradient


def in_copies(case: Case, world: World) -> bool:
    """True where ends are tied by copies: in a pipeline, and on the one rank that is its reference."""
    return case.model.tied and case.layout.pp * world.stages > 1


class CopiedEnds:
    """Keeps copies equal: every one is updated with the sum of the gradients of both, as in Megatron."""

    def __init__(self, model: Llama, pp: DeviceMesh | None) -> None:
        self.model = model
        self._group = None if pp is None else pp.get_group()

    @property
    def copy(self) -> nn.Parameter | None:
        """The weights of the output layer where this rank has it: no others than those of the embedding."""
        return None if self.model.output is None else _weight(self.model.output)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Call it behind the last backward of a step: what ranks hold of gradients is reduced."""
        ends = (module for module in (self.model.tok_embeddings, self.model.output) if module is not None)
        mine = [_local_gradient(_weight(module)) for module in ends]
        if len(mine) == 2:
            total = mine[0] + mine[1]
            for grad in mine:
                grad.copy_(total)
        elif mine:
            mine[0] += self.of_other_end(mine[0].contiguous())

    def of_other_end(self, grad: torch.Tensor) -> torch.Tensor:
        assert self._group is not None, "a rank with one end is a rank of a pipeline"
        is_first = dist.get_rank(self._group) == 0
        peer = dist.get_global_rank(self._group, dist.get_world_size(self._group) - 1 if is_first else 0)
        other = torch.empty_like(grad)
        sent = dist.P2POp(dist.isend, grad, peer, self._group)
        for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, other, peer, self._group)]):
            work.wait()
        return other


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight


def _local_gradient(weight: nn.Parameter) -> torch.Tensor:
    """What this rank has of a gradient, which it holds as it holds the weight."""
    weight.grad = reduced_gradient(weight)
    assert weight.grad is not None, "both ends have computed backward"
    return local_shard(weight.grad)
