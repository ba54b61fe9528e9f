"""What the prose of a report says: a few facts, and what was seen. "Cannot tell" is better than a guess.

Read are only words that stand for a fact in nearly all reports: they are declared with the axes and in `scope.py`. What
a clause says of a run that works is no statement.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from harness.bugs.reading import Source, Statement
from harness.bugs.report import Report, clean_words
from harness.matrix.bugfile import UNREPORTED, Bug, Symptom
from harness.matrix.scope import SCOPE
from harness.matrix.spellings import read_as, spellings_in_prose

_CLAUSE = re.compile(
    r"[.;!?](?=\s|$)|\n|,?\s+(?:but|while|whereas|however)\s|,\s+(?=(?:crash|fail|pass|work|break)\w*\s)"
)
# A run that works, or that the bug is compared with.
_CONTROL = re.compile(
    r"\b(?:works?|worked|working|pass(?:es|ed)?|fine|normal|smooth\w*|succeeds?|no issues?|not an issue|control"
    r"|baselines?|compared (?:with|to)"
    r"|did(?:n't| not) (?:encounter|repro\w*|happen)|does(?:n't| not) (?:repro\w*|happen|crash|fail|occur))\b",
    re.IGNORECASE,
)
_BROKEN = re.compile(r"\b(?:not work|n't work|no longer|un(?:able|expected)|only works|stop\w* work)", re.IGNORECASE)
_RUN = re.compile(
    r"\b(?:us(?:e|es|ed|ing)|with|run(?:s|ning)?|ran|train(?:s|ed|ing)?|enabl\w+|combin\w+|tr(?:y|ied|ying)|debugging)\b",
    re.IGNORECASE,
)
_HEDGED = re.compile(
    r"\b(?:like|other|also|unlike|compar\w+|would|could|should|might|support(?:s|ed)?|instead|rather|similar|e\.g|plan\w*"
    r"|future|such as|fun fact|built to|if you)\b",
    re.IGNORECASE,
)
# What was seen, which denies nothing of what was run.
_FAILED = re.compile(
    r"\b(?:(?:do|does|did|can|could|will|would)(?: not|n't) (?:work|converge|train|run|compile|match|fuse|help|support"
    r"|fit|divide|scale|finish|give|get|improve|start|agree|return)"
    r"|(?:not|n't) (?:work|converg|fus|convert|divisible|equal|the same|support|implement|available|found|giv|match)\w*"
    r"|cannot|unable|no (?:longer|speed\w*|module|attribute|kernel|such|gain|improvement|error|warning))\b",
    re.IGNORECASE,
)
# Before a word: that it was not run, or may not have been. After it: that it was not on.
_DENIED = re.compile(
    r"\b(?:no|not|never|none|neither|nor|without|w/o|w/out|disabl\w+|off|instead|rather|unlike|except|excluding|exclud\w+"
    r"|remov\w+|drop\w*|avoid\w*|skip\w*|rul\w+ out|ruled|if|whether|maybe|perhaps|would|could|should|might|may|plan\w*"
    r"|future|similar|other than|like|e\.g|such as|than|vs\.?|versus)\b|n't\b",
    re.IGNORECASE,
)
_NOT_ON = re.compile(
    r"^[^,;]{0,30}?\b(?:disabled|off|false|ruled out|removed|unused|"
    r"(?:not|never) (?:\w+ )?(?:us|enabl|set|appl|involv|need|part)\w*|n't (?:us|enabl|set|appl|involv|need)\w*)\b",
    re.IGNORECASE,
)
_SETTING = re.compile(r"\s*[-*+]\s+[\w./ -]{1,40}?\s*[=:]\s*\S{1,40}\s*$")
_TRIVIAL = frozenset({"float8", "fsdp", "tp_used", "model_size"})

_LINK = re.compile(r"https://github\.com/([\w.-]{1,60})/([\w.-]{1,80})/(?:issues|pull|discussions)/(\d{1,8})", re.ASCII)
_SHORT = re.compile(
    r"\b([\w.-]{1,60})/([\w.-]{1,80})(?: · (?:issue|pull request|discussion) |\s*)#(\d{1,8})\b", re.ASCII
)
_HEAD_LINES = 12  # in which the link and the date of a pasted report stand
_DATES = (
    (re.compile(r"\b(20[2-4]\d-[01]\d-[0-3]\d)\b"), "%Y-%m-%d"),
    (re.compile(r"\b([A-Z][a-z]{2}[a-z]*\.? \d{1,2},? 20[2-4]\d)\b"), "%b %d %Y"),
)
_NIGHTLY = ((re.compile(r"\bdev(20[2-4]\d[01]\d[0-3]\d)\b"), "%Y%m%d"),)
_ERROR = re.compile(
    r"(?<![\w.])((?:[A-Za-z_]\w*\.){0,6}[A-Z]\w*(?:Error|Exception|Mismatch|Failed|Unsupported))\s*: ?(.{0,600})"
)
_CONSEQUENCES = (
    "ChildFailedError",
    "ProcessRaisedException",
    "BackendCompilerFailed",
    "DistBackendError",
    "ProcessExited",
)
_PREFIX = re.compile(r"^\s*(?:\[?rank\d+\]?:\s*|\[[^\]\n]{0,40}\]:?\s*|E\s+|\d{4}-\d\d-\d\d[\d:., -]*)+")
_STEP = re.compile(
    r"\b(?:step|iter(?:ation)?)s?\s*[:=#]?\s*(\d{1,7})\b"
    r"|\b(\d{1,7})\s*(?:st|nd|rd|th)?[ -]?(?:iter(?:ation)?s?|steps?)\b",
    re.IGNORECASE,
)
_BAD = re.compile(
    r"\b(?:nans?(?! iterations)|inf|diverg\w*|explod\w*|spik\w*|crash\w*|fail\w*|hang\w*|hung|stuck|wrong|mismatch\w*"
    r"|error)\b",
    re.IGNORECASE,
)
_BAD_LOG = re.compile(r"\bstep:?\s*(\d{1,7})\b[^\n]{0,80}\bloss:?\s*(?:nan|inf)\b", re.IGNORECASE)
# In a dump of an environment, or in a list: never in a sentence or a path.
_VERSION = re.compile(
    r"(?im)(?:(?:^|[-*,(] ?|versions?: )`?(?:py)?(torch|torchao|torchtitan|triton|transformers|accelerate|cuda)`? ?"
    r"|(?<![\w./-])`?(?:py)?(torch|torchao|torchtitan|triton|transformers|accelerate|cuda|python)`?"
    r"(?: used to build pytorch| version)?(?: \(gpu\??\))?\s*(?:==|[:=]|\*\*:?)\s*)"
    r"v?(\d{1,4}\.\d{1,4}(?:\.\w[\w.+]{0,40})?)(?=[.`]?\s*(?:$|[,;|()\[]))"
)
_HARDWARE = re.compile(
    r"(?:\b(\d{1,5})\s*(?:x\s*)?)?(?:NVIDIA\s+|AMD\s+)?"
    r"\b(GB200|H100|H200|H20|A100|B200|B100|L40S?|MI300X|MI250X|RTX ?\d{4})s?\b"
    r"(?:[ -]{0,2}(\d{2,3}) ?(?:GB|GiB))?"
)
_SYMPTOMS: tuple[tuple[Symptom, str], ...] = (
    ("hang", r"hang(?:s|ing)?\b|\bhung\b|deadlock|stuck|watchdog|collective timeout"),
    ("nan", r"\bnans?\b|\binf loss"),
    ("memory", r"\bOOM\b|out of memory|memory (?:leak|usage|consumption|increase|overhead)|peak memory|high memory"),
    ("diverges", r"diverg|loss (?:spike|explod)|not converg|doesn.t converge|converge"),
    (
        "slow",
        r"\bslow|low throughput|low perf|performance regress|same perf|throughput|not fusing|not fused|speed",
    ),
    ("traffic", r"all-?gathers? (?:\w+ )?in bf16|instead of fp8|comm bandwidth|ignores `?enable_fsdp"),
    ("not_converted", r"not (?:being )?converted|isn.t converted|no (?:linear|float8linear)"),
    ("metric", r"\bmfu\b|grad(?:ient)?[_ ]norm (?:is|reported|count)"),
    ("crash", r"crash|divisible by|error|unable to run|fails?\b|exception|assert|mismatch"),
    (
        "wrong_numbers",
        r"numeric|wrong|incorrect|accuracy|not (?:giving )?(?:the )?same|differ|discrepan|parity|regress",
    ),
)


class Clause(msgspec.Struct, frozen=True, kw_only=True):
    """A clause of what the reporter wrote. `control`: it is about a run that works."""

    text: str
    title: bool = False
    control: bool = False


def clauses(report: Report) -> tuple[Clause, ...]:
    found = [Clause(text=report.title, title=True)]
    for piece in report.pieces:
        for text in _CLAUSE.split(piece.text) if piece.kind == "prose" and not piece.comment else ():
            if text.strip() and clean_words(re.sub(r"^\s*#+\s*", "", text)) != report.title:
                control = bool(_CONTROL.search(text)) and not _BROKEN.search(text)
                found.append(Clause(text=text, control=control))
    return tuple(found)


def stated_by_prose(told: Sequence[Clause]) -> tuple[list[Statement], list[str]]:
    """What prose states, and what was passed over: of a run that works, of what was not run, or not understood."""
    stated: list[Statement] = []
    passed: list[str] = []
    for clause in told:
        found = list(_statements(clause))
        kept = [each for each, denied in found if not (clause.control or denied)]
        stated += kept
        if any(each.fact not in _TRIVIAL and each not in kept for each, _ in found):
            why = "what works, or is compared with" if clause.control else "it may say what was not run"
            passed.append(f"{clean_words(clause.text)}: {why}")
        elif not found and _SETTING.match(clause.text):
            passed.append(f"{clean_words(clause.text)}: not understood")
    return stated, passed


def refused_by_prose(report: Report, told: Sequence[Clause]) -> dict[str, str]:
    """What prose says was run and no case has, with the words: in the title, or in a sentence that says so.

    The title is read with the repository before it: its issues are about its own software.
    """
    repository = find_link(_head(report))[0].split("/")[4:5]
    told = [replace(told[0], text=": ".join([*repository, told[0].text])), *told[1:]] if told else []
    found: dict[str, str] = {}
    for each in SCOPE if told else ():
        for clause in told:
            match = re.search(each.said, clause.text) if each.said else None
            ran = clause.title or (_RUN.search(clause.text) and not _HEDGED.search(clause.text))
            if match and ran and not (clause.control or _denied(clause.text, match)):
                found.setdefault(each.name, f"{each.reason} ({clean_words(clause.text)})")
    return found


def observe(report: Report, told: Sequence[Clause]) -> Bug:
    """The observations of a report as an open bug; fields that it does not state are empty."""
    message = _message(report)
    head = _head(report)
    return Bug(
        title=report.title,
        link=find_link(head)[0] or UNREPORTED,
        status="open",
        symptom=_symptom(told, message),
        reported=_date(head, _DATES),
        message=message,
        first_bad_step=_first_bad_step(report, told),
        hardware=_hardware(report.text),
        versions=_versions(report, told),
    )


def day_of(report: Report) -> datetime.date | None:
    """The latest day that a report can be from: by its head, else by its versions; None without a date."""
    return _date(_head(report), _DATES) or _date(report.text, (*_NIGHTLY, *_DATES))


def id_of(report: Report) -> str:
    """The id of the issue that a report names in its first lines; "" for none."""
    return find_link(_head(report))[1]


def find_link(text: str) -> tuple[str, str]:
    """(link, id) of the first issue that is named, such as (…/issues/864, "torchtitan-864"); ("", "") for none."""
    found = [each for each in (_LINK.search(text), _SHORT.search(text)) if each is not None]
    if not found:
        return "", ""
    first = min(found, key=re.Match.start)
    owner, name, number = first.groups()
    link = first[0] if first.re is _LINK else f"https://github.com/{owner}/{name}/issues/{number}"
    return link, re.sub(r"[^a-z0-9]+", "-", f"{name}-{number}".lower()).strip("-")


def _head(report: Report) -> str:
    return "\n".join([line for line in report.text.split("\n") if line.strip()][:_HEAD_LINES])


def _statements(clause: Clause) -> Iterator[tuple[Statement, bool]]:
    """What a clause has words for, and whether it may say that this was not run."""
    for axis, spelling in spellings_in_prose():
        for match in re.finditer(spelling.said, clause.text, re.IGNORECASE):
            said = next((group for group in match.groups() if group), "true")
            words = _around(clause.text, match)
            for fact, value in read_as(axis, spelling, said).items():
                source: Source = "title" if clause.title else "prose"
                yield Statement(fact=fact, value=value, words=words, source=source), _denied(clause.text, match)


def _around(text: str, match: re.Match[str]) -> str:
    start = max(text.rfind(" ", 0, max(0, match.start() - 30)) + 1, 0)
    end = text.find(" ", match.end() + 20)
    return clean_words(text if len(text) < 90 else text[start : None if end < 0 else end])


def _denied(text: str, match: re.Match[str]) -> bool:
    before, after = _FAILED.sub("", text[: match.start()]), text[match.end() : match.end() + 60]
    return bool(_DENIED.search(before) or _NOT_ON.search(after))


def _date(text: str, forms: Sequence[tuple[re.Pattern[str], str]]) -> datetime.date | None:
    """The first date in one of these forms, each of which is tried after the one before."""
    for pattern, form in forms:
        found = pattern.search(text)
        words = found[1].replace(",", "").replace(".", "") if found else ""
        if form.startswith("%b"):
            month, _, rest = words.partition(" ")
            words = f"{month[:3]} {rest}"
        try:
            return datetime.datetime.strptime(words, form).date()
        except ValueError:
            continue
    return None


def _message(report: Report) -> str:
    """The error that was raised first, on one line; "" for none."""
    for text in (report.texts("text"), report.texts("prose"), report.title):
        for line in text.split("\n"):
            found = _ERROR.search(_PREFIX.sub("", line))
            if found is None or found[1].rpartition(".")[2] in _CONSEQUENCES:
                continue
            inner = _ERROR.search(found[2])
            kind, words = (inner[1], inner[2]) if inner else (found[1], found[2])
            return clean_words(f"{kind.rpartition('.')[2]}: {words.strip(' `*')}", 300)
    return ""


def _symptom(told: Sequence[Clause], message: str) -> Symptom:
    """The symptom in the title, else a crash if there is an error, else the first symptom in the prose."""
    prose = " ".join(clause.text for clause in told if not (clause.title or clause.control))
    for text in (told[0].text, message and "error", prose):
        for symptom, pattern in _SYMPTOMS:
            if re.search(pattern, text, re.IGNORECASE):
                return symptom
    return "unknown"


def _first_bad_step(report: Report, told: Sequence[Clause]) -> int | None:
    log = _BAD_LOG.search("\n".join(piece.text for piece in report.pieces if not piece.comment))
    if log is not None:
        return int(log[1]) or None
    for clause in told:
        found = _STEP.search(clause.text)
        if found and _BAD.search(clause.text) and not clause.control:
            return int(found[1] or found[2]) or None
    return None


def _versions(report: Report, told: Sequence[Clause]) -> dict[str, str]:
    """Of what the reporter wrote outside of code, without clauses about runs that work."""
    text = "\n".join(piece.text for piece in report.pieces if not piece.comment and piece.kind != "python")
    for clause in told:
        if clause.control:
            text = text.replace(clause.text, "")
    found: dict[str, str] = {}
    for match in _VERSION.finditer(text):
        found.setdefault((match[1] or match[2]).lower(), match[3].rstrip("."))
    return found


def _hardware(text: str) -> str:
    found = sorted(_HARDWARE.finditer(text), key=lambda match: (match[1] is None, match.start()))
    if not found:
        return ""
    count, name, memory = found[0].groups()
    return f"{f'{count} x ' if count else ''}{name}{f' {memory} GB' if memory else ''}"
