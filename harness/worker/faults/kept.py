"""Class I: memory that something keeps alive although nothing needs it any more. No number changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torchao.float8.float8_training_tensor import GemmInputRole

from harness.worker.faults.hooks import after_build, around_loss, float8_part, role_of, wrap, wrap_casts
from harness.worker.faults.parts import blocks


def _after_every_block(keep: Callable[[nn.Module, torch.Tensor], object]) -> None:
    """Call `keep(block, output)` after the forward of every block."""

    def watch(target: Any) -> None:
        for block in blocks(target.model):
            block.register_forward_hook(lambda block, _, output: keep(block, output) and None)

    after_build(watch)


def output_kept_on_module() -> None:
    """Every block keeps its last output, with the graph behind it, as an attribute until its next forward."""
    _after_every_block(lambda block, output: setattr(block, "last_output", output))


def output_kept_by_hook() -> None:
    """A hook on a parameter keeps the outputs of all blocks of all steps in its closure."""
    outputs: list[torch.Tensor] = []

    def count(grad: torch.Tensor) -> None:
        assert outputs, "no block has run"

    _after_every_block(lambda block, output: outputs.append(output.detach()))
    after_build(lambda target: next(target.model.parameters()).register_hook(count))


def logits_kept_of_every_step() -> None:
    """A log keeps the logits of every step."""
    log: list[torch.Tensor] = []

    def change(stock: Any, logits: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        log.append(logits.detach())
        return stock(logits, *args, **options)

    around_loss(change)


def float8_weights_kept_in_cache() -> None:
    """A cache of FP8 weights gets a new entry at every cast and never loses one."""
    cache: dict[int, torch.Tensor] = {}

    def cast(stock: Any, hp_tensor: torch.Tensor, s: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = stock(hp_tensor, s, *rest, **kwargs)
        if role_of(rest, kwargs) is GemmInputRole.WEIGHT:
            cache[len(cache)] = float8_part(result)._data
        return result

    wrap_casts(cast)


def gathered_weights_kept() -> None:
    """The buffers of every FSDP all-gather stay alive after the weights are sharded again."""
    buffers: list[torch.Tensor] = []

    def make(stock: Any) -> Any:
        def foreach_all_gather(*args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            if result is not None:
                buffers.append(result.all_gather_output)
            return result

        return foreach_all_gather

    wrap(_fsdp_param_group, "foreach_all_gather", make)
