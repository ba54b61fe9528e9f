"""Rules about the scale and the values of a single cast, for eager casts and for casts inside of compiled graphs.

Every rule yields (rule, expected, found) for what is broken and nothing otherwise.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

from harness.checks.mismatch import same_number
from harness.checks.rule import Rule, Rules, Stage
from harness.expect.expectations import CASTS
from harness.matrix.case import Case
from harness.matrix.recipes import FLOAT8_MAX
from harness.trace.operands import CastStatistics, ScaleSummary

Broken = tuple[Rule, str, str]  # with what was expected and found


class CastRules(NamedTuple):
    """The rules about one cast, of eager or of compiled casts."""

    amax: Rule
    scale_dtype: Rule
    scale_range: Rule
    power_of_two: Rule
    scale_shape: Rule
    target_dtype: Rule
    number: Rule
    data: Rule
    saturated: Rule
    nonfinite: Rule


def cast_rules(rule: Rules) -> CastRules:
    """The rules about one cast, declared among those of a check."""
    scales, values = (functools.partial(rule, located=True, stage=stage) for stage in (Stage.SCALES, Stage.VALUES))
    return CastRules(
        amax=scales("amax", says="scale does not match the amax"),
        scale_dtype=scales("scale-dtype", says="scale has the wrong dtype"),
        scale_range=scales("scale-range", says="scale is not positive and finite"),
        power_of_two=scales("power-of-two", says="scale is not a power of two"),
        scale_shape=scales("scale-shape", says="scale has the wrong shape"),
        target_dtype=scales("target-dtype", says="cast to the wrong dtype"),
        number=scales("number", says="wrong number of casts{of}", key=("of",), formula=CASTS),
        data=values("data", says="float8 data does not match its source and scale"),
        saturated=values("saturated", says="float8 values saturate"),
        nonfinite=values("nonfinite", says="float8 values are NaN or infinite"),
    )


_EPS = 1e-12  # torchao replaces a smaller amax by this one
_LOG2_TOLERANCE = 1e-6  # log2 of a scale just below a power of two may round up to it


def value_rules(rules: CastRules, case: Case, cast: CastStatistics) -> Iterator[Broken]:
    """Rules that need nothing but the numbers of the cast."""
    scale = cast.scale
    if scale.dtype != "float32":
        yield rules.scale_dtype, "float32", scale.dtype
    if not (scale.minimum > 0 and math.isfinite(scale.maximum)) and cast.elements:
        yield rules.scale_range, "finite, above 0", f"{scale.minimum} to {scale.maximum}"
    finite = math.isfinite(scale.minimum) and math.isfinite(scale.maximum)
    if case.float8.traits.power_of_two_scales and finite and not scale.power_of_two:
        yield rules.power_of_two, "powers of two", f"{scale.minimum} to {scale.maximum}"
    for count, rule in (
        (cast.mismatched, rules.data),
        (cast.saturated, rules.saturated),
        (cast.nonfinite, rules.nonfinite),
    ):
        if count:
            yield rule, "0 elements", f"{count} of {cast.elements} elements"


def tensorwise_scale(target_dtype: str, amax: float) -> float:
    """The scale of a tensor with this amax: fp8 max / amax, rounded once to float32.

    torchao divides in float64, so eager, compiled and precomputed scales are equal to the last bit, and a stale scale
    differs as soon as the amax changes.
    """
    return as_float32(FLOAT8_MAX.get(target_dtype, math.nan) / max(amax, _EPS))


def tensorwise_rule(rule: Rule, cast: CastStatistics, amax: float) -> Iterator[Broken]:
    """The one scale of a tensor is the one for `amax`, the amax of the whole tensor."""
    expected = tensorwise_scale(cast.target_dtype, amax)
    if not same_number(cast.scale.maximum, expected):
        limit, found = FLOAT8_MAX.get(cast.target_dtype, math.nan), cast.scale.maximum
        implied = f" = {limit:g} / amax {limit / found:.7g}" if found > 0 else ""
        yield rule, f"{expected!r} = {limit:g} / amax {amax!r}", f"{found!r}{implied}"


def power_of_two_rule(rule: Rule, target_dtype: str, lowest: float, highest: float) -> Iterator[Broken]:
    """Power-of-two scales put every amax * scale, here from `lowest` to `highest`, into (1/2, 1] of fp8 max."""
    limit = FLOAT8_MAX.get(target_dtype, math.nan)
    fits = lowest / limit > 0.5 * (1 - _LOG2_TOLERANCE) and highest / limit <= 1 + _LOG2_TOLERANCE
    if highest != 0 and not math.isnan(highest) and not fits:
        found = f"{lowest / limit:.9g} to {highest / limit:.9g} of it"
        if 0 < lowest <= highest < math.inf:
            found += f", as for amaxes of {limit / highest / 2:.3g} to {limit / lowest:.3g} times the right ones"
        yield rule, f"amax * scale in (1/2, 1] of {limit:g}", found


def as_float32(value: float) -> float:
    """Rounded as torch rounds; infinite where float32 overflows."""
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(rounded)


def format_scale(scale: ScaleSummary) -> str:
    """A scale in messages: its value, or the range and sum of its values."""
    if scale.minimum == scale.maximum:
        return f"{scale.minimum!r}"
    return f"{scale.minimum!r} to {scale.maximum!r}, sum {scale.total!r}"
