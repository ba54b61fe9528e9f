"""Pages about faults that upstream can be told: `bug list --pages`, of the records and bug files of a project."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.specifiers import SpecifierSet

from harness.hints import WRITE_PAGES, export_test, repro_bug, run_cases
from harness.matrix.known import PACKAGES, KnownFault, matching
from harness.matrix.selector import Selector, parse_selector
from harness.matrix.targets import targets
from harness.plugins.bugs.bugfile import UNREPORTED, BugFile
from harness.report.sections import Block, Facts, Items, Section, Verbatim, markdown

_MEASURED = "[Versions](../versions.md) says with which versions the tool runs every night."
_MADE = f"Written by `{WRITE_PAGES}` from `cases/known.toml` and `cases/bugs`."


def upstream_pages(faults: Sequence[KnownFault], bugs: Sequence[BugFile], root: Path) -> Mapping[str, str]:
    """Markdown by the name of a page: a fault with all its records, or a bug that no case can have. And their index."""
    pages: dict[str, tuple[str, str]] = {}
    covered: set[str] = set()
    for records in _by_cause(faults).values():
        named = [bug for bug in bugs if bug.bug.status == "live" and _is_of(bug, records)]
        covered |= {bug.id for bug in named}
        named.sort(key=lambda bug: not _is_of(bug, records[:1]))  # the first names the page
        title = named[0].bug.title if named else records[0].title or records[0].name
        pages[records[0].name] = title, _page(title, _of_records(records, named, root))
    for bug in bugs:
        if bug.bug.link == UNREPORTED and bug.bug.status in ("live", "refused") and bug.id not in covered:
            pages[bug.id] = bug.bug.title, _page(bug.bug.title, _of_bug(bug))
    lines = tuple(f"[{title}]({name}.md)" for name, (title, _) in sorted(pages.items()))
    index = [Section(title="Ready to file", blocks=(_MADE, Items(lines)))]
    return {"index": markdown(index, level=1, own=True), **{name: text for name, (_, text) in pages.items()}}


def _by_cause(faults: Iterable[KnownFault]) -> Mapping[str, list[KnownFault]]:
    """Records of one report, or of one fix."""
    groups: dict[str, list[KnownFault]] = {}
    for fault in faults:
        key = fault.link if fault.link != UNREPORTED else fault.fix or fault.name
        groups.setdefault(key, []).append(fault)
    return groups


def _is_of(bug: BugFile, records: Sequence[KnownFault]) -> bool:
    """True when one of the records is what makes the case of a bug fail."""
    mine = () if bug.case is None else matching(records, bug.case)
    rules = {symptom.rule for record in mine for symptom in record.requires}
    return bug.bug.link in (UNREPORTED, records[0].link) and not rules.isdisjoint(bug.bug.detected_by)


def _page(title: str, blocks: Iterator[Section]) -> str:
    return markdown([Section(title=title, blocks=tuple(blocks))], level=1, own=True)


def _of_records(records: Sequence[KnownFault], bugs: Sequence[BugFile], root: Path) -> Iterator[Section]:
    first = records[0]
    reasons = {record.verdict: record.reason for record in reversed(records)}
    yield Section(title="Symptom", blocks=tuple(reversed(reasons.values())))
    facts = (
        ("affected", "; ".join(dict.fromkeys(record.versions for record in records))),
        *(("found in", "; ".join(shown)) for shown in [list(_shown(records))] if shown),
        ("first version without it", _fixed_in(records)),
        ("reported", "not yet" if first.link == UNREPORTED else first.link),
        ("look again by", str(first.review_by)),
    )
    yield Section(title="Versions", blocks=(Facts(facts), _MEASURED))
    shows = dict.fromkeys(str(symptom) for record in records for symptom in record.requires)
    yield Section(title="How it shows", blocks=(Items(tuple(shows)),))
    yield Section(title="Reproduce", blocks=tuple(_reproduce(records, bugs, root)))
    fixes = dict.fromkeys(record.fix for record in records if record.fix is not None)
    tried: list[Block] = [text for fix in fixes for text in _fix(root / fix.partition(":")[0], fix)]
    tried += [record.tried for record in records if record.tried]
    yield Section(title="The fix we tried", blocks=tuple(tried) or ("None is recorded.",))


def _shown(records: Sequence[KnownFault]) -> Iterator[str]:
    for package in PACKAGES:
        if versions := dict.fromkeys(version for record in records for version in record.shown.get(package, ())):
            yield f"{package} {', '.join(versions)}"


def _fixed_in(records: Sequence[KnownFault]) -> str:
    """The record says up to which version, or that there is no end."""
    given = [text for record in records for text in record.specifiers.values()]
    ends = [
        str(specifier) for text in given for specifier in SpecifierSet(text) if specifier.operator in ("==", "<", "<=")
    ]
    return f"recorded for {', '.join(dict.fromkeys(ends))} only; others were not looked at" if ends else "none known"


def _reproduce(records: Sequence[KnownFault], bugs: Sequence[BugFile], root: Path) -> Iterator[Block]:
    for bug in bugs:
        test = f"test_{bug.id.replace('-', '_')}.py"
        if (root / "docs" / "upstream" / test).exists():
            yield f"[{test}]({test}) needs torch, torchao and pytest only, and is red:"
            yield Verbatim(f"python -m pytest {test}\n{export_test(bug.id)}")
        else:
            yield Verbatim(repro_bug(bug.id))
    for record in records if not bugs else ():
        yield Verbatim(run_cases(_tier(parse_selector(record.where)), "--select", record.where))


def _tier(selector: Selector) -> str:
    """The tier with these cases: a target that needs a framework has one under its name."""
    asked = [term.values for term in selector.terms if (term.axis, term.operator) == ("target", "=")]
    return next(
        (
            str(values[0])
            for values in asked
            if set(values) <= {name for name, target in targets().items() if target.package}
        ),
        "nightly",
    )


def _fix(path: Path, fix: str) -> Iterator[Block]:
    """The docstring of the file, without its first line's command, and what it does."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first, *rest = [
        " ".join(paragraph.split()) for paragraph in re.split(r"\n\n+", docstring) if not paragraph.startswith("    ")
    ]
    yield f"`{fix}`. {first}"
    yield from rest
    yield "With it every check passes; every run of an affected case applies it and judges the case again."


def _of_bug(bug: BugFile) -> Iterator[Section]:
    symptom = bug.bug.cause or f"Seen as: {bug.bug.symptom.replace('_', ' ')}."
    yield Section(title="Symptom", blocks=(symptom,))
    versions = ", ".join(f"{name} {version}" for name, version in bug.bug.versions.items())
    yield Section(title="Versions", blocks=(Facts((("seen with", versions), ("first version without it", "none"))),))
    why = tuple(f"{name}: {text}" for name, text in bug.refused.items())
    blocks = ("Found in the source; no case can have it, so nothing here reproduces it.", Items(why))
    yield Section(title="Reproduce", blocks=blocks if why else (Verbatim(repro_bug(bug.id)),))
    yield Section(title="The fix we tried", blocks=(bug.bug.fix or "None is recorded.",))
