"""How tensor-parallel ranks share the work of a module, and what one rank computes of it that plays them all.

They add up what a linear multiplies over a sharded dim, and the gradients of norms and routers whose sequence is
sharded. One rank that computes such a sum at once rounds it once; ranks round every part of it, and then the sum.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from harness.matrix.case import Case
from harness.matrix.linears import shard_sizes
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.one_rank.recorded import Recorded, Values
from harness.worker.probes.discovery import is_converted
from harness.worker.probes.fsdp_params import ManagedParam
from harness.worker.probes.module_tensors import NORMS
from harness.worker.process.process import PROCESS
from harness.worker.tensors.ranks import STACKED, Cut, Given, along, on_ranks, products, summed, whole

Tensor = torch.Tensor
Part = Callable[[slice], Tensor]  # multiplies a part of what a matmul contracts
_ALIGNED = 16  # what a scaled matmul contracts must be a multiple of it


class FirstMatmul:
    """The first matmul of float8 tensors behind a `restart`, which may be multiplied again in parts.

    It is torchao's, which scales the result behind `_scaled_mm` for some recipes.
    """

    def __init__(self, matmul: "Matmul") -> None:
        """Watch it for the rest of the life of this process."""
        self._multiply: Part | None = None
        name, function, cutting = matmul
        module: Any = import_module(name)
        stock: Callable[..., Tensor] = getattr(module, function)

        def multiply(*args: Any, **options: Any) -> Tensor:
            if self._multiply is None:
                self._multiply = cutting(stock, *args, **options)
            return stock(*args, **options)

        setattr(module, function, multiply)
        PROCESS.keep(f"parts of {function}")

    def restart(self) -> None:
        self._multiply = None

    def in_parts(self, sizes: Sequence[int]) -> Tensor | None:
        """[ranks, m, n], of which each has contracted a part of this size; None if nothing was multiplied."""
        if self._multiply is None:
            return None
        with unobserved():
            return products(self._multiply, sizes)


def of_tensors(a: Tensor, b: Tensor) -> Part:
    """Multiplies a part of a [m, k] @ b [k, n] in high precision, of which a rank has that part alone."""

    def multiply(part: slice) -> Tensor:
        columns = b[part] if b.is_contiguous() else b[part].t().contiguous().t()
        return a[:, part].contiguous() @ columns

    return multiply


def _cutting_tensors(
    stock: Callable[..., Tensor], a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *rest: Any, **options: Any
) -> Part:
    """Operands may be padded with zeros along the contracted dim, and so are those of every rank."""
    return lambda part: stock(_padded(a[:, part]), a_scale, _padded(b[part].t()).t(), b_scale, *rest, **options)


def _padded(rows: Tensor) -> Tensor:
    """Return contiguous float8 rows, padded with zeros to the next size that can be multiplied."""
    padding = -rows.shape[1] % _ALIGNED
    return F.pad(rows.contiguous().view(torch.uint8), (0, padding)).view(rows.dtype)


Matmul = tuple[str, str, Callable[..., Part]]  # torchao's function that multiplies, and what cuts its operands
FLOAT8_MATMUL: Matmul = ("torchao.float8.float8_ops", "addmm_float8_unwrapped", _cutting_tensors)
_OfSequence = nn.RMSNorm | nn.LayerNorm | nn.Linear
_NORM_FORWARDS = {norm.forward for norm in NORMS}
_ACCUMULATED = "unsharded_accumulated_grad"  # of what FSDP2 knows of a parameter: since torch 2.15 a property


class Accumulated:
    """What every rank has of the gradient of a parameter: over all microbatches, before the ranks add theirs up.

    `managed`: what FSDP2 knows of the parameter. It adds microbatches up in the reduce dtype: apart from `grad`, and
    since torch 2.15 in a `grad` that has that dtype from the first one on.
    """

    def __init__(self, param: Tensor, managed: ManagedParam | None) -> None:
        self._param = param
        self._managed = managed
        self._parts = torch.empty(0)
        param.register_post_accumulate_grad_hook(self._sum)

    @property
    def _elsewhere(self) -> Tensor | None:
        return None if self._managed is None else vars(self._managed).get(_ACCUMULATED)

    def add(self, of_ranks: Sequence[Tensor]) -> None:
        """Add the gradients of a microbatch, before autograd accumulates their sum."""
        grad, elsewhere, parts = self._param.grad, self._elsewhere, STACKED.joined(of_ranks)
        if elsewhere is not None:
            self._parts = self._parts.to(elsewhere.dtype) + parts
        else:
            self._parts = parts if grad is None or not grad.any() else self._parts + parts

    @torch.no_grad()
    def _sum(self, param: Tensor) -> None:
        grad, elsewhere = param.grad, self._elsewhere
        assert grad is not None, "it was just accumulated"
        (grad if elsewhere is None else elsewhere).copy_(summed(self._parts))
        if elsewhere is not None:
            grad.zero_()


def of_columns(linear: nn.Linear, ranks: int) -> Callable[[Tensor], Tensor]:
    """Return the forward of a linear in high precision whose outputs are sharded. It gets a `spread` input."""
    rows, outputs = (along(dim, shard_sizes(linear.out_features, ranks)) for dim in (0, -1))
    return lambda given: on_ranks(
        F.linear, outputs, Given(given, STACKED), Given(linear.weight, rows), Given(linear.bias, rows)
    )


def of_rows(linear: nn.Linear, ranks: int) -> Callable[[Tensor], Tensor]:
    """Return the forward of a linear in high precision whose inputs are sharded. It returns the parts: [ranks, ...].

    DTensor gives every rank an equal share of a bias. Every rank gets the whole gradient of it: no sum is rounded.
    """
    inputs, columns = (along(dim, shard_sizes(linear.in_features, ranks)) for dim in (-1, 1))
    shares = Cut(lambda bias: [bias / ranks] * ranks, lambda parts: parts[0])
    return lambda given: on_ranks(
        F.linear, STACKED, Given(given, inputs), Given(linear.weight, columns), Given(linear.bias, shares)
    )


def of_sequence(
    module: _OfSequence, places: Sequence[tuple[slice, ...]], managed: Sequence[ManagedParam]
) -> Callable[[Tensor], Tensor]:
    """The forward of a norm or a router whose ranks have these places of its input, one behind the other along one dim.

    `managed`: the parameters of FSDP2.
    """
    dim = next(dim for dim, (one, other) in enumerate(zip(*places[:2], strict=True)) if one != other)
    pieces, accumulated = along(dim, [place[dim].stop - place[dim].start for place in places]), dict[int, Accumulated]()

    def shared(param: Tensor | None) -> Given:
        if param is None:
            return Given(None, whole(len(places)))
        if id(param) not in accumulated:
            known = (candidate for candidate in managed if candidate._unsharded_param is param)
            accumulated[id(param)] = Accumulated(param, next(known, None))
        return Given(param, whole(len(places)), accumulated[id(param)].add)

    def forward(given: Tensor) -> Tensor:
        weights = (shared(module.weight), shared(getattr(module, "bias", None)))
        return on_ranks(lambda *operands: _applied(module, *operands), pieces, Given(given, pieces), *weights)

    return forward


def _applied(module: _OfSequence, given: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    if isinstance(module, nn.Linear):
        return F.linear(given, weight, bias)
    norm, shape = module, list(module.normalized_shape)
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(given, shape, weight, bias, norm.eps)
    return F.rms_norm(given, shape, weight, norm.eps)


class Ranks:
    """How TP ranks share the work of one module, as its recorded output shows, and what each of them computes of it."""

    def __init__(
        self,
        module: nn.Module,
        output: Recorded | None,
        case: Case,
        scaled: FirstMatmul,
        managed: Sequence[ManagedParam] = (),
    ) -> None:
        self._module = module
        self.looks_up = isinstance(module, nn.Embedding)
        self._case = case
        self._scaled = scaled
        self._operand = torch.empty(0)
        pieces = {} if output is None else {piece.spans: piece for piece in output.pieces}
        parts = None if output is None else output.values.parts
        self.count = len(pieces) if parts is None else len(parts)
        forward = type(module).forward  # a class of the target may compute something else
        converted = is_converted(module)
        self._is_wide = forward is nn.Linear.forward and not converted
        is_known = self._is_wide or converted
        self.by_rows = is_known and parts is not None  # they add up their outputs
        # They add up the gradients of their inputs.
        self.by_columns = is_known and parts is None and len({spans[-1] for spans in pieces}) > 1
        self.stacks_output, self.spreads_input = self._is_wide and self.by_rows, self._is_wide and self.by_columns
        replaced: Any = module
        if self.stacks_output:
            replaced.forward = of_rows(replaced, self.count)
        elif self.spreads_input:
            replaced.forward = of_columns(replaced, self.count)
        elif (self._is_wide or forward in _NORM_FORWARDS) and len({spans[:-1] for spans in pieces}) > 1:
            replaced.forward = of_sequence(replaced, [piece.place for piece in pieces.values()], managed)

    def restart(self, operand: Tensor) -> None:
        """A matmul of the module follows, of which this is the first operand."""
        self._scaled.restart()
        self._operand = operand

    def values(self, matmul: Literal["forward", "dgrad"], computed: Tensor) -> Values:
        """Return the output that was just computed, or the gradient of the input, and what ranks have of a sum."""
        if not (self.by_rows if matmul == "forward" else self.by_columns):
            return Values(computed)
        parts = computed if self._is_wide else self._multiplied(matmul, computed)
        return Values(computed) if parts is None else Values(summed(parts), parts)

    def _multiplied(self, matmul: Literal["forward", "dgrad"], computed: Tensor) -> Tensor | None:
        module: Any = self._module
        sizes, weight, bias = shard_sizes(self._operand.shape[-1], self.count), module.weight, module.bias
        if self._case.float8.traits.multiplies(matmul):
            parts = self._scaled.in_parts(sizes)
        else:
            factor = weight.t() if matmul == "forward" else weight
            parts = products(of_tensors(self._operand.flatten(0, -2), factor), sizes)
        parts = None if parts is None else parts.view(-1, *computed.shape)
        has_shares = parts is not None and bias is not None and matmul == "forward"
        return parts + bias.to(computed.dtype) / self.count if has_shares else parts
