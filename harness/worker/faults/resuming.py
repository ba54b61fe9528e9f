"""Class G: state that is lost, rounded or misplaced where it is saved or loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from harness.worker.faults.hooks import (
    after_build,
    after_load,
    around,
    around_load,
    first_weight,
    on_last_rank,
    planted,
)
from harness.worker.probes.places import local_shard
from harness.worker.probes.probe import optimizers_of


def _moments(model: nn.Module) -> Iterator[dict[str, Any]]:
    """What optimizers keep, parameter by parameter."""
    for optimizer in optimizers_of(model):
        yield from optimizer.state.values()


@planted(after_load)
def optimizer_state_not_loaded(model: nn.Module) -> None:
    for optimizer in optimizers_of(model):
        optimizer.state.clear()


@planted(after_load)
def optimizer_step_count_lost(model: nn.Module) -> None:
    for kept in _moments(model):
        kept["step"].zero_()


@planted(after_load)
def moments_rounded_by_checkpoint(model: nn.Module) -> None:
    for kept in _moments(model):
        for moment in (local_shard(value) for name, value in kept.items() if name != "step"):
            moment.copy_(moment.bfloat16())


@planted(after_load)
def learning_rate_lost_by_load(model: nn.Module) -> None:
    for optimizer in optimizers_of(model):
        for group in optimizer.param_groups:
            group["lr"] *= 0.1


@planted(around_load)
def weight_of_one_rank_not_loaded(stock: Callable[[], object], model: nn.Module) -> None:
    weight = local_shard(first_weight(model))
    initial = weight.clone()
    stock()
    if on_last_rank():
        local_shard(first_weight(model)).copy_(initial)


def resharded_rows_in_another_order() -> None:
    built = [0]

    def roll(model: nn.Module, places: int) -> None:
        weight = local_shard(first_weight(model))
        weight.copy_(weight.roll(places, 0))

    def load(stock: Callable[[], object], model: nn.Module) -> None:
        stock()
        roll(model, 1)

    def save(stock: Callable[[], object], model: nn.Module) -> None:
        roll(model, -1)
        stock()

    def change(model: nn.Module) -> None:
        built[0] += 1
        if built[0] == 2:  # the first trains before the state is saved, the last behind it
            around("load", load)
            around("save", save)

    after_build(change)


float8_weights_not_safe_to_load = torch.serialization.clear_safe_globals
