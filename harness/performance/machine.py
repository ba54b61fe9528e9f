"""The machine of a prediction: what a device reaches of its data sheet, and how devices are connected.

The rates are those of H100. For another device the same shares of its own peaks are taken, which is an assumption.
"""

from __future__ import annotations

import msgspec

from harness.errors import HarnessError
from harness.performance.gemms import FLOAT8
from harness.performance.peaks import PEAKS, Peak, peak


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of a peak, and costs that no data sheet has. `SOURCES` says where each is from."""

    matmul_bfloat16: float = 0.62
    matmul_float8: float = 0.68
    half_speed_size: int = 192
    rowwise_matmul: float = 0.95
    memory: float = 0.92
    transposing: float = 0.4
    columns: float = 0.3
    attention: float = 0.35
    launch_us: float = 2.0
    link: float = 0.75
    network: float = 0.8
    collective_us: float = 20.0
    behind_compute: float = 0.3
    async_tp_hides: float = 0.55
    dispatch_us: float = 2.8
    block_dispatch_us: float = 5000.0
    other: float = 0.2


_LINEARS = "fitted to the four linears of pytorch/ao#2185"
SOURCES = {
    "matmul_bfloat16": f"share of the BF16 peak that large matmuls reach: {_LINEARS}",
    "matmul_float8": f"share of the FP8 peak that large matmuls reach: {_LINEARS}",
    "half_speed_size": f"size of a dim that halves the speed of a matmul: {_LINEARS}",
    "rowwise_matmul": "speed of a matmul that scales rows, of one that does not: 0.9 to 1 in pytorch/pytorch#147971",
    "memory": "share of the memory bandwidth that fused kernels reach: torchao.testing.training.roofline_utils",
    "transposing": "of that, casts that write transposed: fitted to the tensorwise rows",
    "columns": "of that, casts with a scale for each column: fitted to the rowwise rows",
    "attention": "share of the BF16 peak that FlashAttention-2 reaches on H100: arXiv:2407.08608",
    "launch_us": "shortest kernel: torchao.testing.training.roofline_utils",
    "link": "share of one direction of the links in a node that collectives reach: assumed",
    "network": "share of the network that collectives reach: assumed",
    "collective_us": "shortest collective: assumed",
    "behind_compute": "what a collective behind compute costs, of its time: assumed",
    "async_tp_hides": "share of the time of a fused collective that async TP hides: fitted to the BF16 rows with it",
    "dispatch_us": "one small kernel of an eager cast: fitted to the debug size",
    "block_dispatch_us": "an eager block, forward and backward: fitted to the debug size in BF16",
    "other": "time of a step that no part has, of a BF16 step: fitted to the tokens/s of the BF16 rows",
}


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Devices and their connections. `network_gb_s`: of one device to other nodes, in one direction."""

    peak: Peak
    gpus_per_node: int = 8
    network_gb_s: float = 50.0  # 400 Gb/s
    rates: Rates = Rates()

    @property
    def memory_bytes_s(self) -> float:
        """Bytes per second of kernels that read and write contiguously."""
        return self.peak.memory_tb_s * 1e12 * self.rates.memory

    @property
    def link_bytes_s(self) -> float:
        """Bytes per second of a collective within a node, in one direction."""
        return self.peak.link_gb_s * 1e9 / 2 * self.rates.link

    @property
    def network_bytes_s(self) -> float:
        """Bytes per second and device of a collective between nodes, in one direction."""
        return self.network_gb_s * 1e9 * self.rates.network

    def matmul_flops_s(self, precision: str) -> float:
        """FLOP/s of a large matmul in this precision, which the device must have."""
        tflops = self.peak.tflops(precision)
        assert tflops is not None
        share = self.rates.matmul_float8 if precision == FLOAT8 else self.rates.matmul_bfloat16
        return tflops * 1e12 * share


def machine(device: str, *, gpus_per_node: int = 8, network_gb_s: float = 50.0) -> Machine:
    """The machine with this device. Raises `HarnessError` for one that is not known, or that has no float8 matmuls."""
    found = peak(device)
    if found.float8 is None:
        known = ", ".join(each.name for each in PEAKS if each.float8)
        raise HarnessError(f"{device} has no float8 matmuls.", where="--machine", fix=f"give one of {known}.")
    return Machine(peak=found, gpus_per_node=gpus_per_node, network_gb_s=network_gb_s)
