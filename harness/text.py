"""Text that people read: sentences of findings, counts, ranks and times in them, and what makes text safe to show.

Messages, names, times and commands in a file of results are whatever the author of the file wrote. Every printer passes
text through `printable`; Markdown passes it through `in_markdown` as well.
"""

import contextlib
import datetime
import html
import re
import unicodedata
from collections.abc import Iterable, Mapping
from itertools import groupby


def timestamp() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def to_the_minute(text: str) -> str:
    """Return a timestamp for people, "2026-11-23 00:45"; "?" where there is none."""
    return text.replace("T", " ")[:16] or "?"


def changed_facts(before: Mapping[str, str], now: Mapping[str, str], names: Iterable[str]) -> tuple[str, ...]:
    """Return which of the named facts differ, each as "torch 2.12.0 -> 2.13.0"; "none" for what is not there."""
    return tuple(
        f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in names
        if before.get(name) != now.get(name)
    )


_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return the count with its noun, as in "1 case", "2 cases"; `plural`: one that does not end in "s"."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def binary_bytes(count: int) -> str:
    """Return a number of bytes with a binary unit: "71.5 MiB"."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_BINARY_UNITS) - 1)
    return f"{count / 1024**power:.4g} {_BINARY_UNITS[power]}"


_PLACE = re.compile(r"\{(\w+)(?::([^{}]*))?\}")
_NUMBER = re.compile(r"\+?(?:\.\d)?[efg]")  # of Python's number formats these alone: a template may come from a file
_NOUN = re.compile(r"n ([^|]+)(?:\|(.+))?")


def filled(template: str, values: Mapping[str, object]) -> str:
    """Return the template with its values.

    `{name}` stands for a value, `{name:.2g}` for a number in this format, and `{name:n case|cases}` for a count with
    its noun. What is not known stays as it is.
    """
    return _PLACE.sub(lambda place: _text(place, values), template)


def _text(place: re.Match[str], values: Mapping[str, object]) -> str:
    name, spec = place.groups()
    if name not in values:
        return place[0]
    value = values[name]
    if isinstance(value, tuple):
        return format_ranks(value)
    noun = _NOUN.fullmatch(spec or "")
    if noun and isinstance(value, int):
        return counted(value, noun[1], noun[2] or "")
    if spec and isinstance(value, int | float) and _NUMBER.fullmatch(spec):
        with contextlib.suppress(OverflowError):  # of an integer that is no float, as only a foreign file has
            return format(value, spec)
    return str(value)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks as text: "rank 3", "ranks 0-3, 6"."""
    return format_numbers("rank", ranks)


def format_numbers(noun: str, given: Iterable[int]) -> str:
    numbers = sorted(set(given))
    if not numbers:
        return f"no {noun}"
    runs = [
        [number for _, number in group] for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{noun if len(numbers) == 1 else f'{noun}s'} {', '.join(parts)}"


def shown(template: str) -> str:
    """Return the template as people read it without values: "amax reductions are missing along AXIS"."""
    return _PLACE.sub(lambda place: place[1].upper(), re.sub(r"(?<=\w)\{", " {", template))


# Escape sequences of terminals: with parameters; with a text that BEL or ST ends; of two characters.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-Z\\^-~]?"
)
# Letters and marks that show nothing, although they count as printable.
_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# What runners of GitHub, Azure and GitLab read as a command. They look for `::` behind the spaces that begin a line;
# where text is wrapped any word may begin one. They find the others anywhere.
_COMMAND = re.compile(r"(?<!\S)(?=::)|(?<=##)(?=\[|vso\[)|(?<=section_start)(?=:)|(?<=section_end)(?=:)")

_CODE = re.compile(r"(?<![`\\])(`[^`\n]+`)(?!`)")
_WORD = re.compile(r"\S+")
# Of these GitHub or GitLab makes a link, a mention, an image or a formula.
_LIVE = re.compile(r"[@$]|://|\bwww\.|\bmailto:|[#!%~&]\w|\bGH-\d")
_MARKUP = re.compile(r"[\\\[\]`]")
_BLOCK = re.compile(r"(?m)^(?=[ \t]*(?:[#=|]|-{3}|\*{3}|_{3}|~{3}))")  # headings, rules, tables, fences


def printable(text: str) -> str:
    """Return the text without escape sequences and control characters.

    What is invisible, changes the direction of writing or separates lines is spelled out, as `\\u202e`. A backslash
    stands where a runner of CI would read a command. Line feeds, tabs and the rest of the text stay.
    """
    if not text.replace("\n", "").isprintable():
        text = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
        text = "".join(character if character.isprintable() else _replaced(character) for character in text)
    return _COMMAND.sub(r"\\", text if text.isascii() else _BLANK.sub(lambda match: _spelled(match[0]), text))


def _replaced(character: str) -> str:
    if character in "\n\t":
        return character
    match unicodedata.category(character):
        case "Zs":
            return " "
        case "Cc" | "Cs":
            return ""
        case _:
            return _spelled(character)


def _spelled(character: str) -> str:
    point = ord(character)
    return f"\\u{point:04x}" if point < 1 << 16 else f"\\U{point:08x}"


def in_markdown(text: str) -> str:
    """Return the text as Markdown with no markup but code spans: no link, mention or image.

    A word of which GitHub or GitLab would make one of these is shown as code.
    """
    shown = ""
    for index, part in enumerate(_CODE.split(printable(text))):
        inert = part if index % 2 else _WORD.sub(_word, part)
        touches = shown.endswith("`") and inert.startswith("`")  # the backticks of two spans would be one fence
        shown += " " + inert if touches else inert
    return _BLOCK.sub(r"\\", shown)


def own_markdown(text: str) -> str:
    """Text of the project itself as Markdown: links stay, HTML does not."""
    parts = _CODE.split(printable(text))
    return "".join(part if index % 2 else html.escape(part, quote=False) for index, part in enumerate(parts))


def _word(match: re.Match[str]) -> str:
    word = match[0]
    return code_span(word) if _LIVE.search(word) else _MARKUP.sub(r"\\\g<0>", html.escape(word, quote=False))


def code_span(text: str) -> str:
    """Return the text as code of Markdown, whatever backticks it has; on one line."""
    shown = printable(text).replace("\n", " ")
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence} {shown} {fence}" if len(fence) > 1 else f"`{shown}`"


def in_html(text: str) -> str:
    """Return the text as HTML inside of Markdown, on one line: words that would become links or mentions are code."""
    return _WORD.sub(_html_word, printable(text).replace("\n", " "))


def _html_word(match: re.Match[str]) -> str:
    word = html.escape(match[0], quote=False)
    return f"<code>{word}</code>" if _LIVE.search(match[0]) else word
