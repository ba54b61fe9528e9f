"""What the prose of a report says: a few facts, and what was seen. "Cannot tell" is better than a guess.

Read are only words that stand for a fact in nearly all reports: they are declared with the axes and in `scope.py`. A
word without a value counts in the title, in a list, or beside another value: alone in a sentence it may be about
anything. What a clause denies, doubts, or says about a run that works is no statement.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence

import msgspec

from harness.bugs.reading import Source, Statement
from harness.bugs.report import Report, clean_words
from harness.matrix.bugfile import UNREPORTED, Bug, Symptom
from harness.matrix.scope import DDP, FSDP1, SCOPE, OutOfScope, asked_by_call, asked_by_option
from harness.matrix.spellings import plain_key, read_as, spellings_in_prose

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
# Tags, and what was seen, which deny nothing of what was run.
_FAILED = re.compile(
    r"\[[^\]\n]*\]"
    r"|\b(?:(?:do|does|did|can|could|will|would)(?: not|n't) (?:work|converge|train|run|compile|match|fuse|help|support"
    r"|fit|divide|scale|finish|give|get|improve|start|agree|return)"
    r"|(?:not|n't) (?:work|compil|converg|fus|convert|divisible|equal|the same|support|implement|found|giv|match)\w*"
    r"|similar (?:issue|problem|error|bug|failure|behaviou?r)s?"
    r"|cannot|unable|no (?:longer|speed\w*|module|attribute|kernel|such|gain|improvement|error|warning))\b",
    re.IGNORECASE,
)
# Before a word: that it was not run, or may not have been. After it: that it was not on.
_NEGATION = (
    r"no|not|never|none|neither|nor|without|w/o|w/out|disabl\w+|off|instead|rather|unlike|except|exclud\w+|remov\w+"
    r"|delet\w+|deprecat\w+|drop\w*|avoid\w*|skip\w*|rul\w+ out|ruled|other than|than|vs\.?|versus"
)
_DENIED = re.compile(
    rf"\b(?:{_NEGATION}|if|whether|maybe|perhaps|would|could|should|might|may|also|including|plan\w*|future|similar|like"
    r"|e\.g|such as)\b|n't\b",
    re.IGNORECASE,
)
_NEGATED = re.compile(rf"(?:\b(?:{_NEGATION})\b|n't\b)(?:\W+\w+){{0,4}}\W*$", re.IGNORECASE)  # what follows it soon
_NOT_ON = re.compile(
    r"^[^,;]{0,30}?\b(?:disabled|off|false|ruled out|removed|unused|"
    r"(?:not|never) (?:\w+ )?(?:us|enabl|set|appl|involv|need|part)\w*|n't (?:us|enabl|set|appl|involv|need)\w*)\b",
    re.IGNORECASE,
)
_RAN = re.compile(
    r"\W*(?:(?:hi|hello|so|currently|here)\b,? )?(?:I|we)\b(?:'m|'re|'ve| am| are| have| was| were)?"
    r"(?: been| currently)? (?:run|ran|us(?:e|ing)|train|fine-?tun|tr(?:y|ied)|pre-?train)",
    re.IGNORECASE,
)
_SETTING = re.compile(r"\s*[-*+]\s+[\w./ -]{1,40}?\s*[=:]\s*\S{1,40}\s*$")
_TRIVIAL = frozenset({"float8", "fsdp", "tp_used", "hsdp"})
_FEW = 5  # words of a clause that is no sentence
_FLOAT8 = re.compile(r"(?i)\b(?:mx)?(?:fp8|float8)")
_FSDP, _SECOND = re.compile(r"(?i)\bFSDP\b"), re.compile(r"(?i)FSDP-?2|fully_shard|torchtitan")
_OPTION = re.compile(r"`-{0,2}([\w.-]+)\s*[=: ]\s*([\w.-]+)`")
_NAME = re.compile(r"\b(?=\w*[a-z_][A-Z_]|\w*[a-z]_)[A-Za-z_][\w.]{7,60}")
_PROTOTYPE, _FSDP2 = datetime.date(2024, 2, 1), datetime.date(2024, 7, 24)  # of FSDP2, and torch 2.4 with it

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
    r"\b(?:at|after|from|on|by|in)\s+(?:about |around |roughly |the |~)*"
    r"(?:(?:step|iter(?:ation)?)s?\s*[:=#]?\s*(\d{1,7})\b|(\d{1,7})\s*(?:st|nd|rd|th)?[ -]?(?:iter\w*|steps?)\b)",
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
    r"(?im)(?:\b(\d{1,5})\s*(?:x\s*)?(?:NVIDIA\s+|AMD\s+)?|\b(?:NVIDIA|AMD)\s+"
    r"|^\W{0,4}(?:GPUs?|Hardware)\b[^:\n]{0,9}:[ *]*)"
    r"(GB[23]00|H100|H200|H800|H20|A100|A6000|A40|V100|B[123]00|L40S?|MI\d{3}X|RTX ?\w?\d{4})(?:'?s)?\b"
    r"(?:[ -]{0,2}(\d{2,3}) ?(?:GB|GiB))?"
)
_SYMPTOMS: tuple[tuple[Symptom, str], ...] = (
    ("hang", r"hang(?:s|ing)?\b|\bhung\b|deadlock|stuck|watchdog|collective timeout"),
    ("nan", r"\bnans?\b|\binf loss"),
    ("memory", r"\bOOM\b|out of memory|memory (?:leak|usage|consumption|increase|overhead)|peak memory|high memory"),
    ("diverges", r"diverg|loss (?:spike|explod)|not converg|doesn.t converge"),
    (
        "slow",
        r"\bslow|low throughput|low perf|performance regress|same perf|throughput|not fusing|not fused|\bspeed",
    ),
    ("traffic", r"all-?gathers? (?:\w+ )?in bf16|instead of fp8|comm bandwidth|ignores `?enable_fsdp"),
    ("not_converted", r"not (?:being )?converted|isn.t converted|no (?:linear|float8linear)"),
    ("metric", r"\bmfu\b|grad(?:ient)?[_ ]norm (?:is|reported|count)"),
    (
        "crash",
        r"crash|divisible|not fit|\w+error\b|errors? (?:when|if|with)|unable to|fail(?:s|ed)?\b|assert|raises",
    ),
    (
        "wrong_numbers",
        r"numeric|wrong|incorrect|accuracy|not the same|differ|discrep|inconsisten|mismatch|error in",
    ),
)


class Clause(msgspec.Struct, frozen=True, kw_only=True):
    """A clause of what the reporter wrote. `control`: it is about a run that works."""

    text: str
    title: bool = False
    control: bool = False


def clauses(report: Report) -> tuple[Clause, ...]:
    prose_clauses = [Clause(text=report.title, title=True)]
    for piece in report.pieces:
        for text in _CLAUSE.split(piece.text) if piece.kind == "prose" and not piece.comment else ():
            if text.strip() and clean_words(re.sub(r"^\s*#+\s*", "", text)) != report.title:
                control = bool(_CONTROL.search(text)) and not _BROKEN.search(text)
                prose_clauses.append(Clause(text=text, control=control))
    return tuple(prose_clauses)


def stated_by_prose(prose_clauses: Sequence[Clause]) -> tuple[list[Statement], list[str]]:
    """What prose states, and what was passed over: of a run that works, of what was not run, or not understood."""
    stated: list[Statement] = []
    passed: list[str] = []
    for clause in prose_clauses:
        candidates = list(_statements(clause))
        kept = [statement for statement, denied, _ in candidates if not (clause.control or denied)]
        alone = len({statement.fact for statement in kept} - _TRIVIAL) == 1 and len(clause.text.split()) > _FEW
        if alone and not clause.title:
            kept = [
                statement
                for statement, _, valued in candidates
                if statement in kept and (valued or statement.fact in _TRIVIAL)
            ]
        stated += kept
        if any(statement.fact not in _TRIVIAL and statement not in kept for statement, *_ in candidates):
            why = "what works, or is compared with" if clause.control else "it may say what was not run"
            passed.append(f"{clean_words(clause.text)}: {why}")
        elif not candidates and _SETTING.match(clause.text):
            passed.append(f"{clean_words(clause.text)}: not understood")
    return stated, passed


def outside_by_prose(
    report: Report, prose_clauses: Sequence[Clause], day: datetime.date, link: str
) -> tuple[dict[str, str], dict[str, str]]:
    """(refused, asked): what the title, the repository or "we run" name and no case has; what a sentence mentions."""
    refused: dict[str, str] = {}
    asked: dict[str, str] = {}
    parts = link.split("/")
    repository, name = "/".join(parts[3:5]), "".join(parts[4:5])
    for feature in SCOPE:
        others = bool(feature.float8_of and re.match(feature.float8_of, repository))
        if (feature.said and re.search(feature.said, name)) or (others and _FLOAT8.search(report.title)):
            refused[feature.name] = f"{feature.reason} (an issue of {repository})"
        elif others and _FLOAT8.search(report.text):
            asked[feature.name] = f"an issue of {repository}"
    for clause in prose_clauses:
        for feature, ran in _mentioned(clause, first=day < _FSDP2 and not _SECOND.search(report.text)):
            words = clean_words(clause.text)
            asked.setdefault(feature.name, words)
            may_be = (feature is FSDP1 and day >= _PROTOTYPE and _FSDP.search(words)) or (
                feature is DDP and "HSDP" in words
            )
            if ran and not (may_be or feature.axes):
                refused.setdefault(feature.name, f"{feature.reason} ({words})")
    return refused, {name: words for name, words in asked.items() if name not in refused}


def _mentioned(clause: Clause, *, first: bool) -> Iterator[tuple[OutOfScope, bool]]:
    """What a clause mentions and no case has, and whether it was run. `first`: FSDP is FSDP1."""
    for feature in SCOPE:
        match = re.search(feature.said, clause.text) if feature.said else None
        match = match or (_FSDP.search(clause.text) if feature is FSDP1 and first else None)
        if match and not (clause.control or _denied(clause.text, match, _NEGATED)):
            yield feature, clause.title or bool(_RAN.match(clause.text) and not _denied(clause.text, match))
    for feature in filter(None, map(asked_by_call, _NAME.findall(clause.text))):
        yield feature, clause.title
    for feature in filter(
        None, (asked_by_option(plain_key(key), value) for key, value in _OPTION.findall(clause.text))
    ):
        yield feature, False


def observe(report: Report, prose_clauses: Sequence[Clause]) -> Bug:
    """The observations of a report as an open bug; fields that it does not state are empty."""
    message = _message(report)
    head = _head(report)
    return Bug(
        title=report.title,
        link=find_link(head)[0] or UNREPORTED,
        status="open",
        symptom=_symptom(prose_clauses, message),
        reported=_date(head, _DATES),
        message=message,
        first_bad_step=_first_bad_step(report),
        hardware=_hardware("\n".join(piece.text for piece in report.pieces if not piece.comment)),
        versions=_versions(report, prose_clauses),
    )


def day_of(report: Report) -> datetime.date | None:
    """The latest day that a report can be from: by its head, else by its versions; None without a date."""
    return _date(_head(report), _DATES) or _date(report.text, (*_NIGHTLY, *_DATES))


def id_of(report: Report) -> str:
    """The id of the issue that a report names in its first lines; "" for none."""
    return find_link(_head(report))[1]


def find_link(text: str) -> tuple[str, str]:
    """(link, id) of the first issue that is named, such as (…/issues/864, "torchtitan-864"); ("", "") for none."""
    matches = [match for match in (_LINK.search(text), _SHORT.search(text)) if match is not None]
    if not matches:
        return "", ""
    first = min(matches, key=re.Match.start)
    owner, name, number = first.groups()
    link = first[0] if first.re is _LINK else f"https://github.com/{owner}/{name}/issues/{number}"
    return link, re.sub(r"[^a-z0-9]+", "-", f"{name}-{number}".lower()).strip("-")


def _head(report: Report) -> str:
    return "\n".join([line for line in report.text.split("\n") if line.strip()][:_HEAD_LINES])


def _statements(clause: Clause) -> Iterator[tuple[Statement, bool, bool]]:
    """What a clause has words for, whether it may say that this was not run, and whether a value is given."""
    for axis, spelling in spellings_in_prose():
        for match in re.finditer(spelling.said, clause.text, re.IGNORECASE):
            said = next((group for group in match.groups() if group), "true")
            words = _around(clause.text, match)
            for fact, value in read_as(axis, spelling, said).items():
                source: Source = "title" if clause.title else "prose"
                stated = Statement(fact=fact, value=value, words=words, source=source)
                valued = any(match.groups()) and fact != "model_size"
                yield stated, _denied(clause.text, match), valued


def _around(text: str, match: re.Match[str]) -> str:
    start = max(text.rfind(" ", 0, max(0, match.start() - 30)) + 1, 0)
    end = text.find(" ", match.end() + 20)
    return clean_words(text if len(text) < 90 else text[start : None if end < 0 else end])


def _denied(text: str, match: re.Match[str], before: re.Pattern[str] = _DENIED) -> bool:
    seen, after = _FAILED.sub("", text[: match.start()]), text[match.end() : match.end() + 60]
    return bool(before.search(seen) or _NOT_ON.search(after))


def _date(text: str, forms: Sequence[tuple[re.Pattern[str], str]]) -> datetime.date | None:
    """The first date in one of these forms, each of which is tried after the one before."""
    for pattern, form in forms:
        match = pattern.search(text)
        words = match[1].replace(",", "").replace(".", "") if match else ""
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
            match = _ERROR.search(_PREFIX.sub("", line))
            if match is None or match[1].rpartition(".")[2] in _CONSEQUENCES:
                continue
            inner = _ERROR.search(match[2])
            kind, words = (inner[1], inner[2]) if inner else (match[1], match[2])
            return clean_words(f"{kind.rpartition('.')[2]}: {words.strip(' `*')}", 300)
    return ""


def _symptom(prose_clauses: Sequence[Clause], message: str) -> Symptom:
    """The symptom in the title, else a crash if there is an error."""
    for text in (prose_clauses[0].text, message and "crash"):
        for symptom, pattern in _SYMPTOMS:
            if re.search(pattern, text, re.IGNORECASE):
                return symptom
    return "unknown"


def _first_bad_step(report: Report) -> int | None:
    """Of a log, else of the title."""
    log = _BAD_LOG.search("\n".join(piece.text for piece in report.pieces if not piece.comment))
    if log is not None:
        return int(log[1]) or None
    match = _STEP.search(report.title)
    return int(match[1] or match[2]) or None if match else None


def _versions(report: Report, prose_clauses: Sequence[Clause]) -> dict[str, str]:
    """Of what the reporter wrote outside of code, without clauses about runs that work."""
    text = "\n".join(piece.text for piece in report.pieces if not piece.comment and piece.kind != "python")
    for clause in prose_clauses:
        if clause.control:
            text = text.replace(clause.text, "")
    versions: dict[str, str] = {}
    for match in _VERSION.finditer(text):
        versions.setdefault((match[1] or match[2]).lower(), match[3].rstrip("."))
    return versions


def _hardware(text: str) -> str:
    matches = sorted(_HARDWARE.finditer(text), key=lambda match: (match[1] is None, match.start()))
    if not matches:
        return ""
    count, name, memory = matches[0].groups()
    line = text[text.rfind("\n", 0, matches[0].start()) + 1 : matches[0].end()]
    count = "" if re.search(r"\bnodes?\b", line) else count  # those of a node
    return f"{f'{count} x ' if count else ''}{name}{f' {memory} GB' if memory else ''}"
