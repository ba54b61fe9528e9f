"""Class G: gradients, data, weights, optimizer and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.matrix.case import Case
from harness.worker import reduction, train
from harness.worker.faults.hooks import after_backward, after_build, local, on_odd_rank, wrap
from harness.worker.probes.sketches import clean_fqn
from harness.worker.targets.reference import build

_ONE_WEIGHT = "layers.0.attention.wq.weight"


def gradients_doubled() -> None:
    """Gradients are scaled twice."""

    def change(model: nn.Module, step: int) -> None:
        for param in model.parameters():
            if param.grad is not None:
                local(param.grad).mul_(2)

    after_backward(change)


def one_gradient_lost() -> None:
    """The gradient of one weight is zero."""
    _one_gradient(lambda grad, step: grad.zero_())


def nan_gradient_on_one_rank() -> None:
    """One element of one gradient of one rank is NaN in the second step."""

    def change(grad: torch.Tensor, step: int) -> None:
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            grad.view(-1)[0] = torch.nan

    _one_gradient(change)


def _one_gradient(change: Callable[[torch.Tensor, int], object]) -> None:
    def backward(model: nn.Module, step: int) -> None:
        grad = _one_weight(model).grad
        if grad is not None:
            change(local(grad), step)

    after_backward(backward)


def _one_weight(model: nn.Module) -> nn.Parameter:
    """The weight that faults of this class change; StopIteration where there is none, so that no fault is idle."""
    return next(param for fqn, param in model.named_parameters() if clean_fqn(fqn) == _ONE_WEIGHT)


def gradients_accumulate() -> None:
    """Gradients are not zeroed after the optimizer step."""
    after_build(lambda target: setattr(target.optimizer, "zero_grad", lambda *_, **__: None))


def update_missing_on_one_rank() -> None:
    """One rank never updates its parameters."""
    if on_odd_rank():
        after_build(lambda target: setattr(target.optimizer, "step", lambda *_, **__: None))


def update_missing_for_one_group() -> None:
    """One weight is missing from the parameter groups of the optimizer."""

    def change(target: build.Target) -> None:
        lost = _one_weight(target.model)
        for group in target.optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param is not lost]

    after_build(change)


def weight_decay_lost() -> None:
    """The optimizer runs without weight decay."""
    build.LLAMA_ADAMW = {**build.LLAMA_ADAMW, "weight_decay": 0.0}


def norm_counts_replicas() -> None:
    """The gradient norm counts the share of every rank once for every rank."""
    wrap(reduction, "_squared_norm_share", lambda stock: lambda model: stock(model) * dist.get_world_size())


def loss_over_local_tokens() -> None:
    """The loss is divided by the number of local instead of global tokens."""
    wrap(train, "global_token_count", lambda stock: lambda case: stock(case) // case.layout.dp)


def _batch(change: Callable[[slice, Case], slice]) -> None:
    wrap(build, "batch_slice", lambda stock: lambda case, meshes: change(stock(case, meshes), case))


def same_batch_on_every_dp_rank() -> None:
    """Every data-parallel rank trains on the first slice of the global batch."""
    _batch(lambda mine, case: slice(0, case.local_batch))


def batches_rotated() -> None:
    """Every data-parallel rank trains on the slice of the next one."""

    def change(mine: slice, case: Case) -> slice:
        first = (mine.start + case.local_batch) % case.train.global_batch
        return slice(first, first + case.local_batch)

    _batch(change)


def _tokens_on_odd_rank(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    if on_odd_rank():
        after_build(lambda target: target.tokens.copy_(change(target.tokens.clone())))


def one_rank_repeats_its_batch() -> None:
    """One rank trains on its first batch in every step."""
    _tokens_on_odd_rank(lambda tokens: tokens[:1].expand_as(tokens))


def one_tp_rank_reads_other_tokens() -> None:
    """One TP rank reads its sequences in another order than its peers."""
    _tokens_on_odd_rank(lambda tokens: tokens.roll(1, 2))


def one_rank_has_another_seed() -> None:
    """One rank generates its data from another seed."""
    if on_odd_rank():
        wrap(build, "global_tokens", lambda stock: lambda case: stock(_with_seed(case, case.train.seed + 1)))


def _with_seed(case: Case, seed: int) -> Case:
    from msgspec.structs import replace

    return replace(case, train=replace(case.train, seed=seed))


def one_rank_starts_from_other_weights() -> None:
    """One rank starts with slightly larger values in its shard of one weight."""

    def make(stock: Any) -> Any:
        def apply_checkpointing(layers: nn.ModuleDict, mode: Any) -> None:
            if on_odd_rank():
                with torch.no_grad():
                    shard: Any = local(layers.get_parameter(_ONE_WEIGHT.removeprefix("layers.")))
                    getattr(shard, "_tensor", shard).mul_(1.01)
            stock(layers, mode)

        return apply_checkpointing

    wrap(build, "apply_checkpointing", make)


def weight_frozen() -> None:
    """Wrapping changes `requires_grad`: here it freezes one weight, which a full run can detect."""

    def change(target: build.Target) -> None:
        _one_weight(target.model).requires_grad_(False)

    after_build(change)
