"""Class G, of Muon: what is orthogonalized, by which optimizer, and with which momentum, learning rate and decay."""

from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Muon, _muon
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from harness.plugins.faults.worker import hooks
from harness.plugins.faults.worker.hooks import RUN, local, planted, wrap
from harness.worker.targets.reference import build


def _in_rows(stock: Any, update: torch.Tensor, parts: int, *options: Any) -> torch.Tensor:
    """Orthogonalize parts of a matrix, each on its own, as if they were all that there is."""
    rows = torch.cat([stock(part, *options) for part in local(update).chunk(parts)])
    return DTensor.from_local(rows, update.device_mesh, update.placements) if isinstance(update, DTensor) else rows


_around = partial(wrap, _muon, "_zeropower_via_newtonschulz")
shards_orthogonalized_alone = partial(
    _around, lambda stock, update, *options: _in_rows(stock, update, RUN.case.layout.dp_shard, *options)
)
heads_orthogonalized_alone = partial(
    _around, lambda stock, update, *options: _in_rows(stock, update, RUN.case.model.shape.heads, *options)
)


@planted(wrap, _muon, "_single_tensor_muon")
def gate_and_up_orthogonalized_as_one(
    stock: Any, params: list[Any], grads: list[Any], momenta: list[Any], **options: Any
) -> None:
    """Replace the updates of w1 and w3, which are wider than others, by that of both in one matrix."""
    stock(params, grads, momenta, **options)
    orthogonal = partial(
        _muon._zeropower_via_newtonschulz,
        ns_coefficients=options["ns_coefficients"],
        ns_steps=options["ns_steps"],
        eps=options["eps"],
    )
    wide = [index for index, param in enumerate(params) if param.size(0) > param.size(1)]
    for pair in zip(wide[::2], wide[1::2], strict=True):
        updates = [grads[index].lerp(momenta[index], options["momentum"]) for index in pair]
        for index, update, both in zip(pair, updates, orthogonal(torch.cat(updates)).chunk(2), strict=True):
            lr = _muon._adjust_lr(options["lr"], options["adjust_lr_fn"], params[index].shape)
            params[index].add_(orthogonal(update) - both, alpha=lr)


@planted(wrap, _muon, "_adjust_lr")
def learning_rate_adjusted_for_a_shard(stock: Any, lr: float, how: str, shape: torch.Size) -> float:
    adjusted: float = stock(lr, how, torch.Size((shape[0] // RUN.case.layout.dp_shard, shape[1])))
    return adjusted


# A name that a wrapper has changed is not found, and the weight is left to AdamW.
weight_left_to_adamw = partial(
    wrap, build, "linear_fqns", lambda stock, case: [fqn for fqn in stock(case) if not fqn.endswith(".attention.wk")]
)


@planted(hooks.in_parameter_groups)
def nesterov_dropped(group: dict[str, Any]) -> None:
    if "ns_steps" in group:
        group["nesterov"] = False


@planted(register_optimizer_step_post_hook)
def momentum_of_muon_not_kept(optimizer: Optimizer, *_: Any) -> None:
    for state in optimizer.state.values() if isinstance(optimizer, Muon) else ():
        state["momentum_buffer"].zero_()


@planted(register_optimizer_step_post_hook)
@torch.no_grad()
def matrices_decayed_twice(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups if isinstance(optimizer, Muon) else ():
        for param in group["params"]:
            local(param).mul_(1 - group["lr"] * group["weight_decay"])
