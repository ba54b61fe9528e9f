"""Sparklines: a curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None]) -> str:
    """A bar for every value, from the lowest to the highest; a space for None, "!" for what is not finite."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_bar(value, low, high) for value in values)


def _bar(value: float | None, low: float, high: float) -> str:
    if value is None:
        return " "
    if not math.isfinite(value):
        return "!"
    return _BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] if high > low else _BARS[0]
