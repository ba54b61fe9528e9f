"""Places: where what a rank holds lies in its logical tensor, and which of those that hold the same counts."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from harness.worker.targets.reference.parallel import Meshes


class Place(NamedTuple):
    """The place of a shard in its logical tensor. `owner`: this replica of the shard is the one that counts."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    owner: bool


class Places:
    """The places of the tensors of one run. Found once per distribution, because torch takes its time to find it."""

    def __init__(self, meshes: Meshes) -> None:
        self._meshes = meshes
        self._found: dict[Hashable, Place] = {}

    def __call__(self, tensor: torch.Tensor) -> Place:
        """The place of what this rank holds of `tensor`. Along axes that it knows nothing of, ranks hold the same."""
        distribution = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else None
        key = tensor.shape, distribution
        place = self._found.get(key)
        if place is None:
            place = place_of(tensor)
            counts = all(mesh.get_local_rank() == 0 for mesh in self._absent_axes(tensor))
            place = self._found[key] = place._replace(owner=place.owner and counts)
        return place

    def _absent_axes(self, tensor: torch.Tensor) -> list[DeviceMesh]:
        known = (tensor.device_mesh.mesh_dim_names or ()) if isinstance(tensor, DTensor) else ()
        return [
            mesh[name]
            for mesh in self._meshes
            if mesh is not None
            for name in mesh.mesh_dim_names or ()
            if name not in known
        ]


def place_of(tensor: torch.Tensor) -> Place:
    """The place of what this rank holds of `tensor`, as far as the tensor itself says."""
    if not isinstance(tensor, DTensor):
        return Place(tuple(tensor.shape), (0,) * tensor.dim(), True)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    coordinate = tensor.device_mesh.get_coordinate() or ()
    owner = all(
        place == 0 or not placement.is_replicate()
        for place, placement in zip(coordinate, tensor.placements, strict=True)
    )
    return Place(tuple(tensor.shape), tuple(offset), owner)


def held(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `tensor`, without wrappers: DTensor, collectives in flight, torchao's weight."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if isinstance(local, AsyncCollectiveTensor):
        local = local.trigger_wait()
    return getattr(local, "_tensor", local).detach()
