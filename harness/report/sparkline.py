"""Sparklines: a curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_ABSENT = " "
_NOT_FINITE = "!"


def sparkline(values: Sequence[float | None], low: float | None = None, high: float | None = None) -> str:
    """A bar for every value, " " for None and "!" for what is not finite.

    The bars reach from `low` to `high`: those of all curves that are compared, or else of the finite values.
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    low = min(finite, default=0.0) if low is None else low
    high = max(finite, default=0.0) if high is None else high
    return "".join(_bar(value, low, high) for value in values)


def _bar(value: float | None, low: float, high: float) -> str:
    if value is None:
        return _ABSENT
    if not math.isfinite(value):
        return _NOT_FINITE
    share = (value - low) / (high - low) if high > low else 0.0
    return _BARS[min(max(round(share * (len(_BARS) - 1)), 0), len(_BARS) - 1)]
