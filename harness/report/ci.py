"""What CI systems read: JUnit XML, and the annotations and the job summary of GitHub Actions.

JUnit has a testcase for every case. `failure`: it was judged and is not good. `error`: it could not be judged.
`skipped`: it failed as recorded for an upstream fault, is quarantined, or only differs from a formula with a build that
is no release. A command with another answer about a case gives its own. `system-out` has how ranks failed; of a known
fault also the findings, because few viewers show the text of a skipped test.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple
from xml.etree import ElementTree

from harness.report.case import evidence, failure_blocks, headline, outcome, reproduce, three_lines
from harness.report.run import run_markdown
from harness.report.sections import Block, Section, text_of
from harness.result import CaseResult, RunResult
from harness.text import printable
from harness.verdict import Verdict

Element = Literal["failure", "error", "skipped"]
ANNOTATIONS = 10  # of one step that GitHub shows
SUMMARY_BYTES = 1 << 20  # of one step; GitHub drops a larger summary as a whole
_CUT = "\n\n… cut off here: the whole report is larger than GitHub shows.\n"
_SUITE = "fp8-harness"  # also the class name of every case
_ELEMENTS: Mapping[Verdict, Element] = {
    **dict.fromkeys((Verdict.NUMERIC, Verdict.INVARIANT, Verdict.CHANGED, Verdict.UNEXPECTED_PASS), "failure"),
    **dict.fromkeys((Verdict.CRASH, Verdict.HANG, Verdict.INFRA, Verdict.NOT_RUN), "error"),
    Verdict.KNOWN: "skipped",
}


class JUnitElement(NamedTuple):
    """The word of JUnit for a case, in place of its verdict, and why."""

    element: Element
    why: str


def junit_report(run: RunResult, instead: Mapping[str, JUnitElement] = MappingProxyType({})) -> bytes:
    """Return the XML document in UTF-8. `instead`: by case id."""
    answers = [instead.get(result.case_id) or _junit_element(result) for result in run.results]
    elements = [answer.element for answer in answers if answer is not None]
    counts = {
        "tests": str(len(run.results)),
        "failures": str(elements.count("failure")),
        "errors": str(elements.count("error")),
        "skipped": str(elements.count("skipped")),
        "time": f"{run.end.wall_s:.3f}",
    }
    root = ElementTree.Element("testsuites", {"name": _SUITE, **counts})
    group = ElementTree.SubElement(root, "testsuite", {"name": _SUITE, **counts})
    _add_properties(group, run.end.provenance)
    for result, answer in zip(run.results, answers, strict=True):
        _add_case(group, result, answer)
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _junit_element(result: CaseResult) -> JUnitElement | None:
    element = "skipped" if result.excused else _ELEMENTS.get(result.verdict)
    return None if element is None else JUnitElement(element, headline(result) or outcome(result))


def _add_case(group: ElementTree.Element, result: CaseResult, answer: JUnitElement | None) -> None:
    names = {"classname": _SUITE, "name": printable(result.case_id), "time": f"{result.seconds:.3f}"}
    case = ElementTree.SubElement(group, "testcase", names)
    facts = {"verdict": result.verdict.value, "world_size": str(result.world_size), "command": result.command}
    _add_properties(case, facts)
    findings = _text(*(three_lines(result) or (outcome(result),)), *reproduce(result), evidence(result.findings))
    if answer is not None:
        attributes = {"type": result.verdict.value, "message": printable(answer.why)}
        ElementTree.SubElement(case, answer.element, attributes).text = findings
    output = "\n\n".join(_output(result, findings))
    if output:
        ElementTree.SubElement(case, "system-out").text = output


def _output(result: CaseResult, findings: str) -> list[str]:
    if result.verdict is Verdict.PASSED:  # an expected refusal passes although ranks failed
        return [printable(headline(result))]
    failures = [_text(*failure_blocks(failure, most=None)) for failure in result.failures]
    return [findings, *failures] if result.verdict is Verdict.KNOWN else failures


def _add_properties(parent: ElementTree.Element, values: dict[str, str]) -> None:
    shown = {name: value for name, value in values.items() if value}
    if shown:
        properties = ElementTree.SubElement(parent, "properties")
        for name, value in sorted(shown.items()):
            ElementTree.SubElement(properties, "property", {"name": printable(name), "value": printable(value)})


def annotation_lines(run: RunResult) -> str:
    """Workflow commands, one a line: an error for every bad case, the last one for all that GitHub would not show.

    The summary has what only differs from formulas, once for each.
    """
    bad = [result for result in run.results if not result.verdict.good and result.verdict is not Verdict.CHANGED]
    shown = bad if len(bad) <= ANNOTATIONS else bad[: ANNOTATIONS - 1]
    lines = [
        annotation(result.case_id, _text(outcome(result), *three_lines(result), *reproduce(result))) for result in shown
    ]
    if len(bad) > len(shown):
        names = "\n".join(result.case_id for result in bad[len(shown) :])
        lines.append(annotation(f"{len(bad) - len(shown)} more cases are not good", names))
    return "".join(f"{line}\n" for line in lines)


def job_summary(run: RunResult) -> str:
    """Return the Markdown report, cut at the end of a paragraph where it is larger than GitHub shows."""
    text = run_markdown(run)
    content = text.encode(errors="replace")
    if len(content) < SUMMARY_BYTES:
        return text
    kept = content[: SUMMARY_BYTES - len(_CUT.encode()) - 1].decode(errors="ignore")
    return kept.rpartition("\n\n")[0] + _CUT


def annotation(title: str, message: str, *, file: str = "", line: int = 0) -> str:
    """The workflow command that shows an error of GitHub Actions, at a line of the repository where one is given."""
    given = {"file": file, "line": str(line or ""), "title": title}
    # The runner reads escapes of its own here.
    values = {name: _escaped(value).replace(":", "%3A").replace(",", "%2C") for name, value in given.items() if value}
    return f"::error {','.join(f'{name}={value}' for name, value in values.items())}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return printable(text).replace("%", "%25").replace("\n", "%0A")


def _text(*blocks: Block) -> str:
    return text_of([Section(blocks=blocks)]).rstrip()
