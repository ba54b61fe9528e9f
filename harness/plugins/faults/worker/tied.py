"""Classes D and L: ends that share their weights, as one parameter or as copies in two stages of a pipeline."""

from functools import partial
from typing import Any

import torch
from torch import nn

from harness.plugins.faults.worker.hooks import local, on_last_rank, planted, wrap
from harness.worker.targets.reference import build, tied

Tensor = torch.Tensor


@planted(wrap, build, "cut_sequences")
def ends_untied_before_sharding(stock: Any, model: Any, *args: Any) -> Any:
    """As by what gives every module a parameter of its own: TP, a wrapper of weights, meta devices."""
    model.output.weight = nn.Parameter(model.output.weight.detach().clone())
    return stock(model, *args)


@planted(wrap, build, "cut_sequences")
def gradient_of_tied_embedding_lost(stock: Any, model: Any, *args: Any) -> Any:
    model.tok_embeddings.register_forward_hook(lambda module, inputs, output: _without_gradient(output))
    return stock(model, *args)


def _without_gradient(output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(torch.zeros_like)


copies_keep_their_own_gradients = partial(wrap, tied.CopiedEnds, "add_gradients", lambda stock, ends: None)
copy_counted_in_norm = partial(setattr, tied.CopiedEnds, "copy", None)


@planted(wrap, tied.CopiedEnds, "add_gradients")
def gradients_added_on_first_stage_alone(stock: Any, ends: Any) -> None:
    output = ends.model.output
    own = None if output is None else local(output.weight.grad).clone()
    stock(ends)
    if own is not None and on_last_rank():
        local(output.weight.grad).copy_(own)


@planted(wrap, tied.CopiedEnds, "of_other_end")
def gradient_of_other_rows_added(stock: Any, ends: Any, grad: Tensor) -> Tensor:
    """As where stages shard copies of weights in other places."""
    other: Tensor = stock(ends, grad)
    return other.roll(len(other) // 2, 0)
