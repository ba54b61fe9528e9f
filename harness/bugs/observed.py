"""What a reporter saw: symptom, message, first bad step, versions, hardware, link and date."""

from __future__ import annotations

import datetime
import re

import msgspec

from harness.bugs.prose import clauses
from harness.bugs.report import Report, clean_words
from harness.matrix.bugfile import Symptom

_LINK = re.compile(r"https://github\.com/([\w.-]{1,60})/([\w.-]{1,80})/(?:issues|pull|discussions)/(\d{1,8})", re.ASCII)
_SHORT = re.compile(
    r"\b([\w.-]{1,60})/([\w.-]{1,80})(?: · (?:issue|pull request|discussion) |\s*)#(\d{1,8})\b", re.ASCII
)
_HEAD_LINES = 12  # in which the link and the date of a pasted report stand
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_ISO = re.compile(r"\b(20[2-4]\d)-([01]\d)-([0-3]\d)\b")
_ENGLISH = re.compile(r"\b([A-Z][a-z]{2})[a-z]*\.? (\d{1,2}),? (20[2-4]\d)\b")
_NIGHTLY = re.compile(r"\bdev(20[2-4]\d)([01]\d)([0-3]\d)\b")
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
    re.I,
)
_BAD = re.compile(
    r"\b(?:nans?|inf|diverg\w*|explod\w*|spik\w*|crash\w*|fail\w*|hang\w*|hung|stuck|wrong|mismatch\w*|error)\b", re.I
)
_BAD_LOG = re.compile(r"\bstep:?\s*(\d{1,7})\b[^\n]{0,80}\bloss:?\s*(?:nan|inf)\b", re.IGNORECASE)
_BETWEEN = r"[^\w\n]{0,14}(?:version)?[^\w\n]{0,14}"  # a name and its version
_VERSION = (
    ("torch", rf"(?:PyTorch(?: version)?(?: \(GPU\??\))?|(?<![\w.-])torch){_BETWEEN}"),
    ("torchao", rf"(?<![\w.-])torch-?ao{_BETWEEN}"),
    ("torchtitan", rf"(?<![\w.-])torchtitan{_BETWEEN}"),
    ("triton", rf"(?<![\w.-])(?:pytorch-)?triton{_BETWEEN}"),
    ("transformers", rf"(?<![\w.-])transformers{_BETWEEN}"),
    ("accelerate", rf"(?<![\w.-])accelerate{_BETWEEN}"),
    ("cuda", r"\bCUDA(?: used to build PyTorch| version)?\W{0,4}"),
    ("python", r"\bPython(?: version)?[^\w\n]{0,14}"),
)
_NUMBER = r"v?(\d{1,4}\.\d{1,4}[\w.+]{0,40})"
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
    ("slow", r"\bslow|low throughput|low perf|same perf|throughput|not fusing|not fused|speed"),
    ("traffic", r"all-?gathers? (?:\w+ )?in bf16|instead of fp8|comm bandwidth|ignores `?enable_fsdp"),
    ("not_converted", r"not (?:being )?converted|isn.t converted|no (?:linear|float8linear)"),
    ("metric", r"\bmfu\b|grad(?:ient)?[_ ]norm (?:is|reported|count)"),
    ("crash", r"crash|divisible by|error|unable to run|fails?\b|exception|assert|mismatch"),
    (
        "wrong_numbers",
        r"numeric|wrong|incorrect|accuracy|not (?:giving )?(?:the )?same|differ|discrepan|parity|regress",
    ),
)


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen and by whom. Empty where a report does not say."""

    symptom: Symptom
    message: str
    first_bad_step: int | None
    versions: dict[str, str]
    hardware: str
    link: str
    id: str
    reported: datetime.date | None
    day: datetime.date | None  # of which the report is, at the latest known: that of its head, else of its versions


def observe(report: Report) -> Observed:
    """What a report says of what was seen."""
    message = _message(report)
    head = "\n".join([line for line in report.text.split("\n") if line.strip()][:_HEAD_LINES])
    link, bug_id = find_link(head)
    reported = _date(head)
    return Observed(
        symptom=_symptom(report, message),
        message=message,
        first_bad_step=_first_bad_step(report),
        versions=_versions(_of_reporter(report)),
        hardware=_hardware(report.text),
        link=link,
        id=bug_id,
        reported=reported,
        day=reported or _nightly(report.text) or _date(report.text),
    )


def find_link(text: str) -> tuple[str, str]:
    """(link, id) of the first issue that is named, such as (…/issues/864, "torchtitan-864"); ("", "") for none."""
    url, short = _LINK.search(text), _SHORT.search(text)
    if url is not None and (short is None or url.start() < short.start()):
        return url[0], _id(url[2], url[3])
    if short is not None:
        return f"https://github.com/{short[1]}/{short[2]}/issues/{short[3]}", _id(short[2], short[3])
    return "", ""


def _id(repository: str, number: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{repository}-{number}".lower()).strip("-")


def _date(text: str) -> datetime.date | None:
    found = _ISO.search(text)
    if found is not None:
        return _day(*map(int, found.groups()))
    english = _ENGLISH.search(text)
    if english is not None and english[1].lower() in _MONTHS:
        return _day(int(english[3]), _MONTHS.index(english[1].lower()) + 1, int(english[2]))
    return None


def _nightly(text: str) -> datetime.date | None:
    found = _NIGHTLY.search(text)
    return None if found is None else _day(*map(int, found.groups()))


def _day(year: int, month: int, day: int) -> datetime.date | None:
    try:
        return datetime.date(year, month, day)
    except ValueError:
        return None


def _message(report: Report) -> str:
    """The error that was raised first, on one line; "" for none."""
    for text in (report.texts("trace"), report.texts("prose", "dump", "lines", "command", "toml"), report.title):
        for line in text.split("\n"):
            found = _ERROR.search(_PREFIX.sub("", line))
            if found is None or found[1].rpartition(".")[2] in _CONSEQUENCES:
                continue
            inner = _ERROR.search(found[2])
            kind, words = (inner[1], inner[2]) if inner else (found[1], found[2])
            return clean_words(f"{kind.rpartition('.')[2]}: {words.strip(' `*')}", 300)
    return ""


def _symptom(report: Report, message: str) -> Symptom:
    """The symptom in the title, else a crash if there is an error, else the first symptom in the prose."""
    prose = " ".join(clause.text for clause in clauses(report) if not clause.control and not clause.comment)
    for text in (report.title, message and "error", prose):
        for symptom, pattern in _SYMPTOMS:
            if re.search(pattern, text, re.IGNORECASE):
                return symptom
    return "unknown"


def _first_bad_step(report: Report) -> int | None:
    log = _BAD_LOG.search(report.text)
    if log is not None:
        return int(log[1]) or None
    for clause in clauses(report):
        found = _STEP.search(clause.text)
        if found and _BAD.search(clause.text) and not clause.control:
            return int(found[1] or found[2]) or None
    return None


def _of_reporter(report: Report) -> str:
    """What the reporter wrote, without clauses about runs that work."""
    works = {clause.text for clause in clauses(report) if clause.control}
    text = "\n".join(piece.text for piece in report.pieces if not piece.comment)
    for each in works:
        text = text.replace(each, "")
    return text


def _versions(text: str) -> dict[str, str]:
    found = {name: re.search(rf"(?im)(?:{pattern}){_NUMBER}", text) for name, pattern in _VERSION}
    return {name: match[1].rstrip(".") for name, match in found.items() if match}


def _hardware(text: str) -> str:
    found = sorted(_HARDWARE.finditer(text), key=lambda match: (match[1] is None, match.start()))
    if not found:
        return ""
    count, name, memory = found[0].groups()
    return f"{f'{count} x ' if count else ''}{name}{f' {memory} GB' if memory else ''}"
