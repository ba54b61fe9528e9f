"""Layout: the piece of a tensor that a rank holds, cut by this file and not by the code under test.

Values are chosen so that every sum and average that can occur is exact, whatever its order: a result is right only when
it is bit-equal. Every shard has another largest magnitude, and the largest of all is negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from harness.conformance.check import Placements, axis_order, shard_dim

_STEPS = {torch.float32: 1 / 64, torch.bfloat16: 1.0}  # so that float32 values lose bits in a cast to bfloat16


def values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of `shape` between -97 and 24, mostly negative, with a few large negative elements."""
    step = _STEPS[dtype]
    random = torch.Generator().manual_seed(seed)
    flat = torch.randint(int(-40 / step), int(24 / step), (_count(shape),), generator=random) * step
    if len(flat):
        flat[torch.randint(len(flat), (2,), generator=random)] = torch.tensor([-61.0, -97.0])
    return flat.reshape(tuple(shape)).to(dtype)


def small_integers(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of integers from -2 to 2: matrix products of them are exact in bfloat16 up to 64 terms."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, tuple(shape), generator=random).to(dtype)


def powers_of_two(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of 1/4 to 4 in powers of two with either sign: multiplying and dividing by them is exact."""
    random = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, tuple(shape), generator=random) * 2 - 1
    return (signs * torch.exp2(torch.randint(-2, 3, tuple(shape), generator=random))).to(dtype)


def distribute(full: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """The DTensor that stands for `full`, built from this rank's piece without communication."""
    return wrap(piece(full, mesh, placements), full, mesh, placements)


def wrap(local: torch.Tensor, full: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """A DTensor of the shape of `full` around a local piece."""
    return DTensor.from_local(
        local, mesh, to_torch(placements, mesh), run_check=False, shape=full.shape, stride=full.stride()
    )


def piece(full: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> torch.Tensor:
    """What this rank holds of `full`."""
    local = full
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    for axis in axis_order(placements):
        word, size, index = placements[axis], mesh.size(axis), coordinates[axis]
        dim = shard_dim(word)
        if dim is not None:
            width = -(-local.shape[dim] // size)
            start = min(index * width, local.shape[dim])
            local = local.narrow(dim, start, min(width, local.shape[dim] - start))
        elif word != "R":
            local = _pending(local, word, size, seed=axis)[index]
    return local.clone(memory_format=torch.contiguous_format)


def _pending(full: torch.Tensor, word: str, size: int, seed: int) -> list[torch.Tensor]:
    """`size` tensors whose reduction is `full`."""
    random = torch.Generator().manual_seed(1000 + seed)
    if word in ("Pmax", "Pmin"):
        owner = torch.randint(size, tuple(full.shape), generator=random)
        distance = (1 + torch.randint(5, tuple(full.shape), generator=random)).to(full.dtype)
        other = full - distance if word == "Pmax" else full + distance
        return [torch.where(owner == index, full, other) for index in range(size)]
    step = _STEPS.get(full.dtype, 1.0)
    noise = [
        (torch.randint(int(-8 / step), int(8 / step), tuple(full.shape), generator=random) * step).to(full.dtype)
        for _ in range(size - 1)
    ]
    rest = torch.stack([*noise, torch.zeros_like(full)]).sum(0)
    parts = [*noise, full - rest] if word == "Psum" else [*(full + part for part in noise), full - rest]
    return [part.to(full.dtype) for part in parts]


def to_torch(placements: Placements, mesh: DeviceMesh) -> list[Placement]:
    """torch's placements for words."""
    return [_placement(word, axis, mesh) for axis, word in enumerate(placements)]


def _placement(word: str, axis: int, mesh: DeviceMesh) -> Placement:
    if word == "R":
        return Replicate()
    if word[0] == "P":
        return Partial(word[1:])
    if word[0] == "T":
        right = [mesh.size(other) for other in range(axis + 1, mesh.ndim)]
        return _StridedShard(int(word[1:]), split_factor=_count(right))
    return Shard(int(word[1:]))


def to_words(placements: Sequence[Placement]) -> Placements:
    """Words for torch's placements; what has no word is spelt as torch prints it."""
    return tuple(_word(placement) for placement in placements)


def _word(placement: Placement) -> str:
    if isinstance(placement, _StridedShard):
        return f"T{placement.dim}"
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    if isinstance(placement, Replicate):
        return "R"
    return f"P{placement.reduce_op}" if type(placement) is Partial else repr(placement)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
