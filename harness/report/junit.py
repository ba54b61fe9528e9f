"""The JUnit XML report for CI systems: one testcase per case.

`failure`: the case was judged and is not good. `error`: it could not be judged (crash, hang, infra, not run).
`skipped`: it failed as its recorded upstream fault says, or is quarantined. Their text lists the findings and the
command that reproduces them. `system-out`: how ranks failed, with the end of what they printed; of a known fault also
the findings, because few viewers show the text of a skipped test; of a case that passed as expected, what was expected.
"""

from __future__ import annotations

from xml.etree import ElementTree

from harness.report.wording import failure_text, findings_texts, headline, outcome, printable
from harness.result import CaseResult, RunResult
from harness.verdict import Verdict

_SUITE = "fp8-harness"  # also the class name of every case
_ELEMENTS = {
    Verdict.NUMERIC: "failure",
    Verdict.INVARIANT: "failure",
    Verdict.CHANGED: "failure",
    Verdict.UNEXPECTED_PASS: "failure",
    Verdict.CRASH: "error",
    Verdict.HANG: "error",
    Verdict.INFRA: "error",
    Verdict.NOT_RUN: "error",
    Verdict.KNOWN: "skipped",
}


def junit_report(run: RunResult) -> bytes:
    """The XML document in UTF-8."""
    elements = [_element(result) for result in run.results]
    counts = {
        "tests": str(len(run.results)),
        "failures": str(elements.count("failure")),
        "errors": str(elements.count("error")),
        "skipped": str(elements.count("skipped")),
        "time": f"{run.wall_s:.3f}",
    }
    root = ElementTree.Element("testsuites", {"name": _SUITE, **counts})
    group = ElementTree.SubElement(root, "testsuite", {"name": _SUITE, **counts})
    _add_properties(group, run.provenance)
    for result in run.results:
        _add_case(group, result)
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _element(result: CaseResult) -> str | None:
    return "skipped" if result.excused else _ELEMENTS.get(result.verdict)


def _add_case(group: ElementTree.Element, result: CaseResult) -> None:
    names = {"classname": _SUITE, "name": result.case_id, "time": f"{result.seconds:.3f}"}
    case = ElementTree.SubElement(group, "testcase", names)
    facts = {"verdict": result.verdict.value, "world_size": str(result.world_size), "command": result.command}
    _add_properties(case, facts)
    element = _element(result)
    if element is not None:
        message = headline(result) or outcome(result)
        verdict = ElementTree.SubElement(case, element, {"type": result.verdict.value, "message": message})
        verdict.text = "\n".join(_texts(result))
    output = "\n\n".join(_output(result))
    if output:
        ElementTree.SubElement(case, "system-out").text = output


def _texts(result: CaseResult) -> list[str]:
    command = [f"reproduce: {result.command}"] if result.command else []
    return [*(findings_texts(result.findings) or [outcome(result)]), *map(printable, command)]


def _output(result: CaseResult) -> list[str]:
    if result.verdict is Verdict.PASSED:  # an expected refusal passes although ranks failed
        return list(filter(None, [headline(result)]))
    failures = [failure_text(failure) for failure in (result.run.failures if result.run else ())]
    return ["\n".join(_texts(result)), *failures] if result.verdict is Verdict.KNOWN else failures


def _add_properties(parent: ElementTree.Element, values: dict[str, str]) -> None:
    shown = {name: value for name, value in values.items() if value}
    if not shown:
        return
    properties = ElementTree.SubElement(parent, "properties")
    for name, value in sorted(shown.items()):
        ElementTree.SubElement(properties, "property", {"name": printable(name), "value": printable(value)})
