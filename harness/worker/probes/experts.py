"""Records what becomes of tokens in blocks with experts. See `harness/trace/counts.py`.

A style of expert parallelism exchanges tokens in hooks of the experts' module. Hooks of the probe are before and behind
them, so it sees what a rank sends, what its experts get and return, and what comes back. A target that exchanges them
elsewhere has modules `sent` and `returned` beside its experts, which it calls with these rows.
"""

import functools
import math
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import nn

from harness.matrix.case import Case
from harness.matrix.linears import expert_fqns
from harness.trace.counts import ExpertBias, ExpertCall, ExpertTrace, GroupedMatmuls, Phase, Rows
from harness.worker.dispatch_hooks import matmuls
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.probes.probe import Probe
from harness.worker.process.process import PROCESS, in_backward
from harness.worker.tensors.names import clean_fqn, mark_owned

Tensor = torch.Tensor
_SEED = 7
ALL = slice(None)


class _Block:
    """The calls of one block. Digests are taken at once: nothing of a run is kept."""

    def __init__(self, fqn: str) -> None:
        self.fqn = fqn
        self.step = 0
        self.calls: list[dict[str, Any]] = []
        self._numbers: Counter[tuple[int, Phase]] = Counter()
        self._now: dict[str, Any] = {}
        self._given: Tensor | slice = ALL  # which of the rows that its experts got are of tokens

    @unobserved()
    def routed(self, _: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        phase: Phase = "evaluation" if PROCESS.evaluating else "recompute" if in_backward() else "forward"
        weights, chosen = output[:2]
        self._now = {
            "step": self.step,
            "phase": phase,
            "number": self._numbers[self.step, phase],
            "tokens": digests(args[0]),
            "chosen": chosen.long().contiguous().numpy(force=True).tobytes(),
            "weights": weights.detach().double().contiguous().numpy(force=True).tobytes(),
            "values": {},
            "gradients": {},
        }
        self._numbers[self.step, phase] += 1
        self.calls.append(self._now)

    def sent(self, _: nn.Module, args: tuple[Tensor, Tensor]) -> None:
        self._rows("sent", args[0])
        self._now.setdefault("counts", tuple(args[1].tolist()))

    def arrived(self, _: nn.Module, args: tuple[Tensor, Tensor]) -> None:
        if PROCESS.computes_for_all:
            return
        rows, counts = args
        self._given, own = of_tokens(rows, counts)
        self._rows("arrived", rows, self._given)
        self._now.setdefault("local_counts", own)

    def computed(self, _: nn.Module, __: Any, rows: Tensor) -> None:
        self._rows("computed", rows, self._given)

    def returned(self, _: nn.Module, __: Any, rows: Tensor) -> None:
        self._rows("returned", rows)

    def _rows(self, name: str, rows: Tensor, which: Tensor | slice = ALL) -> None:
        if PROCESS.computes_for_all:
            return
        self._now["values"][name] = digests(rows[which])
        gradients = self._now["gradients"]
        if rows.requires_grad and self._now["phase"] == "forward":
            rows.register_hook(lambda gradient: gradients.update({name: digests(gradient[which])}))


class ExpertProbe(Probe):
    """Watches the router and the experts of every block that has some."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self._blocks: list[_Block] = []
        self._biases: list[ExpertBias] = []
        self._matmuls: Counter[tuple[int, bool, bool]] = Counter()

    def install(self) -> None:
        self.observe(matmuls.grouped_observers, self._multiplied)

    def _multiplied(self, call: matmuls.GroupedMM) -> None:
        if not PROCESS.computes_for_all:
            self._matmuls[self._step, call.is_wgrad, call.scale_a is not None] += 1

    def attach(self, model: nn.Module) -> None:
        modules = {clean_fqn(name): module for name, module in model.named_modules()}
        for fqn in (expert_fqn for expert_fqn in expert_fqns(self._case.model) if expert_fqn in modules):
            block = _Block(fqn.rpartition(".")[0])
            self._blocks.append(block)
            experts = modules[fqn]
            sent, returned = (modules.get(f"{block.fqn}.{name}", experts) for name in ("sent", "returned"))
            modules[f"{block.fqn}.router"].register_forward_hook(block.routed)
            sent.register_forward_pre_hook(block.sent, prepend=True)
            experts.register_forward_pre_hook(block.arrived)
            experts.register_forward_hook(block.computed, prepend=True)
            returned.register_forward_hook(block.returned)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        for block in self._blocks:
            block.step = step

    def after_update(self, model: nn.Module) -> None:
        for name, buffer in model.named_buffers():
            owner, _, own = clean_fqn(name).rpartition(".")
            if own == "expert_bias":
                self._biases.append(ExpertBias(step=self._step, fqn=owner, bias=tuple(buffer.tolist())))

    def result(self) -> ExpertTrace:
        calls = (_call(block.fqn, fields) for block in self._blocks for fields in block.calls)
        grouped = (
            GroupedMatmuls(step=step, wgrad=wgrad, scaled=scaled, times=times)
            for (step, wgrad, scaled), times in sorted(self._matmuls.items())
        )
        return ExpertTrace(calls=tuple(calls), matmuls=tuple(grouped), biases=tuple(self._biases))


def _call(fqn: str, fields: dict[str, Any]) -> ExpertCall:
    values, gradients = (Rows(**fields[kind]) for kind in ("values", "gradients"))
    return ExpertCall(fqn=fqn, **{**fields, "values": values, "gradients": gradients})


@torch.no_grad()
@unobserved()
def of_tokens(rows: Tensor, counts: Tensor) -> tuple[Tensor | slice, tuple[int, ...]]:
    """Return which rows are of tokens, and how many of them each expert has.

    Where kernels ask for it, a trainer pads the groups of experts to a multiple, and what is behind the last, with rows
    of zeros. Groups whose sizes have no common divisor are not padded: a row of zeros is a token's there.
    """
    filled = rows.detach().any(-1)
    if len(rows) == counts.sum() and (filled.all() or math.gcd(*counts.tolist()) == 1):
        return ALL, tuple(counts.tolist())
    groups = [group.nonzero().flatten() for group in filled[: counts.sum()].split(counts.tolist())]
    ends = [int(group[-1]) + 1 if len(group) else 0 for group in groups]
    starts = (counts.cumsum(0) - counts).tolist()
    which = [torch.arange(start, start + end) for start, end in zip(starts, ends, strict=True)]
    return mark_owned(torch.cat(which).to(rows.device)), tuple(ends)


@torch.no_grad()
@unobserved()
def digests(rows: Tensor) -> bytes:
    """Return a digest of the bits of every row of a matrix: int64 each. Rows in another order have other digests."""
    bits = rows.detach().contiguous().view(_INTEGERS[rows.element_size()]).long()
    row_digests: bytes = (bits * _factors(rows.size(-1))).sum(-1).numpy(force=True).tobytes()
    return row_digests


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def _factors(count: int) -> Tensor:
    """Odd numbers of 64 bits, with which sums wrap around."""
    return mark_owned(torch.from_numpy(np.random.Philox(key=_SEED).random_raw(count).astype(np.int64) | 1))
