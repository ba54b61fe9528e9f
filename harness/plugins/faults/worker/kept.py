"""Class I: memory leaks. Something keeps tensors alive that nothing needs any more; no number changes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torchao.float8.float8_training_tensor import GemmInputRole

from harness.plugins.faults.worker.hooks import (
    after_all_gather,
    after_build,
    after_casts,
    around_loss,
    blocks,
)


def _after_every_block(keep: Callable[[nn.Module, torch.Tensor], object]) -> None:
    """Call `keep(block, output)` after the forward of every block."""

    def watch(model: nn.Module) -> None:
        for block in blocks(model):
            block.register_forward_hook(lambda block, _, output: keep(block, output) and None)

    after_build(watch)


output_kept_on_module = partial(_after_every_block, lambda block, output: setattr(block, "last_output", output))


def output_kept_by_hook() -> None:
    outputs: list[torch.Tensor] = []

    def count(grad: torch.Tensor) -> None:
        assert outputs, "no block has run"

    _after_every_block(lambda block, output: outputs.append(output.detach()))
    after_build(lambda model: next(model.parameters()).register_hook(count))


def logits_kept_of_every_step() -> None:
    log: list[torch.Tensor] = []

    def change(stock: Any, logits: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        log.append(logits.detach())
        return stock(logits, *args, **options)

    around_loss(change)


def float8_weights_kept_in_cache() -> None:
    cache: list[torch.Tensor] = []

    def keep(part: Any, hp_tensor: torch.Tensor, role: Any) -> None:
        if role is GemmInputRole.WEIGHT:
            cache.append(part._data)

    after_casts(keep)


def gathered_weights_kept() -> None:
    buffers: list[torch.Tensor] = []
    after_all_gather(lambda output, group: buffers.append(output))
