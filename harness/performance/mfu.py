"""Speed and MFU from tokens a second, with MFU in three definitions that differ by a factor of 2.

Say which one: where precisions are mixed every definition falls while the speed rises, and only the weighted one can
reach 100 %. All count what training needs, without recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from harness.matrix.case import Case
from harness.performance.flops import flops_per_token_by_precision
from harness.performance.peaks import Peak


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast one device trains. MFU is a share of 1; None where the device or its peak in a dtype is not known.

    `mfu_bf16_peak` holds all work against the BF16 peak, as torchtitan does; with float8 it is more than the device
    is used. `mfu_fp8_peak` holds all work against the FP8 peak. `mfu_weighted` is the time that the work takes at the
    peak of its precision, over the time that it took.
    """

    tokens_per_s: float
    tflops: float  # TFLOP/s
    mfu_bf16_peak: float | None = None
    mfu_fp8_peak: float | None = None
    mfu_weighted: float | None = None


def speed(case: Case, tokens_per_s: float, device: Peak | None) -> Speed:
    """The speed of one device that trains `tokens_per_s` tokens a second, its share of those of all."""
    tflops = {name: flops * tokens_per_s / 1e12 for name, flops in flops_per_token_by_precision(case).items()}
    total = sum(tflops.values())
    if device is None:
        return Speed(tokens_per_s=tokens_per_s, tflops=total)
    return Speed(
        tokens_per_s=tokens_per_s,
        tflops=total,
        mfu_bf16_peak=total / device.bfloat16,
        mfu_fp8_peak=total / device.float8 if device.float8 else None,
        mfu_weighted=_weighted(tflops, device),
    )


def _weighted(tflops: Mapping[str, float], device: Peak) -> float | None:
    """The sum of work over peak; None where the device has no peak in one of the dtypes."""
    shares = [done / peak if (peak := device.tflops(precision)) else None for precision, done in tflops.items()]
    known = [share for share in shares if share is not None]
    return sum(known) if len(known) == len(shares) else None


def tokens_per_device(case: Case, step_s: float) -> float:
    """Tokens a second and device of a run whose steps take `step_s` seconds: those of all ranks over their number."""
    return case.train.tokens / step_s / case.world_size
