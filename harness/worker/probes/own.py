"""Tensors that only probes hold. The census of live memory (`live_memory.py`) leaves them out."""

from __future__ import annotations

import torch

_MARK = "held_by_a_probe"


def own(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor object, marked. Nothing else may hold this object; its storage may be shared."""
    setattr(tensor, _MARK, True)
    return tensor


def is_own(tensor: torch.Tensor) -> bool:
    """True for a tensor that a probe has marked."""
    return getattr(tensor, _MARK, False)
