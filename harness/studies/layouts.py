"""One model in many layouts: the cases, and one word about each beside one rank.

The word follows from the verdict on the case and from its measured distances; nothing is checked here. It is `equal`
where every gradient and updated parameter has the bits of one rank, `rounding` where all are within what sums in
another order may differ by, `wrong` where the case failed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from harness.checks.failures import refusal_words
from harness.errors import HarnessError
from harness.matrix.axes import case_from_axes, ignored_axes, own_axes
from harness.matrix.case import Case, Layout
from harness.matrix.caseid import parse_case_id
from harness.matrix.rules import expected_refusal
from harness.result import CaseResult
from harness.verdict import Finding, Verdict

USUAL: Mapping[str, object] = {"recipe": "rowwise", "dtype": "bfloat16"}  # where no case is given
Word = Literal[
    "equal", "rounding", "drift", "wrong", "refused", "excluded", "known", "changed", "infra", "not run", "not checked"
]
ONE_ROUNDING = 2.0**-4  # of a value to float8 (e4m3): a gradient that is further off has more than that behind it
_WORDS: Mapping[Verdict, Word] = {
    Verdict.KNOWN: "known",
    Verdict.CHANGED: "changed",
    Verdict.INFRA: "infra",
    Verdict.NOT_RUN: "not run",
}


def cases_of(base: Mapping[str, object], asked: Sequence[Layout], given: Iterable[str] = ()) -> tuple[Case, ...]:
    """Return the case with these axes in every layout. HarnessError for an axis in `given` that no layout uses."""
    alone: Mapping[str, object] = {"tp_styles": "plain"}
    chosen = [{**base, **of.mesh, **own_axes(Case(layout=of)), **({} if of.tp > 1 else alone)} for of in asked]
    useless = [name for name in given if all(name in ignored_axes(values) for values in chosen)]
    if useless:
        raise HarnessError("no layout of this case has a use for it.", where=useless[0], fix="leave it out.")
    return tuple(dict.fromkeys(map(case_from_axes, chosen)))


def nearest(result: CaseResult) -> Finding | None:
    """Return the first finding, or one of parity about the same step whose cause is certain, so that it has a fix."""
    explained = [of for of in result.findings if of.check == "parity" and of.fix and of.step == result.findings[0].step]
    return next((of for of in result.findings[:1] if of.fix), next(iter((*explained, *result.findings)), None))


def word_of(result: CaseResult) -> tuple[Word, str]:
    """Return the word about a layout that was to run, and why: what is wrong, or what refuses it."""
    finding = nearest(result)
    at = f"step {finding.step}: " if finding is not None and "step" in finding.place else ""
    first = "" if finding is None else f"{at}{finding.first_line}"
    refusal, measured = expected_refusal(parse_case_id(result.case_id)), result.measured
    if result.verdict is Verdict.CRASH and (said := refusal_words(result.failures, any_error=False)):
        return "refused", said
    if result.verdict is not Verdict.PASSED:
        unjudged = result.findings and not any(finding.judged for finding in result.findings)
        return "not checked" if unjudged else _WORDS.get(result.verdict, "wrong"), first
    if refusal is not None:
        return "refused", refusal.name
    worst = None if measured is None else measured.worst_gradient
    if measured is None or worst is None or worst.allowed is None:
        return "not checked", "no gradient was compared with one rank"
    if not worst.distance <= worst.allowed:  # NaN is wrong
        return "wrong", f"{worst.fqn} is further from one rank than allowed"
    return "equal" if measured.same_bits else "drift" if worst.distance > ONE_ROUNDING else "rounding", ""
