"""Experts on one rank that trains for several ranks of expert parallelism, one after another.

An expert computes the tokens of all ranks that share it at once. What it returns for a token depends on that token
alone, and so does the gradient of the token; its weight gradient is a sum over all of them, in the order of ranks. So
the passes of single ranks leave it out, and when all ranks of a group are through, the experts run once more on what
all of them were given, and on the gradients of what they returned.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn

from harness.matrix.case import Case
from harness.matrix.linears import expert_fqns
from harness.worker.one_rank.gradient_sync import GradientSync
from harness.worker.probes.probe import in_backward
from harness.worker.probes.sketches import clean_fqn
from harness.worker.training.evaluation import evaluating

Tensor = torch.Tensor


_running: list[nn.Module] = []  # for all ranks of a group


def computes_for_all() -> bool:
    """True while experts run once more, for the weight gradients of several ranks."""
    return bool(_running)


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
        self._calls, self._rank, self._last = [], 0, False

        def backward(*args: Any, **options: Any) -> None:
            self._stock(*args, **options)
            if self._last and not computes_for_all():
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
        if not computes_for_all() and not evaluating():
            for param in module.parameters():
                param.requires_grad_(False)

    def _after(self, module: nn.Module, args: tuple[Tensor, Tensor], results: Tensor) -> None:
        if computes_for_all() or evaluating():
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
                _running.append(module)
                self._stock(module(rows, torch.stack([call.counts for call in calls]).sum(0)), gradient)
                _running.pop()
        self._calls, self._last = [], False
