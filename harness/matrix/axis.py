"""What an axis declares of itself beside its type and default: on its field of `Case`, and nowhere else.

Ids and their parser, options, case files, families, references and selectors follow from it.
"""

import enum
from collections.abc import Mapping
from typing import Any

import msgspec

from harness.declared import Declaration


class Changes(enum.Enum):
    """What another value of the axis changes. References leave out options that must not change results."""

    NOTHING = "no bit of what is trained"
    LAYOUT = "which rank computes what, and the order of sums"
    SUMS = "how gradients of ranks and microbatches are summed"
    PADDING = "sizes of tensors, with values that no loss depends on"
    ROUNDING = "what is rounded, and to what"
    TRAINING = "the function that is trained, its data or its updates"


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """A word of case ids. `{axis}` in `template` stands for a value of that axis.

    `meaning`: what it means; `{0}` in it is the first such value. `example`: the word with values. `values`: what the
    word sets beside. `pattern`: of the value of a list or a name. `dotted`: a colon in the value is a dot in the word.
    """

    template: str
    meaning: str
    example: str
    values: Mapping[str, object] = {}
    pattern: str = ""
    dotted: bool = False


class Axis(Declaration, frozen=True, kw_only=True):
    """The declaration of an axis.

    `name`: where the field is not named like it. `meaning`: in a few words, for options, case files and editors.
    `part`: of an id, under which its words are listed. `needs`: axes without which its values mean nothing.
    `always`: ids spell its default too. `example`: a value, of an axis without a default. `reference`: its value in
    BF16 references, where that is not the default. `noise`: how a tolerance key spells a value that rounds otherwise.
    `everyday`: commands have an option of its name, beside `--set`. `same_bits`: why a run has the bits of one with the
    default. When it has not is in `relations.py`.
    """

    meaning: str
    changes: Changes
    part: str
    words: tuple[Word, ...] = ()
    name: str = ""
    needs: tuple[str, ...] = ()
    reference: object = None
    always: bool = False
    example: object = None
    everyday: bool = False
    noise: str = ""
    same_bits: str = ""


def axis(meaning: str, *words: Word, changes: Changes, part: str, **rest: Any) -> Any:
    """Return the declaration of an axis with these words, an `Axis`; `rest` are its other fields."""
    return Axis(meaning=meaning, words=words, changes=changes, part=part, **rest)


def flag(word: str, meaning: str, **values: object) -> Word:
    """Return a word without a value in it, which stands for these values of axes."""
    return Word(template=word, meaning=meaning, example=word, values=values)


def number(template: str, example: str, meaning: str, **values: object) -> Word:
    """Return a word with numbers in it, which may stand for further values of axes."""
    return Word(template=template, meaning=meaning, example=example, values=values)
