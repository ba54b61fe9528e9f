"""One step of a target with its tokens, and one with some of them replaced: what moved for those that stay.

A rank compares what its own modules returned, so nothing is gathered. Every step is of a target that is built anew:
the harness writes the same weights.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from harness.engine.program import RankContext
from harness.matrix.case import Case
from harness.matrix.layout import batch_of, coordinates, dp_rank, positions_of_ranks
from harness.plugins.independence.relations import RELATIONS, Moved, Relation
from harness.request import RunRequest
from harness.worker.probes.discovery import is_converted, saved_buffers
from harness.worker.process.process import PROCESS, in_backward
from harness.worker.process_group import join
from harness.worker.program import inject
from harness.worker.targets.contract import TargetMisfit
from harness.worker.targets.data import OUTLIER_SHARDS, batch_slice
from harness.worker.tensors.digests import ordered_digest
from harness.worker.tensors.names import clean_fqn
from harness.worker.tensors.places import Place, local_shard, part_at, place_of
from harness.worker.training.train import Prepared, prepare
from harness.worker.virtual import device as virtual_device

Tensor = torch.Tensor
_PARTS = 4  # of a sequence, at whose borders later tokens begin: twice the ranks of context parallelism, if more


def rank_main(context: RankContext) -> bytes:
    request = msgspec.msgpack.decode(context.payload, type=RunRequest)
    torch.set_num_threads(1)
    PROCESS.phase.report = context.report_phase
    virtual_device.install(request.backend, device=request.device, arithmetic=request.arithmetic)
    device = join(context, request.backend)
    for patch in request.injections:
        inject(patch)
    return msgspec.msgpack.encode(relations_of(request.case, device))


def relations_of(case: Case, device: torch.device) -> tuple[Moved, ...]:
    """Return what this rank found of every relation of a case."""
    every = replace(case.train, steps=1, ignored_tokens="none", packing="none", resume="none", evaluate=False)
    plain = replace(case, train=every)
    padded = replace(plain, train=replace(plain.train, ignored_tokens="unequal"))
    before = _step(plain, device, None)
    others = tuple(_moved(plain, device, before, relation) for relation in RELATIONS if relation != "padding")
    try:
        return (*others, _moved(padded, device, _step(padded, device, None), "padding"))
    except TargetMisfit as misfit:
        return (*others, Moved(relation="padding", why=str(misfit)))


class _Seen(NamedTuple):
    """What a module got or returned: `of` says what kind of module it is."""

    fqn: str
    kind: str
    call: int
    of: Any
    place: Place
    tensor: Tensor


class _Step(NamedTuple):
    seen: list[_Seen]
    gradients: dict[str, Tensor]
    loss: float
    state: dict[str, str]


def _step(case: Case, device: torch.device, relation: Relation | None) -> _Step:
    """Train one step, with the tokens of a relation replaced."""
    from harness.worker.probes.module_tensors import MODULES, is_mixture

    PROCESS.phase.begin(f"{relation or 'its own tokens'}")
    prepared = prepare(case, device)
    model = prepared.target.model
    if relation is not None:
        prepared = prepared._replace(tokens=_replaced(prepared, case, relation))
    seen: list[_Seen] = []
    gradients: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, MODULES) or is_mixture(module):
            _watch(clean_fqn(name), module, seen)

    def keep(*_: object) -> None:
        if not gradients:
            named = ((clean_fqn(name), param.grad) for name, param in model.named_parameters())
            gradients.update({fqn: local_shard(grad).clone() for fqn, grad in named if grad is not None})

    hook = register_optimizer_step_pre_hook(keep)
    loss, _ = prepared.target.step(*prepared.batches(1))
    hook.remove()
    state = {fqn: ordered_digest(local_shard(buffer)) for fqn, buffer in saved_buffers(model)}
    return _Step(seen, gradients, float(loss), state)


def _watch(fqn: str, module: nn.Module, seen: list[_Seen]) -> None:
    from harness.worker.probes.module_tensors import is_mixture, is_wide

    calls = itertools.count()
    of = "experts" if is_mixture(module) else "scale" if is_converted(module) else "module"

    @torch.no_grad()
    def note(kind: str, call: int, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and is_wide(tensor):
            seen.append(_Seen(fqn, kind, call, of, place_of(tensor), local_shard(tensor).clone()))

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if not in_backward() and not PROCESS.evaluating:
            call = next(calls)
            note("input", call, args[0] if args else None)
            note("output", call, output)

    module.register_forward_hook(after)


def _begins(case: Case, relation: Relation) -> list[int]:
    """Return from which token on every sequence of the global batch is replaced; behind its end: none."""
    train, size = case.train, case.microbatch
    none, parts = train.seq_len + 1, max(_PARTS, 2 * case.layout.cp, case.layout.tp)
    begins = []
    for sequence in range(train.global_batch):
        number, row = divmod(sequence, size)
        border = train.seq_len * (1 + number % (parts - 1)) // parts
        choices: dict[Relation, int] = {
            "later token": none if row else border,  # of one sequence: other relations are about the others
            "other sequence": 0 if row % 2 else none,
            "other microbatch": 0 if number % 2 else none,
            "padding": none - train.ignored_labels(sequence),
        }
        begins.append(choices[relation])
    return begins


def _of_rank(case: Case, values: Sequence[int]) -> Tensor:
    """Return the values of the sequences of this rank: [microbatches, sequences of one]."""
    mine = values[batch_slice(case, batch_of(case.layout, dist.get_rank()))]
    return torch.tensor(mine).view(-1, case.microbatch)


def _replaced(prepared: Prepared, case: Case, relation: Relation) -> Tensor:
    """Return the tokens with other ones where the relation replaces them: those whose embeddings have an outlier.

    So an amax that covers them is another one (`make_weight`).
    """
    tokens = prepared.tokens
    begins = _of_rank(case, _begins(case, relation)).to(tokens.device)
    places = torch.arange(tokens.size(-1), device=tokens.device)
    outliers = (2 * (places % OUTLIER_SHARDS) + 1) * case.model.vocab_size // (2 * OUTLIER_SHARDS)
    return torch.where(places >= begins[None, ..., None], outliers, tokens)


def _masks(case: Case, relation: Relation) -> tuple[Tensor, Tensor]:
    """Return which tokens of this rank stay, and which are replaced: [sequences, positions]."""
    rank, layout = dist.get_rank(), case.layout
    pieces = positions_of_ranks(layout, case.train.seq_len)
    positions = torch.tensor(pieces[dp_rank(layout, rank) % len(pieces)])
    begins = _of_rank(case, _begins(case, relation)).flatten()[:, None]
    stays = positions < begins
    if relation == "later token":  # nothing is asked of sequences whose tokens all stay
        stays &= begins <= case.train.seq_len
    return stays, positions >= begins


def _moved(case: Case, device: torch.device, before: _Step, relation: Relation) -> Moved:
    if all(begin > case.train.seq_len for begin in _begins(case, relation)):
        return Moved(relation=relation, why=f"there is no {relation}")
    after = _step(case, device, relation)
    found = Moved(relation=relation)
    compared = list(_compared(case, relation, _pairs(before.seen, after.seen)))
    for one, stayed, replaced in compared:
        found = replace(found, replaced=found.replaced or replaced != 0)
        if stayed is None:
            continue
        found = replace(found, compared=found.compared + (one.kind == "output"))
        if stayed and not found.of:
            kind = "between" if one.kind == "input" else one.of
            found = replace(found, first=one.fqn, of=kind, distance=stayed)
        if one.fqn == compared[-1][0].fqn and one.kind == "output":
            both = torch.tensor([found.output, stayed], dtype=torch.float64)
            found = replace(found, output=both.max().item())  # NaN stays
    return _with_step(found, before, after) if relation == "padding" else found


def _with_step(found: Moved, before: _Step, after: _Step) -> Moved:
    """Add what a whole step shows: loss, gradients, and the state that it leaves."""
    by_name = {name: _distance(grad, after.gradients[name]) for name, grad in before.gradients.items()}
    worst = max(by_name, key=lambda name: by_name[name] if by_name[name] == by_name[name] else float("inf"))
    return replace(
        found,
        loss=abs(after.loss - before.loss),
        gradients=by_name[worst],
        gradient=worst if by_name[worst] else "",
        state=tuple(name for name, digest in before.state.items() if after.state[name] != digest),
    )


def _compared(
    case: Case, relation: Relation, pairs: Sequence[tuple[_Seen, _Seen]]
) -> Iterator[tuple[_Seen, float | None, float]]:
    """Yield what modules got and returned: how far tokens that stay moved, None without any, and those replaced.

    A target may cut its batch further: the calls of a module have the sequences of the rank one behind the other. One
    that is called for other rows than these is left out.
    """
    masks = _masks(case, relation)
    counts: Counter[tuple[str, str]] = Counter()
    for one, _ in pairs:
        counts[one.fqn, one.kind] += _sequences(one, case)
    begun: Counter[tuple[str, str]] = Counter()
    for one, other in pairs:
        key, at = (one.fqn, one.kind), begun[one.fqn, one.kind]
        begun[key] += _sequences(one, case)
        if counts[key] == len(masks[0]):
            staying, replaced = (_local(mask[at : begun[key]], one, case) for mask in masks)
            moved = [_distance(one.tensor[rows], other.tensor[rows]) for rows in (staying, replaced)]
            yield one, moved[0] if staying.any() else None, moved[1]


def _sequences(seen: _Seen, case: Case) -> int:
    """Return of how many sequences a module got or returned the part of this rank."""
    return math.prod(_leading(seen, case)) * case.layout.cp // case.train.seq_len


def _leading(seen: _Seen, case: Case) -> tuple[int, ...]:
    """Return the dims of the logical tensor but the last; a plain one between blocks may be a part of the sequence."""
    dims, positions = tuple(seen.place.shape[:-1]), case.train.seq_len // case.layout.cp
    part = len(dims) == 2 and dims == seen.tensor.shape[:-1] and dims[1] * case.layout.tp == positions
    return (dims[0], positions) if part else dims


def _local(mask: Tensor, seen: _Seen, case: Case) -> Tensor:
    """Return a mask of whole sequences as that of what this rank holds of a tensor."""
    dims, held = _leading(seen, case), tuple(seen.tensor.shape[:-1])
    if dims == mask.shape[::-1] and dims != mask.shape:
        mask = mask.T  # sequence first
    mask = mask.reshape(dims).to(seen.tensor.device)
    if tuple(seen.place.shape[:-1]) == dims:
        return mask[part_at(seen.place.offset[:-1], held)]
    return mask.chunk(case.layout.tp, 1)[coordinates(case.layout, dist.get_rank())["tp"]]


def _pairs(before: Sequence[_Seen], after: Sequence[_Seen]) -> list[tuple[_Seen, _Seen]]:
    """Return what was seen in both steps, in the order of the first."""
    there = {seen[:3]: seen for seen in after}
    return [(seen, there[seen[:3]]) for seen in before if seen[:3] in there]


def _distance(before: Tensor, after: Tensor) -> float:
    """Return the relative distance; 0 for equal values alone, NaN where one is not finite."""
    if torch.equal(before, after):
        return 0.0
    apart, size = (before.double() - after.double()).norm(), before.double().norm()
    return float(apart / size.clamp(min=1e-300))
