"""Runs torchao's own tests, unchanged, on the virtual device, and compares each with what it did before.

    ci/torchao_tests.py PATH [FILE...] [--results FILE]

PATH is a checkout of torchao or its unpacked sdist. `torchao_tests.toml` lists its files and the tests that miss, each
with its cause. Every test that is not listed must pass or skip itself; a listed one that passes is told too. pytest
loads this file as a plug-in: it leaves out what is listed as too large, bounds each test in time, and writes
what each did.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

import pytest

HERE = Path(__file__).resolve()
TABLE = HERE.with_suffix(".toml")
TEST_S = 60  # one test may take so long


def main() -> int:
    """Run the files, print the table, and return 1 where a test is not as it is listed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path, help="a checkout of torchao, or its unpacked sdist")
    parser.add_argument("files", nargs="*", help="some files of the table, by a part of their names")
    parser.add_argument("--results", type=Path, help="write what each test did to this file, as lines of JSON")
    given = parser.parse_args()
    suites = tomllib.loads(TABLE.read_text())["suite"]
    chosen = [suite for suite in suites if not given.files or any(name in suite["file"] for name in given.files)]
    wrong, lines = list[str](), list[str]()
    with ThreadPoolExecutor(2) as pool:
        jobs = [(suite, part) for suite in chosen for part in range(suite.get("parts", 1))]
        found = list(pool.map(lambda job: _run(given.path.resolve(), *job), jobs))
    for suite in chosen:
        results = [row for (of, _), rows in zip(jobs, found, strict=True) if of is suite for row in rows]
        lines += [json.dumps({"file": suite["file"], **row}) for row in results]
        wrong += [f"{suite['file']}: {text}" for text in judge(suite, results)]
        print(row_of(suite, results), flush=True)
    if given.results:
        given.results.write_text("\n".join(lines) + "\n")
    print("\n".join(["", *wrong]) if wrong else "\nEvery test is as it is listed.")
    return int(bool(wrong))


def _run(path: Path, suite: dict[str, Any], part: int) -> list[dict[str, Any]]:
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
        words = shlex.split(suite.get("command", "pytest -p torchao_tests -q -p no:cacheprovider"))
        ranks = ["-n", str(suite["ranks"])] if "ranks" in suite else []
        options = [*ranks, "--no-watch", "--gpu", suite.get("gpu", "h100"), "--timeout", str(suite.get("seconds", 300))]
        program = str(Path(sys.executable).parent / "fp8-harness")
        command = [program, "exec", *options, "--", *words, str(path / "test" / suite["file"])]
        command += shlex.split(suite.get("options", ""))
        ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        rows = [json.loads(line) for line in results.read_text().splitlines()]
        if "-p torchao_tests" not in shlex.join(words):
            outcome = "failed" if ended.returncode else "passed"
            rows = [{"test": suite.get("options", "") or "script", "outcome": outcome, "why": _last(ended.stderr)}]
        elif ended.returncode not in (0, 1, 5) or not rows or "ended:" in ended.stderr:
            rows.append({"test": f"part {part}", "outcome": "ended", "why": _last(ended.stdout + ended.stderr)})
        return rows


def _last(text: str) -> str:
    return " | ".join(line for line in text.strip().splitlines()[-3:])[:400]


def _cause(suite: dict[str, Any], test: str) -> dict[str, Any] | None:
    misses: list[dict[str, Any]] = suite.get("miss", [])
    return next((miss for miss in misses if any(fnmatchcase(test, name) for name in miss["tests"])), None)


def judge(suite: dict[str, Any], results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what is not as it is listed."""
    for row in results:
        miss = _cause(suite, row["test"])
        if row["outcome"] in ("failed", "ended") and (miss is None or not miss.get("run", True)):
            yield f"{row['test']} passed before: {row['why']}"
        elif row["outcome"] == "passed" and miss is not None:
            yield f"{row['test']} passes, and is listed as a miss: {miss['why']}"
    collected = sum(row["outcome"] != "ended" for row in results)
    if suite.get("collected", collected) != collected:
        yield f"{collected} tests are collected, and {suite['collected']} were"


def row_of(suite: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """Return a row of the table: how many tests of a file were collected, ran, passed, and why others did not."""
    counts = Counter(row["outcome"] for row in results)
    causes: Counter[str] = Counter()
    for row in results:
        if row["outcome"] in ("failed", "ended", "left out"):
            causes[(_cause(suite, row["test"]) or {"cause": "not listed"})["cause"]] += 1
    ran = counts["passed"] + counts["failed"]
    told = ", ".join(f"{count} {cause}" for cause, count in causes.items())
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    return (
        f"{suite['file']}: {len(results)} collected, {ran} ran, {counts['passed']} passed{skipped}; {told or 'no miss'}"
    )


# What follows runs in pytest.


def _asked() -> dict[str, Any]:
    asked: dict[str, Any] = json.loads(os.environ["TORCHAO_TESTS"])
    return asked


def _write(test: str, outcome: str, why: str = "", seconds: float = 0.0) -> None:
    if os.environ.get("RANK", "0") == "0":
        with Path(_asked()["results"]).open("a") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "why": why, "s": round(seconds, 1)}) + "\n")


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of this part that can run here."""
    suite = _asked()
    items[:] = items[suite["part"] :: suite.get("parts", 1)]
    kept = []
    for item in items:
        miss = _cause(suite, _name(item.nodeid))
        if miss is not None and not miss.get("run", True):
            _write(_name(item.nodeid), "left out")
        else:
            kept.append(item)
    items[:] = kept


def _too_long(*_: object) -> NoReturn:
    raise TimeoutError(f"it took more than {_asked().get('test_seconds', TEST_S)} s")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Bound a test in time."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(_asked().get("test_seconds", TEST_S))
    yield
    signal.alarm(0)


_DONE: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what a test did: its call, or its setup where that failed or skipped it."""
    if report.nodeid in _DONE or (report.when != "call" and report.passed):
        return
    _DONE.add(report.nodeid)
    crash = getattr(report.longrepr, "reprcrash", None)
    text = (
        crash.message if crash else str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    )
    _write(_name(report.nodeid), report.outcome, "" if report.passed else text[:300], report.duration)


if __name__ == "__main__":
    sys.exit(main())
