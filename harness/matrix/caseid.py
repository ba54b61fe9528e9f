"""Case ids: the one readable spelling of every case, its parser, and the cases that belong to a case.

An id is a list of words joined by `-`: layout, recipe, vocabulary and dtype always, everything else only where it
differs from its default. Ids are safe as file names: they consist of `A-Z a-z 0-9 . _ + -`. Numbers are spelled so that
they round-trip exactly. The words are made from the declarations of the axes, in their order.
"""

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from harness.errors import HarnessError
from harness.hints import LIST_WORDS
from harness.matrix.axes import AXES, DECLARED, DEFAULTS, axis_type, case_from_axes, out_of_scope, own_values, without
from harness.matrix.axis import Changes
from harness.matrix.axis import Word as Declared
from harness.matrix.case import Case, Layout
from harness.matrix.dims import DIMENSIONS
from harness.matrix.model import PRESET_WORDS
from harness.matrix.synonyms import meanings

_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_PATTERNS: Mapping[type[object], str] = {int: r"\d+", float: _NUMBER}


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """A token, or with a value in it, a family of tokens.

    `inside`: the axes whose values are in it. `sets`: these and those that it stands for.
    """

    part: str
    declared: Declared
    pattern: re.Pattern[str]
    inside: tuple[str, ...]
    sets: frozenset[str]

    @property
    def example(self) -> str:
        return self.declared.example

    @property
    def stem(self) -> str:
        """Return what comes before the number; empty for a token without one."""
        numbers = self.inside and all(axis_type(name) in _PATTERNS for name in self.inside)
        return self.declared.template.partition("{")[0] if numbers else ""

    def read(self, match: re.Match[str]) -> dict[str, object]:
        """Return the axis values that a token stands for, in a match of its pattern."""
        inside = {name: self._value(name, match[at]) for at, name in enumerate(self.inside, start=1)}
        return {**self.declared.values, **inside}

    def applies(self, values: Mapping[str, object], *, with_defaults: bool = False) -> bool:
        """Return True if it spells values of these axes. `with_defaults`: numbers that are defaults too."""
        if not self.sets or any(values[name] != value for name, value in self.declared.values.items()):
            return False
        return all(self._is_spelled(name, values[name], with_defaults=with_defaults) for name in self.inside)

    def spelled(self, values: Mapping[str, object]) -> str:
        return self.declared.template.format(**{name: self._text(values[name]) for name in self.inside})

    def _is_spelled(self, name: str, value: object, *, with_defaults: bool) -> bool:
        if value is None or value != DEFAULTS[name]:
            return value is not None
        numbers = with_defaults and axis_type(name) in _PATTERNS
        return bool(self.declared.values) or DECLARED[name].always or numbers

    def _value(self, name: str, text: str) -> object:
        kind = axis_type(name)
        if kind in (int, float):
            return kind(text)
        plain = text.replace(".", ":") if self.declared.dotted else text
        return plain.split("+") if kind is tuple else plain

    def _text(self, value: object) -> str:
        if isinstance(value, tuple):
            text = "+".join(map(str, value))
            return text.replace(":", ".") if self.declared.dotted else text
        return repr(value) if isinstance(value, float) else str(value)


def _words() -> Iterator[Word]:
    for axis in DECLARED.values():
        for declared in axis.words:
            parts = re.split(r"\{(\w+)\}", declared.template)
            inside = tuple(parts[1::2])
            groups = (f"({declared.pattern or _PATTERNS[axis_type(name)]})" for name in inside)
            texts = map(re.escape, parts[::2])
            pattern = "".join(text + group for text, group in zip(texts, (*groups, ""), strict=True))
            yield Word(
                part=axis.part,
                declared=declared,
                pattern=re.compile(pattern, re.ASCII),
                inside=inside,
                sets=frozenset((*inside, *declared.values)),
            )


# In the order in which an id has them.
WORDS: tuple[Word, ...] = tuple(_words())
_FLOAT_STEMS = tuple(word.stem for word in WORDS if word.inside and axis_type(word.inside[0]) is float)


def spelled(values: Mapping[str, object], names: tuple[str, ...], *, with_defaults: bool = False) -> list[str]:
    """Return the words for these values of axes, in the order of ids; of two words for an axis, that which sets more.

    `names`: the axes that are spelled. `with_defaults`: numbers that are defaults too.
    """
    words = [word for word in _words_for(names) if word.applies(values, with_defaults=with_defaults)]
    return [word.spelled(values) for word in words if not any(word.sets < other.sets for other in words)]


@functools.cache
def _words_for(names: tuple[str, ...]) -> tuple[Word, ...]:
    return tuple(word for word in WORDS if word.sets.issubset(names))


def values_of(token: str) -> dict[str, object] | None:
    """Return the axis values that a token stands for; None when it is no word of an id."""
    matched = _match(token)
    return None if matched is None else matched[0].read(matched[1])


def meaning_of(token: str) -> str:
    """Return what a token means; it must be a word of an id."""
    matched = _match(token)
    assert matched is not None, f"'{token}' is no word of an id"
    return matched[0].declared.meaning.format(*matched[1].groups())


def hint(token: str) -> str:
    """Return the `fix` for an unknown token: the likely meaning if there is one, else the command that lists words."""
    near = _for_axis(token)
    outside = None if near else out_of_scope(token)
    if outside is not None:
        return f"leave it out: {outside.text}."
    near = near or _similar(token)
    return f"did you mean {' or '.join(near)}?" if near else f"see `{LIST_WORDS}`."


def _match(token: str) -> tuple[Word, re.Match[str]] | None:
    for word in WORDS:
        match = word.pattern.fullmatch(token)
        if match:
            return word, match
    return None


def _for_axis(token: str) -> list[str]:
    """Return the words for an axis or for a value of one: `compile`, `steps5`, `bfloat16`."""
    name, number = _cut(token)
    for axis in filter(AXES.__contains__, (name, *meanings(name.replace(".", "_")))):
        return [_with_number(word, number) for word in _suggested() if axis in _sample(word)][:3]
    meant = {token, *meanings(token.replace(".", "_"))}
    plain = (word for word in _suggested() if not word.stem)
    return sorted((word.example for word in plain if not meant.isdisjoint(map(str, _sample(word).values()))), key=len)


def _similar(token: str) -> list[str]:
    """Close words of the same kind: with a number like the token, or with a similar head before the same dots."""
    plain = [word.example for word in _suggested() if not word.stem]
    undotted = [word for word in plain if "." in word and _alike(word.replace(".", ""), token, 0.85)]
    if undotted:
        return undotted[:2]
    name, number = _cut(token)
    numbered = {word.stem: word for word in _suggested() if word.stem and _dots(word.stem) == _dots(name)}
    close = difflib.get_close_matches(name, numbered, n=2, cutoff=0.6) if number else []
    same = [word for word in plain if _dots(word) == _dots(token) and _alike(_head(word), _head(token), 0.6)]
    near = difflib.get_close_matches(token, same, n=2, cutoff=0.7)
    return [_with_number(numbered[stem], number) for stem in close] or near


def _suggested() -> Iterable[Word]:
    return (word for word in WORDS if out_of_scope(word.example) is None)


def _sample(word: Word) -> dict[str, object]:
    match = word.pattern.fullmatch(word.example)
    assert match is not None, f"{word.example} is no example of {word.pattern.pattern}"
    return word.read(match)


def _with_number(word: Word, number: str) -> str:
    own = word.stem + number
    return own if word.stem and word.pattern.fullmatch(own) else word.example


def _cut(token: str) -> tuple[str, str]:
    match = re.fullmatch(r"(.*?)(\d[\dx.]*)?", token, flags=re.DOTALL)
    assert match is not None, "every text matches"
    return match[1].rstrip("="), match[2] or ""


def _dots(token: str) -> int:
    return token.rstrip(".").count(".")


def _head(token: str) -> str:
    return token.partition(".")[0]


def _alike(one: str, other: str, cutoff: float) -> bool:
    return difflib.SequenceMatcher(None, one, other).ratio() >= cutoff


_MAX_LENGTH = 1000  # far above any id that fits into a file name; limits the work on invalid input
# A floating-point number may contain a minus (`lr1e-05`), and so may the preset that a file names.
_STEMS = "|".join(map(re.escape, _FLOAT_STEMS))
_WITH_MINUS = "|".join(map(re.escape, (preset for preset in PRESET_WORDS if "-" in preset)))
_TOKEN = re.compile(rf"(?:(?:{_STEMS}){_NUMBER}|{_WITH_MINUS}|[^-]+)(?=-|$)")

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
    """Return the case with this id. HarnessError with a suggestion for an unknown token or a non-canonical spelling."""
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
    """Return the words of an id, which may not be known. Raises HarnessError for a text that is no list of words."""
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
    """Return the words for the mesh of a layout alone: "fsdp2-tp2", "single"."""
    return layout_id(msgspec.structs.replace(Layout(), **layout.mesh, async_tp=layout.async_tp))


def layout_id(layout: Layout) -> str:
    """Return how an id spells a layout, such as "fsdp2-tp2"."""
    return "-".join(_layout_words(own_values(Case(layout=layout))))


def family_id(case: Case) -> str:
    """Return the name of the golden that this case is compared with: all that determines data, weights and updates.

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
    """Return the reference case of a family; None for a text that is no family."""
    values: dict[str, object] = {"dtype": "bfloat16"}
    try:
        for token in id_words(family):
            values |= values_of(token) or {}
        case = case_from_axes(values)
    except HarnessError:
        return None
    return case if family_id(case) == family else None


def solo_case(case: Case) -> Case:
    """Return the case whose single-rank reference is used for `case`: without all options that must not change a
    number.

    These are checkpointing, compile, evaluation, resuming, and degrees but those that the single rank repeats.
    """
    kept = {name: value for one in DIMENSIONS for name, value in one.alone(case).items()}
    alone = without(case, Changes.NOTHING, Changes.LAYOUT)
    return msgspec.structs.replace(alone, layout=msgspec.structs.replace(Layout(), **kept))


def twin_case(case: Case) -> Case:
    """Return the BF16 counterpart of a case: the same layout without FP8, checkpointing, evaluation and resuming."""
    return without(case, Changes.NOTHING, Changes.ROUNDING)


def reference_case(case: Case) -> Case:
    """Return the case whose run is the golden: bf16 on one rank, without all options that must not change a loss."""
    return without(case, *(change for change in Changes if change is not Changes.TRAINING))


def _layout_words(values: Mapping[str, object]) -> list[str]:
    return spelled(values, _OF_LAYOUT) or ["single"]


def parse_layout(text: str, *, option: str = "--layout") -> Layout:
    """Return the layout of words of case ids, `fsdp2-tp2`. Raises HarnessError for any other word."""
    values: dict[str, object] = {}
    layouts = [word for word in WORDS if word.part == "layout"]
    for token in id_words(text):
        axes = values_of(token)
        if axes is None or not any(word.pattern.fullmatch(token) for word in layouts):
            fix = hint(token) if axes is None else "use words of a layout, such as fsdp2, tp2, fsdp2-tp2 or hsdp2x2."
            raise HarnessError(f"'{token}' is no layout.", where=f"{option} {text}", fix=fix)
        values |= axes
    return case_from_axes(values).layout


def resumed_in(case: Case) -> tuple[Case, ...]:
    """Return the cases that load the state, in order; the last one goes on with it. Empty without a resume."""
    other = other_layout(case.layout)
    if case.train.resume == "none":
        return ()
    return (case,) if case.train.resume == "same" or other is None else (_only_built(case, other), case)


def other_layout(layout: Layout) -> Layout | None:
    """FSDP2 over all ranks; where that is the layout itself, HSDP with two replicas. None if there is neither."""
    ranks = layout.world_size
    if layout.dp_shard != ranks:
        return Layout(dp_shard=ranks)
    return Layout(dp_replicate=2, dp_shard=ranks // 2) if ranks >= 4 and ranks % 2 == 0 else None


def _only_built(case: Case, layout: Layout) -> Case:
    """Return the case in another layout, without the options of training: it loads and saves."""
    moved = msgspec.structs.replace(case, layout=layout, float8=msgspec.structs.replace(case.float8, tp_styles="plain"))
    train = without(moved, Changes.SUMS).train  # a pipeline sets how gradients are summed
    train = msgspec.structs.replace(train, global_batch=layout.world_size, evaluate=False, resume="none")
    return msgspec.structs.replace(moved, train=train)
