"""A report as text: cleaned, without secrets, split into its blocks of code, with what was seen. Prose is not read.

Of what was seen, the title, the link and versions are read as they are written, the rest as tools print it.

A report is hostile until it is clean: control characters and terminal escapes are dropped, environment assignments,
tokens and paths never leave `clean_words`, and the size is limited, so that every later step takes bounded time.
"""

import ast
import functools
import json
import re
import textwrap
import tomllib
import warnings
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from harness.errors import HarnessError
from harness.plugins.bugs.bugfile import UNREPORTED, Bug

MAX_BYTES = 1_000_000
_MAX_LINE = 1_000
_MAX_CODE = 200_000  # characters of a block that are parsed
_MOST_LINES, _MOST_WORDS = 60, 3_000  # of prose that is kept
WORDS_LENGTH = 160  # characters of quoted words

Kind = Literal["toml", "yaml", "json", "python", "shell"]  # shell: commands, and any text that is none of the others

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\u2028\u2029]")
_FENCE = re.compile(r"^\s*(?:[-*+]\s+)?(```+|~~~+)\s*([A-Za-z0-9+_-]*)[^`]*$")
_MARKDOWN_LINK = re.compile(r"\[([^\]\n]{0,200})\]\([^)\s]{0,600}\)")
_PROMPT = re.compile(r"^(?:>>> |\.\.\. |In \[\d+\]: )", re.MULTILINE)
_FLAG = re.compile(r"(?:^|\s)--[A-Za-z]")
_SUFFIXES: dict[str, Kind] = {
    ".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sh": "shell", ".conf": "yaml",
}  # fmt: skip
_LANGUAGES: dict[str, Kind] = {
    "python": "python", "py": "python", "toml": "toml", "yaml": "yaml", "yml": "yaml", "json": "json",
    "bash": "shell", "sh": "shell", "shell": "shell", "console": "shell", "zsh": "shell",
}  # fmt: skip
_YAML_LINE = re.compile(r"\s*(?:- .*|[\w.\"'-]+:(?:\s.*)?|[\]\[{}\"'].*)$")
YAML_LOADER = yaml.CBaseLoader if yaml.__with_libyaml__ else yaml.BaseLoader  # every scalar is a text
# The languages that are guessed, in their order, each with what it cannot do without.
_SIGNS: tuple[tuple[Kind, str], ...] = (("json", "{"), ("toml", "="), ("python", "("), ("yaml", ":"))
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

_LINK = re.compile(r"https://github\.com/([\w.-]{1,60})/([\w.-]{1,80})/(?:issues|pull|discussions)/(\d{1,8})", re.ASCII)
_SHORT = re.compile(r"\b([\w.-]{1,60})/([\w.-]{1,80})#(\d{1,8})\b", re.ASCII)
_HEAD_LINES = 12  # in which the link of a pasted report stands
_ERROR = re.compile(
    r"(?<![\w.])((?:[A-Za-z_]\w*\.){0,6}[A-Z]\w*(?:Error|Exception|Mismatch|Failed|Unsupported))\s*: ?(.{0,600})"
)
_CONSEQUENCES = (
    "ChildFailedError", "ProcessRaisedException", "BackendCompilerFailed", "DistBackendError", "ProcessExited"
)  # fmt: skip
_PREFIX = re.compile(r"^\s*(?:\[?rank\d+\]?:\s*|\[[^\]\n]{0,40}\]:?\s*|E\s+|\d{4}-\d\d-\d\d[\d:., -]*)+")
_BAD_LOG = re.compile(r"\bstep:?\s*(\d{1,7})\b[^\n]{0,80}\bloss:?\s*(?:nan|inf)\b", re.IGNORECASE)
_PACKAGES = "torch|torchao|torchtitan|triton|transformers|accelerate"
_PINNED = re.compile(rf"(?<![\w./-])({_PACKAGES})\s*==\s*v?(\d{{1,4}}\.\d{{1,4}}[\w.+]{{0,40}})")
_DUMPED = re.compile(
    r"(?m)^(?:- )?(PyTorch|Python|CUDA)(?: used to build PyTorch)?(?: version)?: (\d{1,4}\.\d[\w.+]{0,40})"
)
_GPU = re.compile(r"(?m)^GPU (\d{1,3}): (?:NVIDIA |AMD )?([\w .-]{2,40})")


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration, a command or a log. `broken`: why it is not what it is called."""

    kind: Kind
    text: str
    broken: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A clean report. `where` is its name in errors; a configuration is a report of one block, without prose.

    `prose`: what stands outside of fences, fit to be printed and stored; it is kept, and not read.
    """

    where: str
    text: str
    title: str
    prose: str = ""
    blocks: tuple[Block, ...]

    @property
    def code(self) -> str:
        """All blocks, one below the other."""
        return "\n".join(block.text for block in self.blocks)

    @property
    def head(self) -> str:
        """The first lines."""
        return "\n".join([line for line in self.text.split("\n") if line.strip()][:_HEAD_LINES])


def read_file(path: str) -> bytes:
    """The content of a file, at most one byte more than is read of a report. HarnessError where there is none."""
    try:
        with Path(path).open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        fix = "give a file that exists."
        raise HarnessError(f"cannot be read: {error.strerror}.", where=path, fix=fix) from error


def read_report(content: bytes, *, where: str) -> Report:
    """Return the report in a file. HarnessError for what is too large, no text, or empty."""
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
    whole = _whole(text, where)
    if whole is None:
        blocks, prose = _parts(text)
        return Report(where=where, text=text, title=_title(text), prose=_kept(prose), blocks=tuple(blocks))
    return Report(where=where, text=text, title=f"the job of {where}", blocks=(_block(whole, text),))


@functools.lru_cache(maxsize=4096)
def clean_words(text: str, length: int = WORDS_LENGTH) -> str:
    """Words of a report, fit to be printed and stored: one line, without secrets, assignments and folders."""
    line = _MARKDOWN_LINK.sub(r"\1", " ".join(text[: 40 * length].split())[: 4 * length])
    for pattern, instead in _SECRETS:
        line = pattern.sub(instead, line)
    line = " ".join(line.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def python_tree(text: str) -> ast.Module:
    """Return the syntax tree of Python code, which may be indented or have prompts. SyntaxError for anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of literals that somebody else wrote
            return ast.parse(textwrap.dedent(_PROMPT.sub("", text)))
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error) or "nested too deeply") from error


def observe(report: Report) -> Bug:
    """Return the observations of a report as an open bug; fields that nothing prints are empty."""
    message, bad = _message(report.code), _BAD_LOG.search(report.code)
    versions: dict[str, str] = {}  # that it pins, or that a dump of an environment prints
    for name, version in (*_PINNED.findall(report.text), *_DUMPED.findall(report.code)):
        versions.setdefault("torch" if name == "PyTorch" else name.lower(), version.rstrip("."))
    return Bug(
        title=report.title,
        link=find_link(report.head)[0] or UNREPORTED,
        status="open",
        symptom="nan" if bad else "crash" if message else "unknown",
        message=message,
        report=report.prose,
        first_bad_step=int(bad[1]) or None if bad else None,
        hardware=_hardware(report.code),
        versions=versions,
    )


def find_link(text: str) -> tuple[str, str]:
    """(link, id) of the first issue that is named, such as (…/issues/864, "torchtitan-864"); ("", "") for none."""
    matches = [match for match in (_LINK.search(text), _SHORT.search(text)) if match is not None]
    if not matches:
        return "", ""
    first = min(matches, key=re.Match.start)
    owner, name, number = first.groups()
    link = first[0] if first.re is _LINK else f"https://github.com/{owner}/{name}/issues/{number}"
    return link, re.sub(r"[^a-z0-9]+", "-", f"{name}-{number}".lower()).strip("-")


def _message(text: str) -> str:
    """Return the error that was raised first, on one line; "" for none."""
    for line in text.split("\n"):
        match = _ERROR.search(_PREFIX.sub("", line))
        if match is None or match[1].rpartition(".")[2] in _CONSEQUENCES:
            continue
        inner = _ERROR.search(match[2])
        kind, words = (inner[1], inner[2]) if inner else (match[1], match[2])
        return clean_words(f"{kind.rpartition('.')[2]}: {words.strip(' `*')}", 300)
    return ""


def _hardware(text: str) -> str:
    """Return the devices that `nvidia-smi -L` and torch's dump of an environment list."""
    names = [name.strip() for _, name in dict.fromkeys(_GPU.findall(text))]
    return f"{len(names)} x {names[0]}" if names else ""


def _cleaned(text: str) -> str:
    text = _CONTROL.sub("", _ESCAPE.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))
    text = re.sub(r"(?<=[ \t]{64})[ \t]+", "", re.sub(r"\n{4,}", "\n\n\n", text))
    return "\n".join(line[:_MAX_LINE] for line in text.split("\n"))


def _unwrapped(text: str) -> str:
    """A report without the fence that somebody put around all of it: one around headings, or around other fences."""
    lines = text.strip("\n").split("\n")
    if len(lines) < 3 or not (_FENCE.match(lines[0]) and _FENCE.match(lines[-1])):
        return text
    inner = sum(bool(_FENCE.match(line)) for line in lines[1:-1])
    headed = any(re.match(r"#{1,4} \S", line) for line in lines[1:4])
    return "\n".join(lines[1:-1]) if (headed or inner) and inner % 2 == 0 else text


def _title(text: str) -> str:
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    headings = [line for line in lines[:12] if re.match(r"#\s+\S|title:\s*\S", line, re.IGNORECASE)]
    first = next((line for line in lines if "://" not in line), "")
    title = headings[0] if headings else first
    return clean_words(re.sub(r"^(?:#+|title:)\s*", "", title, flags=re.IGNORECASE)) or "a bug"


def _parts(text: str) -> tuple[list[Block], list[str]]:
    """What stands between fences, and the lines outside of them. A fence that is not closed ends with the report."""
    blocks: list[Block] = []
    prose: list[str] = []
    lines: list[str] = []
    fence, language = "", ""  # of the block that is open
    for line in [*text.split("\n"), None]:
        mark = None if line is None else _FENCE.match(line)
        if line is None or (mark and fence and mark[1].startswith(fence) and not mark[2]):
            if fence and lines:
                content = textwrap.dedent("\n".join(lines))
                blocks.append(_block(_LANGUAGES.get(language) or _guessed(content), content))
            fence, lines = "", []
        elif mark and not fence:
            fence, language = mark[1][:3], mark[2].lower()
        else:
            (lines if fence else prose).append(line)
    return blocks, prose


def _kept(prose: list[str]) -> str:
    """Return the first words of prose, without its heading."""
    lines = [line for line in prose if line.strip() and not re.match(r"\s*#\s", line)][:_MOST_LINES]
    text = "\n".join(clean_words(line, 4 * WORDS_LENGTH) for line in lines)
    return text if len(text) <= _MOST_WORDS else f"{text[: _MOST_WORDS - 1]}…"


def _block(kind: Kind, text: str) -> Block:
    if len(text) > _MAX_CODE and kind != "shell":
        return Block(kind=kind, text=text, broken=f"longer than {_MAX_CODE // 1000} kB")
    return Block(kind=kind, text=text, broken=_fault_of(kind, text))


def _whole(text: str, where: str) -> Kind | None:
    """Return what a file is that is no report but a configuration; None for a report."""
    suffix = Path(where).suffix.lower()
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    if suffix in (".md", ".rst") or re.search(r"(?m)^\s*(?:```|~~~)", text) or re.match(r"\s*#+ ", text):
        return None
    kind = _guessed(text)
    return None if kind == "shell" and not _FLAG.search(text) else kind


def _guessed(text: str) -> Kind:
    """Return the first language that a text without a name is in: only what nothing else can be."""
    if len(text) > _MAX_CODE:
        return "shell"
    for kind, sign in _SIGNS:
        if sign in text and not _fault_of(kind, text) and _is_meant(kind, text):
            return kind
    return "shell"


def _is_meant(kind: Kind, text: str) -> bool:
    """Return whether a text that can be read as this kind is likely to be it."""
    if kind == "python":
        return any(isinstance(node, ast.Call) for node in ast.walk(python_tree(text)))
    lines = [line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    return kind != "yaml" or (bool(lines) and not _FLAG.search(text) and all(_YAML_LINE.match(line) for line in lines))


def _fault_of(kind: Kind, text: str) -> str:
    """Return why a text is no such configuration; "" where it is one."""
    try:
        if kind == "toml":
            return "" if tomllib.loads(text) else "empty"
        if kind == "json":
            return "" if isinstance(json.loads(text), dict) else "no object"
        if kind == "yaml":
            trees = [tree for tree in yaml.load_all(text, Loader=YAML_LOADER) if tree]
            return "" if trees and all(isinstance(tree, dict) for tree in trees) else "no mapping"
        if kind == "python":
            python_tree(text)
    except (ValueError, SyntaxError, RecursionError, yaml.YAMLError) as error:
        return clean_words(str(error), 100) or "nested too deeply"
    return ""
