"""Runs torchao's own tests, unchanged, on the virtual device, and compares each with what it did before.

    ci/torchao_tests.py PATH [FILE...] [--results FILE]
    ci/torchao_tests.py --compare RESULTS RESULTS

PATH is a checkout of torchao or its unpacked sdist. `torchao_tests.toml` lists its files and the tests that miss, each
with its cause. Every test that is not listed must pass or skip itself, and a listed one must not pass. pytest loads
this file as a plug-in: it leaves out what is listed as too large, bounds each test in time, and writes what each did.
Where the list has `smaller` sizes, they replace those in the parameters and the code of the tests of a file, which keep
their names; the table counts such tests. `--compare` says what two runs do otherwise: of a release and of main, each
with its own checkout.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn

import pytest

HERE = Path(__file__).resolve()
TABLE = HERE.with_suffix(".toml")
CPU_S = 60  # what one test may use of a CPU; ten times as long on the clock, where ranks wait for each other
MISSED = ("failed", "ended", "left out", "not run")
Row = dict[str, Any]


def main() -> int:
    """Run the files, print the table, and return 1 where a test is not as it is listed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", nargs="?", type=Path, help="a checkout of torchao, or its unpacked sdist")
    parser.add_argument("files", nargs="*", help="some files of the table, by a part of their names")
    parser.add_argument("--results", type=Path, help="write what each test did to this file, as lines of JSON")
    parser.add_argument("--compare", nargs=2, type=Path, help="say what the second of two results does otherwise")
    given = parser.parse_args()
    if given.compare:
        told, worse = compare(*map(_read, given.compare))
        print("\n".join(told))
        return int(worse)
    if given.path is None:
        parser.error("give a checkout of torchao")
    suites = tomllib.loads(TABLE.read_text())["suite"]
    chosen = [suite for suite in suites if not given.files or any(name in suite["file"] for name in given.files)]
    wrong, ran = list[str](), list[tuple[Row, list[Row]]]()
    with ThreadPoolExecutor(2) as pool:
        jobs = [(suite, part) for suite in chosen for part in range(suite.get("parts", 1))]
        found = list(pool.map(lambda job: _run(given.path.resolve(), *job), jobs))
    for suite in chosen:
        results = [row for (of, _), rows in zip(jobs, found, strict=True) if of is suite for row in rows]
        wrong += [f"{suite['file']}: {text}" for text in judge(suite, results)]
        ran.append((suite, results))
    print("\n".join(table(ran)))
    if given.results:
        lines = [json.dumps({"file": suite["file"], **row}) for suite, rows in ran for row in rows]
        given.results.write_text("\n".join(lines) + "\n")
    print("\n".join(["", *wrong]) if wrong else "\nEvery test is as it is listed.")
    return int(bool(wrong))


def _run(path: Path, suite: Row, part: int) -> list[Row]:
    """Run one file, or a part of it, in an `exec` of its own; return what each test did."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        results.touch()
        asked = {**suite, "part": part, "results": str(results)}
        environ = {
            **os.environ,
            "TORCHAO_TESTS": json.dumps(asked),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        words = shlex.split(suite.get("command", "pytest"))
        runs_pytest = "pytest" in words
        words += ["-p", "torchao_tests", "-q", "-p", "no:cacheprovider"] if runs_pytest else []
        ranks = ["-n", str(suite["ranks"])] if "ranks" in suite else []
        options = [
            *ranks,
            "--no-watch",
            "--gpu",
            suite.get("gpu", "h100"),
            "--timeout",
            str(suite.get("seconds", 3600)),
        ]
        program = str(Path(sys.executable).parent / "fp8-harness")
        command = [program, "exec", *options, "--", *words, str(path / "test" / suite["file"])]
        command += shlex.split(suite.get("options", ""))
        ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        written = map(json.loads, results.read_text().splitlines())
        rows = list({row["test"]: row for row in written}.values())  # the last word on each
        if not runs_pytest:
            outcome = "failed" if ended.returncode else "passed"
            rows = [{"test": suite.get("options", "") or "script", "outcome": outcome, "why": _last(ended.stderr)}]
        elif ended.returncode not in (0, 1, 5) or not rows or "ended:" in ended.stderr:
            rows.append({"test": f"part {part}", "outcome": "ended", "why": _last(ended.stdout + ended.stderr)})
        return rows


def _last(text: str) -> str:
    return " | ".join(line for line in text.strip().splitlines()[-3:])[:400]


def _cause(suite: Row, test: str) -> Row | None:
    misses: list[Row] = suite.get("miss", [])
    return next((miss for miss in misses if any(fnmatchcase(test, name) for name in miss["tests"])), None)


def judge(suite: Row, results: Sequence[Row]) -> Iterator[str]:
    """Yield what is not as it is listed."""
    for row in results:
        miss = _cause(suite, row["test"])
        if row["outcome"] in ("failed", "ended") and (miss is None or not miss.get("run", True)):
            yield f"{row['test']} is no listed miss, and {row['outcome']}: {row.get('why', '').partition(chr(10))[0]}"
        elif row["outcome"] == "passed" and miss is not None:
            yield f"{row['test']} passes, and is listed as a miss: {miss['why']}"
    not_run = [row["test"] for row in results if row["outcome"] == "not run"]
    if not_run:
        yield f"{len(not_run)} tests were not run, the first is {not_run[0]}"
    collected = sum(row["outcome"] != "ended" for row in results)
    if suite.get("collected", collected) != collected:
        yield f"{collected} tests are collected, and {suite['collected']} were"


def table(ran: Sequence[tuple[Row, Sequence[Row]]]) -> Iterator[str]:
    """Yield the lines of a table: how many tests of a file were collected, ran and passed, and why others did not."""
    yield "| file | collected | skip themselves | ran | with smaller sizes | passed | misses |"
    yield "|---|---|---|---|---|---|---|"
    total: Counter[str] = Counter()
    for suite, results in ran:
        counts = Counter(row["outcome"] for row in results)
        counts["smaller"] = sum(row.get("smaller", False) for row in results if row["outcome"] in ("passed", "failed"))
        causes = Counter(
            (_cause(suite, row["test"]) or {"cause": "not listed"})["cause"]
            for row in results
            if row["outcome"] in MISSED
        )
        total += counts
        yield _line(suite["file"], counts, ", ".join(f"{count} {cause}" for cause, count in causes.items()))
    yield _line("all", total, "")


def _line(name: str, counts: Counter[str], misses: str) -> str:
    collected, ran = counts.total() - counts["ended"] - counts["smaller"], counts["passed"] + counts["failed"]
    numbers = (collected, counts["skipped"], ran, counts["smaller"], counts["passed"])
    return f"| {name} | {' | '.join(map(str, numbers))} | {misses} |"


def _read(path: Path) -> dict[tuple[str, str], Row]:
    return {(row["file"], row["test"]): row for row in map(json.loads, path.read_text().splitlines())}


def compare(base: dict[tuple[str, str], Row], other: dict[tuple[str, str], Row]) -> tuple[list[str], bool]:
    """Return what the second run does otherwise, and whether a test fails that the first run does not have failing."""
    fails, passes, lost = list[str](), list[str](), list[str]()
    for (file, test), row in other.items():
        before = base.get((file, test), {"outcome": "not there"})["outcome"]
        if row["outcome"] in ("failed", "ended", "not run") and before not in ("failed", "ended", "not run"):
            fails.append(f"  {file}::{test} ({before} before): {row.get('why', '')}")
        elif row["outcome"] == "passed" and before in MISSED:
            passes.append(f"  {file}::{test} ({before} before)")
    lost += [
        f"  {file}::{test} ({row['outcome']} before)" for (file, test), row in base.items() if (file, test) not in other
    ]
    told = []
    for title, lines in (("new failures", fails), ("new passes", passes), ("gone", lost)):
        told += [f"{len(lines)} {title}", *lines]
    return told, bool(fails)


# What follows runs in pytest.


def _asked() -> Row:
    asked: Row = json.loads(os.environ["TORCHAO_TESTS"])
    return asked


_SMALLER: set[str] = set()


def _write(test: str, outcome: str, why: str = "", cpu_s: float = 0.0) -> None:
    row: Row = {"test": test, "outcome": outcome, "why": why, "cpu_s": round(cpu_s, 1)}
    if test in _SMALLER:
        row["smaller"] = True
    if os.environ.get("RANK", "0") == "0":
        with Path(_asked()["results"]).open("a") as file:
            file.write(json.dumps(row) + "\n")


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of this part that can run here."""
    suite = _asked()
    items[:] = items[suite["part"] :: suite.get("parts", 1)]
    sizes = {int(size): to for size, to in suite.get("smaller", {}).items()}
    kept = []
    for item in items:
        miss = _cause(suite, _name(item.nodeid))
        left_out = miss is not None and not miss.get("run", True)
        if sizes and _shrink(item, sizes):
            _SMALLER.add(_name(item.nodeid))
        _write(_name(item.nodeid), "left out" if left_out else "not run")
        kept += [] if left_out else [item]
    items[:] = kept


def _shrink(item: Any, sizes: dict[int, int]) -> bool:
    """Give a test smaller sizes; return whether it or the code of its file has one of them."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    small = {name: _smaller(value, sizes) for name, value in params.items()}
    changed = any(small[name] != value for name, value in params.items() if isinstance(value, int | tuple))
    params.update(small)
    places = [vars(item.module), *(vars(kind) for kind in vars(item.module).values() if isinstance(kind, type))]
    for function in (value for place in places for value in place.values() if isinstance(value, FunctionType)):
        if function.__module__ == item.module.__name__:
            code = _smaller(function.__code__, sizes)
            function.__dict__["smaller"] = function.__dict__.get("smaller", code != function.__code__)
            function.__code__ = code
            is_other_test = function.__name__.startswith("test") and function is not item.function
            changed |= function.__dict__["smaller"] and not is_other_test
    return changed


def _smaller(value: Any, sizes: dict[int, int]) -> Any:
    if isinstance(value, CodeType):
        return value.replace(co_consts=tuple(_smaller(each, sizes) for each in value.co_consts))
    if isinstance(value, tuple):
        return tuple(_smaller(each, sizes) for each in value)
    return sizes.get(value, value) if type(value) is int else value


def _too_long(number: int, _: object) -> NoReturn:
    raise TimeoutError(f"it took more than {CPU_S} s of CPU, or {10 * CPU_S} s")


_DONE: set[str] = set()
_BEGAN = [0.0]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Bound a test in time."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, _too_long)
    _BEGAN[0] = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.alarm(10 * CPU_S)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what a test did: its call, or its setup where that failed or skipped it."""
    if report.nodeid in _DONE or (report.when != "call" and report.passed):
        return
    _DONE.add(report.nodeid)
    crash = getattr(report.longrepr, "reprcrash", None)
    text = (
        crash.message if crash else str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    )
    _write(_name(report.nodeid), report.outcome, "" if report.passed else text[:300], time.process_time() - _BEGAN[0])


if __name__ == "__main__":
    sys.exit(main())
