"""One rank that plays the data-parallel ranks of a case, one after another, and sums gradients in their order.

FSDP2 on one rank would add up the gradients of all microbatches in the order in which it meets them. Ranks first
accumulate those of their own, then sum over shards, then over replicas, and round each of these sums to the reduce
dtype. Repeating that makes the single-rank reference equal to the bit, with any number of microbatches.

FSDP2's public hooks show what it reduced: `set_all_reduce_hook` hands over the flat gradient of a group in
the reduce dtype, and the hooks of its sharded parameters name the parts of it, in their order.

An expert computes the tokens of all ranks that share it at once. What it returns for a token depends on that token
alone, and so does the gradient of the token; its weight gradient is a sum over all of them, in the order of ranks. So
the passes of single ranks leave it out, and when all ranks of a group are through, the experts run once more on what
all of them were given, and on the gradients of what they returned.

The tokens of a forward pass tell which rank it is for. Where the model is not called as a whole, all of them count
as the first rank's, and gradients are summed in another order.
"""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from harness.matrix.case import Case
from harness.matrix.dims.dimension import Played
from harness.matrix.linears import expert_fqns
from harness.worker.probes.discovery import Rows, rows_of_pieces
from harness.worker.probes.experts import ALL, of_tokens
from harness.worker.process.process import PROCESS, in_backward
from harness.worker.targets.in_pieces import take_grads, uses_of_weights
from harness.worker.targets.reference.experts import padded_groups
from harness.worker.targets.target import StepResult, Target
from harness.worker.tensors.names import clean_fqn
from harness.worker.tensors.ranks import Sum

Tensor = torch.Tensor


class GradientSync:
    """Whether a backward pass reduces gradients: as the target asks, and always the last one of a rank.

    While it is entered, it notes what the target asks of `FSDPModule.set_requires_gradient_sync`.
    """

    def __init__(self) -> None:
        self.asked: dict[tuple[FSDPModule, bool], bool] = {}
        self._stock = FSDPModule.set_requires_gradient_sync

    def __enter__(self) -> None:
        stock, asked = self._stock, self.asked

        def noted(module: FSDPModule, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
            asked[module, recurse] = requires_gradient_sync
            stock(module, requires_gradient_sync, recurse=recurse)

        patched: Any = FSDPModule
        patched.set_requires_gradient_sync = noted

    def __exit__(self, *_: object) -> None:
        patched: Any = FSDPModule
        patched.set_requires_gradient_sync = self._stock

    def apply(self, *, last: bool) -> None:
        """Reduce in the next backward pass if it is the `last` one of a rank, otherwise as the target asked."""
        for (module, recurse), sync in self.asked.items():
            self._stock(module, sync or last, recurse=recurse)


class _Call(NamedTuple):
    """What experts were called with for one rank: rows by expert, and their numbers; the gradient of the results."""

    rows: Tensor
    counts: Tensor
    multiple: int  # of which its groups are padded to one; 0: they are not
    senders: Tensor  # of each row: the ranks that have parts of the sequence between matmuls
    gradient: list[Tensor]  # one, when backward is through
    asked: dict[Any, bool]  # of FSDP2's reduction


class _Experts:
    """Within it, every backward pass of the last rank of a group computes the weight gradients of experts of all."""

    def __init__(self, model: nn.Module, syncing: GradientSync, case: Case, plays: Played) -> None:
        self._group = plays.sharing_experts
        self._senders, self._positions = plays.products, case.train.seq_len
        self._syncing = syncing
        fqns = expert_fqns(case.model)
        modules = {clean_fqn(name): module for name, module in model.named_modules()}
        self._experts = [modules[fqn] for fqn in fqns]
        self._chosen: dict[nn.Module, Tensor] = {}  # by the last call of the router
        self._calls: list[list[list[_Call]]] = []  # by microbatch of a rank, experts and rank of the group
        self._microbatch = 0
        self._rank, self._last = 0, False
        self._stock = torch.autograd.backward
        for fqn, module in zip(fqns, self._experts, strict=True):
            router = modules[f"{fqn.rpartition('.')[0]}.router"]
            router.register_forward_hook(partial(self._routed, module))
            module.register_forward_pre_hook(self._before)
            module.register_forward_hook(self._after)

    def begin_forward(self, *, rank: int, last: bool) -> None:
        """A forward pass of the model for a rank follows, the `last` of its step or not."""
        place = rank % self._group
        self._microbatch = self._microbatch + 1 if rank == self._rank and self._calls else 0
        self._rank, self._last = rank, last and place == self._group - 1
        if place == 0:
            self._calls.append([[] for _ in self._experts])

    def __enter__(self) -> None:
        """Replace `torch.autograd.backward` by one that goes on with the experts when it is through.

        Their gradients must be there when a target reads gradients, to clip them, right behind its last backward pass,
        so a hook of the optimizer's step comes too late. What runs at the end of a pass, inside of it, comes too early:
        FSDP2 reduces the gradients of that pass in its own callback there.
        """
        self._calls, self._rank, self._last = [], 0, False

        def backward(*args: Any, **options: Any) -> None:
            self._stock(*args, **options)
            if self._last and not PROCESS.computes_for_all:
                self._add_weight_gradients()

        torch.autograd.backward = backward

    def __exit__(self, *_: object) -> None:
        torch.autograd.backward = self._stock

    def _routed(self, experts: nn.Module, _: nn.Module, __: Any, output: tuple[Tensor, Tensor]) -> None:
        self._chosen[experts] = output[1]

    def _senders_of(self, module: nn.Module) -> Tensor:
        """Return which rank sends each row: the one that has the token's part of the sequence."""
        chosen = self._chosen[module]
        tokens = chosen.flatten().argsort(stable=True) // chosen.size(1)
        return tokens % self._positions * self._senders // self._positions

    def _before(self, module: nn.Module, args: tuple[Tensor, Tensor]) -> None:
        if not PROCESS.computes_for_all and not PROCESS.evaluating:
            for param in module.parameters():
                param.requires_grad_(False)

    def _after(self, module: nn.Module, args: tuple[Tensor, Tensor], results: Tensor) -> None:
        if PROCESS.computes_for_all or PROCESS.evaluating:
            return
        for param in module.parameters():
            param.requires_grad_(True)
        if results.requires_grad and not in_backward():
            rows, counts = args
            which, own = of_tokens(rows, counts)
            call = _Call(
                rows.detach()[which],
                counts.new_tensor(own),
                0 if which is ALL else math.gcd(*counts.tolist()),
                self._senders_of(module),
                [],
                dict(self._syncing.asked),
            )
            results.register_hook(lambda gradient: call.gradient.append(gradient.detach()[which]))
            self._calls[self._microbatch][self._experts.index(module)].append(call)

    def _order(self, calls: list[_Call]) -> Tensor:
        """Of the rows of all these calls: by expert, then by the rank that sends them."""
        experts = [torch.arange(len(call.counts)).repeat_interleave(call.counts) for call in calls]
        sources = [call.senders + at * self._senders for at, call in enumerate(calls)]
        return (torch.cat(experts) * len(calls) * self._senders + torch.cat(sources)).argsort(stable=True)

    def _add_weight_gradients(self) -> None:
        for number, of_experts in enumerate(self._calls):
            for module, calls in zip(self._experts, of_experts, strict=True):
                self._syncing.asked.update(calls[-1].asked)
                self._syncing.apply(last=number == len(self._calls) - 1)
                order = self._order(calls)
                rows = torch.cat([call.rows for call in calls])[order]
                gradient = torch.cat([call.gradient[0] for call in calls])[order]
                counts = torch.stack([call.counts for call in calls]).sum(0)
                if multiple := math.gcd(*(call.multiple for call in calls)):
                    places, ends = padded_groups(counts, multiple)
                    counts = ends.diff(prepend=ends.new_zeros(1))
                    rows, gradient = (
                        given.new_zeros(int(ends[-1]), given.size(1)).index_copy(0, places, given)
                        for given in (rows, gradient)
                    )
                PROCESS.computes_for_all = True
                self._stock(module(rows.requires_grad_(), counts), gradient)
                PROCESS.computes_for_all = False
        self._calls, self._last = [], False


class PlayedRanks:
    """A target whose `step` gets the microbatches of all data-parallel ranks of a case, in rank order."""

    def __init__(self, target: Target, case: Case, plays: Played) -> None:
        self.model = target.model
        self._target = target
        self._shards = plays.shards
        self._microbatches_per_rank = case.train.accumulation
        self._sharing = len(plays.positions)
        self._rows = partial(rows_of_pieces, plays.positions)
        self._in_pieces = uses_of_weights(target.model)
        self._rank = 0  # the first of those that share the sequences
        self._batches: Sequence[Rows] = ()  # of each rank, or of those that share sequences
        self._sums: dict[nn.Parameter, list[Sum]] = {}  # one for every reduction of a step
        self._reduced: Counter[nn.Parameter] = Counter()  # how often in this turn
        self._flat = torch.empty(0)  # what FSDP2 has reduced and not yet added to gradients
        self._syncing = GradientSync()
        at_once = case.model.experts and plays.sharing_experts * plays.products > 1
        self._experts = _Experts(self.model, self._syncing, case, plays) if at_once else None
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
                    rank = batch_numbers[0] * self._sharing
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
            sums.append(Sum(part.dtype))
        uses = self._in_pieces.get(id(param))  # one gradient for each of the ranks that share the sequences
        rank_grads = take_grads(uses, part.dtype) if uses else [part.view(local.shape)]
        for number, rank_grad in enumerate(rank_grads):
            sums[self._reduced[param]].add(rank_grad, (self._rank + number) // self._shards)
        self._reduced[param] += 1
        first, *others = sums
        local.copy_(first.value)
        for other in others:
            local += other.value.to(local.dtype)
