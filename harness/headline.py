"""The three lines of a failure: what is wrong, why we say so, and what to do next. Every face shows them first.

Digests, tuples, patterns and long numbers are evidence, which comes behind them.
"""

import re
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from harness.hints import more_of, shrink
from harness.registry import commands
from harness.verdict import Finding

KNOWN = "judge/known"  # the rule of a recorded upstream fault
_MODULES = 3  # that are named of those that show the same
_DIGITS = range(4, 7)  # significant ones of a number: as few as tell it from the one beside it
_LONGEST = 100  # characters of an expected or found value

_FLOAT = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[-+]?\d+)?(?!\.?\w)", re.IGNORECASE)
_LONG_INTEGER = re.compile(r"(?<![\w.])\d{8,}(?![\w.]|\.\d)")
_DIGEST = re.compile(r"(?<![\w.])(?=\d*[a-f])[0-9a-f]{8,}\b|(?<![\w.])[0-9a-f]{16,}\b")
_TUPLE = re.compile(r"\(([^()]*,[^()]*)\)")
_ITEM = re.compile(r"'[^']*'|-?[\d.]+(?:e[-+]?\d+)?|nan|inf|None|True|False")
_PATTERN = re.compile(r"'([^'|]*)\|[^']*'")
_GROUP = re.compile(r"\(\?[^()]*\)|\\+")
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer
_OF_MODULE = re.compile(r"(?: (?:of|in|at|for)|:)? \{module\}")


class Headline(msgspec.Struct, frozen=True):
    """The three lines, each empty where nothing is known. `is_fix`: `next` is what mends it, and no command."""

    what: str = ""
    why: str = ""
    next: str = ""
    is_fix: bool = False


def headline_of(findings: Sequence[Finding], *, command: str, ranks: int, fixed: bool = False) -> Headline:
    """Return the three lines. `command` runs the case again, on so many ranks; `fixed`: with its fixes it passes."""
    if not findings:
        return Headline()
    known, first = [finding for finding in findings if finding.rule == KNOWN], findings[0]
    if known:
        return Headline(_known(known, fixed=fixed), _shown_by(findings[len(known) :]), more_of(command))
    following = first.fix or _next(first, command, ranks)
    return Headline(_what(first, alike(findings)), _why(first), following, is_fix=bool(first.fix))


def _known(known: Sequence[Finding], *, fixed: bool) -> str:
    ends = "passes with the candidate fix" if fixed else "no candidate fix is recorded"
    faults = (finding.values for finding in known)
    names = (f"{fault.get('fault')} ({fault.get('link')}), {ends}: {fault.get('reason')}" for fault in faults)
    return f"{KNOWN}: {' And '.join(names)}"


def _shown_by(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    more = f", as the record says, with {len(findings) - 1} more" if len(findings) > 1 else ""
    return f"it shows by {findings[0].rule}{modules_of(findings[:1])}{more}"


def alike(findings: Sequence[Finding]) -> list[Finding]:
    """Return the first finding and all that say the same of other modules."""
    first, *others = findings
    return [first, *(other for other in others if first.module and other.module and _same(other) == _same(first))]


def _same(finding: Finding) -> tuple[object, ...]:
    words = tuple(value for value in finding.values.values() if isinstance(value, str))
    return finding.rule, finding.says, words, finding.step, finding.ranks, finding.operand


def modules_of(findings: Sequence[Finding]) -> str:
    """Return where findings are: " in layers.0.wq", " in 14 modules (layers.*.wq, …)", or nothing."""
    modules = dict.fromkeys(finding.module for finding in findings if finding.module)
    if len(modules) < 2:
        return "".join(f" in {module}" for module in modules)
    names = list(dict.fromkeys(_INDEX.sub("*", module) for module in modules))
    return f" in {len(modules)} modules ({', '.join(names[:_MODULES])}{', …' if len(names) > _MODULES else ''})"


def _what(first: Finding, same: Sequence[Finding]) -> str:
    """Return the rule, the module and the sentence without it, and the rest of the place."""
    says = re.sub(r"^\{module\}", "it" if len(same) == 1 else "each", first.says) if first.module else first.says
    shown = replace(first, says=_OF_MODULE.sub("", says), module=None)
    sentence = _plain(shown.first_line, _DIGITS[0], [])
    place = replace(shown, operand="" if first.operand in sentence else first.operand).place
    return f"{first.rule}{modules_of(same)}: {sentence}{f' [{place}]' if place else ''}"


def _why(finding: Finding) -> str:
    """Return what was expected and what was found, with as few digits as tell them apart."""
    digests: list[str] = []
    for digits in _DIGITS:
        pair = [_value(text, digits, digests) for text in (finding.expected, finding.found)]
        if pair[0] != pair[1]:
            break
    else:
        pair[1] += _apart(finding) if pair[1] else ""
    return ", ".join(f"{name} {text}" for name, text in zip(("expected", "found"), pair, strict=True) if text)


def _value(text: str | None, digits: int, digests: list[str]) -> str:
    shown = _plain(" ".join((text or "").split()), digits, digests)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST].rpartition(' ')[0]} …"


def _apart(finding: Finding) -> str:
    """Return how far apart two numbers are that no shown digit tells apart."""
    expected, found = (_FLOAT.search(text or "") for text in (finding.expected, finding.found))
    if expected is None or found is None or expected[0] == found[0]:
        return ""
    return f" ({abs(float(expected[0]) - float(found[0])):.2g} apart)"


def _plain(text: str, digits: int, digests: list[str]) -> str:
    """Return the text without digests, tuples and patterns, its numbers rounded. `digests` get letters in order."""

    def letter(match: re.Match[str]) -> str:
        if match[0] not in digests:
            digests.append(match[0])
        return f"bits {chr(ord('A') + digests.index(match[0]) % 26)}"

    text = _TUPLE.sub(_unpacked, text)
    text = _GROUP.sub("", _PATTERN.sub(r"'\1' or the like", _GROUP.sub("", text)))
    text = _DIGEST.sub(letter, _FLOAT.sub(lambda match: f"{float(match[0]):.{digits}g}", text))
    return _LONG_INTEGER.sub(lambda match: f"{int(match[0]):,}", text)


def _unpacked(match: re.Match[str]) -> str:
    """Return the items of a tuple, each once; a shape, and what else is in parentheses, as it is."""
    items = [item for item in re.split(", ?", match[1]) if item]
    is_shape = len(items) > 1 and all(item.isdigit() for item in items)
    if is_shape or not all(map(_ITEM.fullmatch, items)):
        return match[0]
    return ", ".join(dict.fromkeys(item.strip("'") for item in items))


def _next(finding: Finding, command: str, ranks: int) -> str:
    """Return the command that narrows it: to a smaller case where no module is known, or to all of its findings."""
    smaller = shrink(command) if finding.judged and finding.module is None and ranks > 1 else ""
    return smaller if smaller and "bug" in commands() else more_of(command)
