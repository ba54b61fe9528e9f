"""A CPU-only limit of torch 2.13, worked around: saved random-number states of compiled checkpointed blocks.

A graph that recomputes an operator which may draw random numbers saves the generator's state on a CPU as one more
output of the forward graph (on a GPU it is an input). The output comes after the device mesh of a DTensor, where
AOTAutograd expects tensors, and the run dies: "expected all tensors_saved_with_vc_check to be Tensors ... DeviceMesh".
Attention is such an operator even where it drops nothing. Graphs whose attention drops nothing need no state: for them,
and for no others, nothing is saved, and `skipped` says so in the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import partitioners as stock_partitioners

NAME = "no_rng_state_for_attention_without_dropout"

# The names of workarounds that were needed in this process.
skipped: list[str] = []

_DROPOUT_ARGUMENT = "dropout_p"


def install() -> None:
    """Let the partitioner ask again whether a graph really draws random numbers."""
    partitioners: Any = stock_partitioners
    partitioners.has_recomputable_rng_ops = _asked_again(partitioners.has_recomputable_rng_ops)


def _asked_again(stock: Callable[[torch.fx.GraphModule], bool]) -> Callable[[torch.fx.GraphModule], bool]:
    def has_recomputable_rng_ops(module: torch.fx.GraphModule) -> bool:
        if not stock(module):
            return False
        if any(_draws(node) for node in module.graph.nodes if _may_draw(node)):
            return True
        if NAME not in skipped:
            skipped.append(NAME)
        return False

    return has_recomputable_rng_ops


def _may_draw(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _draws(node: torch.fx.Node) -> bool:
    """False for an operator whose probability of dropping is given, or by default, zero."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == _DROPOUT_ARGUMENT:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return bool((argument.default_value if given is None else given) != 0)
    return True
