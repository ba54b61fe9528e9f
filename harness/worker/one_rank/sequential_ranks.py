"""One rank that trains for several data-parallel ranks, one after another, and sums gradients in their order.

FSDP2 on one rank would add up the gradients of all microbatches in the order in which it meets them. Ranks first
accumulate those of their own, then sum over shards, then over replicas, and round each of these sums to the reduce
dtype. Repeating that makes the single-rank reference equal to the bit, with any number of microbatches.

FSDP2's public hooks show what it reduced: `set_all_reduce_hook` hands over the flat gradient of a group in
the reduce dtype, and the hooks of its sharded parameters name the parts of it, in their order.

Experts compute the weight gradients of all ranks that share them at once (`sequential_experts.py`).

A forward pass is for all ranks of context parallelism that share its sequences, whose modules with weights compute one
piece after the other (`in_pieces.py`).

The tokens of a forward pass tell which rank it is for. Where the model is not called as a whole, all of them count
as the first rank's, and gradients are summed in another order.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from harness.matrix.case import Case
from harness.matrix.layout import positions_of_ranks
from harness.worker.one_rank.sequential_experts import ExpertsOfRanks, GradientSync
from harness.worker.probes.inputs import Rows, rows_of_pieces
from harness.worker.targets.in_pieces import take_grads, uses_of_weights
from harness.worker.targets.target import StepResult, Target
from harness.worker.tensors.sums import WIDE


class SequentialRanks:
    """A target whose `step` gets the microbatches of all data-parallel ranks of a case, in rank order."""

    def __init__(self, target: Target, case: Case) -> None:
        self.model = target.model
        self._target = target
        self._shards = case.layout.dp_shard
        self._microbatches_per_rank = case.train.accumulation
        self._cp = case.layout.cp
        self._rows = partial(rows_of_pieces, positions_of_ranks(case.layout, case.train.seq_len))
        self._in_pieces = uses_of_weights(target.model)
        self._rank = 0  # the first of those that share the sequences
        self._batches: Sequence[Rows] = ()  # of each rank, or of those that share sequences
        self._sums: dict[nn.Parameter, list[_Sum]] = {}  # one for every reduction of a step
        self._reduced: Counter[nn.Parameter] = Counter()  # how often in this turn
        self._flat = torch.empty(0)  # what FSDP2 has reduced and not yet added to gradients
        self._syncing = GradientSync()
        self._experts = ExpertsOfRanks(self.model, self._syncing, case) if case.layout.ep > 1 else None
        self.model.register_forward_pre_hook(self._follow_inputs, with_kwargs=True)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(self._take_reduced)
        for param in self.model.parameters():
            if isinstance(param, DTensor) and param.requires_grad:
                param.register_post_accumulate_grad_hook(self._sum_over_ranks)

    def step(self, microbatches: Sequence[torch.Tensor], *labels: Sequence[torch.Tensor]) -> StepResult:
        """One step of the target, in which every reduction of FSDP2 returns what it would return on those ranks."""
        ranks = (
            microbatches[at : at + self._microbatches_per_rank]
            for at in range(0, len(microbatches), self._microbatches_per_rank)
        )
        self._batches = [self._rows(torch.cat(tuple(batches)).cpu().numpy()) for batches in ranks]
        self._rank = 0
        self._sums.clear()
        self._reduced.clear()
        with self._syncing, self._experts or nullcontext():
            result = self._target.step(microbatches, *labels)
        if self._flat.numel():
            raise RuntimeError("FSDP2 reduced gradients without calling the hooks of their parameters.")
        return result

    def _follow_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Find out which rank the forward pass is for. The last one of a rank reduces its gradients, as it would."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and leaf.dim() > 0:
                seen = leaf.detach().cpu().long().numpy()
                batch_numbers = [number for number, batch in enumerate(self._batches) if batch.are_in(seen)]
                if len(batch_numbers) == 1:
                    rank = batch_numbers[0] * self._cp
                    if rank > self._rank:
                        self._reduced.clear()
                        self._rank = rank
                    last = self._batches[batch_numbers[0]].last_is_in(seen)
                    self._syncing.apply(last=last)
                    if self._experts is not None:
                        self._experts.begin_forward(rank=rank, last=last)

    def _take_reduced(self, reduced: torch.Tensor) -> None:
        self._flat = reduced.detach().clone()

    @torch.no_grad()
    def _sum_over_ranks(self, param: nn.Parameter) -> None:
        """Add what was reduced to the sum of this reduction over ranks, and write the gradient so far.

        Several reductions of a step add up in the dtype of the parameter.
        """
        grad = param.grad
        if not isinstance(grad, DTensor) or not self._flat.numel():
            return
        local = grad.to_local()
        part, self._flat = self._flat.split([local.numel(), self._flat.numel() - local.numel()])
        sums = self._sums.setdefault(param, [])
        if len(sums) == self._reduced[param]:
            sums.append(_Sum(part.dtype))
        uses = self._in_pieces.get(id(param))  # one gradient for each of the ranks that share the sequences
        rank_grads = take_grads(uses, part.dtype) if uses else [part.view(local.shape)]
        for number, rank_grad in enumerate(rank_grads):
            sums[self._reduced[param]].add(rank_grad, (self._rank + number) // self._shards)
        self._reduced[param] += 1
        first, *others = sums
        local.copy_(first.value)
        for other in others:
            local += other.value.to(local.dtype)


class _Sum:
    """One reduction: what the ranks of every replica add up, rounded to `dtype`; and then the replicas."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._replicas: dict[int, torch.Tensor] = {}

    def add(self, grad: torch.Tensor, replica: int) -> None:
        part = grad.detach().to(self._dtype).to(WIDE.get(self._dtype, self._dtype))
        if replica in self._replicas:
            self._replicas[replica] += part
        else:
            self._replicas[replica] = part.clone()

    @property
    def value(self) -> torch.Tensor:
        first, *others = (total.to(self._dtype) for total in self._replicas.values())
        total = first.to(WIDE.get(self._dtype, self._dtype))
        for other in others:
            total = total + other
        return total.to(self._dtype)
