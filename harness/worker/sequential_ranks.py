"""One rank that trains for several data-parallel ranks, one after another, and sums gradients in their order.

FSDP2 on one rank would add up the gradients of all microbatches in the order in which it meets them. Ranks first
accumulate those of their own, then sum over shards, then over replicas, and round each of these sums to the reduce
dtype. Repeating that makes the single-rank reference equal to the bit, with any number of microbatches.

The tokens of a forward pass tell which rank it is for. Where the model is not called as a whole, all of them count
as the first rank's, and gradients are summed in another order.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils._pytree import tree_leaves

from harness.matrix.case import Case
from harness.worker.inputs import sequences_in
from harness.worker.probes.gathered import FSDPParam, fsdp_params
from harness.worker.targets.target import StepResult, Target

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # sums are rounded once, as by the virtual device


class SequentialRanks:
    """A target whose `step` gets the microbatches of all data-parallel ranks of a case, in rank order."""

    def __init__(self, target: Target, case: Case) -> None:
        self.model = target.model
        self._target = target
        self._shards = case.layout.dp_shard
        self._microbatches_per_rank = case.train.accumulation
        self._rank = 0
        self._batches: Sequence[Any] = ()
        self._sums: dict[FSDPParam, list[_Sum]] = {}  # one for every reduction of a step
        self._reduced: Counter[FSDPParam] = Counter()  # how often in this turn
        self.model.register_forward_pre_hook(self._follow_inputs, with_kwargs=True)

    def step(self, microbatches: Sequence[torch.Tensor], *labels: Sequence[torch.Tensor]) -> StepResult:
        """One step of the target, in which every reduction of FSDP2 returns what it would return on those ranks."""
        ranks = (
            microbatches[at : at + self._microbatches_per_rank]
            for at in range(0, len(microbatches), self._microbatches_per_rank)
        )
        self._batches = [torch.cat(tuple(batches)).cpu().numpy() for batches in ranks]
        self._rank = 0
        self._sums.clear()
        self._reduced.clear()
        reducing: Any = _fsdp_param_group
        stock = reducing.foreach_reduce
        reducing.foreach_reduce = self._reducing(stock)
        try:
            return self._target.step(microbatches, *labels)
        finally:
            reducing.foreach_reduce = stock

    def _follow_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and leaf.dim() > 0:
                seen = leaf.detach().cpu().long().numpy()
                ranks = [rank for rank, batch in enumerate(self._batches) if sequences_in(seen, batch)]
                if len(ranks) == 1 and ranks[0] > self._rank:
                    self._finish_rank(ranks[0])

    def _finish_rank(self, following: int) -> None:
        """Add what this rank accumulated without a reduction to the sum that the next ranks reduce."""
        for param in fsdp_params(self.model):
            grad = param.unsharded_accumulated_grad
            unsharded = getattr(param, "_unsharded_param", None)
            if grad is None and unsharded is not None:
                grad, unsharded.grad = unsharded.grad, None
            param.unsharded_accumulated_grad = None
            if grad is not None:
                self._add(param, grad, param.reduce_dtype or grad.dtype)
        self._reduced.clear()
        self._rank = following

    def _reducing(self, stock: Any) -> Any:
        signature = inspect.signature(stock)

        def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            params, grads = given["fsdp_params"], tuple(given["unsharded_grads"])
            factor = given["gradient_divide_factor"] or 1.0
            result = stock(*args, **kwargs)
            for param, grad in zip(params, grads, strict=True):
                self._add(param, grad / factor, given["reduce_dtype"] or grad.dtype)
                self._reduced[param] += 1
                self._write_gradient(param)
            return result

        return foreach_reduce

    def _add(self, param: FSDPParam, grad: torch.Tensor, dtype: torch.dtype) -> None:
        sums = self._sums.setdefault(param, [])
        if len(sums) == self._reduced[param]:
            sums.append(_Sum(dtype))
        sums[self._reduced[param]].add(grad, self._rank // self._shards)

    def _write_gradient(self, param: FSDPParam) -> None:
        """Write the gradient so far; several reductions of a step add up in the dtype of the parameter."""
        local: torch.Tensor = param.sharded_param.grad.to_local()
        first, *others = self._sums[param]
        local.copy_(first.value)
        for other in others:
            local += other.value.to(local.dtype)


class _Sum:
    """One reduction: what the ranks of every replica add up, rounded to `dtype`; and then the replicas."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._replicas: dict[int, torch.Tensor] = {}

    def add(self, grad: torch.Tensor, replica: int) -> None:
        """Add what the next rank contributes."""
        part = grad.detach().to(self._dtype).to(_WIDE.get(self._dtype, self._dtype))
        if replica in self._replicas:
            self._replicas[replica] += part
        else:
            self._replicas[replica] = part.clone()

    @property
    def value(self) -> torch.Tensor:
        """The sum of what was added so far, in the dtype in which it is reduced."""
        first, *others = (total.to(self._dtype) for total in self._replicas.values())
        total = first.to(_WIDE.get(self._dtype, self._dtype))
        for other in others:
            total = total + other
        return total.to(self._dtype)
