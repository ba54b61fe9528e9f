"""Candidate fix for torch 2.15: a compiled block rounds gradients that its eager form keeps wide.

    fp8-harness run pr --select 'compile!=none dtype=bfloat16' --inject cases/fixes/gradient_dtype_in_graphs.py:apply

FSDP2 asks for gradients of bfloat16 weights in float32 (`Tensor.grad_dtype`), and eager autograd returns them so.
AOTAutograd hands that wish to its fake tensors, but not to the tensors that it differentiates by, which are made to
look like the fake ones: their gradients are rounded to the dtype of the weight. Here they get it too, and are leaves,
as the weights are.
"""

from __future__ import annotations

from typing import Any

import torch


def apply() -> None:
    """Patch how autograd's view of a tensor is copied to another, in this process."""
    module: Any = torch
    stock = module._mirror_autograd_meta_to

    def mirror(source: Any, copy: Any) -> None:
        if source.requires_grad and source.is_leaf and source.grad_dtype != source.dtype:
            copy.requires_grad_()
            copy.grad_dtype = source.grad_dtype
        else:
            stock(source, copy)

    module._mirror_autograd_meta_to = mirror
