"""The rank program of the conformance study: runs a batch of checks and returns the observations of this rank."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from harness.trace.operator_checks import Batch, Mesh, Observation, OperatorCheck, Output
from harness.worker.conformance import layout, operators
from harness.worker.conformance.meter import Meter, resynchronize
from harness.worker.injection import inject
from harness.worker.probes.scales import dtype_name
from harness.worker.process_group import join
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
    """All meshes, watched by the meter. The mesh of two exists twice, on ranks 0-1 and 2-3."""
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
    """The state of a running check: its phase, the cost of the operator and the outputs so far."""

    def __init__(self) -> None:
        self.phase: Phase = "inputs"
        self.wire_bytes = 0.0
        self.calls: tuple[str, ...] = ()
        self.outputs: list[Output] = []


@torch.no_grad()
def observe(check: OperatorCheck, mesh: DeviceMesh, meter: Meter, rank: int) -> Observation:
    """Run one check on this rank. Exceptions become part of the observation."""
    attempt = _Attempt()
    error: Exception | None = None
    try:
        _run(check, mesh, meter, attempt)
    except Exception as raised:
        error = raised
    return Observation(
        rank=rank,
        coordinates=tuple(mesh.get_coordinate() or ()),
        error="" if error is None else _error_text(error),
        phase=attempt.phase,
        consequence=isinstance(error, CollectiveMismatch) and "barrier" in str(error),
        outputs=tuple(attempt.outputs),
        wire_bytes=attempt.wire_bytes,
        calls=attempt.calls,
    )


def _error_text(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:400]}"


def _run(check: OperatorCheck, mesh: DeviceMesh, meter: Meter, attempt: _Attempt) -> None:
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


def _output(check: OperatorCheck, found: torch.Tensor, expected: torch.Tensor, full: list[torch.Tensor]) -> Output:
    found, expected = operators.dequantized(found), operators.dequantized(expected)
    local, whole, placements = found, found, None
    if isinstance(found, DTensor):
        local, whole, placements = found.to_local(), found.full_tensor(), layout.to_strings(found.placements)
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
    """The allowed error of a result: 0, except for rowwise matmuls, which round every partial sum to bfloat16.

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
