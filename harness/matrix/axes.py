"""The axes: flat names of everything that can vary in a case, and the field of `Case` behind each.

These are the names that users write in case files, selectors and on the command line. Converts between flat values and
cases.
"""

from __future__ import annotations

import difflib
import functools
import math
import operator
import re
import typing
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from harness.errors import HarnessError
from harness.matrix.case import Case, CaseStruct, Model, ModelShape
from harness.matrix.scope import out_of_scope

# Fields whose name does not say enough outside of their part of a case.
_RENAMED: dict[tuple[str, ...], str] = {
    ("model", "preset"): "model",
    ("checkpointing", "mode"): "checkpointing",
    ("checkpointing", "every"): "checkpoint_every",
}


def _paths() -> Iterator[tuple[str, ...]]:
    """Every field of a case and of its parts, in order."""
    for name, default in zip(Case.__struct_fields__, Case.__struct_defaults__, strict=True):
        if isinstance(default, CaseStruct):
            yield from ((name, field) for field in default.__struct_fields__)
        else:
            yield (name,)


AXES: dict[str, tuple[str, ...]] = {_RENAMED.get(path, path[-1]): path for path in _paths()}
# What each is, in a few words: for comments in case files, options and the schema of editors.
MEANINGS: dict[str, str] = {
    "target": "what trains: reference, torchtitan, torchtitan_0_3, or the module of your own target",
    "model": "preset; every size below overrides it",
    "vocab_size": "tokens of the vocabulary",
    "pad_vocab_to_multiple_of": "add rows to embedding and output layer up to a multiple of this",
    "dim": "features of the residual stream",
    "layers": "blocks",
    "heads": "attention heads",
    "kv_heads": "heads of keys and values",
    "ffn_dim": "hidden features of the feed-forward",
    "bias": "the linears of blocks have a bias; the output layer has none",
    "dp_replicate": "HSDP: replicas of every shard",
    "dp_shard": "FSDP2: ranks that share every parameter",
    "tp": "tensor parallelism: ranks that share every linear",
    "async_tp": "fuse the collectives of TP with matmuls; needs compile",
    "symm_mem": "form of the fused operators of async TP",
    "wait_for_embedding": "compiled blocks get the finished embedding",
    "sequence_parallel": "TP ranks share the positions of the residual stream",
    "loss_parallel": "TP ranks share the logits",
    "reshard_after_forward": "FSDP2 frees gathered weights after forward; by default all but those of the last unit",
    "recipe": "how linears are converted to FP8; bf16 converts none",
    "fp8_all_gather": "FSDP2 gathers weights in float8",
    "precompute_scale": "compute the scales of all gathered weights at once",
    "pad_inner_dim": "pad inner dimensions of matmuls to multiples of 16",
    "output_layer": "convert the output layer too",
    "tp_styles": "float8: TP gathers activations in float8",
    "filter_fqns": "do not convert linears whose name contains one of these",
    "casts": "operands whose cast differs from the recipe: go:e4m3, i_gw:dis, w_gi:ten",
    "checkpointing": "activation checkpointing",
    "checkpoint_every": "selective_layer: every n-th block is checkpointed",
    "compile": "graph executes compiled graphs, inductor generates code",
    "steps": "optimizer steps",
    "global_batch": "sequences per step, over all ranks",
    "seq_len": "tokens of a sequence",
    "dtype": "dtype of parameters and activations; float64 for sharp comparisons",
    "parameter_dtype": "dtype of the parameters that the optimizer updates, where activations are bfloat16",
    "reduce_dtype": "dtype in which FSDP2 sums gradients over ranks",
    "accumulation": "microbatches per optimizer step",
    "reduce_grads": "microbatches after which FSDP2 reduces gradients",
    "max_norm": "clip gradients to this global norm; without it there is no clipping",
    "evaluate": "evaluate the batch of every step first, without gradients and in evaluation mode",
    "ignored_tokens": "labels that the loss ignores: a different number per rank, or half the batch",
    "resume": "save the state mid-run and load it into a new target; resharded: through another layout",
    "lr": "learning rate of AdamW",
    "seed": "seed of weights and data",
    "loss_tolerance": "allowed distance of the loss from BF16, in nats",
}
_VALUES = operator.attrgetter(*(".".join(path) for path in AXES.values()))  # of a case, in the order of the axes
_AXIS_OF_PATH = {path: name for name, path in AXES.items()}


def axis_values(case: Case) -> dict[str, object]:
    """Every axis of a case with its value, in the order of `AXES`. Model sizes are the effective ones, never None."""
    shape = case.model.shape
    values = dict(zip(AXES, _VALUES(case), strict=True))
    return values | {name: getattr(shape, name) for name in ModelShape.__struct_fields__}


def own_axes(case: Case) -> dict[str, object]:
    """The axes of a case that are not at their defaults, in the order of `AXES`: what a case file must say."""
    values, default = axis_values(case), axis_values(Case(model=Model(preset=case.model.preset)))
    preset = case.model.preset != Case().model.preset
    return {
        name: value
        for name, value in values.items()
        if (value is not None and value != default[name]) or (name == "model" and preset)
    }


def case_from_axes(values: Mapping[str, object]) -> Case:
    """The case with these values and defaults elsewhere; the inverse of `axis_values`.

    Drops values that the case ignores (`ignored_axes`). Raises HarnessError for an unknown axis or an invalid value.
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
        raise _invalid_case(error, values) from error


def known_axis(name: str) -> str:
    """The name itself. Raises HarnessError with a suggestion when there is no such axis."""
    if name not in AXES:
        raise HarnessError(f"unknown axis '{name}'.", fix=suggestion(name, AXES))
    return name


def checked_value(name: str, value: object) -> object:
    """The value converted to the type of its axis. Raises HarnessError when no case can have it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise _invalid_value(name, value, "not a finite number")
    try:
        return msgspec.convert(value, type=_type_of(known_axis(name)))
    except msgspec.ValidationError as error:
        raise _invalid_value(name, value, str(error)) from error


def ignored_axes(values: Mapping[str, object]) -> tuple[str, ...]:
    """Names in `values` that have no effect next to the others, such as `pad_inner_dim` with recipe bf16."""
    kept = axis_values(case_from_axes(values))
    return tuple(name for name, value in values.items() if value is not None and kept[name] != _as_tuple(value))


def choices(name: str) -> tuple[object, ...]:
    """Every value that an axis can have; () for numbers and strings."""
    return _literals(_type_of(name))


def axis_type(name: str) -> type[object]:
    """The type of the values of an axis: bool, int, float, str, or tuple for a list of strings."""
    hint = _base_type(_type_of(name))
    if typing.get_origin(hint) is typing.Literal:
        return str
    return typing.cast("type[object]", typing.get_origin(hint) or hint)


def axis_schema(name: str) -> dict[str, typing.Any]:
    """The JSON schema of the values of an axis: type, limits, choices, meaning and default."""
    schema = msgspec.json.schema(_type_of(name))
    if "anyOf" in schema:  # TOML has no null: an axis is left out instead
        schema = next(each for each in schema["anyOf"] if each != {"type": "null"})
    default = axis_values(Case())[name]
    return {**schema, "description": MEANINGS[name], **({} if default is None else {"default": default})}


def suggestion(word: str, known: Iterable[object]) -> str:
    """The `fix` for an unknown word: why it is out of scope, else the closest known ones, or all when none is close."""
    outside = out_of_scope(word)
    if outside is not None:
        return f"leave it out: {outside.text}."
    words = [str(item) for item in known]
    near = difflib.get_close_matches(word, words, n=2, cutoff=0.55)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"use one of {', '.join(words)}."


def shown_value(value: object) -> str:
    """A value of an axis as reports print it: `false`, `wk+wq`, `none` for an empty list."""
    if isinstance(value, tuple | list):
        return "+".join(map(str, value)) or "none"
    return _format_value(value)


def _as_tuple(value: object) -> object:
    return tuple(sorted(set(value))) if isinstance(value, list | tuple) else value


@functools.cache
def _type_of(name: str) -> object:
    owner: typing.Any = Case
    *parents, last = AXES[name]
    for part in parents:
        owner = typing.get_type_hints(owner, include_extras=True)[part]
    return typing.get_type_hints(owner, include_extras=True)[last]


def _base_type(hint: object) -> object:
    """The type hint without `| None` and without its constraints."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        return _base_type(parts[0])
    if type(None) in parts:
        return _base_type(next(part for part in parts if part is not type(None)))
    return hint


def _literals(hint: object) -> tuple[object, ...]:
    hint = _base_type(hint)
    if hint is bool:
        return (True, False)
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def _invalid_case(error: msgspec.ValidationError, values: Mapping[str, object]) -> HarnessError:
    """The error of msgspec, which names `$.float8.recipe`, with the axis and the value that the user wrote."""
    text = str(error)
    place = re.search(r" - at `\$\.?([^`\[]*)", text)
    what = text[: place.start()] if place else text
    name = _AXIS_OF_PATH.get(tuple(place.group(1).split("."))) if place else None
    if name is None:
        return HarnessError(f"{what}.")
    return _invalid_value(name, values[name], what)


def _invalid_value(name: str, value: object, what: str) -> HarnessError:
    fix = suggestion(_format_value(value), map(_format_value, choices(name))) if choices(name) else None
    return HarnessError(f"{name} = {_format_value(value)}: {what}.", fix=fix)


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
