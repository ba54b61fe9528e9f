"""The solo witness: one rank that computes exactly what all ranks of a layout must compute together.

Data-parallel shards are replayed one after the other on the full weights and their gradients added up, in rank order
and in the reduce dtype: tensorwise scales of activations belong to a dp rank by design. Weights are cast where FSDP2
casts them, because FSDP2 itself runs, on a mesh of one rank: mixed precision, the float8 all-gather and precomputed
scales mean there what they mean in the layout, with the scale of the full weight. Tensor parallel needs nothing: with
DTensor every scale is that of the logical tensor.
"""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

from harness.spec.case import Case
from harness.worker.data import Tokens
from harness.worker.parallel import Meshes, uses_fsdp


def meshes(case: Case, device: str) -> Meshes:
    """FSDP2 on one rank where the layout uses FSDP2 at all, and nothing else."""
    return Meshes(tp=None, dp=init_device_mesh(device, (1,), mesh_dim_names=("dp_shard",)) if uses_fsdp(case) else None)


def replays(tokens: Tokens, case: Case) -> Tokens:
    """Tokens [steps, global_batch, n] as [steps, dp ranks, local_batch, n]."""
    steps, _, length = tokens.shape
    return tokens.reshape(steps, case.layout.dp, case.local_batch, length)
