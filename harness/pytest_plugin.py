"""Cases as pytest items: `pytest cases/`, `pytest --fp8-tier pr`.

Owns collection, how a verdict becomes a pytest outcome, and that a session is stored as one run. Every pytest of
everyone who has the harness installed loads it, so importing it costs nothing and it does nothing until cases are asked
for. The command line does not depend on it.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback

if TYPE_CHECKING:
    import msgspec

    from harness.matrix.case import Case
    from harness.project import Project
    from harness.result import CaseResult
    from harness.run_options import Option
    from harness.running.executor import Executor
    from harness.running.plan import Plan
    from harness.running.references import ReferenceRunner
    from harness.store import RunStore

pytest_plugins = ["fp8_harness.fixtures"]

Part = TypeVar("Part", bound="msgspec.Struct")
_RESULT = "fp8_harness_result"  # of a report, which pytest-xdist sends from a worker as it is
_PLAN = pytest.StashKey["Plan"]()
_RUN = pytest.StashKey["Callable[[Case], CaseResult]"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the `--fp8-...` options: those of `fp8-harness run` that pytest has none of its own for."""
    from harness.run_options import PARTS, options_of

    group = parser.getgroup("fp8-harness", "FP8 parallel training cases")
    group.addoption("--fp8-tier", action="append", default=[], metavar="TIER", help="Collect this tier. Repeatable.")
    for option in (option for part in PARTS for option in options_of(part).values() if option.pytest_flag):
        form: dict[str, Any] = {"action": "append"} if option.repeatable else {"type": _reader(option)}
        if option.choices:
            form["choices"] = option.choices
        default = list(option.default) if option.repeatable else option.default
        text = option.help.replace("%", "%%") + (f" Default: {default}." if option.shown_default else "")
        group.addoption(option.pytest_flag, default=default, metavar=option.metavar, help=text, **form)


def _reader(option: Option) -> Callable[[str], Any]:
    """Return what makes the value of an option of its text."""
    if option.number is None:
        return Path if option.type is Path else str

    def number(text: str) -> Any:
        import msgspec

        try:
            return msgspec.convert(text, option.type, strict=False)
        except msgspec.ValidationError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return number


def pytest_configure(config: pytest.Config) -> None:
    """Add the files of `--fp8-tier` to what pytest collects; alone, unless other paths were named too."""
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(_StoredRun(config), "fp8_harness_run")
    tiers: list[str] = config.getoption("--fp8-tier")
    if not tiers:
        return
    project = _project(config)
    with _usage_errors():
        paths = [str(project.case_file(tier)) for tier in tiers]
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    config.args = [*(arg for arg in config.args if named and arg not in paths), *paths]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return the tiers of `--fp8-tier` that the project has instead of the package's."""
    tiers: list[str] = config.getoption("--fp8-tier")
    return [f"fp8-harness: {sentence}" for sentence in _project(config).replaced_tiers(tiers)] if tiers else []


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Return a collector for a tier file that is named, or is in a named `cases/` folder."""
    if file_path.suffix != ".toml" or not _is_asked_for(file_path, parent.config):
        return None
    return CaseFileNode.from_parent(parent, path=file_path)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cases of `--fp8-shard` alone, of all cases that `-k` and node ids left."""
    text: str | None = config.getoption("--fp8-shard")
    if text is None:
        return
    from harness.matrix.caseid import case_id
    from harness.matrix.choice import parse_shard
    from harness.running.selection import in_shard

    with _usage_errors():
        cases = tuple({item.name: item.case for item in items if isinstance(item, CaseItem)}.values())
        kept = {case_id(case) for case in in_shard(_project(config), cases, parse_shard(text))}
    elsewhere = [item for item in items if isinstance(item, CaseItem) and item.name not in kept]
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in elsewhere]


class CaseFileNode(pytest.File):
    """One TOML file with cases."""

    def collect(self) -> Iterator[CaseItem]:
        """Yield one item for every selected case, named by its id. It is expected to fail where a record says so."""
        from harness.errors import HarnessError
        from harness.matrix.caseid import case_id
        from harness.matrix.records import matching
        from harness.running.case_judge import known_here
        from harness.running.selection import Query, narrowed, quarantined_cases, select_file

        expressions = tuple(self.config.getoption("--fp8-select"))
        query = Query(expressions=expressions, target=self.config.getoption("--fp8-target"))
        project = _project(self.config)
        try:
            cases = narrowed(select_file(project, self.path).cases, query)
            known, quarantined = known_here(project), quarantined_cases(project, cases, _ignore_note)
        except HarnessError as error:
            raise self.CollectError(error.text) from None
        for case in cases:
            item: CaseItem = CaseItem.from_parent(self, name=case_id(case), case=case)
            if item.name in quarantined:
                item.add_marker(pytest.mark.xfail(reason=quarantined[item.name], raises=CaseFailed, strict=False))
            elif faults := matching(known, case):
                reason = "; ".join(f"{fault.name}: {fault.reason} ({fault.link})" for fault in faults)
                strict = any(fault.must_show(case) for fault in faults)
                item.add_marker(pytest.mark.xfail(reason=reason, raises=FailedAsRecorded, strict=strict))
            yield item


class CaseItem(pytest.Item):
    """One case: runs on fresh ranks of this process' warm engine."""

    def __init__(self, *, case: Case, **rest: Any) -> None:
        super().__init__(**rest)
        self.case = case
        self.result: CaseResult | None = None

    def runtest(self) -> None:
        """Run and judge the case. One that passes although a fault is recorded is failed by its strict mark."""
        from harness.verdict import Verdict

        if _RUN not in self.session.stash:
            self.session.stash[_RUN] = _warm_engine(self.session)
        result = self.result = self.session.stash[_RUN](self.case)
        self.user_properties += [("verdict", result.verdict.value), ("command", result.command)]
        if result.verdict is Verdict.KNOWN:
            raise FailedAsRecorded(result)
        if result.verdict is Verdict.UNEXPECTED_PASS:
            self.add_report_section("call", "findings", _findings(result))
        elif result.excused and not result.quarantined:
            pytest.xfail(_headline(result))
        elif not result.verdict.good:
            raise CaseFailed(result)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the findings of a case; pytest's own words for everything else."""
        from harness.errors import HarnessError

        if isinstance(excinfo.value, CaseFailed):
            result, whole = excinfo.value.result, self.config.option.verbose > 0
            findings = ReprTraceback([ReprEntryNative([f"{_findings(result, whole=whole)}\n"])], None, "native")
            # What pytest tells of a failure on one line is the headline: rule and module first.
            return ReprExceptionInfo(findings, ReprFileLocation(str(self.path), 1, _headline(result)))
        if isinstance(excinfo.value, HarnessError):
            return excinfo.value.text
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


class CaseFailed(Exception):
    """A case ended otherwise than `passed`."""

    def __init__(self, result: CaseResult) -> None:
        super().__init__(f"{result.case_id}: {result.verdict.value}")
        self.result = result


class FailedAsRecorded(CaseFailed):
    """A case shows the upstream fault that is recorded for it, and nothing else."""


def _headline(result: CaseResult) -> str:
    from harness.report.case import headline

    return headline(result)


def _findings(result: CaseResult, *, whole: bool = False) -> str:
    from harness.report.case import case_section
    from harness.report.sections import text_of

    return text_of([case_section(result, whole=whole)])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if isinstance(item, CaseItem) and item.result is not None and report.when == "call":
        from harness.jsonform import to_json
        from harness.verdict import Verdict

        if item.result.verdict is Verdict.KNOWN:
            report.wasxfail = _headline(item.result)
        vars(report)[_RESULT] = to_json(item.result).decode()
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """Say where nothing was collected in a project that cases are named to be collected."""
    from harness.project import is_project

    bare = config.args_source is not pytest.Config.ArgsSource.ARGS
    if bare and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and is_project(config.invocation_params.dir):
        hint = "cases are collected by name: pytest cases/, or pytest --fp8-tier TIER."
        terminalreporter.write_line(f"fp8-harness: {hint}")


class _StoredRun:
    """Stores the results of all workers of a session as one run, in the process that has their reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._store: RunStore | None = None  # until there are cases
        self._results: list[CaseResult] = []
        self._started_s = time.time()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._begin([item.nodeid for item in session.items if isinstance(item, CaseItem)])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """A worker has collected, the same as every other: its items are known here by their node ids alone."""
        self._begin([node_id for node_id in ids if node_id.partition("::")[0].endswith(".toml")])

    def _begin(self, ids: Sequence[str]) -> None:
        if not ids or self._store is not None:
            return
        import msgspec

        from harness.running.stored import remove_old_runs
        from harness.store import RunStore
        from harness.workflow import run_start

        project, plan = _project(self._config), _plan(self._config)
        names = tuple(dict.fromkeys(node_id.partition("::")[2] for node_id in ids))
        with _usage_errors():
            self._store = RunStore(project.new_run(), lambda text: warnings.warn(text, stacklevel=2))
            lock = contextlib.ExitStack()
            lock.enter_context(self._store.locked())
            self._config.add_cleanup(lock.close)
            start = run_start(project, plan, names)
            self._store.begin(msgspec.structs.replace(start, shard=self._config.getoption("--fp8-shard") or ""))
            remove_old_runs(project)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = vars(report).get(_RESULT)
        if text is not None and self._store is not None:
            from harness.jsonform import from_json
            from harness.result import CaseResult

            self._results.append(from_json(text.encode(), CaseResult))
            self._store.append(self._results[-1])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what is wrong where, which pytest cuts off, and on which devices cases ran, as `fp8-harness run` does."""
        for result in self._results:
            if not result.good and not result.excused:
                terminalreporter.write_line(f"{result.case_id}: {_headline(result).partition(': ')[0]}")
        if self._results:
            from harness.report.run import devices_line

            if line := devices_line(self._results):
                terminalreporter.write_line(f"fp8-harness: {line}")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self._store is None:
            return
        import msgspec

        from harness.result import RunEnd
        from harness.workflow import provenance

        end = RunEnd(
            wall_s=time.time() - self._started_s,
            interrupted=exitstatus == pytest.ExitCode.INTERRUPTED,
            provenance=provenance(self._results, _plan(self._config)),
        )
        self._store.finish(msgspec.structs.replace(self._store.read(), end=end))


def _warm_engine(session: pytest.Session) -> Callable[[Case], CaseResult]:
    """Return what runs a case, on an engine that is stopped with the session."""
    from harness.running.case_runner import CaseRunner
    from harness.running.executor import open_executor
    from harness.running.references import open_references
    from harness.workflow import prepared

    project = _project(session.config)
    serving = _plan(session.config).serving(item.case for item in session.items if isinstance(item, CaseItem))
    engines: dict[tuple[str, str], tuple[Executor, ReferenceRunner]] = {}  # by device and arithmetic

    def run(case: Case) -> CaseResult:
        judge, plan = prepared(project, [case], serving.of(case), _ignore_note)
        where = (plan.device, plan.arithmetic)
        if where not in engines:
            opened = open_executor(plan, project)
            session.config.add_cleanup(opened.stop)
            engines[where] = opened, open_references(project, plan, opened)
        executor, references = engines[where]
        work = CaseRunner(plan, executor, judge, references)
        return work.run(case) or work.not_run(case)

    return run


def _ignore_note(text: str) -> None:
    """Drop notes of the engine: pytest reports cases only."""


def _project(config: pytest.Config) -> Project:
    from harness.project import find_project

    with _usage_errors():
        return find_project(config.getoption("--fp8-root"), (arg.partition("::")[0] for arg in config.args))


def _plan(config: pytest.Config) -> Plan:
    if _PLAN in config.stash:
        return config.stash[_PLAN]
    import msgspec

    from harness.run_options import CommandOptions, PlanOptions, RunOptions
    from harness.running.plan import make_plan, with_command

    with _usage_errors():
        plan = make_plan(**msgspec.structs.asdict(_asked(config, PlanOptions)))
        plan = with_command(plan, _asked(config, RunOptions), _asked(config, CommandOptions))
        plan = msgspec.structs.replace(plan, root_option=config.getoption("--fp8-root"))
    config.stash[_PLAN] = plan
    return plan


def _asked(config: pytest.Config, part: type[Part]) -> Part:
    """Return the options of a part of `harness/run_options.py` that pytest was given, without those the default."""
    from harness.run_options import options_of

    options = {name: option for name, option in options_of(part).items() if option.pytest_flag}
    values = {name: config.getoption(option.pytest_flag) for name, option in options.items()}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return part(**{name: value for name, value in given.items() if value != options[name].default})


def _is_asked_for(path: Path, config: pytest.Config) -> bool:
    """Return True for a file that was named, and for the tiers of a project whose cases/ folder was named."""
    from harness.project import is_case_file

    named = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    return path in named or (path.parent in named and is_case_file(path))


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    """Turn bad input into pytest's own usage error: one line, exit code 4."""
    from harness.errors import HarnessError

    try:
        yield
    except HarnessError as error:
        raise pytest.UsageError(error.text) from None
