"""What was seen: the title and the link as they are written, and what tools print word for word. Prose is not read."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping

from harness.plugins.bugs.bugfile import UNREPORTED, Bug, Symptom
from harness.plugins.bugs.report import Report, clean_words

_LINK = re.compile(r"https://github\.com/([\w.-]{1,60})/([\w.-]{1,80})/(?:issues|pull|discussions)/(\d{1,8})", re.ASCII)
_SHORT = re.compile(r"\b([\w.-]{1,60})/([\w.-]{1,80})#(\d{1,8})\b", re.ASCII)
_HEAD_LINES = 12  # in which the link and the date of a pasted report stand
_DAY = re.compile(
    r"\b(20[2-4]\d)-([01]\d)-([0-3]\d)\b|\b([A-Z][a-z]{2}) (\d{1,2}), (20[2-4]\d)\b"
)  # as GitHub writes it
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
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
_BAD_LOG = re.compile(r"\bstep:?\s*(\d{1,7})\b[^\n]{0,80}\bloss:?\s*(?:nan|inf)\b", re.IGNORECASE)
_PACKAGES = "torch|torchao|torchtitan|triton|transformers|accelerate"
_PINNED = re.compile(rf"(?<![\w./-])({_PACKAGES})\s*==\s*v?(\d{{1,4}}\.\d{{1,4}}[\w.+]{{0,40}})")
_DUMPED = re.compile(
    r"(?m)^(?:- )?(PyTorch|Python|CUDA)(?: used to build PyTorch)?(?: version)?: (\d{1,4}\.\d[\w.+]{0,40})"
)
_GPU = re.compile(r"(?m)^GPU (\d{1,3}): (?:NVIDIA |AMD )?([\w .-]{2,40})")


def observe(report: Report, *, symptom: Symptom | None) -> Bug:
    """The observations of a report as an open bug; fields that nothing prints are empty."""
    message, bad = _message(report.code), _BAD_LOG.search(report.code)
    return Bug(
        title=report.title,
        link=find_link(_head(report))[0] or UNREPORTED,
        status="open",
        symptom=symptom or ("nan" if bad else "crash" if message else "unknown"),
        reported=_day(_head(report)),
        message=message,
        report=report.prose,
        first_bad_step=int(bad[1]) or None if bad else None,
        hardware=_hardware(report.code),
        versions=versions_in(report),
    )


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


def versions_in(report: Report) -> Mapping[str, str]:
    """The versions that a report pins, or that a dump of an environment prints."""
    versions: dict[str, str] = {}
    for name, version in (*_PINNED.findall(report.text), *_DUMPED.findall(report.code)):
        versions.setdefault(name.lower().removeprefix("py") if name == "PyTorch" else name.lower(), version.rstrip("."))
    return versions


def _head(report: Report) -> str:
    return "\n".join([line for line in report.text.split("\n") if line.strip()][:_HEAD_LINES])


def _day(text: str) -> datetime.date | None:
    match = _DAY.search(text)
    if match is None or (match[4] and match[4] not in _MONTHS):
        return None
    year, month, day = (match[1], match[2], match[3]) if match[1] else (match[6], _MONTHS.index(match[4]) + 1, match[5])
    try:
        return datetime.date(int(year), int(month), int(day))
    except ValueError:
        return None


def _message(text: str) -> str:
    """The error that was raised first, on one line; "" for none."""
    for line in text.split("\n"):
        match = _ERROR.search(_PREFIX.sub("", line))
        if match is None or match[1].rpartition(".")[2] in _CONSEQUENCES:
            continue
        inner = _ERROR.search(match[2])
        kind, words = (inner[1], inner[2]) if inner else (match[1], match[2])
        return clean_words(f"{kind.rpartition('.')[2]}: {words.strip(' `*')}", 300)
    return ""


def _hardware(text: str) -> str:
    """The devices that `nvidia-smi -L` and torch's dump of an environment list."""
    names = [name.strip() for _, name in dict.fromkeys(_GPU.findall(text))]
    return f"{len(names)} x {names[0]}" if names else ""
