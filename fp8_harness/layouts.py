"""`assert_layouts_equal`: a model of your own, trained in each layout and compared with one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

if TYPE_CHECKING:
    from harness.matrix.case import Case
    from harness.result import CaseResult


def assert_layouts_equal(
    build: Callable[[Any, Any], Any], layouts: Sequence[str], *, recipe: str = "rowwise", steps: int = 2, **axes: Any
) -> Mapping[str, str]:
    """Train what `build(case, world)` returns in each layout on CPU ranks, and compare it with one rank.

    `build`: a function or class of a module, such as the test's own. `layouts`: words of case ids, such as "fsdp2",
    "tp2", "fsdp2-tp2", "hsdp2x2". `axes`: further axes of the case by name, such as `dtype="float64"`.
    Returns a word for each layout: "equal" bits, "rounding", or "drift".

    Raises AssertionError with the three lines of a failed case, which name the layout; TypeError and HarnessError for
    bad input; unittest.SkipTest where the machine has too few ranks or `build` raises NotImplementedError for a layout
    and no other is wrong; MachineFailed where the machine ended ranks.
    """
    __tracebackhide__ = True
    from fp8_harness.builds import name_for, write_module
    from fp8_harness.session import session
    from harness.errors import HarnessError

    try:
        cases = _cases(layouts, {"recipe": recipe, "steps": steps, **axes, "target": name_for(build)})
        write_module(build)
        results = session().run(list(cases.values()), goldens=False)
    except HarnessError as error:
        raise error.with_traceback(None) from None  # bad input is no fault of the harness: its frames say nothing
    return _judged(dict(zip(cases, results, strict=True)))


def _cases(layouts: Sequence[str], axes: Mapping[str, Any]) -> dict[str, Case]:
    """Return the case of each layout. HarnessError for one that there is not, and for one that a rule excludes."""
    from harness.errors import HarnessError
    from harness.matrix.axes import own_axes
    from harness.matrix.caseid import parse_layout
    from harness.matrix.rules import changes, exclusions
    from harness.studies.layouts import USUAL, cases_of

    if isinstance(layouts, str) or not layouts:
        raise HarnessError("this is no list of layouts.", where="layouts", fix='write layouts=["fsdp2", "tp2"].')
    parsed = [parse_layout(text, option="layout") for text in layouts]
    cases = {text: cases_of({**USUAL, **axes}, [layout])[0] for text, layout in zip(layouts, parsed, strict=True)}
    cases_of({**USUAL, **axes}, parsed, axes)  # raises for an axis that no layout has a use for
    for text, case in cases.items():
        for rule in exclusions(case):
            own = own_axes(case)
            asked = changes([name for name in rule.axes if name in own and name != "target"], own)
            fix = f"leave it out, or change {asked or ', '.join(rule.axes)}."
            raise HarnessError(f"rule {rule.name} excludes it: {rule.reason}.", where=f"layout {text}", fix=fix)
    return cases


def _judged(results: Mapping[str, CaseResult]) -> Mapping[str, str]:
    """Return the words. Raises AssertionError for a wrong layout, then SkipTest for one that was not compared."""
    __tracebackhide__ = True
    from fp8_harness.failures import check_machine, three_lines, warn_of
    from harness.studies.layouts import word_of

    words = {layout: word_of(result) for layout, result in results.items()}
    wrong = [(layout, why) for layout, (word, why) in words.items() if word in ("wrong", "not checked")]
    if wrong:
        (layout, why), *rest = wrong
        text = three_lines(results[layout]) if results[layout].findings else why
        others = (f"also {other}: {results[other].headline or why}" for other, why in rest)
        raise AssertionError("\n".join((f"{layout}: {text}", *others)))
    for layout, result in results.items():
        check_machine(result)
        if words[layout][0] in ("known", "changed"):
            warn_of(result)
    refused = [f"{layout} is not compared: {why}" for layout, (word, why) in words.items() if word == "refused"]
    if refused:
        raise SkipTest("; ".join(refused))
    return {layout: word for layout, (word, _) in words.items()}
