"""The words of case ids: how the axes that a case sets are spelled, what each word means, and its values.

Made from the declarations of the axes, in their order. Here are also the hints for a token that is no such word.
"""

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from harness.hints import LIST_WORDS
from harness.matrix.axes import AXES, DECLARED, DEFAULTS, axis_type
from harness.matrix.axis import Word as Declared
from harness.matrix.scope import out_of_scope

NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_PATTERNS: Mapping[type[object], str] = {int: r"\d+", float: NUMBER}


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
        """What comes before the number; empty for a token without one."""
        numbers = self.inside and all(axis_type(name) in _PATTERNS for name in self.inside)
        return self.declared.template.partition("{")[0] if numbers else ""

    def read(self, match: re.Match[str]) -> dict[str, object]:
        """The axis values that a token stands for, in a match of its pattern."""
        inside = {name: self._value(name, match[at]) for at, name in enumerate(self.inside, start=1)}
        return {**self.declared.values, **inside}

    def applies(self, values: Mapping[str, object], *, with_defaults: bool = False) -> bool:
        """True when it spells values of these. `with_defaults`: it spells numbers that are defaults too."""
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
FLOAT_STEMS = tuple(word.stem for word in WORDS if word.inside and axis_type(word.inside[0]) is float)


def spelled(values: Mapping[str, object], names: tuple[str, ...], *, with_defaults: bool = False) -> list[str]:
    """The words for these values of axes, in the order of ids; of two words for an axis, that which sets more.

    `names`: the axes that are spelled. `with_defaults`: numbers that are defaults too.
    """
    words = [word for word in _words_for(names) if word.applies(values, with_defaults=with_defaults)]
    return [word.spelled(values) for word in words if not any(word.sets < other.sets for other in words)]


@functools.cache
def _words_for(names: tuple[str, ...]) -> tuple[Word, ...]:
    return tuple(word for word in WORDS if word.sets.issubset(names))


def values_of(token: str) -> dict[str, object] | None:
    """The axis values that a token stands for; None when it is no word of an id."""
    matched = _match(token)
    return None if matched is None else matched[0].read(matched[1])


def meaning_of(token: str) -> str:
    """What a token means; it must be a word of an id."""
    matched = _match(token)
    assert matched is not None, f"'{token}' is no word of an id"
    return matched[0].declared.meaning.format(*matched[1].groups())


def hint(token: str) -> str:
    """The `fix` for an unknown token: the likely meaning if there is one, else the command that lists all words."""
    outside = out_of_scope(token)
    if outside is not None:
        return f"leave it out: {outside.text}."
    near = _for_axis(token) or _similar(token)
    return f"did you mean {' or '.join(near)}?" if near else f"see `{LIST_WORDS}`."


def _match(token: str) -> tuple[Word, re.Match[str]] | None:
    for word in WORDS:
        match = word.pattern.fullmatch(token)
        if match:
            return word, match
    return None


def _for_axis(token: str) -> list[str]:
    """The words for an axis or for a value of one: `compile`, `steps5`, `bfloat16`."""
    name, number = _cut(token)
    if name in AXES:
        return [_with_number(word, number) for word in _suggested() if name in _sample(word)][:3]
    return sorted((word.example for word in _suggested() if not word.stem and token in _sample(word).values()), key=len)


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
