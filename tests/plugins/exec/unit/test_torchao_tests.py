"""`ci/torchao_tests.py`: what is compared with the list, the table, two runs, and smaller sizes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci import torchao_tests as tool

SUITE = {
    "file": "float8/test_a.py",
    "collected": 4,
    "miss": [
        {"tests": ["test_slow*"], "cause": "size", "run": False, "why": "too large"},
        {"tests": ["test_ptx"], "cause": "kernel without a body", "why": "PTX"},
    ],
}


def row(test: str, outcome: str, **more: object) -> dict[str, object]:
    return {"test": test, "outcome": outcome, **more}


AS_LISTED = (
    row("test_a", "passed"),
    row("test_b", "skipped"),
    row("test_slow[1]", "left out"),
    row("test_ptx", "failed"),
)


def test_what_is_listed_is_nothing_to_tell() -> None:
    assert list(tool.judge(SUITE, AS_LISTED)) == []


@pytest.mark.parametrize(
    ("instead", "told"),
    [
        (row("test_a", "failed", why="wrong\nlong"), "test_a is no listed miss, and failed: wrong"),
        (row("test_ptx", "passed"), "test_ptx passes, and is listed as a miss: PTX"),
        (row("test_a", "not run"), "1 tests were not run, the first is test_a"),
        (row("test_slow[1]", "failed", why="x"), "test_slow[1] is no listed miss, and failed: x"),
    ],
)
def test_what_is_otherwise_is_told(instead: dict[str, object], told: str) -> None:
    rows = [instead if instead["test"] == each["test"] else each for each in AS_LISTED]
    assert list(tool.judge(SUITE, rows)) == [told]


def test_a_test_that_is_gone_is_told() -> None:
    assert list(tool.judge(SUITE, AS_LISTED[1:])) == ["3 tests are collected, and 4 were"]
    ended = (*AS_LISTED[1:], row("part 0", "ended", why="killed"))
    assert "part 0 is no listed miss, and ended: killed" in list(tool.judge(SUITE, ended))


def test_the_table_counts_by_cause() -> None:
    rows = (*AS_LISTED[:2], row("test_a2", "passed", smaller=True), *AS_LISTED[2:])
    *_, line, total = tool.table([(SUITE, rows)])
    assert line == "| float8/test_a.py | 5 | 1 | 3 | 1 | 2 | 1 size, 1 kernel without a body |"
    assert total.startswith("| all | 5 | 1 | 3 | 1 | 2 |")


def test_two_runs_are_compared_by_test() -> None:
    base = {("f", each["test"]): each for each in AS_LISTED}
    other = base | {("f", "test_a"): row("test_a", "failed", why="w"), ("f", "new"): row("new", "passed")}
    other |= {("f", "test_ptx"): row("test_ptx", "passed")}
    del other["f", "test_b"]
    told, worse = tool.compare(base, other)
    assert worse
    assert told == [
        "1 new failures", "  f::test_a (passed before): w", "1 new passes", "  f::test_ptx (failed before)", "1 gone",
        "  f::test_b (skipped before)",
    ]  # fmt: skip
    assert tool.compare(base, base) == (["0 new failures", "0 new passes", "0 gone"], False)


def test_smaller_sizes_reach_parameters_code_and_helpers() -> None:
    scope: dict[str, object] = {"__name__": "of_torchao"}
    exec(
        "def helper():\n    return 4096\ndef test_a(n):\n    return n, (5120, 2, True)\ndef test_b():\n    return 1",
        scope,
    )
    module = SimpleNamespace(**scope)
    params = {"n": 8192, "shape": (4096, 1), "flag": True}
    item = SimpleNamespace(module=module, function=scope["test_a"], callspec=SimpleNamespace(params=params))
    assert tool._shrink(item, {1: 9, 4096: 64, 5120: 128, 8192: 256})
    assert params == {"n": 256, "shape": (64, 9), "flag": True}
    assert scope["test_a"](params["n"]) == (256, (128, 2, True)) and scope["helper"]() == 64  # type: ignore[operator]
    other: dict[str, object] = {"__name__": "of_torchao"}
    exec("def test_a():\n    return 4096\ndef test_b():\n    return 1", other)
    plain = SimpleNamespace(module=SimpleNamespace(**other), function=other["test_b"])
    assert not tool._shrink(plain, {4096: 64})


def test_every_suite_of_the_list_names_a_cause_for_each_miss() -> None:
    causes = {"size", "kernel without a body", "limit of a CPU", "fault of torchao", "not explained"}
    import tomllib

    suites = tomllib.loads(tool.TABLE.read_text())["suite"]
    misses = [miss for suite in suites for miss in suite.get("miss", [])]
    assert misses and all(miss["cause"] in causes and miss["why"] and miss["tests"] for miss in misses)
    assert all(miss.get("run", True) for miss in misses if miss["cause"] == "fault of torchao")


def test_results_are_read_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("\n".join(json.dumps({"file": "f", **each}) for each in AS_LISTED))
    assert tool._read(tmp_path / "r")["f", "test_ptx"]["outcome"] == "failed"
