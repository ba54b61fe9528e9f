"""One rank that computes what every tensor-parallel rank computes: each in its own shape, and sums in their order.

TP ranks add up what a linear multiplies over a sharded dim, and the gradients of norms and routers whose sequence is
sharded. One rank that computes such a sum at once rounds it once; ranks round every part of it, and then the sum. So it
computes the parts, as every rank does from its own operands, and adds them up in rank order. What ranks had of a tensor
of a recorded run is put together from their shards.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from harness.matrix.case import Case
from harness.matrix.layout import dp_rank
from harness.matrix.linears import shard_sizes
from harness.trace.model import FLOAT8, ModuleShard, ModuleTensorKind, SumTerms
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.probes.discovery import is_converted
from harness.worker.probes.fsdp_params import ManagedParam
from harness.worker.probes.module_tensors import NORMS
from harness.worker.process.process import PROCESS
from harness.worker.tensors.digests import ordered_digest
from harness.worker.tensors.reduction import spread, summed

EXPLAINED = 0.1  # of a distance at most is left where terms of a sum explain it: below 0.02 in bfloat16


class Key(NamedTuple):
    """One tensor of a run. `part`: the data-parallel rank it belongs to; None for parameters and their gradients."""

    step: int
    part: int | None
    fqn: str
    call: int
    kind: ModuleTensorKind


class Values(NamedTuple):
    """One logical tensor. `parts` [ranks, ...] add up to it; None if it is no sum over TP ranks."""

    whole: torch.Tensor
    parts: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Values":
        return Values(change(self.whole), None if self.parts is None else change(self.parts))

    def stacked(self, ranks: int) -> torch.Tensor:
        """Return the parts; of what is no sum, all of it on the first rank."""
        if self.parts is not None and len(self.parts) == ranks:
            return self.parts
        parts = self.whole.new_zeros(ranks, *self.whole.shape)
        parts[0] = self.whole
        return parts


class Piece(NamedTuple):
    """The place in a logical tensor of what a rank had of it."""

    rank: int
    spans: tuple[tuple[int, int], ...]  # by dim: from, and up to

    @property
    def place(self) -> tuple[slice, ...]:
        return tuple(slice(*span) for span in self.spans)


class Recorded(NamedTuple):
    """One logical tensor as the run had it: `pieces` in the order of ranks. `spread` is that of `ModuleDistance`."""

    values: Values
    pieces: tuple[Piece, ...]
    spread: float
    problem: str | None
    holders: Mapping[int, int]  # by rank: which of `pieces` it holds, by their rank
    unequal: Mapping[int, tuple[Piece, str]]  # by rank: the place and digest of what is not equal to the piece there


def assembled(case: Case, ranks: Sequence[Sequence[ModuleShard]], device: torch.device) -> dict[Key, Recorded | None]:
    """Return the logical tensors of a run, from the shards of all its ranks; None for what was float8 already."""
    shards: dict[Key, dict[int, ModuleShard]] = defaultdict(dict)
    for rank, recorded in enumerate(ranks):
        for shard in recorded:
            part = None if shard.kind in ("grad", "param") else dp_rank(case.layout, rank)
            shards[Key(shard.step, part, shard.fqn, shard.call, shard.kind)][rank] = shard
    return {key: _recorded(by_rank, device) for key, by_rank in shards.items()}


def _recorded(shards: Mapping[int, ModuleShard], device: torch.device) -> Recorded | None:
    first = next(iter(shards.values()))
    if first.dtype == FLOAT8:
        return None
    owned = {rank: shard for rank, shard in shards.items() if shard.data is not None}
    pieces = tuple(Piece(rank, _spans(shard)) for rank, shard in owned.items())
    local = [_local(shard) for shard in owned.values()]
    covered = sum(tensor.numel() for tensor in local)
    if first.summed and all(shard.local_shape == first.shape for shard in owned.values()):
        parts = torch.stack(local)
        values, wanted = Values(summed(parts), parts), parts.numel()
    else:
        values = Values(torch.zeros(first.shape, dtype=getattr(torch, first.dtype)))
        for piece, addend in zip(pieces, local, strict=True):
            values.whole[piece.place] += addend
        wanted = values.whole.numel() * (max(1, round(covered / max(1, values.whole.numel()))) if first.summed else 1)
    holders = _holders(shards)
    norm = values.whole.double().norm().item()
    squares = sum(tensor.double().square().sum().item() for tensor in local)
    return Recorded(
        values.map(lambda tensor: tensor.to(device)),
        pieces,
        math.sqrt(squares) / norm if first.summed and norm else 0.0,
        _problem(tuple(shards.values()), covered, wanted),
        holders,
        {rank: (Piece(rank, _spans(shard)), shard.digest) for rank, shard in shards.items() if rank not in holders},
    )


def _holders(shards: Mapping[int, ModuleShard]) -> Mapping[int, int]:
    owners = {(shard.offset, shard.digest): rank for rank, shard in shards.items() if shard.data is not None}
    return {
        rank: owners[shard.offset, shard.digest] if shard.data is None else rank
        for rank, shard in shards.items()
        if (shard.offset, shard.digest) in owners
    }


def _spans(shard: ModuleShard) -> tuple[tuple[int, int], ...]:
    return tuple((at, at + size) for at, size in zip(shard.offset, shard.local_shape, strict=True))


def _local(shard: ModuleShard) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, shard.dtype)
    flat = torch.frombuffer(bytearray(shard.data), dtype=dtype) if shard.data else torch.empty(0, dtype=dtype)
    return flat.view(shard.local_shape)


def _problem(shards: Sequence[ModuleShard], covered: int, wanted: int) -> str | None:
    replicas: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for shard in shards:
        if not shard.summed:
            replicas[shard.offset].add(shard.digest)
    if any(len(digests) > 1 for digests in replicas.values()):
        return "ranks that hold the same tensor hold different values"
    return None if covered == wanted else f"the ranks hold {covered} of {wanted} elements"


def terms_of_sum(
    given: Recorded, computed: torch.Tensor, fqn: str, output: Recorded, stream: torch.Tensor | None
) -> SumTerms | None:
    """Return what ranks go on with instead of the sum of the outputs of module `fqn`, where this is why `given` is off.

    `given`: what a later module gets, to which the sum is added; `computed`: the same with the sum. `stream`: what it
    is added to, or None.
    """
    parts, weights = output.values.parts, dict[int, tuple[float, ...]]()
    if parts is None or parts[0].shape != computed.shape or given.values.whole.shape != computed.shape:
        return None
    ranks = tuple(piece.rank for piece in output.pieces)
    for piece in given.pieces:
        off = (given.values.whole[piece.place].double() - computed[piece.place].double()).flatten()
        terms = torch.stack([part[piece.place].double().flatten() for part in parts], 1)
        if not (off.isfinite().all() and terms.isfinite().all()):
            return None
        solution = torch.linalg.lstsq(terms, off[:, None]).solution[:, 0]
        if (terms @ solution - off).norm() > EXPLAINED * off.norm():
            return None
        weights[piece.rank] = tuple(round(1 + coefficient, 2) for coefficient in solution.tolist())
    for rank, (piece, digest) in given.unequal.items():
        values = (computed, *(part if stream is None else stream + part for part in parts))
        times = ((1.0,) * len(ranks), *(tuple(float(term_rank == of) for term_rank in ranks) for of in ranks))
        alike = (
            candidate
            for candidate, value in zip(times, values, strict=True)
            if ordered_digest(value[piece.place]) == digest
        )
        weights[rank] = next(alike, ())
    if not all(weights.values()) or all(weight == 1 for times in weights.values() for weight in times):
        return None  # what cannot be told from the bits of a replica, or a sum of other bits
    return SumTerms(fqn=fqn, ranks=ranks, weights=weights)


Tensor = torch.Tensor
_OfSequence = nn.RMSNorm | nn.LayerNorm | nn.Linear
_NORM_FORWARDS = {norm.forward for norm in NORMS}


_ACCUMULATED = "unsharded_accumulated_grad"  # of what FSDP2 knows of a parameter: since torch 2.15 a property


class PartsOfGradient:
    """What every rank has of the gradient of a parameter: over all microbatches, before the ranks add theirs up.

    `managed`: what FSDP2 knows of the parameter. It adds microbatches up in the reduce dtype: apart from `grad`, and
    since torch 2.15 in a `grad` that has that dtype from the first one on.
    """

    def __init__(self, param: Tensor, managed: ManagedParam | None) -> None:
        self._param = param
        self._managed = managed
        self._dtype = None if managed is None or _ACCUMULATED in vars(managed) else managed.reduce_dtype
        self._parts = torch.empty(0)
        self._of_ranks: dict[int, Tensor] = {}  # of this microbatch, by rank
        param.register_post_accumulate_grad_hook(self._sum)

    @property
    def _elsewhere(self) -> Tensor | None:
        return None if self._managed is None else vars(self._managed).get(_ACCUMULATED)

    def of_ranks(self, ranks: int) -> Sequence[Tensor]:
        """Return the parameter as every rank has it: as a leaf where autograd keeps what comes to a leaf unrounded."""
        if self._dtype is not None:
            return [self._leaf(rank, ranks) for rank in range(ranks)]
        return tuple(spread(self._param, ranks, self.add))

    def _leaf(self, rank: int, ranks: int) -> Tensor:
        leaf: Any = self._param.detach().requires_grad_()
        leaf.grad_dtype = self._dtype

        def keep(leaf: Tensor) -> None:
            assert leaf.grad is not None, "it was just accumulated"
            self._of_ranks[rank] = leaf.grad
            if len(self._of_ranks) == ranks:
                self.add(torch.stack([self._of_ranks[rank_number] for rank_number in range(ranks)]))
                self._param.grad = summed(self._parts)
                self._of_ranks.clear()

        leaf.register_post_accumulate_grad_hook(keep)
        return cast("Tensor", leaf)

    def add(self, parts: Tensor) -> None:
        grad, elsewhere = self._param.grad, self._elsewhere
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
    """Return the forward of a linear in high precision whose outputs are sharded. It gets a `Spread` input."""

    def forward(given: Tensor) -> Tensor:
        weights, biases = (_chunks(param, ranks, 0) for param in (linear.weight, linear.bias))
        return torch.cat([F.linear(*operands) for operands in zip(given, weights, biases, strict=True)], dim=-1)

    return forward


def of_rows(linear: nn.Linear, ranks: int) -> Callable[[Tensor], Tensor]:
    """Return the forward of a linear in high precision whose inputs are sharded. It returns the parts: [ranks, ...]."""

    def forward(given: Tensor) -> Tensor:
        inputs, weights = _chunks(given, ranks, -1), _chunks(linear.weight, ranks, 1)
        biases = [None] * ranks if linear.bias is None else _shares_of_bias(linear.bias, ranks)
        return torch.stack([F.linear(*operands) for operands in zip(inputs, weights, biases, strict=True)])

    return forward


def _shares_of_bias(bias: Tensor, ranks: int) -> list[Tensor]:
    """Return what DTensor gives every rank of a bias: an equal share.

    Every rank gets the whole gradient, so one share has it: the sum of all would be rounded before it is divided.
    """
    share = bias / ranks
    if share.requires_grad:
        share.register_hook(lambda gradient: gradient * ranks)
    return [share, *[share.detach()] * (ranks - 1)]


def of_sequence(
    module: _OfSequence, places: Sequence[tuple[slice, ...]], managed: Sequence[ManagedParam]
) -> Callable[[Tensor], Tensor]:
    """The forward of a norm or a router whose ranks have these places of its input, one behind the other along one dim.

    `managed`: the parameters of FSDP2.
    """
    dim = next(dim for dim, one, other in zip(itertools.count(), *places[:2], strict=False) if one != other)

    @functools.cache
    def parts(param: Tensor) -> PartsOfGradient:
        return PartsOfGradient(
            param, next((candidate for candidate in managed if candidate._unsharded_param is param), None)
        )

    def forward(given: Tensor) -> Tensor:
        weights, biases = (
            [None] * len(places) if param is None else parts(param).of_ranks(len(places))
            for param in (module.weight, getattr(module, "bias", None))
        )
        inputs = (given[place[:-1]].contiguous() for place in places)
        return torch.cat(
            [_applied(module, *operands) for operands in zip(inputs, weights, biases, strict=True)], dim=dim
        )

    return forward


def _applied(module: _OfSequence, given: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    if isinstance(module, nn.Linear):
        return F.linear(given, weight, bias)
    norm, shape = module, list(module.normalized_shape)
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(given, shape, weight, bias, norm.eps)
    return F.rms_norm(given, shape, weight, norm.eps)


def _chunks(tensor: Tensor | None, ranks: int, dim: int) -> Sequence[Any]:
    if tensor is None:
        return [None] * ranks
    sizes = shard_sizes(tensor.shape[dim], ranks)
    return [part.contiguous() for part in tensor.split(sizes, dim)]


def products_in_parts(a: Tensor, b: Tensor, ranks: int) -> Tensor:
    """Return what every rank multiplies of a [m, k] @ b [k, n] in high precision, of which it has a part of k."""
    rows = _chunks(b, ranks, 0) if b.is_contiguous() else [chunk.t() for chunk in _chunks(b.t(), ranks, 1)]
    return torch.stack([one @ other for one, other in zip(_chunks(a, ranks, 1), rows, strict=True)])


Cut = Callable[[slice], Tensor]  # multiplies a part of what a matmul contracts


class ScaledProducts:
    """Multiplies the first matmul of float8 tensors behind a `restart` again, as TP ranks do.

    It is torchao's, which scales the result behind `_scaled_mm` for some recipes.
    """

    def __init__(self) -> None:
        self._first: Cut | None = None

    def watch(self, matmul: "Matmul") -> None:
        """For the rest of the life of this process."""
        module: Any = import_module(matmul.module)
        setattr(module, matmul.name, self._watched(getattr(module, matmul.name), matmul.cutting))
        PROCESS.keep(f"parts of {matmul.name}")

    def _watched(self, stock: Callable[..., Tensor], cutting: Callable[..., Cut]) -> Callable[..., Tensor]:
        def multiply(*args: Any, **options: Any) -> Tensor:
            if self._first is None:
                self._first = cutting(stock, *args, **options)
            return stock(*args, **options)

        return multiply

    def restart(self) -> None:
        self._first = None

    def in_parts(self, k: int, ranks: int) -> Tensor | None:
        """[ranks, m, n], of which each has contracted its part of `k`; None if nothing was multiplied."""
        if self._first is None:
            return None
        with unobserved():
            ends = itertools.accumulate(shard_sizes(k, ranks), initial=0)
            return torch.stack([self._first(slice(*part)) for part in itertools.pairwise(ends)])


def _cutting_tensors(
    stock: Callable[..., Tensor], a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *rest: Any, **options: Any
) -> Cut:
    """Operands may be padded with zeros along the contracted dim, and so are those of every rank."""
    return lambda part: stock(_padded(a[:, part]), a_scale, _padded(b[part].t()).t(), b_scale, *rest, **options)


class Matmul(NamedTuple):
    """The function of torchao that multiplies the operands of a linear."""

    module: str
    name: str
    cutting: Callable[..., Cut]


FLOAT8_MATMUL = Matmul("torchao.float8.float8_ops", "addmm_float8_unwrapped", _cutting_tensors)


_ALIGNED = 16  # what a scaled matmul contracts must be a multiple of it


def _padded(rows: Tensor) -> Tensor:
    """Return contiguous float8 rows, padded with zeros to the next size that can be multiplied."""
    padding = -rows.shape[1] % _ALIGNED
    return F.pad(rows.contiguous().view(torch.uint8), (0, padding)).view(rows.dtype)


class Ranks:
    """How TP ranks share the work of one module, as its recorded output shows, and what each of them computes of it."""

    def __init__(
        self,
        module: nn.Module,
        output: Recorded | None,
        case: Case,
        products: ScaledProducts,
        managed: Sequence[ManagedParam] = (),
    ) -> None:
        self._module = module
        self._case = case
        self._products = products
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
        replaced: Any = module
        if self._is_wide and self.by_rows:
            replaced.forward = of_rows(replaced, self.count)
        elif self._is_wide and self.by_columns:
            replaced.forward = of_columns(replaced, self.count)
        elif (self._is_wide or forward in _NORM_FORWARDS) and len({spans[:-1] for spans in pieces}) > 1:
            replaced.forward = of_sequence(replaced, [piece.place for piece in pieces.values()], managed)

    @property
    def spreads_input(self) -> bool:
        return self.by_columns and self._is_wide

    @property
    def stacks_output(self) -> bool:
        return self.by_rows and self._is_wide

    @property
    def looks_up(self) -> bool:
        return isinstance(self._module, nn.Embedding)

    def restart(self, operand: torch.Tensor) -> None:
        """A matmul of the module follows, of which this is the first operand."""
        self._products.restart()
        self._operand = operand

    def output_parts(self, whole: torch.Tensor) -> torch.Tensor | None:
        """Return the parts of the output that was just computed; None if it is no sum."""
        parts, bias = self._in_parts("forward", whole) if self.by_rows else None, getattr(self._module, "bias", None)
        return parts if parts is None or bias is None else parts + bias.to(whole.dtype) / self.count

    def gradient_parts(self, whole: torch.Tensor) -> torch.Tensor | None:
        """Return those of the gradient of the input."""
        return self._in_parts("dgrad", whole) if self.by_columns else None

    def _in_parts(self, matmul: Literal["forward", "dgrad"], whole: torch.Tensor) -> torch.Tensor | None:
        if self._case.float8.traits.multiplies(matmul):
            parts = self._products.in_parts(self._operand.shape[-1], self.count)
        else:
            weight: Any = self._module.weight
            factor = weight.t() if matmul == "forward" else weight
            parts = products_in_parts(self._operand.flatten(0, -2), factor, self.count)
        return None if parts is None else parts.view(-1, *whole.shape)
