"""Makes text safe to show, in a terminal, a log of CI, a page, JUnit, and Markdown.

Messages, names, times and commands in a file of results are whatever the author of the file wrote. Every printer passes
text through `printable`; Markdown passes it through `in_markdown` as well.
"""

import html
import re
import unicodedata

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
    """The text without escape sequences and control characters.

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
    """The text as Markdown in which no markup begins but code spans, and nothing is a link, a mention or an image.

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
    """The text as code of Markdown, whatever backticks it has; on one line."""
    shown = printable(text).replace("\n", " ")
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence} {shown} {fence}" if len(fence) > 1 else f"`{shown}`"


def in_html(text: str) -> str:
    """The text as HTML inside of Markdown, on one line: words that would become links or mentions are code."""
    return _WORD.sub(_html_word, printable(text).replace("\n", " "))


def _html_word(match: re.Match[str]) -> str:
    word = html.escape(match[0], quote=False)
    return f"<code>{word}</code>" if _LIVE.search(match[0]) else word
