"""The rank program of the kernel study: `torch._scaled_mm` of the device beside the exact one, check by check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
import torch

from harness.trace.device import KernelBatch, KernelCheck, KernelObservation
from harness.worker.injection import inject
from harness.worker.kernels.operands import Arguments, arguments
from harness.worker.probes.cast_numbers import dtype_name
from harness.worker.virtual.scaled_mm import require_allowed, scaled_mm

if TYPE_CHECKING:
    from harness.engine.program import RankContext


def preload(options: Mapping[str, str]) -> None:
    """Leave the process with one thread. Nothing is installed: `torch._scaled_mm` stays that of the device."""
    torch.set_num_threads(1)


def rank_main(context: RankContext) -> bytes:
    """Run the checks of the payload (`KernelBatch`). Returns an encoded list, one `KernelObservation` per check."""
    batch = msgspec.msgpack.decode(context.payload, type=KernelBatch)
    device = torch.device("cpu")
    if batch.device == "cuda":
        device = torch.device("cuda", context.device or 0)
        torch.cuda.set_device(device)
    for spec in batch.injections:
        inject(spec)
    observations = []
    for check in batch.checks:
        context.report_phase(check.id)
        observations.append(observe(check, device))
    return msgspec.msgpack.encode(observations)


def observe(check: KernelCheck, device: torch.device) -> KernelObservation:
    """Run both kernels. What either raises becomes part of the observation."""
    given = arguments(check).on(device)
    exact, refusal = _attempt(lambda: _exact(given))
    found, raised = _attempt(lambda: _of_device(given))
    if exact is None or found is None:
        return KernelObservation(raised=raised, refusal=refusal)
    rounded = exact.to(given.out_dtype)
    observation = KernelObservation(
        shape=tuple(found.shape),
        dtype=dtype_name(found.dtype),
        expected_shape=tuple(exact.shape),
        expected_dtype=dtype_name(given.out_dtype),
    )
    if found.shape != exact.shape or found.dtype != rounded.dtype or not found.numel():
        return observation
    return _compared(observation, given, found, exact)


def _of_device(given: Arguments) -> torch.Tensor:
    return torch._scaled_mm(
        given.a,
        given.b,
        scale_a=given.scale_a,
        scale_b=given.scale_b,
        bias=given.bias,
        out_dtype=given.out_dtype,
        use_fast_accum=given.use_fast_accum,
    )


def _exact(given: Arguments) -> torch.Tensor:
    """The result in float64, for arguments that the contract allows with their real output dtype."""
    require_allowed(*given[:5], out_dtype=given.out_dtype)
    return scaled_mm(*given[:5], out_dtype=torch.float64)


def _attempt(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor | None, str]:
    try:
        return call(), ""
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return None, " ".join(str(error).split())[:400] or type(error).__name__


def _compared(
    observation: KernelObservation, given: Arguments, found: torch.Tensor, exact: torch.Tensor
) -> KernelObservation:
    mine, right = found.double(), exact.to(found.dtype).double()
    same = (mine == right) | (mine.isnan() & right.isnan())
    finite = mine.isfinite() & right.isfinite()
    beyond = ((mine - exact).abs() - _rounding(exact, found.dtype)).clamp(min=0.0)
    share = torch.where(finite & (beyond > 0), beyond / _sum_of_magnitudes(given), 0.0).nan_to_num(float("inf"))
    worst = (torch.where(finite, share, float("inf")) if (~finite & ~same).any() else share).masked_fill(same, -1.0)
    at = divmod(int(worst.argmax()), mine.shape[1])
    return msgspec.structs.replace(
        observation,
        unequal=int((~same).sum()),
        nonfinite=int((~finite & ~same).sum()),
        error_of_sum=float(share.max()),
        example="" if same.all() else f"{list(at)} = {mine[at].item():.9g}, expected {right[at].item():.9g}",
    )


def _rounding(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest error of rounding to the nearest value of `dtype`: half a unit in the last place."""
    kind = torch.finfo(dtype)
    return (exact.abs() * (kind.eps / 2)).clamp(min=kind.smallest_normal * kind.eps / 2)


def _sum_of_magnitudes(given: Arguments) -> torch.Tensor:
    """What errors of the accumulation are measured by: the sum of |a| |b|, scaled, with the bias."""
    products = given.a.double().abs() @ given.b.double().abs()
    scaled = products * (given.scale_a.double() * given.scale_b.double()).abs()
    return scaled if given.bias is None else scaled + given.bias.double().abs()
