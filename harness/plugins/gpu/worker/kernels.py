"""The rank program of the kernel study: `torch._scaled_mm` of the device beside the exact one, check by check.

Operands and scales are drawn from a seed of the id of a check.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch.nn.functional import ScalingType, SwizzleType

from harness.engine.program import RankContext
from harness.matrix.recipes import MX
from harness.plugins.gpu.kernel_checks import KernelBatch, KernelCheck, KernelObservation, Misfit
from harness.worker.program import inject
from harness.worker.tensors.names import dtype_name
from harness.worker.virtual.scaled_mm import block_product, require_allowed, require_swizzled, scaled_mm, unswizzled

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
OUT = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def preload(options: Mapping[str, str]) -> None:
    """Leave the process with one thread. Nothing is installed: `torch._scaled_mm` stays the device's."""
    torch.set_num_threads(1)


def rank_main(context: RankContext) -> bytes:
    """Run the checks of the payload (`KernelBatch`). Returns an encoded list, one `KernelObservation` per check."""
    batch = msgspec.msgpack.decode(context.payload, type=KernelBatch)
    device = torch.device("cpu")
    if batch.device == "cuda":
        device = torch.device("cuda", context.device or 0)
        torch.cuda.set_device(device)
    else:
        _multiply_blocks()
    for spec in batch.injections:
        inject(spec)
    observations = []
    for check in batch.checks:
        context.report_phase(check.id)
        observations.append(observe(check, device))
    return msgspec.msgpack.encode(observations)


def _multiply_blocks() -> None:
    """Give the CPU, whose kernel has no scales of blocks, one that multiplies dequantized values in float32."""
    stock = torch._scaled_mm

    def dequantized(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        whole = unswizzled(scale, data.shape[0], data.shape[1] // MX[1])
        return data.float() * whole.float().repeat_interleave(MX[1], dim=1)

    def multiplied(a: torch.Tensor, b: torch.Tensor, *, scale_a: Any, scale_b: Any, **given: Any) -> torch.Tensor:
        if scale_a.dtype != torch.float8_e8m0fnu:
            result: torch.Tensor = stock(a, b, scale_a=scale_a, scale_b=scale_b, **given)
            return result
        return (dequantized(a, scale_a) @ dequantized(b.t(), scale_b).t()).to(given["out_dtype"])

    def second(*args: Any, output_dtype: torch.dtype) -> torch.Tensor:
        a, b, scale_a, _, scale_b, *_ = args
        return multiplied(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=output_dtype)

    torch._scaled_mm, torch.nn.functional.scaled_mm = multiplied, second  # type: ignore[assignment]


def observe(check: KernelCheck, device: torch.device) -> KernelObservation:
    """Run both kernels. What either raises becomes part of the observation."""
    given = arguments(check).on(device)
    exact, refusal = _attempt(lambda: _exact(given))
    result, raised = _attempt(lambda: _of_device(given))
    if exact is None or result is None:
        return KernelObservation(raised=raised, refusal=refusal)
    rounded = exact.to(given.out_dtype)
    observation = KernelObservation(
        shape=tuple(result.shape),
        dtype=dtype_name(result.dtype),
        expected_shape=tuple(exact.shape),
        expected_dtype=dtype_name(given.out_dtype),
    )
    if result.shape != exact.shape or result.dtype != rounded.dtype or not result.numel():
        return observation
    return _compared(observation, given, result, exact)


def _of_device(given: "Arguments") -> torch.Tensor:
    if given.swizzle is not None:
        kind, swizzle = ScalingType.BlockWise1x32, given.swizzle
        scales = given.scale_a, kind, given.scale_b, kind, swizzle, swizzle
        return torch.nn.functional.scaled_mm(given.a, given.b, *scales, output_dtype=given.out_dtype)
    options = ("scale_a", "scale_b", "bias", "out_dtype", "use_fast_accum")
    return torch._scaled_mm(given.a, given.b, **{name: getattr(given, name) for name in options})


def _exact(given: "Arguments") -> torch.Tensor:
    """Return the result in float64, for arguments that the contract allows with their real output dtype."""
    if given.swizzle is not None:
        require_swizzled(given.swizzle, given.swizzle)
    require_allowed(*given[:5], out_dtype=given.out_dtype)
    return scaled_mm(*given[:5], out_dtype=torch.float64)


def _attempt(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor | None, str]:
    try:
        return call(), ""
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return None, " ".join(str(error).split())[:400] or type(error).__name__


def _compared(
    observation: KernelObservation, given: "Arguments", result: torch.Tensor, exact: torch.Tensor
) -> KernelObservation:
    mine, right = result.double(), exact.to(result.dtype).double()
    same = (mine == right) | (mine.isnan() & right.isnan())
    finite = mine.isfinite() & right.isfinite()
    beyond = ((mine - exact).abs() - _rounding(exact, result.dtype)).clamp(min=0.0)
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
    """Return the largest error of rounding to the nearest value of `dtype`: half a unit in the last place."""
    kind = torch.finfo(dtype)
    return (exact.abs() * (kind.eps / 2)).clamp(min=kind.smallest_normal * kind.eps / 2)


def _sum_of_magnitudes(given: "Arguments") -> torch.Tensor:
    """Return what errors of the accumulation are measured by: the sum of |a| |b|, scaled, with the bias."""
    if given.scale_a.dtype == torch.float8_e8m0fnu:
        return block_product(given.a.float().abs(), given.b.float().abs(), given.scale_a, given.scale_b)
    products = given.a.double().abs() @ given.b.double().abs()
    scaled = products * (given.scale_a.double() * given.scale_b.double()).abs()
    return scaled if given.bias is None else scaled + given.bias.double().abs()


class Arguments(NamedTuple):
    """The arguments of `_scaled_mm`: `a` is [m, k] row-major, `b` [k, n] column-major, unless the check breaks that."""

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    bias: torch.Tensor | None
    out_dtype: torch.dtype
    use_fast_accum: bool
    swizzle: SwizzleType | None = None  # of the second version of the operator, if that is called

    def on(self, device: torch.device) -> "Arguments":
        return Arguments._make(
            argument.to(device) if isinstance(argument, torch.Tensor) else argument for argument in self
        )


def arguments(check: KernelCheck) -> Arguments:
    draw = torch.Generator().manual_seed(int(hashlib.sha256(check.id.encode()).hexdigest()[:12], 16))
    parts = {"tensorwise": 0, "rowwise": 1, "blocks": check.k // MX[1]}[check.scaling]

    def made(rows: int, dtype: torch.dtype, *, low: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (rows, check.k)
        if check.values == "integers":
            return _integers(shape, dtype, draw, low=low, parts=parts)
        return _as_torchao_casts(shape, dtype, draw, parts=parts, positive=check.values == "positive")

    a, scale_a = made(check.m, FLOAT8[check.a], low=-1)
    b, scale_b = made(check.n, FLOAT8[check.b], low=0)
    bias = torch.randint(-8, 9, (check.n,), generator=draw).to(OUT[check.out]) if check.bias else None
    _special(check, a, b, scale_a)
    if check.scaling == "blocks":
        scale_a, scale_b = _swizzled(scale_a), _swizzled(scale_b)
    elif check.scaling == "rowwise":
        scale_b = scale_b.t()
    swizzle = SwizzleType.SWIZZLE_32_4_4 if check.v2 else None
    whole = Arguments(a, b.t(), scale_a, scale_b, bias, OUT[check.out], check.fast, swizzle)
    return _misfitting(whole, check.misfit)


def _scales(rows: int, parts: int) -> tuple[int, ...]:
    """Return the shape of scales of so many parts of each row; 0: one for all rows."""
    return (rows, parts) if parts else ()


def _integers(
    shape: tuple[int, int], dtype: torch.dtype, draw: torch.Generator, *, low: int, parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers from `low` to 1 or 2, mostly positive so that sums grow, with scales that are powers of two.

    Those of the blocks of a row differ by one power, so that no accumulator loses a bit of their sum.
    """
    values = torch.randint(low, 3, shape, generator=draw).clamp(max=2 + low).float()
    exponents = torch.randint(*((0, 2) if parts > 1 else (-3, 4)), _scales(shape[0], parts), generator=draw)
    return values.to(dtype), torch.exp2(exponents.float())


def _as_torchao_casts(
    shape: tuple[int, int], dtype: torch.dtype, draw: torch.Generator, *, parts: int, positive: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values scaled so that the largest, of a part or of all, is the largest of the dtype; inverse scales.

    Those of blocks are the power of two above, as RCEIL rounds them, and blocks have different magnitudes.
    """
    values = torch.randn(shape, generator=draw)
    values = values.abs() if positive else values
    largest = torch.finfo(dtype).max
    if not values.numel():
        return values.to(dtype), torch.ones(_scales(shape[0], parts))
    if parts > 1:
        blocks = values.view(shape[0], parts, -1) * torch.exp2(
            torch.randint(-3, 4, (shape[0], parts, 1), generator=draw)
        )
        scale = torch.exp2((blocks.abs().amax(dim=2) / largest).log2().ceil())
        return (blocks / scale[..., None]).clamp(-largest, largest).view(shape).to(dtype), scale
    amax = values.abs().amax(dim=1, keepdim=True) if parts else values.abs().max()
    return (values * (largest / amax)).clamp(-largest, largest).to(dtype), amax / largest


def _swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Return the scales [rows, blocks] in the order in which the hardware reads them: what `unswizzled` undoes."""
    rows, blocks = scale.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-blocks // 4) * 4)
    padded[:rows, :blocks] = scale
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.flatten().to(torch.float8_e8m0fnu)


def _special(check: KernelCheck, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor) -> None:
    if check.values == "nan":
        a.view(torch.uint8)[1, 2] = 0x7F  # NaN in both dtypes
        b.view(torch.uint8)[3, 0] = 0xFF
    if check.values == "inf":
        a.view(torch.uint8)[1, 2] = 0x7C  # e5m2: infinity
        a.view(torch.uint8)[2, 0] = 0xFC
    if check.values == "zero_scale":
        scale_a.view(-1)[0] = 0.0


def _misfitting(fitting: Arguments, misfit: Misfit) -> Arguments:
    a, b, scale_a, scale_b, bias = fitting[:5]
    wrong: dict[str, Any] = {}
    match misfit:
        case "a_column_major":
            wrong = {"a": a.t().contiguous().t()}
        case "b_row_major":
            wrong = {"b": b.contiguous()}
        case "scale_float64":
            wrong = {"scale_a": scale_a.double(), "scale_b": scale_b.double()}
        case "scale_shape":
            wrong = {"scale_a": scale_a[: a.shape[0] // 2]}
        case "scale_strided":
            wrong = {"scale_a": scale_a.expand(-1, 2).contiguous()[:, :1]}
        case "bias_dtype":
            assert bias is not None, "this check has a bias"
            wrong = {"bias": bias.to(torch.float16)}
        case "scale_of_shard":
            wrong = {"scale_b": scale_b[: scale_b.numel() // 2]}
        case "not_swizzled":
            wrong = {"swizzle": SwizzleType.NO_SWIZZLE}
    return fitting._replace(**wrong)
