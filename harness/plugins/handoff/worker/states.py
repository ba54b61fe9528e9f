"""Tensors of torch as states: plain ones, DTensors, torchao's quantized ones; and hand-offs on ranks."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from harness.errors import HarnessError
from harness.plugins.handoff.formats import SUFFIXES
from harness.plugins.handoff.numbers import OF_TORCH, STORAGE
from harness.plugins.handoff.tensors import Held, Part, State
from harness.worker import calls

Tensors = Mapping[str, Any]


def state_of(tensors: Tensors, origin: str) -> State:
    """Return a dict of tensors as a state. HarnessError for one without tensors."""
    found = {name: _held(name, value) for given, each in tensors.items() for name, value in _parts(given, each)}
    if not found:
        raise HarnessError("it has no tensors.", where=origin, fix="give what state_dict() returns.")
    return State(origin, found)


def _parts(name: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what this process has of a tensor: its numbers, where they are, and the shape of the whole.

    A quantized tensor of torchao is two, its data and its scale; what is no tensor is none.
    """
    qdata, scale = getattr(value, "qdata", None), getattr(value, "scale", None)
    if isinstance(value, dict) and value.keys() >= _PART:
        yield name, value
    elif isinstance(qdata, torch.Tensor) and isinstance(scale, torch.Tensor):
        yield from (*_parts(name, qdata), *_parts(name + SUFFIXES[0], scale))
    elif isinstance(value, DTensor):
        from harness.worker.tensors.places import place_of  # which imports torchao

        place = place_of(value)
        yield name, {"local": value.to_local().detach(), "offsets": place.offset, "shape": place.shape}
    elif isinstance(value, torch.Tensor):
        yield name, {"local": value.detach(), "offsets": (0,) * value.ndim, "shape": tuple(value.shape)}


_PART = {"local", "offsets", "shape"}


def _held(name: str, part: Mapping[str, Any]) -> Held:
    dtype, raw = _raw(name, part["local"])
    only = Part(tuple(part["offsets"]), raw, "", memory=part["local"].data_ptr())
    return Held(name, dtype, tuple(part["shape"]), (only,))


def _raw(name: str, value: torch.Tensor) -> tuple[str, Any]:
    """Return the dtype of a tensor and its bits, in the memory that it has wherever that is possible."""
    dtype = OF_TORCH.get(str(value.dtype).removeprefix("torch."))
    if dtype is None:
        fix = f"of these it can be compared: {', '.join(OF_TORCH)}."
        raise HarnessError(f"tensor {name} is {value.dtype}, which is not known.", where="state", fix=fix)
    plain = value.detach().cpu().contiguous()
    flat = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.zeros(0, "u1")
    return dtype, flat.view(STORAGE[dtype]).reshape(tuple(plain.shape))


def hand_off(source: str, exported: str, update: str, load: str) -> dict[str, Any]:
    """Call the functions that these modules have as `build`, and return the states, for every rank alike.

    The source is called once. An update changes it in place, and then it is exported again; what was loaded is too.
    """
    functions = [
        importlib.import_module(module).build if module else None for module in (source, exported, update, load)
    ]
    assert functions[0] is not None
    return states(*functions)


def states(
    source: Callable[[], Tensors] | None,
    export: Callable[[Tensors], Tensors] | None,
    update: Callable[[Tensors], object] | None = None,
    load: Callable[[Tensors], Tensors] | None = None,
) -> dict[str, Any]:
    """Return copies of the source and of its exports, before and after an update, and after they were loaded."""
    assert source is not None
    state = source()
    made = {"source": copied(state)}
    if export is None:
        return made
    first = export(state)
    made["exported"] = copied(first)
    if load is not None:
        made["again"] = copied(export(load(first)))
    if update is not None:
        update(state)
        made["kept"] = copied(first)
        made["updated"], made["after"] = copied(state), copied(export(state))
    return made


def copied(tensors: Tensors) -> dict[str, Any]:
    """Return tensors that nothing changes any more; of DTensors what this rank has."""
    parts = (part for given, tensor in tensors.items() for part in _parts(given, tensor))
    return {name: {**part, "local": part["local"].clone()} for name, part in parts}


def sent(arguments: Any) -> bytes:
    """Return what a rank reads of arguments."""
    return calls.encoded(arguments, "an argument is")


def received(content: bytes) -> Any:
    """Return what a rank returned."""
    return calls.decoded(content)
