"""Test tensors and their shards, computed here and not by the code under test.

Values are chosen so that all sums and averages are exact in any order: a right result is bit-equal. Shards differ in
their largest magnitude, and the largest of all is negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from harness.trace.operator_checks import Placements, axis_order, shard_dim

_STEPS = {torch.float32: 1 / 64, torch.bfloat16: 1.0}  # so that float32 values lose bits in a cast to bfloat16


def values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor with values from -97 to 24, mostly negative, with two large negative elements."""
    step = _STEPS[dtype]
    random = torch.Generator().manual_seed(seed)
    flat = torch.randint(int(-40 / step), int(24 / step), (math.prod(shape),), generator=random) * step
    if len(flat):
        flat[torch.randint(len(flat), (2,), generator=random)] = torch.tensor([-61.0, -97.0])
    return flat.reshape(tuple(shape)).to(dtype)


def small_integers(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of integers from -2 to 2: matrix products of up to 64 terms are exact in bfloat16."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, tuple(shape), generator=random).to(dtype)


def powers_of_two(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of positive and negative powers of two from 1/4 to 4: multiplying and dividing by them is exact."""
    random = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, tuple(shape), generator=random) * 2 - 1
    return (signs * torch.exp2(torch.randint(-2, 3, tuple(shape), generator=random))).to(dtype)


def distribute(full: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """`full` as a DTensor, built from the local tensor of this rank without communication."""
    return wrap(local_part(full, mesh, placements), full, mesh, placements)


def wrap(local: torch.Tensor, full: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """A DTensor with the shape of `full` and this local tensor."""
    return DTensor.from_local(
        local, mesh, to_torch(placements, mesh), run_check=False, shape=full.shape, stride=full.stride()
    )


def local_part(full: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> torch.Tensor:
    """The local tensor of this rank for `full` with these placements."""
    local = full
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    for axis in axis_order(placements):
        placement, size, index = placements[axis], mesh.size(axis), coordinates[axis]
        dim = shard_dim(placement)
        if dim is not None:
            width = -(-local.shape[dim] // size)
            start = min(index * width, local.shape[dim])
            local = local.narrow(dim, start, min(width, local.shape[dim] - start))
        elif placement != "R":
            local = _partial_terms(local, placement, size, seed=axis)[index]
    return local.clone(memory_format=torch.contiguous_format)


def _partial_terms(full: torch.Tensor, placement: str, size: int, seed: int) -> list[torch.Tensor]:
    """`size` tensors whose reduction is `full`."""
    random = torch.Generator().manual_seed(1000 + seed)
    if placement in ("Pmax", "Pmin"):
        owner = torch.randint(size, tuple(full.shape), generator=random)
        distance = (1 + torch.randint(5, tuple(full.shape), generator=random)).to(full.dtype)
        other = full - distance if placement == "Pmax" else full + distance
        return [torch.where(owner == index, full, other) for index in range(size)]
    step = _STEPS.get(full.dtype, 1.0)
    noise = [
        (torch.randint(int(-8 / step), int(8 / step), tuple(full.shape), generator=random) * step).to(full.dtype)
        for _ in range(size - 1)
    ]
    rest = torch.stack([*noise, torch.zeros_like(full)]).sum(0)
    parts = [*noise, full - rest] if placement == "Psum" else [*(full + part for part in noise), full - rest]
    return [part.to(full.dtype) for part in parts]


def to_torch(placements: Placements, mesh: DeviceMesh) -> list[Placement]:
    """The torch placements of these strings."""
    return [_placement(placement, axis, mesh) for axis, placement in enumerate(placements)]


def _placement(placement: str, axis: int, mesh: DeviceMesh) -> Placement:
    if placement == "R":
        return Replicate()
    if placement[0] == "P":
        return Partial(placement[1:])
    if placement[0] == "T":
        right = [mesh.size(other) for other in range(axis + 1, mesh.ndim)]
        return _StridedShard(int(placement[1:]), split_factor=math.prod(right))
    return Shard(int(placement[1:]))


def to_strings(placements: Sequence[Placement]) -> Placements:
    """These torch placements as strings; any other kind by its repr."""
    return tuple(_string(placement) for placement in placements)


def _string(placement: Placement) -> str:
    if isinstance(placement, _StridedShard):
        return f"T{placement.dim}"
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    if isinstance(placement, Replicate):
        return "R"
    return f"P{placement.reduce_op}" if type(placement) is Partial else repr(placement)
