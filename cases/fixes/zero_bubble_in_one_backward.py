"""Candidate fix for torch 2.13: zero bubble schedules compute gradients of inputs and of weights in one backward pass.

    fp8-harness run pp2-zb-rowwise-v2048-s2-accum4-f64 --inject cases/fixes/zero_bubble_in_one_backward.py:apply

`stage_backward_input` and `stage_backward_weight` split the backward pass of a microbatch by autograd, into one pass up
to the input and one for each group of parameters. A custom autograd function, as of torchao's float8 linears, computes
all its gradients in either pass, twice in total, and a checkpointed block is computed again in each of them. Parameters
that FSDP2 has freed are no part of the graph, and get no gradient; those that it has not freed get theirs in the dtype
of the forward, in which microbatches are then added up.

A stage with a `dw_builder` computes all gradients in the first of the two, and calls what that builds in the second:
nothing is left to do here. The bubbles are not filled, and every gradient is right.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import PipelineStage


def apply() -> None:
    """Give every stage a `dw_builder`, in this process."""
    stock: Any = PipelineStage.__init__

    def create(stage: PipelineStage, *args: Any, **kwargs: Any) -> None:
        stock(stage, *args, **{"dw_builder": lambda: lambda: None, **kwargs})

    changed: Any = PipelineStage
    changed.__init__ = create
