"""A report as text: cleaned, without secrets, and split into pieces by what they are.

A report is hostile until it is clean: control characters and terminal escapes are dropped, environment assignments,
tokens and paths never leave `clean_words`, and the size is limited, so that every later step takes bounded time.
"""

from __future__ import annotations

import ast
import contextlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from harness.errors import HarnessError

MAX_BYTES = 1_000_000
_MAX_LINE = 1_000
_MAX_PROSE = 100_000  # characters that are searched for words
_MAX_CODE = 200_000  # characters of one piece that are parsed
WORDS_LENGTH = 160  # characters of quoted words
_PROMPT = re.compile(r"^(?:>>> |\.\.\. |In \[\d+\]: )", re.MULTILINE)
_MARKDOWN_LINK = re.compile(r"\[([^\]\n]{0,200})\]\([^)\s]{0,600}\)")
_SPAN = re.compile(r"`([^`\n]+)`")

Kind = Literal["prose", "python", "text"]  # text: commands, settings, logs, traces, dumps

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\u2028\u2029]")
_FENCE = re.compile(r"^\s{0,3}(?:```+|~~~+)\s*([A-Za-z0-9+_-]*)\s*$")
_POST = re.compile(r"^\W{0,4}([\w.-]{1,60})\W{0,4}(?:· (description|comment|review)\b|(opened|commented)\b)", re.ASCII)
_TITLE = re.compile(r"\s*(?:#|title:|labels:|https?://\S+$)", re.IGNORECASE)
_HEAD = re.compile(r" · (?:issue|pull request|discussion) #\d")
_TRACE = re.compile(
    r'Traceback \(most recent|^[ \t]*(?:\[?rank\d+\]?:?)*\s*File ".*", line \d+|^\s*\[?rank\d+\]?:', re.MULTILINE
)
_COMMAND = re.compile(
    r"(?:^|[\s/`])(?:torchrun|run_(?:llama_)?train\.sh|accelerate launch|python3? )|(?:^|\s)--[a-z][\w-]*"
)
_PYTHON = re.compile(
    r"^\s*(?:>>> )?(?:import \w|from [\w.]+ import|def \w|class \w|@\w|[\w.]+\s*=\s*[\w.]+\(|[\w.]+\()"
)
_SETTING = re.compile(r"^\s*(?:\[[\w.]+\]|[\w.-]+\s*=\s*[^=\s]|[\w.-]+:(?:\s|$))")
_ASSIGNED = re.compile(r"\s*(?:\[[\w.]+\]\s*$|[\w.]+_[\w.]+\s*[=:]\s*\S|[a-z]\w*\.[\w.]+\s*=\s*\S)")
# In a list, only where nothing but a remark follows: `- steps = 400 (a shorter run)`.
_LISTED = re.compile(r"\s*[-*+]\s+\w+[._][\w.]+\s*[=:]\s*(?:[\w./-]+|\"[^\"]*\"|'[^']*')\s*(?:\(.*\))?\s*$")
_YAML = re.compile(r"\s*(?:- )?[a-z][\w.-]*:(?:\s+(?:[\w./+-]+|\"[^\"]*\"|'[^']*'|\[.*\]))?\s*(?:#.*)?$")
_DUMP = re.compile(
    r"^\W{0,4}(?:\[?(?:pip3?|conda)\]|Collecting environment|(?:Is |CUDA |GCC |Clang |CMake |Libc |OS\b|ROCM|Platform"
    r"|Python |Numpy |PyTorch |GPU |Nvidia |cuDNN |Versions of|CPU|System RAM|`?Accelerate`? )[^:]{0,40}:"
    r"|[A-Za-z][\w.-]{1,40}\s*==\s*\d)",
    re.IGNORECASE,
)
_MESH = r"(?:FSDP|HSDP|TP|DP|CP|PP|EP|AC|SP|NGPU)\b"
_SECRETS = (
    (re.compile(rf"\b(?:export\s+)?(?!{_MESH})[A-Z][A-Z0-9_]{{1,60}}=(?:\"[^\"]*\"|'[^']*'|\S*)"), "…"),
    (re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA|ASIA|AIza|eyJ)[\w.-]{8,}"), "…"),
    (re.compile(r"(?i)\b(?:api[_-]?key|token|secret|passw(?:or)?d|bearer|authorization)\b\s*[=:]?\s*\S+"), "…"),
    (re.compile(r"\b(?=(?:[A-Za-z_-]{0,40}\d){4})[A-Za-z0-9_-]{32,}\b"), "…"),
    (re.compile(r"[\w.+-]{1,64}@[\w-]{1,64}\.[\w.-]{1,64}"), "…"),
    (re.compile(r"\b[a-z][a-z0-9+]{1,10}://\S*"), "…"),
    (re.compile(r"(?<![\w.])(?:~|[A-Za-z]:\\|\.{0,2}/)[\w.@+~\\/-]*[\\/]([\w.@+-]+)"), r"\1"),
    (re.compile(r"(?<![\w.])/(?:home|root|data|mnt|tmp|users|Users|opt|var|etc)[\w.@+~/-]*"), "…"),
)


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a report of one kind. `comment`: it is of somebody who answered."""

    kind: Kind
    text: str
    comment: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A clean report. `where` is its name in errors."""

    where: str
    text: str
    title: str
    pieces: tuple[Piece, ...]

    def texts(self, *kinds: Kind) -> str:
        """All pieces of these kinds, one below the other."""
        return "\n".join(piece.text for piece in self.pieces if piece.kind in kinds)


def read_file(path: str) -> bytes:
    """The content of a file, at most one byte more than is read of a report. HarnessError where there is none."""
    try:
        with Path(path).open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        fix = "give a file that exists."
        raise HarnessError(f"cannot be read: {error.strerror}.", where=path, fix=fix) from error


def read_report(content: bytes, *, where: str) -> Report:
    """The report in a file. HarnessError for what is too large, no text, or empty."""
    if len(content) > MAX_BYTES:
        what = f"{len(content) / 1e6:.1f} MB is no report: at most {MAX_BYTES // 1_000_000} MB are read."
        raise HarnessError(what, where=where, fix="keep the text of the report, without attached logs.")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HarnessError("not UTF-8 text.", where=where, fix="paste the text of the report.") from error
    if text.count("\x00"):
        raise HarnessError("not a text: it has zero bytes.", where=where, fix="paste the text of the report.")
    text = _unwrapped(_cleaned(text))
    if not text.strip():
        raise HarnessError("there is no text.", where=where, fix="paste the text of the report.")
    pieces = _pieces(text, where)
    has_prose = any(piece.kind == "prose" for piece in pieces)
    return Report(where=where, text=text, title=_title(text) if has_prose else f"the job of {where}", pieces=pieces)


def clean_words(text: str, length: int = WORDS_LENGTH) -> str:
    """Words of a report, fit to be printed and stored: one line, without secrets, assignments and folders."""
    line = _MARKDOWN_LINK.sub(r"\1", " ".join(text.split())[: 4 * length])
    for pattern, instead in _SECRETS:
        line = pattern.sub(instead, line)
    line = " ".join(line.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def options_of_toml(text: str) -> dict[str, object]:
    """The values of a TOML text by dotted name. ValueError for what is no TOML."""
    try:
        return dict(_flat(tomllib.loads(text)))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def python_tree(text: str) -> ast.Module | None:
    """The syntax tree of Python code, which may be indented or have prompts; None for what is no Python."""
    code = _PROMPT.sub("", text[:_MAX_CODE])
    lines = code.split("\n")
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    for candidate in dict.fromkeys((code, "\n".join(line[indent:] for line in lines))):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            return ast.parse(candidate)
    return None


def _flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _cleaned(text: str) -> str:
    text = _CONTROL.sub("", _ESCAPE.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))
    text = text.replace(chr(0x2019), "'").replace(chr(0xD7), "x")  # the apostrophe and the times sign of prose
    text = re.sub(r"[ \t]{65,}", " " * 64, re.sub(r"\n{4,}", "\n\n\n", text))
    return "\n".join(line[:_MAX_LINE] for line in text.split("\n"))


def _unwrapped(text: str) -> str:
    """A report without the fence that somebody put around all of it."""
    lines = text.strip("\n").split("\n")
    marks = [_FENCE.match(line) for line in lines]
    if len(lines) < 3 or not (marks[0] and marks[-1] and not marks[-1][1]):
        return text
    inner = [mark for mark in marks[1:-1] if mark]
    report = any(_POST.match(line) or _HEAD.search(line) or re.match(r"#{1,4} \S", line) for line in lines[1:4])
    wraps = marks[0][1].lower() in ("md", "markdown") or report or (inner and inner[0][1])
    return "\n".join(lines[1:-1]) if wraps and len(inner) % 2 == 0 else text


def _title(text: str) -> str:
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    headings = [line for line in lines[:12] if re.match(r"#\s+\S|title:\s*\S", line, re.IGNORECASE)]
    first = next((line for line in lines if " · " not in line and "://" not in line), "") if lines else ""
    title = headings[0] if headings else first
    return clean_words(re.sub(r"^(?:#+|title:)\s*", "", title, flags=re.IGNORECASE)) or "a bug"


def _pieces(text: str, where: str) -> tuple[Piece, ...]:
    whole = _whole(text, where)
    if whole is not None:
        return (Piece(kind=whole, text=text),)
    pieces: list[Piece] = []
    lines: list[str] = []
    language: str | None = None  # of the fence that is open
    comment, reporter, begun = False, "", False  # begun: text precedes the first post, which is then an answer

    def end() -> None:
        content = "\n".join(lines)
        if language is not None:
            pieces.append(Piece(kind=_kind(language, content), text=content, comment=comment))
        else:
            pieces.extend(_of_prose(lines, comment=comment))
        lines.clear()

    for line in text.split("\n"):
        mark, post = _FENCE.match(line), _POST.match(line)
        if mark and (language is None or not mark[1]):
            end()
            language = mark[1].lower() if language is None else None
        elif post and language is None:
            end()
            opens = (post[2] or post[3]) in ("description", "opened") or not begun
            reporter = reporter or (post[1] if opens else "")
            comment, begun = post[1] != reporter, True
        elif language is not None or not _HEAD.search(line):
            lines.append(line)
            begun = begun or bool(line.strip() and not _TITLE.match(line))
    end()
    return tuple(pieces)


def _whole(text: str, where: str) -> Kind | None:
    """What a file is that is no report but a configuration; None for a report."""
    tree = python_tree(text)
    if where.endswith(".py") or (tree is not None and any(isinstance(node, ast.Call) for node in ast.walk(tree))):
        return "python"
    if where.endswith((".yaml", ".yml", ".conf")):
        return "text"
    if "```" in text or "~~~" in text or re.search(r"(?:^|\s)--[a-z]", text):
        return None
    try:
        return "text" if options_of_toml(text) else None
    except ValueError:
        lines = [line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
        settings = lines and all(_SETTING.match(line) or line[0] in " -" for line in lines)
        return "text" if where.endswith(".toml") or settings else None


def _kind(language: str, text: str) -> Kind:
    lines = [line for line in text.split("\n") if line.strip()]
    calls = sum(bool(_PYTHON.match(line)) for line in lines) * 3 > len(lines)
    if not _TRACE.search(text) and (calls or (language in ("py", "python") and python_tree(text) is not None)):
        return "python"
    may_be_prose = language in ("", "text", "diff") and len(lines) < 4 and not any(map(_SETTING.match, lines))
    return "prose" if may_be_prose and not any(map(_is_text, lines)) else "text"


def _of_prose(lines: list[str], *, comment: bool) -> list[Piece]:
    """The pieces of what stands outside of fences: commands, settings, traces and dumps by line, the rest is prose."""
    prose: list[str] = []
    texts: list[str] = []
    yaml = [bool(_YAML.match(line)) for line in lines]
    for at, line in enumerate(lines):
        if yaml[at] and any(yaml[max(0, at - 1) : at] + yaml[at + 1 : at + 2]):  # two in a row
            texts.append(line)
            continue
        commands = [span for span in _SPAN.findall(line) if _COMMAND.search(span)]
        rest = _SPAN.sub(lambda span: "" if _COMMAND.search(span[1]) else span[0], line)
        texts += commands
        (texts if _is_text(rest) else prose).append(rest)
    pieces: tuple[tuple[Kind, str], ...] = (("text", "\n".join(texts)), ("prose", "\n".join(prose)[:_MAX_PROSE]))
    return [Piece(kind=kind, text=text, comment=comment) for kind, text in pieces if text.strip()]


def _is_text(line: str) -> bool:
    patterns = (_TRACE.search, _DUMP.match, _COMMAND.search, _ASSIGNED.match, _LISTED.match)
    return any(matches(line) for matches in patterns)
