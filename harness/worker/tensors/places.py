"""Places: the offset of a local shard in its logical tensor, and which of its replicas is the owner."""

import functools
import sys
from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from harness.matrix.case import Layout
from harness.matrix.layout import EXPERT_AXES, MESH_AXES, STAGE_AXES, axis_of_group, coordinates, mesh_with


class Place(NamedTuple):
    """The place of a shard in its logical tensor. `owner` is True on exactly one of its replicas."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    owner: bool


def part_at(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a shard of this shape in its logical tensor."""
    return tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))


class Places:
    """The places of the tensors of one run. Found once per distribution, because torch takes its time to find it.

    Along those of `axes` that a tensor knows nothing of, ranks hold the same of it. Stages of a pipeline hold others.
    """

    def __init__(self, layout: Layout, axes: Collection[str] = MESH_AXES) -> None:
        self._layout = layout
        self._axes = [axis for axis in axes if layout.mesh[axis] > 1 and axis in STAGE_AXES]
        self._places: dict[Hashable, Place] = {}

    def __call__(self, tensor: torch.Tensor) -> Place:
        tensor = unwrapped(tensor)
        distribution = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else None
        key = tensor.shape, distribution
        place = self._places.get(key)
        if place is None:
            place = place_of(tensor)
            counts = self._is_first_along(self._absent_axes(tensor))
            place = self._places[key] = place._replace(owner=place.owner and counts)
        return place

    def _is_first_along(self, axes: Collection[str]) -> bool:
        if not axes:
            return True
        mine = coordinates(self._layout, dist.get_rank(), axes)
        return all(mine[axis] == 0 for axis in axes)

    def _absent_axes(self, tensor: torch.Tensor) -> list[str]:
        known = mesh_axes(tensor.device_mesh, self._layout) if isinstance(tensor, DTensor) else ()
        joined = {axis for name in known for axis in (MESH_AXES if name == "world" else name.split("+"))}
        of_experts = joined & set(EXPERT_AXES)
        axes = mesh_with(self._layout, EXPERT_AXES) if of_experts and "dp_shard" in self._axes else self._axes
        return [axis for axis in axes if axis not in {*joined, "pp"}]


@functools.lru_cache(maxsize=64)
def mesh_axes(mesh: DeviceMesh, layout: Layout) -> tuple[str, ...]:
    """Return the axis of the layout of every mesh dim, identified by its ranks, whatever name a target gave it."""
    rank = dist.get_rank()
    groups = (mesh.get_group(dim) for dim in range(mesh.ndim))
    return tuple(axis_of_group(layout, rank, tuple(dist.get_process_group_ranks(group))) for group in groups)


def place_of(tensor: torch.Tensor) -> Place:
    """Return the place of what this rank holds of `tensor`, as far as the tensor itself says."""
    tensor = unwrapped(tensor)
    if not isinstance(tensor, DTensor):
        return Place(tuple(tensor.shape), (0,) * tensor.dim(), True)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    coordinate = tensor.device_mesh.get_coordinate() or ()
    owner = all(
        place == 0 or not placement.is_replicate()
        for place, placement in zip(coordinate, tensor.placements, strict=True)
    )
    return Place(tuple(tensor.shape), tuple(offset), owner)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    shard: torch.Tensor = local_part(tensor).detach()
    return shard


def local_part(tensor: torch.Tensor) -> Any:
    """Return what this rank holds of `tensor`, without wrappers: DTensor, collectives in flight, torchao's weights."""
    local = unwrapped(local_tensor(tensor))
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    return local._tensor if isinstance(local, WeightWithDynamicFloat8CastTensor) else local


def local_tensor(tensor: torch.Tensor) -> Any:
    """Return the local tensor of a DTensor, without a copy and unknown to autograd; other tensors as they are."""
    tensor = unwrapped(tensor)
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def unwrapped(tensor: Any) -> Any:
    """Return the tensor inside of a weight that torchao has wrapped: a DTensor, a part of one, or a plain one."""
    return getattr(tensor, tensor.__tensor_flatten__()[0][0]) if is_wrapped(tensor) else tensor


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Return True for a weight that torchao's `quantize_` wrapped, for MXFP8 or experts."""
    wrapper = sys.modules.get("torchao.prototype.moe_training.tensor")  # imported where something is converted to MXFP8
    return wrapper is not None and isinstance(tensor, wrapper.TrainingWeightWrapperBaseTensor)
