"""Cases as pytest items: `pytest cases/`, `pytest --fp8-tier pr`.

Owns collection and how a verdict becomes a pytest outcome. It is loaded in every pytest of everyone who has the harness
installed, so importing it costs nothing and it does nothing until cases are asked for. The command line does not
depend on it.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    import msgspec

    from harness.matrix.case import Case
    from harness.project import Project
    from harness.result import CaseResult, RunResult
    from harness.run_options import Option
    from harness.running.plan import Plan

Part = TypeVar("Part", bound="msgspec.Struct")
_OUTPUTS = ("--fp8-json", "--fp8-markdown", "--fp8-html")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the `--fp8-...` options: those of `fp8-harness run` that pytest has none of its own for."""
    from harness.run_options import PARTS, options_of

    group = parser.getgroup("fp8-harness", "FP8 parallel training cases")
    group.addoption("--fp8-tier", action="append", default=[], metavar="TIER", help="Collect this tier. Repeatable.")
    for option in (each for part in PARTS for each in options_of(part).values() if each.pytest_flag):
        form: dict[str, Any] = {"action": "append"} if option.repeatable else {"type": _reader(option)}
        if option.choices:
            form["choices"] = option.choices
        metavar = option.metavar and option.metavar.removesuffix("|-")
        default = list(option.default) if option.repeatable else option.default
        text = option.help.replace("%", "%%") + (f" Default: {default}." if option.shown_default else "")
        group.addoption(option.pytest_flag, default=default, metavar=metavar, help=text, **form)


def _reader(option: Option) -> Callable[[str], Any]:
    """What makes the value of an option of its text."""
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
    if any(config.getoption(name) for name in _OUTPUTS):
        config.pluginmanager.register(_Results(config), "fp8_harness_results")
    tiers: list[str] = config.getoption("--fp8-tier")
    if not tiers:
        return
    project = _project(config)
    with _usage_errors():
        paths = [str(project.case_file(tier)) for tier in tiers]
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    config.args = [*(arg for arg in config.args if named and arg not in paths), *paths]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """A tier file is collected when it is named, or a `cases/` folder at or above it is."""
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
    from harness.matrix.parts import parse_shard
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
        """One item for every selected case, named by its id."""
        from harness.errors import HarnessError
        from harness.matrix.caseid import case_id
        from harness.running.selection import Query, narrowed, select_file

        expressions = tuple(self.config.getoption("--fp8-select"))
        query = Query(expressions=expressions, target=self.config.getoption("--fp8-target"))
        try:
            cases = narrowed(select_file(_project(self.config), self.path).cases, query)
        except HarnessError as error:
            raise self.CollectError(error.text) from None
        for case in cases:
            yield CaseItem.from_parent(self, name=case_id(case), case=case)


class CaseItem(pytest.Item):
    """One case: runs on fresh ranks of this process' warm engine."""

    def __init__(self, *, case: Case, **rest: Any) -> None:
        super().__init__(**rest)
        self.case = case
        self.result: CaseResult | None = None

    def runtest(self) -> None:
        """Run and judge the case; anything but `passed` ends in an exception."""
        from harness.verdict import Verdict

        result = self.result = _session_runner(self.session).run(self.case)
        self.user_properties += [("verdict", result.verdict.value), ("command", result.command)]
        if result.verdict is Verdict.KNOWN:
            pytest.xfail(f"known: {result.expectation or result.findings[0].message}")
        if result.excused:
            pytest.xfail(result.quarantined)
        if not result.verdict.good:
            raise CaseNotGood(result)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The findings of a case; pytest's own words for everything else."""
        from harness.errors import HarnessError
        from harness.report.case import case_section
        from harness.report.sections import text_of

        if isinstance(excinfo.value, CaseNotGood):
            return text_of([case_section(excinfo.value.result)])
        if isinstance(excinfo.value, HarnessError):
            return excinfo.value.text
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where the case comes from."""
        return self.path, None, self.name


class CaseNotGood(Exception):
    """A case ended with a verdict that is not good."""

    def __init__(self, result: CaseResult) -> None:
        super().__init__(f"{result.case_id}: {result.verdict.value}")
        self.result = result


class _Results:
    """Gathers the results of all workers of a session, and writes what `run` writes of them."""

    _FIELD = "fp8_harness_result"  # of a report, which pytest-xdist sends from a worker as it is

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._gathered: list[str] = []
        self._started_s = time.time()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the result of a case to its report."""
        report = yield
        if isinstance(item, CaseItem) and item.result is not None and report.when == "call":
            from harness.jsonform import to_json

            vars(report)[self._FIELD] = to_json(item.result).decode()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the result out of a report, in the process that reports to the user."""
        self._gathered += filter(None, [vars(report).get(self._FIELD)])

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the files, in the process that has the reports of all workers."""
        if hasattr(self._config, "workerinput"):
            return
        from harness.cli.show import page_of
        from harness.durable import write_whole
        from harness.report.run import run_markdown
        from harness.store import run_lines

        run = self._run(interrupted=exitstatus == pytest.ExitCode.INTERRUPTED)
        renders: tuple[Callable[[], bytes], ...] = (
            lambda: run_lines(run),
            lambda: run_markdown(run).encode(),
            lambda: page_of(_project(self._config), run),
        )
        for name, render in zip(_OUTPUTS, renders, strict=True):
            path: Path | None = self._config.getoption(name)
            if path is not None:
                write_whole(path, render())

    def _run(self, *, interrupted: bool) -> RunResult:
        from harness.jsonform import from_json
        from harness.result import CaseResult, RunEnd, RunResult, RunStart
        from harness.running.identity import environment
        from harness.timestamp import timestamp
        from harness.workflow import provenance

        results = tuple(from_json(text.encode(), CaseResult) for text in self._gathered)
        plan = _plan(self._config)
        return RunResult(
            results=results,
            start=RunStart(
                environment=environment(plan, _project(self._config).root),
                name=plan.name,
                started=timestamp(self._started_s),
                shard=self._config.getoption("--fp8-shard") or "",
            ),
            end=RunEnd(
                wall_s=time.time() - self._started_s,
                interrupted=interrupted,
                provenance=provenance(results, plan),
            ),
        )


class _SessionRunner:
    """The executor, judge and witnesses of this process: created for the first case, stopped with the session."""

    def __init__(self, project: Project, plan: Plan) -> None:
        from harness.running.executor import open_executor
        from harness.running.witnesses import open_witnesses

        self._project = project
        self._plan = plan
        self._executor = open_executor(plan, project)
        self.stop = self._executor.stop
        self._witnesses = open_witnesses(project, plan, self._executor, _ignore_note)

    def run(self, case: Case) -> CaseResult:
        """The result of one case."""
        import msgspec

        from harness.running.case_judge import prepare_judge
        from harness.running.case_runner import CaseRunner
        from harness.running.quarantined import quarantined_cases

        judge = prepare_judge(self._project, [case], self._plan)
        plan = msgspec.structs.replace(self._plan, quarantined=quarantined_cases(self._project, [case], _ignore_note))
        work = CaseRunner(plan, self._executor, judge, self._witnesses, _ignore_note)
        return work.run(case) or work.not_run(case)


def _ignore_note(text: str) -> None:
    """Drops notes of the engine: pytest reports cases only."""


_RUNNER = pytest.StashKey[_SessionRunner]()


def _session_runner(session: pytest.Session) -> _SessionRunner:
    config = session.config
    runner = config.stash.get(_RUNNER, None)
    if runner is None:
        plan = _plan(config).serving(item.case for item in session.items if isinstance(item, CaseItem))
        runner = config.stash[_RUNNER] = _SessionRunner(_project(config), plan)
        config.add_cleanup(runner.stop)
    return runner


def _project(config: pytest.Config) -> Project:
    from harness.project import find_project

    with _usage_errors():
        return find_project(config.getoption("--fp8-root"))


def _plan(config: pytest.Config) -> Plan:
    import msgspec

    from harness.run_options import CommandOptions, PlanOptions
    from harness.running.plan import make_plan

    asked = _asked(config, CommandOptions)
    with _usage_errors():
        plan = make_plan(**msgspec.structs.asdict(_asked(config, PlanOptions)))
    if asked.keep_logs is not None:
        asked.keep_logs.mkdir(parents=True, exist_ok=True)
    return msgspec.structs.replace(
        plan,
        root_option=asked.root,
        logs=None if asked.keep_logs is None else asked.keep_logs.resolve(),
        traces=asked.save_trace,
        name=asked.name,
    )


def _asked(config: pytest.Config, part: type[Part]) -> Part:
    """The options of a part of `harness/run_options.py`, as pytest was given them."""
    from harness.run_options import options_of

    flags = {name: option.pytest_flag for name, option in options_of(part).items() if option.pytest_flag}
    values = {name: config.getoption(flag) for name, flag in flags.items()}
    return part(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _is_asked_for(path: Path, config: pytest.Config) -> bool:
    """True for a file that was named, and for the tiers of a project whose cases/ folder was named."""
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
