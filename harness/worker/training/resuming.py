"""Resuming: the state of a target is saved, and loaded into others that are built anew. The last of them trains on.

The whole state is digested before and after, so that it can be compared across layouts, bit for bit. Of a pipeline that
is the state of all stages, of which a rank has some.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from harness.trace.model import Resumed, State
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.probes.discovery import saved_buffers
from harness.worker.targets.target import Resumes, Target
from harness.worker.tensors.digests import ordered_digest
from harness.worker.tensors.names import clean_fqn, dtype_name
from harness.worker.tensors.ownership import optimizers_of
from harness.worker.tensors.places import local_shard, part_at, place_of
from harness.worker.tensors.reduction import with_other_ranks


def hand_over(trained: Target, targets: Sequence[Target], folder: Path, *, step: int) -> Resumed:
    """Save the target trained for `step` steps, load it into the first of `targets`, save that, and so on."""
    states, wrong = [state_of(trained.model)], []
    for number, target in enumerate(targets):
        place = folder / f"checkpoint-{number}"
        cast("Resumes", trained).save(place)
        dist.barrier()
        cast("Resumes", target).load(place)
        states.append(state_of(target.model))
        differing = _differing(*states[-2:], device=next(trained.model.parameters()).device)
        wrong.append(_wrong_here(trained.model, target.model, differing))
        trained = target
    return Resumed(after_step=step, saved=states[0], loaded=tuple(states[1:]), wrong=tuple(wrong))


@unobserved()
def _differing(saved: State, loaded: State, *, device: torch.device) -> tuple[str, ...]:
    """What both have and is not the same on some rank: only this is gathered again, by all ranks."""
    names = sorted(saved)
    differs = torch.tensor([saved[name] != loaded.get(name, saved[name]) for name in names], device=device).int()
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    return tuple(name for name, wrong in zip(names, differs.tolist(), strict=True) if wrong)


@torch.no_grad()
@unobserved()
def _wrong_here(trained: nn.Module, fresh: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Of these names, what this rank holds of the state of `fresh` and is not that part of what `trained` has."""
    saved, loaded = dict(_values(trained)), dict(_values(fresh))
    wholes = with_other_ranks({name: _whole(saved[name]) for name in names if name in saved}) if names else {}
    return tuple(name for name in names if name in loaded and not _has_its_part(wholes[name], loaded[name]))


def _has_its_part(whole: object, loaded: object) -> bool:
    if not (isinstance(whole, torch.Tensor) and isinstance(loaded, torch.Tensor)):
        return repr(whole) == repr(loaded)
    mine = local_shard(loaded)
    expected = whole[part_at(place_of(loaded).offset, mine.shape)]
    return ordered_digest(expected.contiguous()) == ordered_digest(mine.contiguous())


@torch.no_grad()
@unobserved()
def state_of(model: nn.Module) -> State:
    """Parameters and saved buffers of a model, and what its optimizers keep and have for options of each parameter.

    All ranks must call it.
    """
    values = dict(sorted(_values(model), key=lambda pair: pair[0]))
    return dict(sorted(with_other_ranks({name: _written(value) for name, value in values.items()}).items()))


def _values(model: nn.Module) -> Iterator[tuple[str, object]]:
    optimizers = optimizers_of(model)
    yield from saved_buffers(model)
    for name, param in model.named_parameters():
        fqn = clean_fqn(name)
        yield fqn, param
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if any(param is grouped for grouped in group["params"]):
                    yield from ((f"{fqn} {option}", value) for option, value in group.items() if option != "params")
            for kept, value in optimizer.state.get(param, {}).items():
                yield f"{fqn} {kept}", value


def _written(value: object) -> str:
    whole = _whole(value)
    if not isinstance(whole, torch.Tensor):
        return repr(whole)
    return f"{dtype_name(whole.dtype)} {list(whole.shape)} {ordered_digest(whole)}"


def _whole(tensor: object) -> object:
    """The logical tensor, without the subclass that FSDP2 casts; what is none stays."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    local: Any = local_shard(tensor)
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()
