"""The kernel check: one call of a device's `_scaled_mm` beside the exact one, asked of its own process."""

from typing import Literal

from harness.trace.record import Patch, Record

Scaling = Literal["tensorwise", "rowwise", "blocks"]  # blocks: MXFP8, a power of two for 32 values
Float8Dtype = Literal["e4m3", "e5m2"]
OutDtype = Literal["float32", "bfloat16", "float16"]
# Integers: small ones, whose sums every tensor core holds exactly. Normal: as torchao casts activations.
# Positive: without cancellation. The others are normal ones with something special in them.
Values = Literal["integers", "normal", "positive", "nan", "inf", "zero_scale"]
# How an argument breaks the contract, where its shape and dtypes do not say so.
Misfit = Literal[
    "",
    "a_column_major",
    "b_row_major",
    "scale_float64",
    "scale_shape",
    "scale_strided",
    "bias_dtype",
    "not_swizzled",
    "scale_of_shard",
]

_SHORT = {"float32": "f32", "bfloat16": "b16", "float16": "f16"}


class KernelCheck(Record, frozen=True, kw_only=True):
    """A [m, k] x [k, n] matmul of float8 operands `a` and `b`."""

    scaling: Scaling
    m: int
    k: int
    n: int
    a: Float8Dtype = "e4m3"
    b: Float8Dtype = "e4m3"
    out: OutDtype = "bfloat16"
    fast: bool = False  # use_fast_accum
    bias: bool = False
    values: Values = "normal"
    misfit: Misfit = ""
    v2: bool = False  # by `torch.nn.functional.scaled_mm`

    @property
    def id(self) -> str:
        """Return a unique and readable name: `rowwise-32x1024x64-e4m3xe4m3-b16-fast-integers`."""
        words = [self.scaling, f"{self.m}x{self.k}x{self.n}", f"{self.a}x{self.b}", _SHORT[self.out]]
        marks = [word for word, on in (("fast", self.fast), ("bias", self.bias), ("v2", self.v2)) if on]
        return "-".join([*words, *marks, self.misfit or self.values])


class KernelObservation(Record, frozen=True, kw_only=True):
    """What the two kernels did. Without `raised` and `refusal` both ran; the numbers compare their results.

    `error_of_sum`: the largest error of an element beyond the rounding to the output dtype, divided by the sum of the
    magnitudes of its products; inf where that sum is 0. `unequal` counts elements whose bits differ (-0 equals 0),
    `nonfinite` those where one is NaN or infinite and the other is not the same.
    """

    raised: str = ""  # message of the device's kernel
    refusal: str = ""  # message of the contract
    shape: tuple[int, ...] = ()
    dtype: str = ""
    expected_shape: tuple[int, ...] = ()
    expected_dtype: str = ""
    unequal: int = 0
    nonfinite: int = 0
    error_of_sum: float = 0.0
    example: str = ""  # "[0, 3] = 1.0, expected 2.0": the worst element


class KernelBatch(Record, frozen=True, kw_only=True):
    """The payload of a job: checks to run on this device after applying `injections`."""

    checks: tuple[KernelCheck, ...]
    device: Literal["cpu", "cuda"] = "cpu"
    injections: tuple[Patch, ...] = ()
