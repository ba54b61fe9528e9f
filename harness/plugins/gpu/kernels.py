"""The float8 matmul of a device against the exact one: the checks, what error a kernel may have, and the judgement.

Products of float8 values are exact in float32, so all error comes from adding them up, from the scales and from the
output dtype. The rank already takes off the rounding to the output dtype.

float32: each of k additions is rounded, or truncated, by at most 2**-23 of a partial sum, and no partial sum is larger
than the sum of magnitudes S. So the error is at most k * 2**-23 * S.

tensor_core: Ada and Hopper add up 32 products and the accumulator in one instruction, all of them cut off at 13 bits
below the largest (https://arxiv.org/abs/2412.19437, section 3.3.2; https://arxiv.org/abs/2411.10958). That is at most
33 * 2**-13 * S an instruction. Without fast accumulation the accumulator is added to one in float32 every 128 products,
so S covers 128 products, and the shares of all blocks add up to 4 * 33 * 2**-13 of the whole S. With fast
accumulation it is not: each of k / 32 instructions may lose 33 * 2**-13 * S. Later architectures lose less.

These are the worst cases. What finds faults in long sums are integers: every accumulator with 13 bits below its largest
addend holds their sums exactly, so their results must have the bits of the exact ones.
"""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal

import msgspec

from harness.engine.cluster import Cluster
from harness.engine.messages import Job, JobOutcome
from harness.plugins.gpu.kernel_checks import Float8Dtype, KernelBatch, KernelCheck, KernelObservation, OutDtype
from harness.studies.surviving import run_surviving
from harness.trace.record import Patch, Record

PROGRAM = "harness.plugins.gpu.worker.kernels"

Accumulator = Literal["float32", "tensor_core"]
ProblemKind = Literal["refused", "ran", "message", "shape", "nonfinite", "bits", "error", "lost"]

_BASE_DEADLINE_S = 120.0  # a GPU loads its libraries in the first check
_DEADLINE_PER_CHECK_S = 0.5

# Tokens, inner and output features: the smallest, tokens that are no multiple of 16, small models, long inner dims.
SHAPES = ((16, 16, 16), (7, 64, 32), (32, 96, 48), (64, 256, 128), (48, 1024, 80), (64, 4096, 64))
PAIRS: tuple[tuple[Float8Dtype, Float8Dtype], ...] = (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"))
ALL_LAYOUTS_FROM = (10, 0)  # compute capability from which cuBLASLt multiplies any layout
BLOCKS_FROM = (10, 0)  # and MXFP8
# Whole tiles of 128 rows by 4 blocks, rows and blocks that are padded to one, several, and long inner dims.
BLOCK_SHAPES = ((128, 128, 128), (32, 32, 32), (7, 64, 32), (160, 288, 96), (64, 1024, 160), (64, 4096, 64))

_FLOAT32 = 2.0**-23
_TENSOR_CORE = 2.0**-13
_INSTRUCTION = 32  # products
_PROMOTED = 4  # instructions between two additions in float32, without fast accumulation
_SCALES = 3 * _FLOAT32  # two multiplications by scales, one addition of a bias

# What a refusal is about, by words of torch's messages: those of its CUDA kernel and those of its meta registration.
REASONS = {
    "alignment": r"divisible by 16",
    "layout": r"row_major|col_major|row-major and column-major",
    "bias": r"\bBias\b",
    "operand dtypes": r"two Float8_e5m2 matrices",
    "output dtype": r"output types? (?:is|are) supported for row-wise|only supports BFloat16 output",
    "swizzle": r"must be swizzled",
    "scales": r"scaling configuration|must be float \(fp32\)|contiguous for rowwise|scale_[ab] (?:must|stride)",
}


def value_checks(capability: tuple[int, int]) -> tuple[KernelCheck, ...]:
    """Return the calls that a GPU takes, whose results are compared. Ids are unique."""
    blocks = _blocks() if capability >= BLOCKS_FROM else ()
    return tuple(dict.fromkeys((*_tensorwise(), *_rowwise(), *_special(), *blocks)))


def _tensorwise() -> Iterator[KernelCheck]:
    outs: tuple[OutDtype, ...] = ("float32", "bfloat16", "float16")
    for (m, k, n), out, fast in product(SHAPES, outs, (False, True)):
        for a, b in PAIRS:
            yield KernelCheck(scaling="tensorwise", m=m, k=k, n=n, a=a, b=b, out=out, fast=fast, values="integers")
        for values in ("normal", "positive"):
            yield KernelCheck(scaling="tensorwise", m=m, k=k, n=n, out=out, fast=fast, values=values)
        if out != "float32":
            yield KernelCheck(scaling="tensorwise", m=m, k=k, n=n, out=out, fast=fast, bias=True, values="integers")
    for a, b in PAIRS[1:]:
        yield KernelCheck(scaling="tensorwise", m=64, k=256, n=128, a=a, b=b, out="float32")


def _rowwise() -> Iterator[KernelCheck]:
    """In bfloat16, as rowwise recipes ask for; a gradient of weights in high precision changes no shape."""
    for (m, k, n), fast in product(SHAPES, (False, True)):
        for values in ("integers", "normal", "positive"):
            yield KernelCheck(scaling="rowwise", m=m, k=k, n=n, fast=fast, values=values)
        yield KernelCheck(scaling="rowwise", m=m, k=k, n=n, fast=fast, bias=True, values="integers")


def _blocks() -> Iterator[KernelCheck]:
    """As torchao's MXFP8 multiplies, in bfloat16, by the first version of the operator; and by the second."""
    for (m, k, n), v2 in product(BLOCK_SHAPES, (False, True)):
        for values in ("integers", "normal", "positive"):
            yield KernelCheck(scaling="blocks", m=m, k=k, n=n, values=values, v2=v2)
    yield KernelCheck(scaling="blocks", m=32, k=96, n=64, values="nan")


def _special() -> Iterator[KernelCheck]:
    """Yield operands and scales with something in them that must come out, and no tokens at all."""
    for fast in (False, True):
        for scaling in ("tensorwise", "rowwise"):
            for values in ("nan", "zero_scale"):
                yield KernelCheck(scaling=scaling, m=32, k=96, n=48, fast=fast, values=values)
            yield KernelCheck(scaling=scaling, m=0, k=64, n=32, fast=fast)
        yield KernelCheck(scaling="tensorwise", m=32, k=96, n=48, a="e5m2", fast=fast, values="inf")


def refusal_checks(capability: tuple[int, int]) -> tuple[KernelCheck, ...]:
    calls = [
        KernelCheck(scaling="tensorwise", m=32, k=40, n=32),
        KernelCheck(scaling="tensorwise", m=32, k=48, n=24),
        KernelCheck(scaling="rowwise", m=32, k=48, n=1128),
        KernelCheck(scaling="tensorwise", m=32, k=48, n=32, a="e5m2", b="e5m2"),
        KernelCheck(scaling="tensorwise", m=32, k=48, n=32, out="float32", bias=True),
        KernelCheck(scaling="tensorwise", m=32, k=48, n=32, bias=True, misfit="bias_dtype"),
        KernelCheck(scaling="tensorwise", m=32, k=48, n=32, misfit="scale_float64"),
        KernelCheck(scaling="rowwise", m=32, k=48, n=32, misfit="scale_shape"),
        KernelCheck(scaling="rowwise", m=32, k=48, n=32, misfit="scale_strided"),
    ]
    if capability < ALL_LAYOUTS_FROM:
        calls += [
            KernelCheck(scaling="tensorwise", m=32, k=48, n=32, misfit="a_column_major"),
            KernelCheck(scaling="tensorwise", m=32, k=48, n=32, misfit="b_row_major"),
        ]
    if capability >= BLOCKS_FROM:
        calls += [
            KernelCheck(scaling="blocks", m=32, k=64, n=24),
            KernelCheck(scaling="blocks", m=128, k=128, n=128, misfit="scale_of_shard"),
            KernelCheck(scaling="blocks", m=128, k=128, n=128, misfit="not_swizzled", v2=True),
        ]
    return tuple(calls)


def allowed_of_sum(check: KernelCheck, accumulator: Accumulator) -> float:
    """Return the largest error of an element beyond the rounding of its output, as a share of the sum of magnitudes."""
    in_float32 = check.k * _FLOAT32 + _SCALES
    if accumulator == "float32":
        return in_float32
    instructions = math.ceil(check.k / _INSTRUCTION)
    counted = instructions if check.fast else min(instructions, _PROMOTED)
    return counted * (_INSTRUCTION + 1) * _TENSOR_CORE + in_float32


def is_exact(check: KernelCheck) -> bool:
    """Return True if every kernel must give the bits of the exact one."""
    return check.values == "integers"


class Problem(Record, frozen=True, kw_only=True):
    kind: ProblemKind
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.kind}: expected {self.expected}, found {self.found}"


class KernelConclusion(Record, frozen=True, kw_only=True):
    """The result of a check. `allowed` is what `error_of_sum` may be; 0 where bits must be equal, and of refusals."""

    check: KernelCheck
    problems: tuple[Problem, ...]
    error_of_sum: float = 0.0
    allowed: float = 0.0

    @property
    def good(self) -> bool:
        return not self.problems


def reason_of(message: str) -> str:
    """Return what a refusal is about; "unknown" for words that no reason has."""
    return next((name for name, words in REASONS.items() if re.search(words, message)), "unknown")


def conclude(check: KernelCheck, seen: KernelObservation, accumulator: Accumulator) -> KernelConclusion:
    if seen.raised or seen.refusal:
        return KernelConclusion(check=check, problems=tuple(_refusal_problems(seen)))
    allowed = 0.0 if is_exact(check) else allowed_of_sum(check, accumulator)
    problems = tuple(_value_problems(check, seen, allowed))
    return KernelConclusion(check=check, problems=problems, error_of_sum=seen.error_of_sum, allowed=allowed)


def conclude_lost(check: KernelCheck, message: str) -> KernelConclusion:
    return KernelConclusion(check=check, problems=(Problem(kind="lost", expected="a result", found=message),))


def _refusal_problems(seen: KernelObservation) -> Iterator[Problem]:
    if not seen.raised:
        yield Problem(kind="ran", expected=f"a refusal: {seen.refusal}", found="a result")
    elif not seen.refusal:
        yield Problem(kind="refused", expected="a result", found=seen.raised)
    elif reason_of(seen.raised) != reason_of(seen.refusal) or reason_of(seen.raised) == "unknown":
        yield Problem(kind="message", expected=f"{reason_of(seen.refusal)}: {seen.refusal}", found=seen.raised)


def _value_problems(check: KernelCheck, seen: KernelObservation, allowed: float) -> Iterator[Problem]:
    if (seen.shape, seen.dtype) != (seen.expected_shape, seen.expected_dtype):
        expected, found = f"{list(seen.expected_shape)} {seen.expected_dtype}", f"{list(seen.shape)} {seen.dtype}"
        yield Problem(kind="shape", expected=expected, found=found)
    if seen.nonfinite:
        found = f"{seen.nonfinite} elements where they are not: {seen.example}"
        yield Problem(kind="nonfinite", expected="NaN and infinities where the exact result has them", found=found)
    if is_exact(check) and seen.unequal:
        found = f"{seen.unequal} others: {seen.example}"
        yield Problem(kind="bits", expected="the bits of the exact result", found=found)
    elif not is_exact(check) and not seen.error_of_sum <= allowed:
        found = f"{seen.error_of_sum:.3g}: {seen.example}"
        yield Problem(kind="error", expected=f"at most {allowed:.3g} of the sum of |a| |b|", found=found)


def run_checks(
    cluster: Cluster,
    checks: Sequence[KernelCheck],
    *,
    device: Literal["cpu", "cuda"],
    accumulator: Accumulator,
    injections: Sequence[Patch] = (),
) -> list[KernelConclusion]:
    """Run and judge all checks, in order. Raises RanksFailed when the rank fails outside of any check."""

    def judge(pending: Sequence[KernelCheck], outcome: JobOutcome) -> list[KernelConclusion]:
        observations = msgspec.msgpack.decode(outcome.ranks[0].payload or b"", type=list[KernelObservation])
        return [conclude(check, seen, accumulator) for check, seen in zip(pending, observations, strict=True)]

    return run_surviving(
        cluster,
        checks,
        job_of=lambda pending: Job(
            job_id="kernels",
            world_size=1,
            payload=msgspec.msgpack.encode(KernelBatch(checks=pending, device=device, injections=tuple(injections))),
            deadline_s=_BASE_DEADLINE_S + _DEADLINE_PER_CHECK_S * len(pending),
        ),
        judge=judge,
        conclude_lost=conclude_lost,
        where="evidence kernel",
        fix="check the driver and the memory of this machine.",
    )
