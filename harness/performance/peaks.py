"""What devices can do by their data sheets: dense matmuls, memory and interconnect.

A device that is not here has no MFU and no prediction; none is guessed from a similar name.
"""

from __future__ import annotations

import re

import msgspec

from harness.errors import HarnessError


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The data sheet of one device. `bfloat16` and `float8` are dense TFLOP/s; None: it has no such matmuls.

    `link_gb_s`: to the other devices of a node, both directions together, as vendors give it. `names` is a pattern of
    what `torch.cuda.get_device_name` returns for it.
    """

    name: str
    bfloat16: float
    float8: float | None
    memory_tb_s: float
    memory_gb: int
    link_gb_s: int
    names: str
    source: str

    def tflops(self, precision: str) -> float | None:
        """The peak in "float8" or "bfloat16" in TFLOP/s; None where the device has none, or it is not known."""
        return {"float8": self.float8, "bfloat16": self.bfloat16}.get(precision)


# Data sheets of NVIDIA give matmuls with sparsity; dense ones are half of that.
PEAKS = (
    Peak(
        name="h100",
        bfloat16=989,
        float8=1979,
        memory_tb_s=3.35,
        memory_gb=80,
        link_gb_s=900,
        names=r"NVIDIA H100 80GB HBM3",
        source="NVIDIA H100 data sheet, SXM",
    ),
    Peak(
        name="h100-pcie",
        bfloat16=756,
        float8=1513,
        memory_tb_s=2.0,
        memory_gb=80,
        link_gb_s=600,
        names=r"NVIDIA H100 PCIe",
        source="NVIDIA H100 data sheet, PCIe with NVLink bridge",
    ),
    Peak(
        name="h100-nvl",
        bfloat16=835,
        float8=1671,
        memory_tb_s=3.9,
        memory_gb=94,
        link_gb_s=600,
        names=r"NVIDIA H100 NVL",
        source="NVIDIA H100 data sheet, NVL",
    ),
    Peak(
        name="h200",
        bfloat16=989,
        float8=1979,
        memory_tb_s=4.8,
        memory_gb=141,
        link_gb_s=900,
        names=r"NVIDIA H200",
        source="NVIDIA H200 data sheet, SXM",
    ),
    Peak(
        name="b200",
        bfloat16=2250,
        float8=4500,
        memory_tb_s=8.0,
        memory_gb=180,
        link_gb_s=1800,
        names=r"NVIDIA B200",
        source="NVIDIA DGX B200 data sheet, one of eight",
    ),
    Peak(
        name="l40s",
        bfloat16=362,
        float8=733,
        memory_tb_s=0.864,
        memory_gb=48,
        link_gb_s=64,
        names=r"NVIDIA L40S",
        source="NVIDIA L40S data sheet, PCIe 4.0",
    ),
    Peak(
        name="a100",
        bfloat16=312,
        float8=None,
        memory_tb_s=2.039,
        memory_gb=80,
        link_gb_s=600,
        names=r"NVIDIA A100-SXM4-80GB",
        source="NVIDIA A100 data sheet, SXM 80 GB",
    ),
    Peak(
        name="mi300x",
        bfloat16=1307.4,
        float8=2614.9,
        memory_tb_s=5.3,
        memory_gb=192,
        link_gb_s=896,
        names=r"AMD Instinct MI300X( OAM)?",
        source="AMD Instinct MI300X data sheet",
    ),
)
DEVICES = tuple(peak.name for peak in PEAKS)


def peak(name: str) -> Peak:
    """The device of this short name. Raises `HarnessError` that lists all of them."""
    found = next((each for each in PEAKS if each.name == name), None)
    if found is None:
        raise HarnessError(
            f"the peaks of machine {name!r} are not known.", where="--machine", fix=f"give one of {', '.join(DEVICES)}."
        )
    return found


def peak_of_device(device_name: str) -> Peak | None:
    """The device with this name in torch; None for an unknown one or a MIG instance."""
    return next((each for each in PEAKS if re.fullmatch(each.names, device_name)), None)
