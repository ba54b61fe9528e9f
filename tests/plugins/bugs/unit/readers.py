"""How tests of the reader read: as `bug import` does, and as `new --from` does."""

import datetime

from harness.matrix.case import Case
from harness.plugins.bugs.importing import ImportedBug, ImportOptions, Job, import_configuration, import_report
from harness.plugins.bugs.report import read_report

TODAY = datetime.date(2026, 11, 28)


def head(repository: str, number: int, title: str) -> str:
    return f"# {title}\n\nhttps://github.com/{repository}/issues/{number}\n\n"


def fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text}\n```\n"


def imported(text: str | bytes, where: str = "report.md", **asked: object) -> ImportedBug:
    content = text if isinstance(text, bytes) else text.encode()
    options = ImportOptions(**{"today": TODAY, "id": "x", **asked})  # type: ignore[arg-type]
    return import_report(read_report(content, where=where), options)


def case_of(job: ImportedBug) -> Case:
    assert job.bug.case is not None, job.bug.refused
    return job.bug.case


def configured(
    text: str, ranks: int | None = None, where: str = "job", ignore: tuple[str, ...] = (), **axes: object
) -> Job:
    report = read_report(text.encode(), where=where)
    return import_configuration(report, ImportOptions(today=TODAY, axes=axes, ranks=ranks, ignore=ignore))


def configured_case(text: str, ranks: int | None = None, where: str = "job", **axes: object) -> Case:
    case = configured(text, ranks, where, **axes).case
    assert case is not None
    return case
