"""Class G: gradients that are clipped to a norm, and the norm itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from harness.worker.faults.hooks import layout_of_run, local, wrap_everywhere


def gradients_not_clipped() -> None:
    """The norm of all gradients is taken and reported, and no gradient is scaled."""
    wrap_everywhere(clip_grad, "_clip_grads_with_norm_", lambda stock, *args, **kwargs: None)


def clipped_by_norm_of_own_shards() -> None:
    """Every rank clips by the norm of the gradients that it holds."""

    def total(stock: Any, grads: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return stock([local(grad) for grad in grads], *args, **kwargs)

    wrap_everywhere(clip_grad, "_get_total_norm", total)


def replicated_gradients_counted_by_every_rank() -> None:
    """Gradients that all TP ranks hold alike count once for every rank in the global norm."""
    layout = layout_of_run()

    def total(stock: Any, grads: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        grads = list(grads)
        alike = [grad for grad in grads if isinstance(grad, DTensor) and not grad.placements[-1].is_shard()]
        whole: torch.Tensor = stock(grads, *args, **kwargs)
        if not alike or layout().tp == 1:
            return whole
        whole, extra = (_whole(norm) for norm in (whole, stock(alike, *args, **kwargs)))
        return (whole.square() + (layout().tp - 1) * extra.square()).sqrt()

    wrap_everywhere(clip_grad, "_get_total_norm", total)


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
