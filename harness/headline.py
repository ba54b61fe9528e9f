"""The three lines of a failure: what is wrong, why we say so, and what to do next. Every face shows them first.

Digests, tuples, patterns and long numbers are evidence, which comes behind them.
"""

import re
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from harness.hints import shrink
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
_PATTERN = re.compile(r"\(\?[^()]*\)|\\+|\|[^']*(?=')")
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer
_OF_MODULE = re.compile(r"(?: (?:of|in|at|for)|:)? \{module\}")


class Headline(msgspec.Struct, frozen=True):
    """The three lines, each empty if nothing is known. `is_fix`: `next` is what mends it, and no command."""

    what: str = ""
    why: str = ""
    next: str = ""
    is_fix: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        following = f"{'fix' if self.is_fix else 'next'}: {self.next}" if self.next else ""
        return tuple(filter(None, (self.what, self.why, following)))


def headline_of(findings: Sequence[Finding], *, command: str, ranks: int, fixed: bool = False) -> Headline:
    """Return the three lines. `command` runs the case again, on so many ranks; `fixed`: with its fixes it passes."""
    if not findings:
        return Headline()
    known, first, whole = [finding for finding in findings if finding.rule == KNOWN], findings[0], f"{command} -v"
    if known:
        shown = findings[len(known) :][:1]
        why = "".join(f"{finding.rule} fails{modules_of(shown)} as recorded" for finding in shown)
        return Headline(_known(known, fixed=fixed), why, whole if command else "")
    can_shrink = first.judged and first.module is None and ranks > 1 and "bug" in commands()
    following = first.fix or (can_shrink and shrink(command)) or (whole if command else "")
    return Headline(_what(first, alike(findings)), _why(first), following, is_fix=bool(first.fix))


def _known(known: Sequence[Finding], *, fixed: bool) -> str:
    ends = "passes with the candidate fix" if fixed else "no candidate fix is recorded"
    faults = (finding.values for finding in known)
    names = (f"{fault.get('fault')} ({fault.get('link')}), {ends}: {fault.get('reason')}" for fault in faults)
    return f"{KNOWN}: {' And '.join(names)}"


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
    given, digests = [" ".join((text or "").split()) for text in (finding.expected, finding.found)], list[str]()
    for digits in _DIGITS:
        expected, found = (_cut(_plain(text, digits, digests)) for text in given)
        if expected != found:
            break
    else:
        numbers = [float(number[0]) for text in given if (number := _FLOAT.search(text))]
        apart = abs(numbers[0] - numbers[1]) if len(numbers) == 2 else 0.0
        found += f" ({apart:.2g} apart)" if apart else ""
    return ", ".join(f"{name} {text}" for name, text in (("expected", expected), ("found", found)) if text)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rpartition(' ')[0]} …"


def _plain(text: str, digits: int, digests: list[str]) -> str:
    """Return the text without digests, tuples and patterns, its numbers rounded. `digests` get letters in order."""

    def letter(match: re.Match[str]) -> str:
        if match[0] not in digests:
            digests.append(match[0])
        return f"bits {chr(ord('A') + digests.index(match[0]) % 26)}"

    text = _PATTERN.sub("", _TUPLE.sub(_unpacked, text))
    text = _DIGEST.sub(letter, _FLOAT.sub(lambda match: f"{float(match[0]):.{digits}g}", text))
    return _LONG_INTEGER.sub(lambda match: f"{int(match[0]):,}", text)


def _unpacked(match: re.Match[str]) -> str:
    """Return the items of a tuple, each once; a shape, and what else is in parentheses, as it is."""
    items = [item for item in re.split(", ?", match[1]) if item]
    is_shape = len(items) > 1 and all(item.isdigit() for item in items)
    if is_shape or not all(map(_ITEM.fullmatch, items)):
        return match[0]
    return ", ".join(dict.fromkeys(item.strip("'") for item in items))
