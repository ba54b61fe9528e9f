"""Case ids: the one readable spelling of every case, safe as a file name, and its parser.

An id is a list of tokens joined by `-`: layout, recipe, vocabulary and dtype always, everything else only where it
differs from its default. Ids consist of `A-Z a-z 0-9 . _ + -`. Numbers are spelled so that they round-trip exactly.
"""

import functools
import re
from collections.abc import Mapping

import msgspec

from harness.errors import HarnessError
from harness.matrix.axes import AXES, DECLARED, DEFAULTS, case_from_axes, own_values, without
from harness.matrix.axis import Changes
from harness.matrix.case import Case, Layout
from harness.matrix.layout import DP_AXES
from harness.matrix.model import PRESET_WORDS
from harness.matrix.scope import out_of_scope
from harness.matrix.words import FLOAT_STEMS, NUMBER, WORDS, hint, spelled, values_of

_MAX_LENGTH = 1000  # far above any id that fits into a file name; limits the work on invalid input
# A floating-point number may contain a minus (`lr1e-05`), and so may the preset that a file names.
_STEMS = "|".join(map(re.escape, FLOAT_STEMS))
_WITH_MINUS = "|".join(map(re.escape, (preset for preset in PRESET_WORDS if "-" in preset)))
_TOKEN = re.compile(rf"(?:(?:{_STEMS}){NUMBER}|{_WITH_MINUS}|[^-]+)(?=-|$)")

_OF_LAYOUT = tuple(name for name, path in AXES.items() if path[0] == "layout")
_AFTER_LAYOUT = tuple(name for name in AXES if name not in ("target", *_OF_LAYOUT))
_OF_MODEL = tuple(name for name, path in AXES.items() if path[0] == "model" and name != "model")
# What determines a golden, in the order of its name: the steps come before the batch.
_OF_FAMILY = tuple(
    name
    for name in dict.fromkeys((*_OF_MODEL, "steps", *AXES))
    if DECLARED[name].changes is Changes.TRAINING and name not in ("target", "model")
)


@functools.lru_cache(maxsize=4096)
def case_id(case: Case) -> str:
    values = own_values(case)
    target, layout = spelled(values, ("target",)), _layout_words(values)
    return "-".join((*target, *layout, *spelled(values, _AFTER_LAYOUT)))


@functools.lru_cache(maxsize=4096)
def parse_case_id(text: str) -> Case:
    """The case of an id. Raises HarnessError with a suggestion for an unknown token or a non-canonical spelling."""
    values: dict[str, object] = {}
    for token in id_words(text):
        token_values = values_of(token)
        if token_values is None:
            raise HarnessError(f"unknown token '{token}'.", where=f"case id '{text}'", fix=hint(token))
        values |= token_values
    try:
        case = case_from_axes(values)
    except HarnessError as error:
        raise HarnessError(error.what, where=f"case id '{text}'", fix=error.fix) from error
    if case_id(case) != text:
        outside = next(filter(None, map(out_of_scope, id_words(text))), None)
        what = "not the canonical spelling of a case id." if outside is None else f"{outside.text}."
        raise HarnessError(what, where=f"case id '{text}'", fix=f"write {case_id(case)}")
    return case


def id_words(text: str) -> list[str]:
    """The words of an id, which may not be known. Raises HarnessError for a text that is no list of words."""
    tokens = []
    position = 0
    while position < len(text) <= _MAX_LENGTH:
        match = _TOKEN.match(text, position)
        if match is None:
            break
        tokens.append(match.group())
        position = match.end() + 1
    if not tokens or "-".join(tokens) != text:
        raise HarnessError("not a case id: expected tokens joined by single '-'.", where=f"case id '{text}'")
    return tokens


def mesh_words(layout: Layout) -> str:
    """The words for the mesh of a layout alone: "fsdp2-tp2", "single"."""
    return layout_id(msgspec.structs.replace(Layout(), **layout.mesh, async_tp=layout.async_tp))


def layout_id(layout: Layout) -> str:
    """How an id spells a layout, such as "fsdp2-tp2"."""
    return "-".join(_layout_words(own_values(Case(layout=layout))))


def family_id(case: Case) -> str:
    """The name of the golden that this case is compared with: everything that determines data, weights and updates.

    Axes that change the training, and no other. Numbers that are defaults are spelled out, so that a changed default
    cannot change the meaning of an old golden; but not those of an option that the case does without.
    """
    values = own_values(case)
    words = (
        word for name in _OF_FAMILY if _is_used(name, values) for word in spelled(values, (name,), with_defaults=True)
    )
    return "-".join((*spelled(values, ("target",)), PRESET_WORDS[case.model.preset], *words))


def _is_used(name: str, values: Mapping[str, object]) -> bool:
    axis = DECLARED[name]
    is_left_out = axis.example is not None and values[name] == DEFAULTS[name]
    return not is_left_out and all(values[need] != DEFAULTS[need] for need in axis.needs)


def family_case(family: str) -> Case | None:
    """The reference case of a family; None for a text that is no family."""
    values: dict[str, object] = {"dtype": "bfloat16"}
    try:
        for token in id_words(family):
            values |= values_of(token) or {}
        case = case_from_axes(values)
    except HarnessError:
        return None
    return case if family_id(case) == family else None


def solo_case(case: Case) -> Case:
    """The case whose solo witness is used for `case`: without all options that must not change a number.

    These are checkpointing, compile, evaluation, resuming, and what ranks share but the batch, its sequences, of
    experts the tokens, and of a pipeline tied ends. Nor may the split of the batch into shards and replicas change one,
    unless both sums of it are rounded.
    """
    layout = case.layout
    rounds_twice = case.train.reduce_dtype == "bfloat16"
    split = msgspec.structs.replace(Layout(), **{axis: layout.mesh[axis] for axis in DP_AXES})
    alone = without(case, Changes.NOTHING, Changes.LAYOUT)
    shared = split if rounds_twice else Layout(dp_shard=layout.dp)
    sharing = max(1, layout.ep // layout.tp)  # data-parallel ranks that share experts
    stages = 2 if case.model.tied and layout.pp > 1 else 1  # copies of tied weights, of any number of stages
    apart = {"ep": sharing, "cp": layout.cp, "sequence_order": layout.sequence_order, "pp": stages}
    return msgspec.structs.replace(alone, layout=msgspec.structs.replace(shared, **apart))


def twin_case(case: Case) -> Case:
    """The BF16 twin of a case: the same layout without FP8, checkpointing, evaluation and resuming, in bfloat16."""
    return without(case, Changes.NOTHING, Changes.ROUNDING)


def reference_case(case: Case) -> Case:
    """The case whose run is the golden: bf16 on one rank, without all options that must not change a loss."""
    return without(case, *(change for change in Changes if change is not Changes.TRAINING))


def _layout_words(values: Mapping[str, object]) -> list[str]:
    return spelled(values, _OF_LAYOUT) or ["single"]


def parse_layout(text: str, *, option: str = "--layout") -> Layout:
    """The layout of words of case ids, `fsdp2-tp2`. Raises HarnessError for any other word."""
    values: dict[str, object] = {}
    layouts = [word for word in WORDS if word.part == "layout"]
    for token in id_words(text):
        axes = values_of(token)
        if axes is None or not any(word.pattern.fullmatch(token) for word in layouts):
            fix = hint(token) if axes is None else "use words of a layout, such as fsdp2, tp2, fsdp2-tp2 or hsdp2x2."
            raise HarnessError(f"'{token}' is no layout.", where=f"{option} {text}", fix=fix)
        values |= axes
    return case_from_axes(values).layout
