"""The rank program of the conformance study: runs operators on DTensors and returns what this rank observed.

Tensors and their shards are computed here and not by the code under test. Values are chosen so that all sums and
averages are exact in any order: a right result is bit-equal. Shards differ in their largest magnitude, and the largest
of all is negative. Float8 operands are cast from high precision with scales that are powers of two.

The cost of an operator is counted on the virtual backend, below every layer of torch that moves data.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torchao.float8 import float8_scaling_utils, float8_utils
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    hp_tensor_and_scale_to_float8,
)

from harness.engine.program import RankContext
from harness.matrix.recipes import MX
from harness.plugins.conformance.checks import (
    MATMULS,
    Batch,
    Mesh,
    Observation,
    OperatorCheck,
    Output,
    Placements,
    axis_order,
    shard_dim,
)
from harness.worker.process_group import join
from harness.worker.program import inject
from harness.worker.tensors.names import dtype_name
from harness.worker.virtual import device
from harness.worker.virtual.collectives import FABRIC
from harness.worker.virtual.fabric import CollectiveMismatch, Group, Loopback

Tensor = torch.Tensor
_E4M3 = torch.float8_e4m3fn
_STEPS = {torch.float32: 1 / 64, torch.bfloat16: 1.0}  # so that float32 values lose bits in a cast to bfloat16


def full_inputs(check: OperatorCheck) -> list[Tensor]:
    dtype, shape = getattr(torch, check.dtype), check.shape
    if check.op in MATMULS:
        return [small_integers(shape, dtype, 1), small_integers((shape[1], *check.sizes), dtype, 2)]
    first = values(shape, dtype, 1)
    if check.op == "cat":
        return [first, values(shape, dtype, 2)]
    if check.op in ("mul", "div"):
        return [first, powers_of_two(shape, dtype, 2)]
    if check.op in ("mul.scale", "div.scale"):
        return [first, powers_of_two((), dtype, 3)]
    return [first]


def operands(check: OperatorCheck, full: Sequence[Tensor], mesh: DeviceMesh | None) -> list[Tensor]:
    """Return the arguments of the operator: plain tensors without a mesh, DTensors with one; float8 if needed."""
    placed = zip(full, check.inputs, strict=True)
    if check.op.startswith("f8."):
        return [_float8(check, index, value, mesh, placements) for index, (value, placements) in enumerate(placed)]
    if mesh is None:
        return list(full)
    return [distribute(value, mesh, placements) for value, placements in placed]


def apply(check: OperatorCheck, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Call the operator. Returns its results as tensors, in float8 if the operator returns float8."""
    result = OPERATORS[check.op](check, *inputs)
    return [result] if isinstance(result, Tensor) else list(result)


def dequantized(result: Tensor) -> Tensor:
    """Return a float8 result in high precision, from the local data of each rank; other results unchanged."""
    local = result.to_local() if isinstance(result, DTensor) else result
    if not isinstance(local, Float8TrainingTensor):
        return result
    original: Any = local.to_original_precision()
    if not isinstance(result, DTensor):
        return original
    return DTensor.from_local(
        original,
        result.device_mesh,
        result.placements,  # as they are: strings do not say the split factor of a strided shard
        run_check=False,
        shape=result.shape,
        stride=result.stride(),
    )


_MM_CONFIG = LinearMMConfig()  # with fast accumulation, as in torchao's rowwise recipe
_ROLES = (GemmInputRole.INPUT, GemmInputRole.WEIGHT)


def _float8(check: OperatorCheck, index: int, full: Tensor, mesh: DeviceMesh | None, placements: Placements) -> Tensor:
    """Input `index` in float8: with one scale, or one per row of the left and per column of the right operand."""
    axis = (-1, 0)[index] if check.op == "f8.mm.rowwise" else None
    amax = full.abs().max() if axis is None else full.abs().amax(dim=axis, keepdim=True)
    scale = float8_utils.amax_to_scale(amax, _E4M3, round_scales_to_power_of_2=True)
    whole = _cast(full, scale, index, axis)
    if mesh is None:
        return whole
    local_scale = scale
    if axis is not None:
        spread = local_part(scale.expand(full.shape), mesh, placements)
        local_scale = spread[:, :1] if axis == -1 else spread[:1]
    local = local_part(full, mesh, placements)
    return wrap(_cast(local, local_scale, index, axis), whole, mesh, placements)


def _cast(tensor: Tensor, scale: Tensor, index: int, axis: int | None) -> Tensor:
    cast: Any = hp_tensor_and_scale_to_float8(tensor, scale, _E4M3, _MM_CONFIG, _ROLES[index], axis)
    if index == 1:  # column-major, as the right operand of a linear is
        data = cast._data.t().contiguous().t()
        return Float8TrainingTensor(data, cast._scale, cast._orig_dtype, _MM_CONFIG, _ROLES[index], axis)
    return cast


def _redistribute(check: OperatorCheck, x: Tensor) -> Tensor:
    return x.redistribute(placements=to_torch(check.target, x.device_mesh)) if isinstance(x, DTensor) else x


def _over_dim(reduction: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reduction over the dim of the check, or over all."""
    return lambda check, x: reduction(x) if check.dim is None else reduction(x, dim=check.dim, keepdim=check.keepdim)


def _granularity(check: OperatorCheck) -> dict[str, Any]:
    if check.dim is None:
        return {}
    return {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": check.dim}


def _cat_of_split(check: OperatorCheck, x: Tensor) -> Tensor:
    assert check.dim is not None
    return torch.cat(list(torch.split(x, check.sizes[0], check.dim)), check.dim)


OPERATORS: dict[str, Callable[..., Any]] = {
    "abs": lambda _, x: x.abs(),
    "clamp": lambda _, x: x.clamp(min=-20.0, max=10.0),
    "clamp.min": lambda _, x: x.clamp(min=-20.0),
    "reciprocal": lambda _, x: x.reciprocal(),
    "cast.bfloat16": lambda _, x: x.to(torch.bfloat16),
    "cast.float32": lambda _, x: x.to(torch.float32),
    "cast.float64": lambda _, x: x.to(torch.float64),
    "cast.e4m3": lambda _, x: x.to(_E4M3),
    "cast.e5m2": lambda _, x: x.to(torch.float8_e5m2),
    "mul": lambda _, x, y: x * y,
    "div": lambda _, x, y: x / y,
    **{name: _over_dim(getattr(torch, name)) for name in ("amax", "amin", "max", "aminmax")},
    "view": lambda check, x: x.view(check.sizes),
    "reshape": lambda check, x: x.reshape(check.sizes),
    "t": lambda _, x: x.t(),
    "transpose": lambda _, x: x.transpose(-2, -1),
    "cat": lambda check, x, y: torch.cat([x, y], check.dim),
    "split": lambda check, x: torch.split(x, check.sizes[0], check.dim),
    **dict.fromkeys(MATMULS, lambda _, x, y: torch.mm(x, y)),
    "f8.cat": _cat_of_split,
    "f8.clone": lambda _, x: x.clone(),
    "f8.detach": lambda _, x: x.detach(),
    "tensor_to_amax": lambda check, x: float8_utils.tensor_to_amax(x, **_granularity(check)),
    "tensor_to_scale": lambda check, x: float8_utils.tensor_to_scale(x, _E4M3, **_granularity(check)),
    "tensor_to_scale.pow2": lambda check, x: float8_utils.tensor_to_scale(
        x, _E4M3, round_scales_to_power_of_2=True, **_granularity(check)
    ),
    "to_float8": lambda check, x: float8_scaling_utils.hp_tensor_to_float8_dynamic(
        x, _E4M3, _MM_CONFIG, **_granularity(check)
    ),
    "redistribute": _redistribute,
}
_MXFP8: Any = torch.ops.torchao
OPERATORS |= {
    "mxfp8.rows": lambda _, x: _MXFP8.triton_to_mxfp8_dim0(x, MX[1]),
    "mxfp8.rows.floor": lambda _, x: _MXFP8.triton_to_mxfp8_dim0(x, MX[1], "floor"),
    "mxfp8.columns": lambda _, x: _MXFP8.mxfp8_quantize(x, False, True, 1, MX[1], "e4m3", "rceil")[1::2],
    "mxfp8.columns.floor": lambda _, x: _MXFP8.mxfp8_quantize(x, False, True, 1, MX[1], "e4m3", "floor")[1::2],
}
OPERATORS |= {f"{name}.scale": OPERATORS[name] for name in ("mul", "div")}
OPERATORS |= {f"f8.{name}": OPERATORS[name] for name in ("t", "transpose", "view", "split", "redistribute")}


def values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor with values from -97 to 24, mostly negative, with two large negative elements."""
    step = _STEPS[dtype]
    random = torch.Generator().manual_seed(seed)
    flat = torch.randint(int(-40 / step), int(24 / step), (math.prod(shape),), generator=random) * step
    if len(flat):
        flat[torch.randint(len(flat), (2,), generator=random)] = torch.tensor([-61.0, -97.0])
    return flat.reshape(tuple(shape)).to(dtype)


def small_integers(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of integers from -2 to 2: matrix products of up to 64 terms are exact in bfloat16."""
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
    """Return a DTensor with the shape of `full` and this local tensor."""
    return DTensor.from_local(
        local, mesh, to_torch(placements, mesh), run_check=False, shape=full.shape, stride=full.stride()
    )


def local_part(full: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> torch.Tensor:
    """Return the local tensor of this rank for `full` with these placements."""
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


def _string(placement: Placement) -> str:
    """Return a torch placement as `checks.py` writes it; any other kind by its repr."""
    if isinstance(placement, _StridedShard):
        return f"T{placement.dim}"
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    if isinstance(placement, Replicate):
        return "R"
    return f"P{placement.reduce_op}" if type(placement) is Partial else repr(placement)


Phase = Literal["inputs", "operator", "result"]
Exchange = Callable[..., list[torch.Tensor]]


def preload(options: Mapping[str, str]) -> None:
    """Import what every rank needs and install the virtual device."""
    torch.set_num_threads(1)
    from harness.worker.virtual import casts

    casts.install_if_possible()
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


def open_meshes(meter: "Meter") -> dict[Mesh, DeviceMesh]:
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
def observe(check: OperatorCheck, mesh: DeviceMesh, meter: "Meter", rank: int) -> Observation:
    """Run one check on this rank. Exceptions become part of the observation."""
    phase: Phase = "inputs"
    outputs: list[Output] = []
    error: Exception | None = None
    meter.calls.clear()
    try:
        full = full_inputs(check)
        expected = apply(check, operands(check, full, None))
        inputs = operands(check, full, mesh)
        phase = "operator"
        with meter:
            found = apply(check, inputs)
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
    found, expected = dequantized(found), dequantized(expected)
    local, whole, placements = found, found, None
    if isinstance(found, DTensor):
        local, whole, placements = found.to_local(), found.full_tensor(), tuple(map(_string, found.placements))
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
    """Return the number of elements that differ (NaN always does), the largest error, and the first of them as text."""
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
    """Return the bytes that a rank receives in a collective of `size` ranks to which it sends `payload_bytes`."""
    if kind == "all_to_all":
        payload_bytes -= 8 * size  # the backend also sends a table of the splits
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
