"""The axes: flat names of everything that can vary in a case, the field of `Case` behind each, and what no case has.

These are the names that users write in case files, selectors and on the command line. What is declared of each is on
its field. Converts between flat values and cases.
"""

import difflib
import functools
import math
import operator
import re
import typing
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from harness.errors import HarnessError
from harness.matrix.axis import Axis, Changes
from harness.matrix.case import Case, Model, ModelShape
from harness.matrix.model import CaseStruct
from harness.matrix.synonyms import meanings


class OutOfScope(typing.NamedTuple):
    """What people know from FP8 training and no case has. `words`: how they write it in ids, axes and values."""

    name: str
    reason: str
    words: str = ""

    @property
    def text(self) -> str:
        return f"{self.name} is out of scope: {self.reason}"


# The one list; what asks for it in configurations of other tools is in `harness/plugins/bugs/spellings.toml`.
SCOPE = (
    OutOfScope("a mixture of experts", "the built-in Llama has one: write experts, top_k and ep in a case"),
    OutOfScope("pipeline parallelism", "the built-in Llama has it: write pp, schedule and accumulation in a case"),
    OutOfScope("context parallelism", "the built-in Llama has it: write cp and sequence_order in a case"),
    OutOfScope(
        "expert tensor parallelism",
        "each expert is on one EP rank, and TP shards the other linears only",
        r"(etp|expert_tensor_parallel\w*)\d*",
    ),
    OutOfScope(
        "MX formats other than MXFP8",
        "torchao trains in MXFP8 only",
        r"mx(fp[46])?(_\w+)?",
    ),
    OutOfScope(
        "emulated MXFP8",
        "MXFP8 runs the kernels of a GPU, and emulation multiplies in bfloat16",
    ),
    OutOfScope("NVFP4", "4-bit values need another matmul", r"nv(fp)?4?(_\w+)?|fp4"),
    OutOfScope(
        "group-wise scaling",
        "torchao trains with a scale per tensor, row, 32 or 128 values, or 128 x 128",
        r"groupwise\w*",
    ),
    OutOfScope(
        "delayed scaling",
        "torchao removed it; every recipe computes a scale from the tensor that it casts",
        r"delayed(_\w+)?",
    ),
    OutOfScope("TransformerEngine", "it does not use torchao"),
    OutOfScope("FP8 of another library", "it does not use the casts of torchao"),
    OutOfScope("FSDP1", "the float8 all-gather exists in FSDP2 (fully_shard) only", r"fsdp1|fsdp_?v1"),
    OutOfScope(
        "ZeRO stage 1 or 2", "it keeps whole parameters on every rank; FSDP2 stands for stage 3, which shards them"
    ),
    OutOfScope("DDP", "replicas come with shards, as HSDP (hsdp2x2); dp_replicate alone is excluded", r"ddp\d*"),
    OutOfScope("float16", "float8 training is for models in bfloat16 or float32", r"f16|fp16|float16|half"),
    OutOfScope("LoRA", "frozen weights with adapters need a case that does not train every weight"),
    OutOfScope("another compiler", "blocks are compiled by torch.compile, or not at all"),
    OutOfScope("a memory budget of the compiler", "the compiler chooses what to recompute"),
    OutOfScope("inference", "a case trains"),
    OutOfScope("checkpoint save and load", "a case starts from its seed, and loads only what it saved itself (resume)"),
)


def out_of_scope(word: str) -> OutOfScope | None:
    plain = re.sub(r"[ .-]", "_", word.lower())
    return next((feature for feature in SCOPE if feature.words and re.fullmatch(feature.words, plain)), None)


def _fields(owner: type[CaseStruct]) -> Iterator[tuple[tuple[str, ...], object]]:
    for name, hint in typing.get_type_hints(owner, include_extras=True).items():
        if isinstance(hint, type) and issubclass(hint, CaseStruct):
            yield from (((name, *path), inner) for path, inner in _fields(hint))
        else:
            yield (name,), hint


_HINTS = dict(_fields(Case))  # by path, in the order of the words of ids
_DECLARATIONS = {
    path: next(argument for argument in typing.get_args(hint) if isinstance(argument, Axis))
    for path, hint in _HINTS.items()
}
AXES: dict[str, tuple[str, ...]] = {axis.name or path[-1]: path for path, axis in _DECLARATIONS.items()}
DECLARED: dict[str, Axis] = {name: _DECLARATIONS[path] for name, path in AXES.items()}
_VALUES = operator.attrgetter(*(".".join(path) for path in AXES.values()))  # of a case, in the order of the axes
_BOOLS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
_AXIS_OF_PATH = {path: name for name, path in AXES.items()}


def own_values(case: Case) -> dict[str, object]:
    """Return every axis with the value of its field; None for a model size that the preset gives."""
    return dict(zip(AXES, _VALUES(case), strict=True))


DEFAULTS = own_values(Case())


def axis_values(case: Case) -> dict[str, object]:
    """Return every axis of a case with its value, in `AXES` order. Model sizes are the effective ones, never None."""
    shape = case.model.shape
    return own_values(case) | {name: getattr(shape, name) for name in ModelShape.__struct_fields__}


def read_as(name: str) -> str:
    """Return the expression by which a target reads the value of an axis for its case, `case.layout.tp`."""
    if name in ModelShape.__struct_fields__:
        return f"case.model.shape.{name}"
    if isinstance(getattr(Case, name, None), property):
        return f"case.{name}"
    return ".".join(("case", *AXES[name]))


def own_axes(case: Case) -> dict[str, object]:
    """Return the axes of a case that are not at their defaults, in the order of `AXES`: what a case file must say."""
    values, default = axis_values(case), axis_values(Case(model=Model(preset=case.model.preset)))
    preset = case.model.preset != Case().model.preset
    return {
        name: value
        for name, value in values.items()
        if (value is not None and value != default[name]) or (name == "model" and preset)
    }


def case_from_axes(values: Mapping[str, object]) -> Case:
    """Return the case with these values and defaults elsewhere; the inverse of `axis_values`.

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


def without(case: Case, *changes: Changes) -> Case:
    """Return the case with the default, or the value of references, on every axis that changes one of these."""
    return changed(case, _resets(frozenset(changes)))


@functools.cache
def _resets(changes: frozenset[Changes]) -> dict[str, object]:
    references = {name: axis.reference for name, axis in DECLARED.items() if axis.changes in changes}
    return {name: DEFAULTS[name] if reference is None else reference for name, reference in references.items()}


def changed(case: Case, values: Mapping[str, object]) -> Case:
    parts: dict[str, dict[str, object]] = {}  # "" for the own fields of a case
    for name, value in values.items():
        *part, field = AXES[name]
        parts.setdefault("".join(part), {})[field] = value
    own = parts.pop("", {})
    inner = {part: msgspec.structs.replace(getattr(case, part), **fields) for part, fields in parts.items()}
    return msgspec.structs.replace(case, **own, **inner)


def known_axis(name: str) -> str:
    """Return the name itself. Raises HarnessError with a suggestion when there is no such axis."""
    if name not in AXES:
        raise HarnessError(f"unknown axis '{name}'.", fix=suggestion(name, AXES))
    return name


def checked_value(name: str, value: object) -> object:
    """Return the value converted to the type of its axis. Raises HarnessError if no case can have it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise _invalid_value(name, value, "not a finite number")
    try:
        return msgspec.convert(value, type=_type_of(known_axis(name)))
    except msgspec.ValidationError as error:
        raise _invalid_value(name, value, str(error)) from error


def read_value(name: str, text: str) -> object:
    """Return the value of an axis that a word stands for; a list is written as `a+b` or `a,b`, an empty one as `none`.

    Raises HarnessError with the nearest value when no case can have it.
    """
    kind = axis_type(known_axis(name))
    try:
        if kind is bool:
            return _BOOLS[text.lower()]
        if kind is tuple:
            parts = [] if text in ("", "none") else re.split("[+,]", text)
            return _as_tuple(checked_value(name, parts))
        return checked_value(name, kind(text) if kind in (int, float) else text)
    except (KeyError, ValueError) as error:
        known = [str(choice).lower() for choice in choices(name)]
        fix = suggestion(text, known) if known else f"write a number ({kind.__name__})."
        raise HarnessError(f"axis '{name}' cannot be '{text}'.", fix=fix) from error


def read_assignments(words: Iterable[str], *, option: str = "") -> dict[str, object]:
    """Return the values of words AXIS=VALUE, by axis. Raises HarnessError that names the word, after `option`."""
    values: dict[str, object] = {}
    for word in words:
        name, equals, text = word.partition("=")
        try:
            if known_axis(name) in values:
                raise HarnessError(f"{name} is given twice.", fix="give it once; a list is written as a+b.")
            if not equals:
                raise HarnessError(f"{name} has no value.", fix=f"write {name}={shown_value(example(name))}.")
            values[name] = read_value(name, text)
        except HarnessError as error:
            raise HarnessError(error.what, where=f"{option} {word}".strip(), fix=error.fix) from error
    return values


def option_of(name: str) -> str:
    """Return the option that sets an axis: `--tp`, `--set lr`."""
    return f"--{name.replace('_', '-')}" if DECLARED[name].everyday else f"--set {name}"


def said(name: str, value: object) -> str:
    """Return the words of a command line that set an axis to this value: `--tp 2`, `--set lr=0.1`."""
    return f"{option_of(name)}{' ' if DECLARED[name].everyday else '='}{shown_value(value)}"


def ignored_axes(values: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names in `values` that have no effect given the others, such as `pad_inner_dim` with recipe bf16."""
    kept = axis_values(case_from_axes(values))
    return tuple(name for name, value in values.items() if value is not None and kept[name] != _as_tuple(value))


def choices(name: str) -> tuple[object, ...]:
    """Return every value that an axis can have; () for numbers and strings."""
    hint = _base_type(_type_of(name))
    if hint is bool:
        return (True, False)
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def axis_type(name: str) -> type[object]:
    """Return the type of the values of an axis: bool, int, float, str, or tuple for a list of strings."""
    hint = _base_type(_type_of(name))
    if typing.get_origin(hint) is typing.Literal:
        return str
    return typing.cast("type[object]", typing.get_origin(hint) or hint)


def axis_schema(name: str) -> dict[str, typing.Any]:
    """Return the JSON schema of the values of an axis: type, limits, choices, meaning and default."""
    schema = msgspec.json.schema(_type_of(name))
    if "anyOf" in schema:  # TOML has no null: an axis is left out instead
        schema = next(subschema for subschema in schema["anyOf"] if subschema != {"type": "null"})
    default = axis_values(Case())[name]
    return {**schema, "description": DECLARED[name].meaning, **({} if default is None else {"default": default})}


def suggestion(word: str, known: Iterable[object], *, listed: str = "") -> str:
    """Return the `fix` for an unknown word: what other tools mean by it, why it is out of scope, or close known words.

    `listed`: the command that lists the known words. Without it all are listed when none is close. An axis comes with
    its values.
    """
    words = [str(item) for item in known]
    near = [name for name in meanings(word) if name in words]
    outside = None if near else out_of_scope(word)
    if outside is not None:
        return f"leave it out: {outside.text}."
    near = near or difflib.get_close_matches(word, words, n=2, cutoff=0.55)
    if near:
        whole = AXES.keys() <= set(words)
        told = (f"{name}{allowed_values(name)}" if whole and name in AXES else name for name in near)
        return f"did you mean {' or '.join(told)}?"
    return f"see `{listed}`." if listed else f"use one of {', '.join(words)}."


def allowed_values(axis: str) -> str:
    """Return the values of an axis as ` (none, full)` or ` (a number of at least 1)`."""
    allowed = [shown_value(choice) for choice in choices(axis)]
    limit = axis_schema(axis).get("minimum")
    numbers = f"a number{'' if limit is None else f' of at least {limit}'}"
    return f" ({', '.join(allowed) or (numbers if axis_type(axis) in (int, float) else 'any name')})"


def shown_value(value: object) -> str:
    """Return a value of an axis as reports print it: `false`, `wk+wq`, `none` for an empty list."""
    if isinstance(value, tuple | list):
        return "+".join(map(str, value)) or "none"
    return _format_value(value)


def _as_tuple(value: object) -> object:
    return tuple(sorted(set(value))) if isinstance(value, list | tuple) else value


def _type_of(name: str) -> object:
    return _HINTS[AXES[name]]


def _base_type(hint: object) -> object:
    """Return the type hint without `| None` and without its constraints."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        return _base_type(parts[0])
    if type(None) in parts:
        return _base_type(next(part for part in parts if part is not type(None)))
    return hint


def _invalid_case(error: msgspec.ValidationError, values: Mapping[str, object]) -> HarnessError:
    """Return the error of msgspec, which names `$.float8.recipe`, with the axis and the value that the user wrote."""
    text = str(error)
    place = re.search(r" - at `\$\.?([^`\[]*)", text)
    what = text[: place.start()] if place else text
    name = _AXIS_OF_PATH.get(tuple(place.group(1).split("."))) if place else None
    if name is None:
        return HarnessError(f"{what}.")
    return _invalid_value(name, values[name], what)


def _invalid_value(name: str, value: object, what: str) -> HarnessError:
    allowed = [_format_value(choice) for choice in choices(name)]
    fix = (
        suggestion(_format_value(value), allowed) if allowed else f"write a value like {_format_value(example(name))}."
    )
    return HarnessError(f"{name} = {_format_value(value)}: {what}.", fix=fix)


def example(name: str) -> object:
    """Return a value of an axis: its default, where it has one."""
    return DECLARED[name].example if DEFAULTS[name] is None else DEFAULTS[name]


def _format_value(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
