"""Machines of predictions: data sheets of devices, what kernels reach of them, and what ranks send over their links.

A device that is not here has no MFU and no prediction; none is guessed from a similar name. The rates are those of
H100. For another device the same shares of its own peaks are taken, which is an assumption. Ranks send along every mesh
axis by ring algorithms, over links in a node and between nodes.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import Annotated, get_type_hints

import msgspec

from harness.errors import HarnessError
from harness.expect.traffic import expected_transfers, of_age
from harness.matrix.case import Case, Layout
from harness.matrix.caseid import case_id
from harness.matrix.dims.dimension import Sender, Transfer, repeated
from harness.matrix.dims.ep import COUNTS, dispatched
from harness.matrix.layout import EXPERT_AXES, MESH_AXES, SEQUENCE_AXES, mesh_with
from harness.matrix.recipes import E8M0
from harness.matrix.upstream import NONE, Changes
from harness.registry import is_llama
from harness.trace.counts import FLOAT8


class Peak(msgspec.Struct, frozen=True):
    """The data sheet of one device. `bfloat16` and `float8` are dense TFLOP/s; None: it has no such matmuls.

    `link_gb_s`: to the other devices of a node, both directions together, as vendors give it. `names` is a pattern of
    what `torch.cuda.get_device_name` returns for it. `mxfp8`: its float8 matmuls take a scale for 32 values.
    """

    name: str
    bfloat16: float
    float8: float | None
    memory_tb_s: float
    memory_gb: int
    link_gb_s: int
    names: str
    source: str
    mxfp8: bool = False

    @property
    def memory_bytes(self) -> int:
        return self.memory_gb << 30

    def tflops(self, precision: str) -> float | None:
        """Return the peak in "float8" or "bfloat16" in TFLOP/s; None if the device has none, or it is not known."""
        return {FLOAT8: self.float8, "bfloat16": self.bfloat16}.get(precision)


# Data sheets of NVIDIA give matmuls with sparsity; dense ones are half of that.
PEAKS = (
    Peak("h100", 989, 1979, 3.35, 80, 900, "NVIDIA H100 80GB HBM3", "NVIDIA H100 data sheet, SXM"),
    Peak("h100-pcie", 756, 1513, 2.0, 80, 600, "NVIDIA H100 PCIe", "NVIDIA H100 data sheet, PCIe with NVLink bridge"),
    Peak("h100-nvl", 835, 1671, 3.9, 94, 600, "NVIDIA H100 NVL", "NVIDIA H100 data sheet, NVL"),
    Peak("h200", 989, 1979, 4.8, 141, 900, "NVIDIA H200", "NVIDIA H200 data sheet, SXM"),
    Peak("b200", 2250, 4500, 8.0, 180, 1800, "NVIDIA B200", "NVIDIA DGX B200 data sheet, one of eight", True),
    Peak("l40s", 362, 733, 0.864, 48, 64, "NVIDIA L40S", "NVIDIA L40S data sheet, PCIe 4.0"),
    Peak("a100", 312, None, 2.039, 80, 600, "NVIDIA A100-SXM4-80GB", "NVIDIA A100 data sheet, SXM 80 GB"),
    Peak("mi300x", 1307.4, 2614.9, 5.3, 192, 896, "AMD Instinct MI300X( OAM)?", "AMD Instinct MI300X data sheet"),
)

_LINEARS = "fitted to the four linears of pytorch/ao#2185"
_ROOFLINE = "torchao.testing.training.roofline_utils"


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of a peak, and costs that no data sheet has, each with what it is of and where it is from."""

    matmul_bfloat16: Annotated[float, f"share of the BF16 peak that large matmuls reach: {_LINEARS}"] = 0.62
    matmul_float8: Annotated[float, f"share of the FP8 peak that large matmuls reach: {_LINEARS}"] = 0.68
    half_speed_size: Annotated[int, f"size of a dim that halves the speed of a matmul: {_LINEARS}"] = 192
    rowwise_matmul: Annotated[
        float, "speed of a matmul that scales rows, of one that does not: 0.9 to 1 in pytorch/pytorch#147971"
    ] = 0.95
    memory: Annotated[float, f"share of the memory bandwidth that fused kernels reach: {_ROOFLINE}"] = 0.92
    transposing: Annotated[float, "of that, casts that write transposed: fitted to the tensorwise rows"] = 0.4
    columns: Annotated[float, "of that, casts with a scale for each column: fitted to the rowwise rows"] = 0.3
    blocks: Annotated[float, "of that, casts to MXFP8: 5.8 of 8 TB/s in pytorch/ao#3568"] = 0.79
    attention: Annotated[float, "share of the BF16 peak that FlashAttention-2 reaches on H100: arXiv:2407.08608"] = 0.35
    launch_us: Annotated[float, f"shortest kernel: {_ROOFLINE}"] = 2.0
    link: Annotated[float, "share of one direction of the links in a node that collectives reach: assumed"] = 0.75
    network: Annotated[float, "share of the network that collectives reach: assumed"] = 0.8
    collective_us: Annotated[float, "shortest collective: assumed"] = 20.0
    behind_compute: Annotated[float, "what a collective behind compute costs, of its time: assumed"] = 0.3
    async_tp_hides: Annotated[
        float, "share of the time of a fused collective that async TP hides: fitted to the BF16 rows with it"
    ] = 0.55
    dispatch_us: Annotated[float, "one small kernel of an eager cast: fitted to the debug size"] = 2.7
    block_dispatch_us: Annotated[float, "an eager block, forward and backward: fitted to the debug size in BF16"] = 5e3
    other: Annotated[
        float, "time of a step that no part has, of a BF16 step: fitted to the tokens/s of the BF16 rows"
    ] = 0.2

    @property
    def words(self) -> tuple[str, ...]:
        hints = get_type_hints(Rates, include_extras=True)
        return tuple(f"{name} {getattr(self, name):g}: {hints[name].__metadata__[0]}" for name in hints)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Devices and their connections. `network_gb_s`: of one device to other nodes, in one direction."""

    peak: Peak
    gpus_per_node: int = 8
    network_gb_s: float = 50.0  # 400 Gb/s
    rates: Rates = Rates()

    @property
    def memory_bytes_s(self) -> float:
        """Return the bytes per second of kernels that read and write contiguously."""
        return self.peak.memory_tb_s * 1e12 * self.rates.memory

    @property
    def link_bytes_s(self) -> float:
        """Return the bytes per second of a collective within a node, in one direction."""
        return self.peak.link_gb_s * 1e9 / 2 * self.rates.link

    @property
    def network_bytes_s(self) -> float:
        """Return the bytes per second and device of a collective between nodes, in one direction."""
        return self.network_gb_s * 1e9 * self.rates.network

    def matmul_flops_s(self, precision: str) -> float:
        """FLOP/s of a large matmul in this precision, which the device must have."""
        tflops = self.peak.tflops(precision)
        assert tflops is not None
        share = self.rates.matmul_float8 if precision == FLOAT8 else self.rates.matmul_bfloat16
        return tflops * 1e12 * share


def machine(name: str, *, gpus_per_node: int = 8, network_gb_s: float = 50.0) -> Machine:
    """Return the machine with this device. Raises `HarnessError` for one not known, or that has no float8 matmuls."""
    device = peak(name)
    if device.float8 is None:
        known = ", ".join(other.name for other in PEAKS if other.float8)
        raise HarnessError(f"{name} has no float8 matmuls.", where="--machine", fix=f"give one of {known}.")
    return Machine(peak=device, gpus_per_node=gpus_per_node, network_gb_s=network_gb_s)


def require_formulas(case: Case) -> None:
    """HarnessError for a target whose model is not known before it is built, and for a pipeline."""
    if not is_llama(case.target):
        fix = "give --model NAME, or a case of the reference or of torchtitan."
        raise HarnessError(f"there is no formula for the model of {case.target}.", where=case_id(case), fix=fix)
    if case.layout.pp > 1:
        what = "this prediction is of ranks that hold the whole model, and a stage of a pipeline holds a part."
        raise HarnessError(what, where=case_id(case), fix="leave pp out, or see `predict cost`.")


def require_multiplies(machine: Machine, case: Case) -> None:
    """Raise HarnessError for a case in MXFP8 on a machine without its matmuls."""
    if case.float8.traits.scale_dtype == E8M0 and not machine.peak.mxfp8:
        known = ", ".join(device.name for device in PEAKS if device.mxfp8)
        what = f"{machine.peak.name} has no matmuls in MXFP8, which SM 10.0 has."
        raise HarnessError(what, where="--machine", fix=f"give --machine {known}.")


def peak(name: str) -> Peak:
    """Return the device of this short name. Raises `HarnessError` that lists all of them."""
    devices = {device.name: device for device in PEAKS}
    if name not in devices:
        what = f"the peaks of machine {name!r} are not known."
        raise HarnessError(what, where="--machine", fix=f"give one of {', '.join(devices)}.")
    return devices[name]


def peak_of_device(device_name: str) -> Peak | None:
    """Return the device with this name in torch; None for an unknown one or a MIG instance."""
    return next((device for device in PEAKS if re.fullmatch(device.names, device_name)), None)


_ORDER = (*MESH_AXES, *SEQUENCE_AXES, *EXPERT_AXES)


class AxisTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives of one rank and step along one axis.

    `payload_bytes`: their inputs on this rank. `sent_bytes`: what it sends in rings. `crosses_nodes`: some group of the
    axis has ranks of several nodes. `amax_reductions`: those of the calls that reduce an amax.
    """

    axis: str
    ranks: int
    crosses_nodes: bool
    calls: int
    payload_bytes: int
    sent_bytes: int
    amax_reductions: int


def wire(case: Case, *, gpus_per_node: int) -> tuple[AxisTraffic, ...]:
    """The traffic of rank 0 in step 2, which all later steps repeat, by axis, outermost first. Experts are balanced."""
    layout = case.layout
    by_axis: dict[str, list[Transfer]] = {}
    for term in transfers_if_balanced(case, step=2, rank=0):
        by_axis.setdefault(term.axis, []).append(term)
    return tuple(
        AxisTraffic(
            axis=axis,
            ranks=group_size(layout, axis),
            crosses_nodes=crosses_nodes(layout, axis, gpus_per_node),
            calls=sum(term.times for term in by_axis[axis]),
            payload_bytes=sum(term.payload_bytes for term in by_axis[axis]),
            sent_bytes=round(sum(sent_bytes(term, layout) for term in by_axis[axis])),
            # of scales: the loss has maxima of its own
            amax_reductions=sum(term.times for term in by_axis[axis] if term.op == "max" and "amax" in term.purpose),
        )
        for axis in sorted(by_axis, key=lambda axis: _ORDER.index(_axes(layout, axis)[0]))
    )


def sent_bytes(transfer: Transfer, layout: Layout) -> float:
    """Return the bytes that a rank sends in all executions of a transfer, by ring algorithms."""
    ranks = group_size(layout, transfer.axis)
    whole = transfer.payload_bytes * {"all_gather": ranks, "all_reduce": 2}.get(transfer.kind, 1)
    return whole * (ranks - 1) / ranks


def transfer_s(transfer: Transfer, layout: Layout, machine: Machine) -> float:
    """Return the seconds of all executions of a transfer on one rank, without contention."""
    sent_s = sent_bytes(transfer, layout) / axis_bytes_s(layout, transfer.axis, machine)
    return sent_s + transfer.times * machine.rates.collective_us * 1e-6


@functools.lru_cache(maxsize=1024)
def axis_bytes_s(layout: Layout, axis: str, machine: Machine) -> float:
    """Return the bytes per second that a rank of a group along this axis can send.

    The ranks of a group in one node pass on what the network brings, so a group that spans nodes has the network of as
    many devices as it has in a node.
    """
    between = _stride(layout, axis)
    if between * group_size(layout, axis) <= machine.gpus_per_node:
        return machine.link_bytes_s
    in_node = max(1, machine.gpus_per_node // between)
    return min(machine.link_bytes_s, in_node * machine.network_bytes_s)


def crosses_nodes(layout: Layout, axis: str, gpus_per_node: int) -> bool:
    """Return True if a group along the axis spans nodes. Nodes have consecutive ranks."""
    span = _stride(layout, axis) * group_size(layout, axis)
    return layout.world_size > gpus_per_node and gpus_per_node % span != 0


@functools.lru_cache(maxsize=1024)
def group_size(layout: Layout, axis: str) -> int:
    """Return the ranks of a group along an axis, or along several that are joined by "+"."""
    axes = _axes(layout, axis)
    return math.prod(mesh_with(layout, axes)[name] for name in axes)


def _stride(layout: Layout, axis: str) -> int:
    """Return how far apart the ranks of a group are: the product of the degrees of the axes that vary faster."""
    last = _axes(layout, axis)[-1]
    mesh = mesh_with(layout, (last,))
    names = list(mesh)
    return math.prod(mesh[name] for name in names[names.index(last) + 1 :])


def _axes(layout: Layout, axis: str) -> tuple[str, ...]:
    if axis == "world":
        return tuple(name for name in MESH_AXES if layout.mesh[name] > 1)
    return tuple(axis.split("+"))


def transfers_if_balanced(case: Case, *, step: int, rank: int, changes: Changes = NONE) -> tuple[Transfer, ...]:
    """Return all collectives of `rank` in `step`, with what experts send back where tokens are spread evenly."""
    transfers = expected_transfers(case, step=step, rank=rank, changes=changes)
    return (*transfers, *of_age(Sender(case, rank, step, changes)), *sent_back_if_balanced(case, rank))


def sent_back_if_balanced(case: Case, rank: int) -> Iterator[Transfer]:
    """Yield what a rank sends back in a step where tokens are spread evenly."""
    sent = [term for term in dispatched(case, rank) if term.purpose != COUNTS]
    if case.layout.ep > 1:
        for term in repeated(sent, case.train.accumulation):
            yield msgspec.structs.replace(term, purpose="results of experts, if tokens are spread evenly")
