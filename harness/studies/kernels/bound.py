"""How far a kernel may be off: a bound on the error of one element, as a share of the sum of its |a| |b|.

Products of float8 values are exact in float32, so all error comes from adding them up, from the scales and from the
output dtype. The rank already takes off the rounding to the output dtype.

float32: each of k additions is rounded, or truncated, by at most 2**-23 of a partial sum, and no partial sum is larger
than the sum of magnitudes S. So the error is at most k * 2**-23 * S.

tensor_core: Ada and Hopper add up 32 products and the accumulator in one instruction, all of them cut off at 13 bits
below the largest (https://arxiv.org/abs/2412.19437, section 3.3.2; https://arxiv.org/abs/2411.10958). That is at most
33 * 2**-13 * S an instruction. Without fast accumulation the accumulator is added to one in float32 every 128 products,
so S is that of 128 products, and the shares of all blocks add up to 4 * 33 * 2**-13 of the whole S. With fast
accumulation it is not: each of k / 32 instructions may lose 33 * 2**-13 * S. Later architectures lose less.

These are the worst cases. What finds faults in long sums are integers: every accumulator with 13 bits below its largest
addend holds their sums exactly, so their results must have the bits of the exact ones.
"""

from __future__ import annotations

import math
from typing import Literal

from harness.trace.device import KernelCheck

Accumulator = Literal["float32", "tensor_core"]

_FLOAT32 = 2.0**-23
_TENSOR_CORE = 2.0**-13
_INSTRUCTION = 32  # products
_PROMOTED = 4  # instructions between two additions in float32, without fast accumulation
_SCALES = 3 * _FLOAT32  # two multiplications by scales, one addition of a bias


def allowed_of_sum(check: KernelCheck, accumulator: Accumulator) -> float:
    """The largest error of an element beyond the rounding of its output, as a share of the sum of magnitudes."""
    in_float32 = check.k * _FLOAT32 + _SCALES
    if accumulator == "float32":
        return in_float32
    instructions = math.ceil(check.k / _INSTRUCTION)
    counted = instructions if check.fast else min(instructions, _PROMOTED)
    return counted * (_INSTRUCTION + 1) * _TENSOR_CORE + in_float32


def is_exact(check: KernelCheck) -> bool:
    """True where every kernel must give the bits of the exact one."""
    return check.values == "integers"
