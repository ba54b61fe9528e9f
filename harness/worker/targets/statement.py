"""The statement of a target: reads what `expect` of its module returned, and says what is wrong with the answer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from harness.matrix.case import Case
from harness.matrix.layout import MESH_AXES
from harness.matrix.targets import module_of
from harness.trace.counts import MATMULS, SAVED_BYTES, TRAFFIC, Sent, Stated, collective_of
from harness.worker.targets.contract import TargetMisfit
from harness.worker.targets.target import World

_COLLECTIVE = "all_reduce (max) in float32 along tp"


def stated_by(case: Case, world: World) -> tuple[Stated, ...] | None:
    """What the target of a case states of every step of this rank; None where it states nothing.

    Raises TargetMisfit for an answer that is no statement.
    """
    expect = getattr(importlib.import_module(module_of(case.target)), "expect", None)
    if expect is None:
        return None
    found = tuple(_statement(expect(case, world, step), step) for step in range(1, case.train.steps + 1))
    return found if any(stated.topics for stated in found) else None


def _statement(answer: Any, step: int) -> Stated:
    entries = _entries(answer, "expect() returned", "a dict with any of the keys " + ", ".join(_READ))
    for key in entries:
        if key not in _READ:
            raise TargetMisfit(f"expect() states '{key}'.", f"state {MATMULS}, {SAVED_BYTES} or {TRAFFIC}.")
    return Stated(step=step, **{key: _READ[key](value) for key, value in entries.items()})


def _matmuls(given: Any) -> int:
    return _count(given, "the scaled matmuls of a step")


def _saved_bytes(given: Any) -> dict[str, int]:
    entries = _entries(given, f"expect() states {SAVED_BYTES} as", 'bytes by dtype, such as {"float8_e4m3fn": 0}')
    for dtype in entries:
        _require_dtype(dtype, dtype)
    return {dtype: _count(count, f"the bytes of {dtype}") for dtype, count in entries.items()}


def _traffic(given: Any) -> dict[str, Sent]:
    wanted = f'calls and bytes by collective, such as {{"{_COLLECTIVE}": (12, 48)}}'
    entries = _entries(given, f"expect() states {TRAFFIC} as", wanted)
    for words in entries:
        _require_collective(words)
    return {words: _sent(words, value) for words, value in entries.items()}


def _sent(words: str, given: Any) -> Sent:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TargetMisfit(
            f"expect() states {given!r} of '{words}'.",
            "state a pair: how often this rank calls it in the step, and the bytes of all inputs of these calls.",
        )
    calls, payload_bytes = (
        _count(each, f"the {what} of '{words}'") for each, what in zip(given, ("calls", "bytes"), strict=True)
    )
    return Sent(calls=calls, payload_bytes=payload_bytes)


_READ: Mapping[str, Callable[[Any], Any]] = {MATMULS: _matmuls, SAVED_BYTES: _saved_bytes, TRAFFIC: _traffic}


def _require_collective(words: str) -> None:
    found = collective_of(words)
    if found is None:
        raise TargetMisfit(
            f"expect() names a collective '{words}'.",
            f"name kind, reduction, dtype and mesh axis as findings and signatures do: '{_COLLECTIVE}'.",
        )
    _require_dtype(found["dtype"], words)
    if found["axis"] not in ("world", "self") and not set(found["axis"].split("+")) <= set(MESH_AXES):
        raise TargetMisfit(
            f"expect() names an axis '{found['axis']}' in '{words}'.",
            f"the axes are {', '.join(MESH_AXES)}, several joined by '+', 'world' for all ranks of several axes, and "
            "'self' for a group of one.",
        )


def _require_dtype(name: str, where: str) -> None:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise TargetMisfit(f"expect() names a dtype '{name}' in '{where}'.", "name it as torch does: bfloat16, uint8.")


def _entries(given: Any, what: str, wanted: str) -> dict[str, Any]:
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise TargetMisfit(f"{what} {given!r}.", f"return {wanted}; what is not stated is left out.")
    return given


def _count(given: Any, what: str) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise TargetMisfit(f"expect() states {given!r} as {what}.", "state a whole number, with // in place of /.")
    return given
