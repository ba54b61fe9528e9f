"""The replay: one rank repeats every module of a parallel run on the operands that the run recorded.

It trains as the single-rank reference does, compares the tensors before and behind every module
with those that the run recorded, and goes on with the recorded ones. So nothing accumulates from module to module:
attention, residual sums and the loss are repeated from recorded results as well, and so are the sum of gradients over
data-parallel ranks and the optimizer's step.
"""

import math
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn

from harness.matrix.case import Case
from harness.trace.model import ModuleDistance, ModuleTensorKind
from harness.worker.one_rank.module_ranks import FirstMatmul, Ranks
from harness.worker.one_rank.recorded import Key, Recorded, Values, terms_of_sum
from harness.worker.probes.fsdp_params import fsdp_params
from harness.worker.probes.module_tensors import is_mixture, is_recorded, is_wide, uses_input_once
from harness.worker.process.process import PROCESS
from harness.worker.targets.in_pieces import InPieces
from harness.worker.tensors.digests import ordered_digest
from harness.worker.tensors.names import clean_fqn, dtype_name
from harness.worker.tensors.places import local_shard
from harness.worker.tensors.ranks import spread
from harness.worker.tensors.reduction import relative_distance


class Call(NamedTuple):
    """One call of a module: the data-parallel rank whose tokens it is for, and its number among those for it."""

    part: int | None
    number: int


OF_PARAMETER = Call(None, 0)


class Replay:
    """Compares as the single-rank reference trains, and replaces what it computed by what the run had."""

    def __init__(self, recorded: dict[Key, Recorded | None], dp: int, sharing: int) -> None:
        self.sharing = sharing  # data-parallel ranks that share sequences
        self._recorded = recorded
        self._dp = dp
        self._gradient_factor = 0.0  # not known before the first gradient
        self._left = set(recorded)
        self._step = 0
        self._boundaries: list[_ModuleBoundary] = []
        self._spread: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._summed: tuple[str, Recorded] | None = None  # the last module of forward whose outputs ranks add up
        self.stream: torch.Tensor | None = None  # the input of the last norm or block of forward
        self.distances: list[ModuleDistance] = []

    def attach(self, model: nn.Module, case: Case, scaled: FirstMatmul, *, compiled: bool) -> None:
        """Hook every module that eager runs record; of a compiled run what it recorded, where blocks are modules."""
        calls = Counter(key.fqn for key in self._recorded if key[:2] == (1, 0) and key.kind == "output")
        outputs = {key.fqn: recorded for key, recorded in self._recorded.items() if key.kind == "output" and recorded}
        managed, in_pieces = fsdp_params(model), dict[str, InPieces]()
        for name, module in model.named_modules():
            fqn = clean_fqn(name)
            if isinstance(module, InPieces):
                in_pieces[fqn] = module
            if fqn in calls if compiled else is_recorded(module, case):
                ranks = Ranks(module, outputs.get(fqn), case, scaled, () if fqn in in_pieces else managed)
                boundary = _ModuleBoundary(fqn, self, ranks, max(1, calls[fqn]), in_pieces=fqn in in_pieces)
                self._boundaries.append(boundary)
                if fqn in in_pieces and boundary.ranks.by_columns:
                    in_pieces[fqn].register_forward_pre_hook(boundary.before_pieces)
                if not is_mixture(module):
                    module.register_forward_pre_hook(boundary.before)
                module.register_forward_hook(boundary.after)

    def begin_step(self, step: int) -> None:
        self._step = step
        self.stream = None
        self._spread.clear()
        for boundary in self._boundaries:
            boundary.calls = 0

    def spread(self, given: torch.Tensor, ranks: int) -> torch.Tensor:
        """`given` for every rank, once for all linears that read it: a rank sums its own gradients of them first."""
        return self._spread.setdefault((id(given), ranks), (given, spread(given, ranks)))[1]

    @torch.no_grad()
    def replaced(
        self, fqn: str, call: Call, kind: ModuleTensorKind, computed: Values, *, looked_up: bool = False
    ) -> Values:
        """Return the tensor of the run instead of `computed`; the two are compared on the first call.

        `looked_up`: every rank looks up the tokens of its part of the vocabulary, and has zeros of the others.
        """
        key = Key(self._step, call.part, fqn, call.number, kind)
        if key not in self._recorded:
            if not (kind == "grad_input" and self._recorded.get(key._replace(kind="input"), key) is None):
                self._note(key, computed, problem="the run did not record it")
            return computed
        recorded, first = self._recorded[key], key in self._left
        self._left.discard(key)
        if recorded is None:
            return computed
        if kind in ("grad_output", "grad_input"):
            recorded = self._of_mean(recorded, computed.whole)
        if looked_up and recorded.values.parts is not None:
            computed = computed._replace(parts=computed.whole * (recorded.values.parts != 0))
        values = recorded.values
        forms = _form(values.whole), _form(computed.whole)
        alike = forms[0] == forms[1]
        if kind == "output" and values.parts is not None:
            self._summed = fqn, recorded
        if first:
            form = None if alike else f"it is {forms[0]}, the replay's is {forms[1]}"
            self._note(key, computed, recorded, form or recorded.problem)
        return values if alike else computed

    @torch.no_grad()
    def load(self, fqn: str, param: torch.Tensor, step: int) -> None:
        """Write into a parameter what it was in the run after `step`, which is not replayed."""
        key, local = Key(step, None, fqn, 0, "param"), local_shard(param)
        recorded = self._recorded.get(key)
        if recorded is None:
            self._note(key, Values(local), problem="the run did not record it")
        else:
            self._left.discard(key)
            local.copy_(recorded.values.whole)

    def _of_mean(self, recorded: Recorded, computed: torch.Tensor) -> Recorded:
        """Return a recorded gradient as one rank has it, which divides the loss by the number of data-parallel ranks.

        Ranks divide it too, or leave that to FSDP2, which averages gradients of parameters: the first gradient tells.
        Those of a Llama divide by all tokens: `dp` is 1.
        """
        if not self._gradient_factor:
            norms = recorded.values.whole.double().norm().item(), computed.double().norm().item()
            self._gradient_factor = min((1.0, float(self._dp)), key=lambda factor: abs(norms[0] - factor * norms[1]))
        return recorded._replace(values=recorded.values.map(lambda tensor: tensor / self._gradient_factor))

    def finish(self) -> None:
        """Note every tensor that the run recorded and the replay never computed."""
        for key in sorted(self._left, key=str):
            recorded = self._recorded[key]
            if recorded is not None:
                self._note(key, recorded.values, problem="the replay did not compute it")

    def _note(self, key: Key, computed: Values, recorded: Recorded | None = None, problem: str | None = None) -> None:
        off, of_ranks = math.nan, dict[int, float]()
        if recorded is not None and problem is None:
            off, of_ranks = _compared(recorded, computed)
        elif recorded is not None and _form(recorded.values.whole) == _form(computed.whole):  # replicas are unequal
            of_ranks = _compared(recorded, computed)[1]
        terms = None
        if recorded is not None and off != 0 and key.kind == "input" and self._summed is not None:
            terms = terms_of_sum(recorded, computed.whole, *self._summed, self.stream)
        parts = None if recorded is None else recorded.values.parts
        self.distances.append(
            ModuleDistance(
                **key._asdict(),
                dtype=dtype_name(computed.whole.dtype),
                distance=off,
                of_ranks=of_ranks,
                terms=terms,
                spread=0.0 if recorded is None else recorded.spread,
                parts=1 if parts is None else len(parts),
                problem=problem,
                tail=_tail(computed.whole) if off > 0 else 0.0,
            )
        )


def _compared(recorded: Recorded, computed: Values) -> tuple[float, dict[int, float]]:
    """Return the distance of a tensor, or of its worst part, and the distance of each rank's part.

    That of a replica is NaN where its bits are neither those of the one that is compared nor those of the replay.
    """
    found, expected = recorded.values, computed
    whole = relative_distance(found.whole, expected.whole)
    if found.parts is not None and expected.parts is not None and len(found.parts) == len(expected.parts):
        pairs = zip(recorded.pieces, found.parts, expected.parts, strict=True)
        of_pieces = {piece.rank: relative_distance(one, other) for piece, one, other in pairs}
        worst = max(of_pieces.values(), key=lambda distance: math.inf if math.isnan(distance) else distance)
        if worst == 0:
            return whole, {}
    elif found.parts is not None:
        return whole, {}
    else:
        places = {piece.rank: piece.place for piece in recorded.pieces}
        of_pieces = {
            rank: relative_distance(found.whole[place], expected.whole[place]) if whole else 0.0
            for rank, place in places.items()
        }
        worst = whole
    of_others = {
        rank: 0.0 if ordered_digest(expected.whole[piece.place]) == digest else math.nan
        for rank, (piece, digest) in recorded.unequal.items()
    }
    return worst, {rank: of_pieces[of] for rank, of in recorded.holders.items()} | of_others


class _ModuleBoundary:
    """The pre- and post-hooks of one module, which replace computed tensors by those of the run.

    The input of a norm or a block is the residual stream, which has other readers. It is overwritten in place, so that
    they read what the run had as well, and so that gradients are summed in the order in which the run summed them.
    """

    def __init__(self, fqn: str, watching: Replay, ranks: Ranks, calls_per_part: int, *, in_pieces: bool) -> None:
        self.fqn = fqn
        self.watching = watching
        self.ranks = ranks
        self._calls_per_part = calls_per_part
        self._in_pieces = in_pieces
        self.calls = 0  # in this step, those that are complete

    def before_pieces(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Spread all pieces at once: piece by piece, several linears would not read the same tensor."""
        return (self.watching.spread(args[0], self.ranks.count), *args[1:])

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        given = args[0]
        if not is_wide(given) or PROCESS.computes_for_all:
            return None  # tokens
        if not uses_input_once(module):
            self.watching.stream = self.watching.replaced(self.fqn, self.call, "input", Values(given)).whole
            given.data.copy_(self.watching.stream)
            return None
        if self.ranks.by_columns and not self._in_pieces:
            given = self.watching.spread(given, self.ranks.count)
        placed = _ReplaceInput.apply(given, self, self.call)
        self.ranks.restart(placed)
        return (placed, *args[1:])

    def after(self, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        if PROCESS.computes_for_all:
            return output
        replaced: torch.Tensor = _ReplaceOutput.apply(output, self, self.call)
        self.calls += 1
        return replaced

    @property
    def call(self) -> Call:
        """Ranks that share sequences take turns at every call; other ranks follow when all calls of one are through."""
        ranks = self.watching.sharing
        first, rest = divmod(self.calls, self._calls_per_part * ranks)
        number, piece = divmod(rest, ranks)
        return Call(first * ranks + piece, number)


class _ReplaceInput(torch.autograd.Function):
    """Hands on the input of the run in the forward pass, and in the backward pass its gradient, each rank its own."""

    @staticmethod
    def forward(ctx: Any, computed: torch.Tensor, at: _ModuleBoundary, call: Call) -> torch.Tensor:
        ctx.at, ctx.call = at, call
        whole = computed[0] if at.ranks.by_columns else computed
        given = at.watching.replaced(at.fqn, call, "input", Values(whole)).whole
        return (given.expand(computed.shape) if at.ranks.spreads_input else given).clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        at, (grad,) = ctx.at, grads
        grad_input = at.watching.replaced(at.fqn, ctx.call, "grad_input", at.ranks.values("dgrad", grad))
        return (grad_input.stacked(at.ranks.count) if at.ranks.by_columns else grad_input.whole).clone(), None, None


class _ReplaceOutput(torch.autograd.Function):
    """Hands on the output of the run in the forward pass, and its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, computed: torch.Tensor, at: _ModuleBoundary, call: Call) -> torch.Tensor:
        ctx.at, ctx.call = at, call
        values, looked_up = at.ranks.values("forward", computed), at.ranks.looks_up
        return at.watching.replaced(at.fqn, call, "output", values, looked_up=looked_up).whole.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        at = ctx.at
        grad = at.watching.replaced(at.fqn, ctx.call, "grad_output", Values(grads[0])).whole
        at.ranks.restart(grad)
        return (grad.expand(at.ranks.count, *grad.shape) if at.ranks.stacks_output else grad).clone(), None, None


def _tail(tensor: torch.Tensor) -> float:
    squares = tensor.double().square()
    total = squares.sum()
    return float((total - squares.amax(-1).sum()) / total) if total else 0.0


def _form(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
