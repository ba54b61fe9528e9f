"""The rank program of conformance: runs a batch of checks on four ranks and returns what this rank saw of each."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from harness.conformance.check import Batch, Check, Mesh, Observation, Output
from harness.worker.conformance import layout, operators
from harness.worker.conformance.meter import Meter, meet
from harness.worker.injection import inject
from harness.worker.main import start_ranks
from harness.worker.virtual import device
from harness.worker.virtual.fabric import CollectiveMismatch

if TYPE_CHECKING:
    from harness.engine.program import RankContext

Phase = Literal["inputs", "operator", "result"]


def preload(options: Mapping[str, str]) -> None:
    """Import what every rank needs and install the virtual device."""
    torch.set_num_threads(1)
    device.install()


def rank_main(context: RankContext) -> bytes:
    """Run every check of the payload (`Batch`). Returns an encoded list of `Observation`, one for each in order."""
    batch = msgspec.msgpack.decode(context.payload, type=Batch)
    torch.set_num_threads(1)
    start_ranks(context, "cpu")
    warnings.simplefilter("ignore")
    meter = Meter()
    meshes = open_meshes(meter)
    for spec in batch.injections:
        inject(spec)
    seen = []
    for check in batch.checks:
        context.report_phase(check.id)
        seen.append(observe(check, meshes[check.mesh], meter, context.rank))
        meet(meshes[check.mesh])
    return msgspec.msgpack.encode(seen)


def open_meshes(meter: Meter) -> dict[Mesh, DeviceMesh]:
    """All meshes, watched. Ranks 0-1 and 2-3 have a mesh of two each."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    meshes: dict[Mesh, DeviceMesh] = {
        "m4": init_device_mesh("cpu", (4,), mesh_dim_names=("line",)),
        "m2x2": square,
        "m2": square["b"],
    }
    for mesh in meshes.values():
        meter.watch(mesh)
    return meshes


class _Attempt:
    """One check under way: which phase it is in, and what the operator cost."""

    def __init__(self) -> None:
        self.phase: Phase = "inputs"
        self.wire_bytes = 0.0
        self.calls: tuple[str, ...] = ()
        self.outputs: list[Output] = []


@torch.no_grad()
def observe(check: Check, mesh: DeviceMesh, meter: Meter, rank: int) -> Observation:
    """Run one check on this rank. Whatever is raised is part of the observation."""
    attempt = _Attempt()
    error: Exception | None = None
    try:
        _run(check, mesh, meter, attempt)
    except Exception as raised:
        error = raised
    return Observation(
        rank=rank,
        coordinates=tuple(mesh.get_coordinate() or ()),
        error="" if error is None else _told(error),
        phase=attempt.phase,
        consequence=isinstance(error, CollectiveMismatch) and "barrier" in str(error),
        outputs=tuple(attempt.outputs),
        wire_bytes=attempt.wire_bytes,
        calls=attempt.calls,
    )


def _told(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:400]}"


def _run(check: Check, mesh: DeviceMesh, meter: Meter, attempt: _Attempt) -> None:
    full = operators.full_inputs(check)
    expected = operators.apply(check, operators.operands(check, full, None), None)
    inputs = operators.operands(check, full, mesh)
    attempt.phase = "operator"
    meter.start()
    try:
        found = operators.apply(check, inputs, mesh)
    finally:
        attempt.wire_bytes, attempt.calls = meter.wire_bytes, meter.calls
    attempt.phase = "result"
    assert len(found) == len(expected), f"{len(found)} results, expected {len(expected)}"
    for mine, reference in zip(found, expected, strict=True):
        attempt.outputs.append(_output(check, mine, reference, full))


def _output(check: Check, found: torch.Tensor, expected: torch.Tensor, full: list[torch.Tensor]) -> Output:
    found, expected = operators.dequantized(found), operators.dequantized(expected)
    local, whole, placements = found, found, None
    if isinstance(found, DTensor):
        local, whole, placements = found.to_local(), found.full_tensor(), layout.to_words(found.placements)
    wrong, largest, example = _difference(whole, expected, allowed_error(check, full))
    return Output(
        placements=placements,
        shape=tuple(found.shape),
        local_shape=tuple(local.shape),
        dtype=str(whole.dtype).removeprefix("torch."),
        expected_shape=tuple(expected.shape),
        expected_dtype=str(expected.dtype).removeprefix("torch."),
        wrong=wrong,
        largest_error=largest,
        example=example,
    )


def allowed_error(check: Check, full: list[torch.Tensor]) -> torch.Tensor | float:
    """How far a result may be off: 0 but for rowwise matmuls, whose partial sums are rounded to bfloat16 each.

    Half a unit in the last place (2**-9) of every partial sum, and as much again for the reference.
    """
    if check.op != "f8.mm.rowwise":
        return 0.0
    return 2.0**-7 * (full[0].abs().double() @ full[1].abs().double())


def _difference(found: torch.Tensor, expected: torch.Tensor, allowed: Any) -> tuple[int, float, str]:
    """Elements that differ (NaN differs from everything), the largest difference, and one of them in words."""
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
