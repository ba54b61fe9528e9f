"""How far a tensor is from what it must be."""

from __future__ import annotations

import math

import torch


def relative_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|: infinite where only `expected` is zero, NaN where a value is not finite."""
    found, expected = found.double(), expected.double()
    if not (found.isfinite().all() and expected.isfinite().all()):
        return math.nan
    far, norm = (found - expected).norm().item(), expected.norm().item()
    return far / norm if norm else (math.inf if far else 0.0)
