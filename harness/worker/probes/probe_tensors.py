"""Tensors that only probes hold. The census of live memory (`live_memory.py`) leaves them out."""

from __future__ import annotations

import torch

_MARK = "held_by_a_probe"


def mark_owned(tensor: torch.Tensor) -> torch.Tensor:
    """Mark `tensor` as held by a probe alone, and return it. Its storage may be shared, the tensor object must not."""
    setattr(tensor, _MARK, True)
    return tensor


def is_owned(tensor: torch.Tensor) -> bool:
    """True for a tensor that a probe has marked."""
    return getattr(tensor, _MARK, False)
