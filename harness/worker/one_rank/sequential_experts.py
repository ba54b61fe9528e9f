"""Experts on one rank that trains for several ranks of expert parallelism, one after another.

An expert computes the tokens of all ranks that share it at once. What it returns for a token depends on that token
alone, and so does the gradient of the token; its weight gradient is a sum over all of them, in the order of ranks. So
the passes of single ranks leave it out, and when all ranks of a group are through, the experts run once more on what
all of them were given, and on the gradients of what they returned.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from harness.matrix.case import Case
from harness.matrix.linears import expert_fqns
from harness.worker.process.process import PROCESS, in_backward
from harness.worker.tensors.names import clean_fqn

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
    tp_ranks: Tensor  # that send each row
    gradient: list[Tensor]  # one, when backward is through
    asked: dict[Any, bool]  # of FSDP2's reduction


class ExpertsOfRanks:
    """Within it, every backward pass of the last rank of a group computes the weight gradients of experts of all."""

    def __init__(self, model: nn.Module, syncing: GradientSync, case: Case) -> None:
        self._group = case.layout.ep // case.layout.tp  # data-parallel ranks
        self._tp, self._positions = case.layout.tp, case.train.seq_len
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
            router.register_forward_hook(functools.partial(self._routed, module))
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
        FSDP2 reduces the gradients of that pass in a callback of its own there.
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

    def _tp_ranks(self, module: nn.Module) -> Tensor:
        """Which TP rank sends each row: the one that has the token's part of the sequence."""
        chosen = self._chosen[module]
        tokens = chosen.flatten().argsort(stable=True) // chosen.size(1)
        return tokens % self._positions * self._tp // self._positions

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
            call = _Call(rows.detach(), counts, self._tp_ranks(module), [], dict(self._syncing.asked))
            results.register_hook(lambda gradient: call.gradient.append(gradient.detach()))
            self._calls[self._microbatch][self._experts.index(module)].append(call)

    def _order(self, calls: list[_Call]) -> Tensor:
        """Of the rows of all these calls: by expert, then by the rank that sends them."""
        experts = [torch.arange(len(call.counts)).repeat_interleave(call.counts) for call in calls]
        sources = [call.tp_ranks + at * self._tp for at, call in enumerate(calls)]
        return (torch.cat(experts) * len(calls) * self._tp + torch.cat(sources)).argsort(stable=True)

    def _add_weight_gradients(self) -> None:
        for number, of_experts in enumerate(self._calls):
            for module, calls in zip(self._experts, of_experts, strict=True):
                self._syncing.asked.update(calls[-1].asked)
                self._syncing.apply(last=number == len(self._calls) - 1)
                order = self._order(calls)
                rows = torch.cat([call.rows for call in calls])[order].requires_grad_()
                gradient = torch.cat([call.gradient[0] for call in calls])[order]
                PROCESS.computes_for_all = True
                self._stock(module(rows, torch.stack([call.counts for call in calls]).sum(0)), gradient)
                PROCESS.computes_for_all = False
        self._calls, self._last = [], False
