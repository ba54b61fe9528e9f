"""Expert parallelism: ranks of `ep` hold the experts between them, and send tokens to those that hold theirs.

Sent tokens arrive by source rank, then expert; an expert computes those of the first source first.
"""

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

Tensor = torch.Tensor


class ExpertParallel(ParallelStyle):
    """A style of `parallelize_module` for `GroupedExperts`, as torchtitan has one.

    The module is then called with the tokens of its own rank and their counts for all experts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []  # rows to every rank
        self.received: list[int] = []
        self.order = torch.zeros(0, dtype=torch.int64)  # of received rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, param in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(param.data, device_mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(sharded))
        module.register_forward_pre_hook(lambda _, args: self.dispatch(device_mesh, *args))
        module.register_forward_hook(lambda _, __, rows: self.combine(device_mesh, rows))
        return module

    def dispatch(self, mesh: DeviceMesh, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        ranks = mesh.size()
        with torch.no_grad():
            received: Any = funcol.all_to_all_single(counts, None, None, mesh.get_group())
            table = received.unflatten(0, (ranks, -1))  # [source, local expert]
            self.sent = counts.unflatten(0, (ranks, -1)).sum(1).tolist()
            self.received = table.sum(1).tolist()
            experts = torch.arange(table.numel(), device=table.device) % table.size(1)
            self.order = experts.repeat_interleave(table.flatten()).argsort(stable=True)
        arrived = _exchanged(rows, self.received, self.sent, mesh)
        return arrived[self.order], table.sum(0)

    def combine(self, mesh: DeviceMesh, rows: Tensor) -> Tensor:
        order, self.order = self.order, self.order.new_zeros(0)
        return _exchanged(rows[order.argsort()], self.sent, self.received, mesh)


def _exchanged(rows: Tensor, received: list[int], sent: list[int], mesh: DeviceMesh) -> Tensor:
    exchanged: Any = funcol.all_to_all_single_autograd(rows, received, sent, mesh.get_group())
    return exchanged


def tokens_of_step(counts: Tensor, *meshes: DeviceMesh | None) -> Tensor:
    """The counts of all ranks: those of these meshes count different tokens."""
    for mesh in meshes:
        for axis in range(0 if mesh is None else mesh.ndim):
            if mesh is not None and mesh.size(axis) > 1:
                counts = funcol.all_reduce(counts, "sum", (mesh, axis))
    return counts.clone()  # which waits: torch keeps a result alive that nobody waits for
