"""One step of a target with its tokens, and one with some of them replaced: what moved for those that stay.

A rank compares what its own modules returned, so nothing is gathered. Every step is of a target that is built anew:
the harness writes the same weights.
"""

import itertools
from collections.abc import Sequence
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
from harness.worker.probes.module_tensors import MODULES, is_mixture, is_wide
from harness.worker.process.process import PROCESS, in_backward
from harness.worker.process_group import join
from harness.worker.program import inject
from harness.worker.targets.contract import TargetMisfit
from harness.worker.targets.data import OUTLIER_SHARDS, batch_slice
from harness.worker.tensors.digests import ordered_digest
from harness.worker.tensors.names import clean_fqn
from harness.worker.tensors.places import local_shard, part_at, place_of
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
    plain = replace(case, train=replace(case.train, steps=1, ignored_tokens="none", resume="none", evaluate=False))
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
    tensor: Tensor


class _Step(NamedTuple):
    seen: list[_Seen]
    gradients: dict[str, Tensor]
    loss: float
    state: dict[str, str]


def _step(case: Case, device: torch.device, relation: Relation | None) -> _Step:
    """Train one step, with the tokens of a relation replaced."""
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
    calls = itertools.count()
    of = "experts" if is_mixture(module) else "scale" if is_converted(module) else "module"

    @torch.no_grad()
    def note(kind: str, call: int, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and is_wide(tensor):
            place = place_of(tensor)
            seen.append(_Seen(fqn, kind, call, (of, place), local_shard(tensor).clone()))

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
    """Return which tokens of this rank stay, and which are replaced: [microbatches, sequences, positions]."""
    rank, layout = dist.get_rank(), case.layout
    pieces = positions_of_ranks(layout, case.train.seq_len)
    positions = torch.tensor(pieces[dp_rank(layout, rank) % len(pieces)])
    begins = _of_rank(case, _begins(case, relation))
    replaced = positions >= begins[..., None]
    stays = ~replaced
    if relation == "later token":  # nothing is asked of sequences whose tokens all stay
        stays &= (begins <= case.train.seq_len)[..., None]
    return stays, replaced


def _moved(case: Case, device: torch.device, before: _Step, relation: Relation) -> Moved:
    stays, replaced = _masks(case, relation)
    if not any(begin <= case.train.seq_len for begin in _begins(case, relation)):
        return Moved(relation=relation, why=f"there is no {relation}")
    after = _step(case, device, relation)
    found = Moved(relation=relation)
    pairs = _pairs(before.seen, after.seen)
    for one, other in pairs:
        microbatch = one.call * len(stays) // (1 + max(each.call for each, _ in pairs if each.fqn == one.fqn))
        of_staying, of_replaced = (_rows(mask[microbatch], one, case) for mask in (stays, replaced))
        if of_staying is None or of_replaced is None:
            continue
        moved_others = not torch.equal(one.tensor[of_replaced], other.tensor[of_replaced])
        found = replace(found, replaced=found.replaced or moved_others)
        if of_staying.any():
            distance = _distance(one.tensor[of_staying], other.tensor[of_staying])
            if one.kind == "output":
                found = replace(found, compared=found.compared + 1)
            if distance and not found.of:
                kind = "between" if one.kind == "input" else one.of[0]
                found = replace(found, first=one.fqn, of=kind, distance=distance)
            if one.fqn == pairs[-1][0].fqn and one.kind == "output":
                found = replace(found, output=distance if not distance < found.output else found.output)
    if relation != "padding":
        return found
    names = sorted(before.gradients)
    by_name = {name: _distance(before.gradients[name], after.gradients[name]) for name in names}
    worst = max(names, key=lambda name: by_name[name] if by_name[name] == by_name[name] else float("inf"))
    return replace(
        found,
        loss=abs(after.loss - before.loss),
        gradients=by_name[worst],
        gradient=worst if by_name[worst] else "",
        state=tuple(name for name, digest in before.state.items() if after.state[name] != digest),
    )


def _pairs(before: Sequence[_Seen], after: Sequence[_Seen]) -> list[tuple[_Seen, _Seen]]:
    """Return what was seen in both steps, in the order of the first."""
    there = {seen[:3]: seen for seen in after}
    return [(seen, there[seen[:3]]) for seen in before if seen[:3] in there]


def _rows(mask: Tensor, seen: _Seen, case: Case) -> Tensor | None:
    """Return the mask of what this rank holds of a tensor; None for one that has other rows than its tokens."""
    tensor, (_, place) = seen.tensor, seen.of
    local = tensor.shape[:-1]
    if place.shape[:-1].count(0) == 0 and torch.Size(place.shape[:-1]).numel() == mask.numel():
        return mask.reshape(place.shape[:-1])[part_at(place.offset[:-1], local)].to(tensor.device)
    tp = case.layout.tp
    if len(local) == 2 and local[0] == len(mask) and local[1] * tp == mask.size(1):  # a part of the sequence
        return mask.chunk(tp, 1)[coordinates(case.layout, dist.get_rank())["tp"]].to(tensor.device)
    return None


def _distance(before: Tensor, after: Tensor) -> float:
    """Return the relative distance; 0 for equal values alone, NaN where one is not finite."""
    if torch.equal(before, after):
        return 0.0
    apart, size = (before.double() - after.double()).norm(), before.double().norm()
    return float(apart / size.clamp(min=1e-300))
