"""Works around a CPU-only limitation of torch 2.13: saved RNG states of compiled checkpointed blocks.

On a CPU, a graph that recomputes an operator which may draw random numbers saves the RNG state as an extra output of
the forward graph (on a GPU it is an input). That output follows the device mesh of a DTensor, where AOTAutograd expects
tensors, and the run fails: "expected all tensors_saved_with_vc_check to be Tensors ... DeviceMesh". Attention counts as
such an operator even without dropout. Graphs that draw no random numbers need no RNG state, so none is saved for them,
and only for them; the trace lists the workaround.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import partitioners as stock_partitioners

NAME = "no_rng_state_for_attention_without_dropout"

# Names of the workarounds that this process has used.
workarounds: list[str] = []

_DROPOUT_ARGUMENT = "dropout_p"


def install() -> None:
    """Make the partitioner check whether a graph really draws random numbers."""
    partitioners: Any = stock_partitioners
    partitioners.has_recomputable_rng_ops = _only_if_any_op_draws(partitioners.has_recomputable_rng_ops)


def _only_if_any_op_draws(stock: Callable[[torch.fx.GraphModule], bool]) -> Callable[[torch.fx.GraphModule], bool]:
    def has_recomputable_rng_ops(module: torch.fx.GraphModule) -> bool:
        if not stock(module):
            return False
        if any(_draws(node) for node in module.graph.nodes if _may_draw(node)):
            return True
        if NAME not in workarounds:
            workarounds.append(NAME)
        return False

    return has_recomputable_rng_ops


def _may_draw(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _draws(node: torch.fx.Node) -> bool:
    """False for an operator whose dropout probability is zero."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == _DROPOUT_ARGUMENT:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return bool((argument.default_value if given is None else given) != 0)
    return True
