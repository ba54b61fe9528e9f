"""The page: its template, style, script and data in one file, which a browser opens from disk and which loads nothing.

What a run recorded is data: texts in the template are escaped, and the script shows texts as texts. Its policy lets the
browser execute this very script and apply this very style alone.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

from harness.jsonform import to_json
from harness.report.html.data import index_and_details
from harness.report.run import totals, totals_line
from harness.report.sections import Facts, Section, Table
from harness.result import RunResult
from harness.text import counted, printable
from harness.verdict import ExitCode

if TYPE_CHECKING:
    from jinja2 import Template

_PACKAGE = "harness.report.html"
# Parts of one function, in order.
_SCRIPTS = ("page.js", "matrix.js", "cases.js", "curves.js", "heat.js", "case.js", "start.js")
# In JSON these are the same characters, and in HTML they end nothing.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}"}
_POLICY = "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
_STATES = {
    ExitCode.GOOD: "good",
    ExitCode.NOTHING_RAN: "nothing ran",
    ExitCode.INFRA: "infrastructure failed",
    ExitCode.CHANGED: "changed by unverified versions",
    ExitCode.INTERRUPTED: "interrupted",
}


class Front(msgspec.Struct, frozen=True, kw_only=True):
    """The top of the page: title, answer, a line; and the section before the cases, if any."""

    title: str
    state: str
    good: bool
    line: str
    section: Section | None = None


def html_report(
    run: RunResult,
    *,
    front: Front | None = None,
    sections: Sequence[Section] = (),
    history: Mapping[str, Table] | None = None,
) -> bytes:
    """The page of a run in UTF-8. `sections` follow the cases; `history` has earlier results, by the id of a case.

    `front` replaces the top that the run itself has.
    """
    index, details = index_and_details(run, history or {})
    if front is None:
        title = " ".join(filter(None, ("fp8-harness", run.start.name)))
        failed = sum(not case.good and not case.excused for case in run.results)
        state = _STATES.get(run.exit_code, f"{failed} of {counted(len(run.results), 'case')} failed")
        front = Front(title=title, state=state, good=run.exit_code == 0, line=totals_line(run))
    data = {"index": index, **{f"detail-{number}": detail for number, detail in enumerate(details)}}
    return _rendered(data, front=front, sections=(*sections, _run_section(run)))


def _rendered(data: Mapping[str, object], **values: object) -> bytes:
    """Return the page in UTF-8. Each of `data` is JSON in an element of its name, for the scripts."""
    from markupsafe import Markup

    own = "\n".join(['(() => {\n"use strict";', *map(_asset, _SCRIPTS), "})();"])
    license = f"/* uPlot\n{_asset('uPlot.LICENSE', 'vendor')}*/"
    script = Markup("\n".join([license, _asset("uPlot.iife.min.js", "vendor"), own]))
    style = Markup("\n".join([_asset("uPlot.min.css", "vendor"), _asset("page.css")]))
    plain = {name: to_json(_printable(msgspec.to_builtins(value))).decode() for name, value in data.items()}
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; {_POLICY}"
    data = {name: Markup(text.translate(_ESCAPES)) for name, text in plain.items()}
    return _template().render(policy=policy, style=style, script=script, data=data, **values).encode()


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters["kind"] = lambda block: type(block).__name__
    return environment.from_string("".join(map(_asset, ("parts.html", "page.html"))))


def _run_section(run: RunResult) -> Section:
    ran = [reference for reference in run.end.references if reference.ran]
    references = Table(
        title=f"References that were run ({len(ran)} of {len(run.end.references)})",
        columns=("reference", "CPU s", "retried after"),
        rows=tuple((reference.name, f"{reference.cpu_s:.1f}", "; ".join(reference.retried)) for reference in ran),
        right=(1,),
        folded=True,
    )
    facts, environment = [("name", run.start.name), ("started", run.start.started)], run.start.environment
    facts += [] if environment is None else [("fingerprint", environment.fingerprint)]
    facts += (run.end.provenance if environment is None else environment.words).items()
    *others, last = totals(run)
    shown = Section(title="Totals", blocks=(*last.blocks, *others))
    return Section(name="run", title="Run", blocks=(Facts(tuple(facts)), shown, references))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _printable(plain: object) -> object:
    match plain:
        case str():
            return printable(plain)
        case dict():
            return {_printable(key): _printable(item) for key, item in plain.items()}
        case list() | tuple():
            return [_printable(item) for item in plain]
        case _:
            return plain


def _asset(name: str, folder: str = "assets") -> str:
    return (files(_PACKAGE) / folder / name).read_text(encoding="utf-8")
