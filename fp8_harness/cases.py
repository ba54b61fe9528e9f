"""`assert_case`: one case of the harness, judged whole."""

from __future__ import annotations

from os import PathLike, fspath


def assert_case(case: str | PathLike[str]) -> None:
    """Run one case, by its id or the path of a file with one case, and judge it by every check.

    Raises AssertionError with the three lines of a failed case, HarnessError for an id or a file that is none,
    unittest.SkipTest where the machine has too few ranks, and MachineFailed where it ended them. Warns of a case that
    fails exactly as recorded for a bug of torch or torchao.
    """
    __tracebackhide__ = True
    from fp8_harness.failures import check_machine, three_lines, warn_of
    from fp8_harness.session import session
    from harness.errors import HarnessError
    from harness.running.selection import one_case

    try:
        (result,) = session().run([one_case(session().project, fspath(case))], goldens=True)
    except HarnessError as error:
        raise error.with_traceback(None) from None  # bad input is no fault of the harness: its frames say nothing
    check_machine(result)
    if not (result.verdict.good or result.excused):
        raise AssertionError(three_lines(result))
    if result.findings:
        warn_of(result)
