"""The solo witness: the single-rank reference, which computes exactly what all ranks of a layout compute together.

The batches of all data-parallel ranks are replayed one after another on the full weights, because tensorwise scales of
activations belong to one dp rank. Their gradients are accumulated in rank order and in the reduce dtype. Weights are
cast where FSDP2 casts them, because FSDP2 itself runs, on a mesh of one rank: mixed precision, the float8 all-gather
and precomputed scales work as in the layout, with the scale of the full weight. Tensor parallelism needs no replay:
with DTensor every scale is that of the logical tensor.
"""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

from harness.matrix.case import Case
from harness.worker.data import Tokens
from harness.worker.targets.reference.parallel import Meshes


def meshes(case: Case, device: str) -> Meshes:
    """A mesh of one rank for FSDP2 if the layout uses FSDP2; no TP mesh."""
    return Meshes(tp=None, dp=init_device_mesh(device, (1,), mesh_dim_names=("dp_shard",)) if case.uses_fsdp else None)


def replays(tokens: Tokens, case: Case) -> Tokens:
    """Tokens [steps, global_batch, n] reshaped to [steps, dp ranks, local_batch, n]."""
    steps, _, length = tokens.shape
    return tokens.reshape(steps, case.layout.dp, case.local_batch, length)
