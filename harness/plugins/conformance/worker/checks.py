"""The rank program of the conformance study: runs operators on DTensors and returns what this rank observed.

The cost of an operator is counted on the virtual fabric, below every layer of torch that moves data.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from harness.plugins.conformance.operator_checks import Batch, Mesh, Observation, OperatorCheck, Output
from harness.plugins.conformance.worker import operators
from harness.worker.process_group import join
from harness.worker.program import inject
from harness.worker.tensors.names import dtype_name
from harness.worker.virtual import device
from harness.worker.virtual.collectives import FABRIC
from harness.worker.virtual.fabric import CollectiveMismatch, Group, Loopback

if TYPE_CHECKING:
    from harness.engine.program import RankContext

Phase = Literal["inputs", "operator", "result"]
Exchange = Callable[..., list[torch.Tensor]]


def preload(options: Mapping[str, str]) -> None:
    """Import what every rank needs and install the virtual device."""
    torch.set_num_threads(1)
    from harness.worker.virtual import mxfp8

    mxfp8.install_if_possible()
    device.install()


def rank_main(context: RankContext) -> bytes:
    """Run the checks of the payload (`Batch`). Returns an encoded list with one `Observation` per check, in order."""
    batch = msgspec.msgpack.decode(context.payload, type=Batch)
    torch.set_num_threads(1)
    join(context, "shared")
    warnings.simplefilter("ignore")
    meter = Meter()
    meshes = open_meshes(meter)
    for patch in batch.injections:
        inject(patch)
    observations = []
    for check in batch.checks:
        context.report_phase(check.id)
        observations.append(observe(check, meshes[check.mesh], meter, context.rank))
        resynchronize(meshes[check.mesh])
    return msgspec.msgpack.encode(observations)


def open_meshes(meter: Meter) -> dict[Mesh, DeviceMesh]:
    """Open all meshes, watched by the meter. The mesh of two exists twice, on ranks 0-1 and 2-3."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    meshes: dict[Mesh, DeviceMesh] = {
        "m4": init_device_mesh("cpu", (4,), mesh_dim_names=("line",)),
        "m2x2": square,
        "m2": square["b"],
    }
    for mesh in meshes.values():
        meter.watch(mesh)
    return meshes


@torch.no_grad()
def observe(check: OperatorCheck, mesh: DeviceMesh, meter: Meter, rank: int) -> Observation:
    """Run one check on this rank. Exceptions become part of the observation."""
    phase: Phase = "inputs"
    outputs: list[Output] = []
    error: Exception | None = None
    meter.calls.clear()
    try:
        full = operators.full_inputs(check)
        expected = operators.apply(check, operators.operands(check, full, None))
        inputs = operators.operands(check, full, mesh)
        phase = "operator"
        with meter:
            found = operators.apply(check, inputs)
        phase = "result"
        assert len(found) == len(expected), f"{len(found)} results, expected {len(expected)}"
        for mine, reference in zip(found, expected, strict=True):
            outputs.append(_output(check, mine, reference, full))
    except Exception as raised:
        error = raised
    return Observation(
        rank=rank,
        coordinates=tuple(mesh.get_coordinate() or ()),
        error="" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
        phase=phase,
        consequence=isinstance(error, CollectiveMismatch) and "barrier" in str(error),
        outputs=tuple(outputs),
        wire_bytes=sum(received_bytes(*call) for call in meter.calls),
        calls=tuple(f"{kind} of {count} bytes among {size}" for kind, count, size in meter.calls),
    )


def _output(check: OperatorCheck, found: torch.Tensor, expected: torch.Tensor, full: list[torch.Tensor]) -> Output:
    found, expected = operators.dequantized(found), operators.dequantized(expected)
    local, whole, placements = found, found, None
    if isinstance(found, DTensor):
        local, whole, placements = found.to_local(), found.full_tensor(), operators.to_strings(found.placements)
    wrong, largest, example = _difference(whole, expected, allowed_error(check, full))
    return Output(
        placements=placements,
        shape=tuple(found.shape),
        local_shape=tuple(local.shape),
        dtype=dtype_name(whole.dtype),
        expected_shape=tuple(expected.shape),
        expected_dtype=dtype_name(expected.dtype),
        wrong=wrong,
        largest_error=largest,
        example=example,
    )


def allowed_error(check: OperatorCheck, full: list[torch.Tensor]) -> torch.Tensor | float:
    """Return the allowed error of a result: 0, except for rowwise matmuls, which round every partial sum to bfloat16.

    Half a unit in the last place (2**-9) for every partial sum, and the same for the reference.
    """
    if check.op != "f8.mm.rowwise":
        return 0.0
    return 2.0**-7 * (full[0].abs().double() @ full[1].abs().double())


def _difference(found: torch.Tensor, expected: torch.Tensor, allowed: Any) -> tuple[int, float, str]:
    """The number of elements that differ (NaN always does), the largest error, and the first of them as text."""
    if found.shape != expected.shape:
        return max(expected.numel(), 1), float("inf"), f"shape {list(found.shape)}, expected {list(expected.shape)}"
    mine, right = found.double(), expected.double()
    distance = torch.where(mine == right, 0.0, (mine - right).abs())
    wrong = ~(distance <= allowed)
    if not wrong.any():
        return 0, 0.0, ""
    at = wrong.nonzero()[0].tolist()
    example = f"{at} = {mine[tuple(at)].item():g}, expected {right[tuple(at)].item():g}"
    largest = distance[wrong].nan_to_num(float("inf")).max().item()
    return int(wrong.sum()), largest, example


class Meter:
    """Keeps the exchanges of the watched groups while it is entered: their kinds, bytes and ranks."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self._counts = False
        self._watched: set[int] = set()

    def __enter__(self) -> None:
        self._counts = True

    def __exit__(self, *_: object) -> None:
        self._counts = False

    def watch(self, mesh: DeviceMesh) -> None:
        """Count the exchanges on all axes of `mesh`. Every rank of the mesh must call this."""
        for group in groups(mesh):
            if id(group) not in self._watched:
                self._watched.add(id(group))
                setattr(group, "exchange", self._counted(group.exchange, group.size))  # noqa: B010  mypy rejects assigning to a method

    def _counted(self, exchange: Exchange, size: int) -> Exchange:
        def counting(kind: str, payload: torch.Tensor, **options: Any) -> list[torch.Tensor]:
            if self._counts:
                self.calls.append((kind, payload.numel(), size))
            return exchange(kind, payload, **options)

        return counting


def received_bytes(kind: str, payload_bytes: int, size: int) -> float:
    """Bytes that a rank receives in a collective of `size` ranks to which it sends `payload_bytes`."""
    if kind == "all_to_all":
        payload_bytes -= 8 * size  # the fabric also sends a table of the splits
    factors = {
        "barrier": 0.0,
        "all_gather": size - 1.0,
        "all_reduce": 2 * (size - 1) / size,
        "reduce_scatter": (size - 1) / size,
        "all_to_all": (size - 1) / size,
    }
    return factors.get(kind, 1.0) * payload_bytes


def groups(mesh: DeviceMesh) -> list[Group | Loopback]:
    axis_groups = []
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        ranks = functools.partial(dist.get_process_group_ranks, group)
        axis_groups.append(FABRIC.group(group.group_name, ranks, group.rank))
    return axis_groups


def resynchronize(mesh: DeviceMesh) -> None:
    """Wait for every rank of the mesh, even those that are still in a collective that this one left.

    For a rank still in a collective, this barrier is a CollectiveMismatch, which makes it leave the operator and call
    this function too; until then the barrier is retried.
    """
    waiting = groups(mesh)
    while waiting:
        with contextlib.suppress(CollectiveMismatch):
            waiting[0].exchange("barrier", torch.empty(0, dtype=torch.uint8))
            del waiting[0]
