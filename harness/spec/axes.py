"""The flat names of what a case can vary, and where each lives in a `Case`.

Owns the words that users write in case files, selectors and on the command line, and the way between flat values and
cases. It does not know which combinations make sense (`rules.py`) nor how any of this is spelled in a file or an id.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import typing
from collections.abc import Iterable, Mapping

import msgspec

from harness.errors import HarnessError
from harness.spec.case import Case, ModelShape

AXES: dict[str, tuple[str, ...]] = {
    "model": ("model", "preset"),
    "vocab_size": ("model", "vocab_size"),
    "pad_vocab_to_multiple_of": ("model", "pad_vocab_to_multiple_of"),
    "dim": ("model", "dim"),
    "layers": ("model", "layers"),
    "heads": ("model", "heads"),
    "kv_heads": ("model", "kv_heads"),
    "ffn_dim": ("model", "ffn_dim"),
    "dp_replicate": ("layout", "dp_replicate"),
    "dp_shard": ("layout", "dp_shard"),
    "tp": ("layout", "tp"),
    "async_tp": ("layout", "async_tp"),
    "symm_mem": ("layout", "symm_mem"),
    "wait_for_embedding": ("layout", "wait_for_embedding"),
    "sequence_parallel": ("layout", "sequence_parallel"),
    "loss_parallel": ("layout", "loss_parallel"),
    "recipe": ("float8", "recipe"),
    "fp8_all_gather": ("float8", "fp8_all_gather"),
    "precompute_scale": ("float8", "precompute_scale"),
    "pad_inner_dim": ("float8", "pad_inner_dim"),
    "output_layer": ("float8", "output_layer"),
    "tp_styles": ("float8", "tp_styles"),
    "filter_fqns": ("float8", "filter_fqns"),
    "checkpointing": ("checkpointing", "mode"),
    "checkpoint_every": ("checkpointing", "every"),
    "compile": ("compile",),
    "steps": ("train", "steps"),
    "global_batch": ("train", "global_batch"),
    "seq_len": ("train", "seq_len"),
    "dtype": ("train", "dtype"),
    "lr": ("train", "lr"),
    "seed": ("train", "seed"),
    "loss_tolerance": ("checks", "loss_tolerance"),
}
_AXIS_OF_PATH = {path: name for name, path in AXES.items()}


def axis_values(case: Case) -> dict[str, object]:
    """Every axis of a case with its value, in the order of `AXES`. Model sizes are the effective ones, never None."""
    shape = case.model.shape
    return {
        name: getattr(shape, name) if name in ModelShape.__struct_fields__ else _value_at(case, path)
        for name, path in AXES.items()
    }


def case_from_axes(values: Mapping[str, object]) -> Case:
    """The case with these values and defaults elsewhere; the inverse of `axis_values`.

    Values that a case ignores (`ignored_axes`) are dropped. HarnessError on an unknown axis or an impossible value.
    """
    tree: dict[str, typing.Any] = {}
    for name, value in values.items():
        head, *rest = AXES[known_axis(name)]
        if rest:
            tree.setdefault(head, {})[rest[0]] = value
        else:
            tree[head] = value
    try:
        return msgspec.convert(tree, Case)
    except msgspec.ValidationError as error:
        raise _bad_value(error, values) from error


def known_axis(name: str) -> str:
    """The name itself; HarnessError with a suggestion when there is no such axis."""
    if name not in AXES:
        raise HarnessError(f"unknown axis '{name}'.", fix=suggestion(name, AXES))
    return name


def checked_value(name: str, value: object) -> object:
    """The value as a case would hold it, judged on its own; HarnessError when no case can have it on this axis."""
    if isinstance(value, float) and not math.isfinite(value):
        raise _refused(name, value, "not a finite number")
    try:
        return msgspec.convert(value, type=_type_of(known_axis(name)))
    except msgspec.ValidationError as error:
        raise _refused(name, value, str(error)) from error


def ignored_axes(values: Mapping[str, object]) -> tuple[str, ...]:
    """Names in `values` that mean nothing next to the others, such as `pad_inner_dim` with recipe bf16."""
    kept = axis_values(case_from_axes(values))
    return tuple(name for name, value in values.items() if value is not None and kept[name] != _frozen(value))


def choices(name: str) -> tuple[object, ...]:
    """Every value an axis can have, or () when there is no such list (numbers and texts)."""
    return _literals(_type_of(name))


def axis_type(name: str) -> type[object]:
    """The plain type of an axis' values: bool, int, float, str, or tuple for a list of texts."""
    hint = _bare(_type_of(name))
    if typing.get_origin(hint) is typing.Literal:
        return str
    return typing.cast("type[object]", typing.get_origin(hint) or hint)


def suggestion(word: str, known: Iterable[object]) -> str:
    """The `fix` for a misspelt word: the nearest known ones, or all of them when none is near."""
    words = [str(item) for item in known]
    near = difflib.get_close_matches(word, words, n=2, cutoff=0.55)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"use one of {', '.join(words)}."


def _value_at(case: Case, path: tuple[str, ...]) -> object:
    value: object = case
    for part in path:
        value = getattr(value, part)
    return value


def _frozen(value: object) -> object:
    return tuple(sorted(set(value))) if isinstance(value, list | tuple) else value


@functools.cache
def _type_of(name: str) -> object:
    owner: typing.Any = Case
    *parents, last = AXES[name]
    for part in parents:
        owner = typing.get_type_hints(owner, include_extras=True)[part]
    return typing.get_type_hints(owner, include_extras=True)[last]


def _bare(hint: object) -> object:
    """The hint without `| None` and without its limits."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        return _bare(parts[0])
    if type(None) in parts:
        return _bare(next(part for part in parts if part is not type(None)))
    return hint


def _literals(hint: object) -> tuple[object, ...]:
    hint = _bare(hint)
    if hint is bool:
        return (True, False)
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def _bad_value(error: msgspec.ValidationError, values: Mapping[str, object]) -> HarnessError:
    """msgspec names the place as `$.float8.recipe`; say it with the axis and the value the user wrote."""
    text = str(error)
    place = re.search(r" - at `\$\.?([^`\[]*)", text)
    what = text[: place.start()] if place else text
    name = _AXIS_OF_PATH.get(tuple(place.group(1).split("."))) if place else None
    if name is None:
        return HarnessError(f"{what}.")
    return _refused(name, values[name], what)


def _refused(name: str, value: object, what: str) -> HarnessError:
    fix = suggestion(_spelling(value), map(_spelling, choices(name))) if choices(name) else None
    return HarnessError(f"{name} = {_spelling(value)}: {what}.", fix=fix)


def _spelling(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
