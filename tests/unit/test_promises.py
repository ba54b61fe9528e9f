"""Every limit is a row of `harness/promises.toml` with its evidence, and no wider than what was measured explains."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci.promises import WIDE, Runs, is_wide, read
from harness.promises import PROMISES, Limit, Promise, keeps, used

ROOT = Path(__file__).parents[2]
RECORD = read()
KILLS = json.loads((ROOT / "golden/evidence/kills.json").read_text())["found"]
JUDGING = (*sorted((ROOT / "harness/checks").glob("*.py")), *sorted((ROOT / "harness/expect").glob("*.py")))
# Numbers of others, which are no limits of ours.
CONSTANTS = {
    "casts.py": {1e-12: "torchao replaces a smaller amax by it", 0.5: "half of a power of two"},
    "model.py": {0.5: "a square root"},
    "reported.py": {1e-6: "torch adds it to the norm that it divides by"},
    "routing.py": {1e-3: "the coefficient of torchtitan 0.2.2, and of the reference target"},
}


@pytest.mark.parametrize("name", PROMISES)
def test_a_limit_has_evidence_a_fault_that_it_finds_and_a_reason_where_it_is_wide(name: str) -> None:
    row = PROMISES[name]
    assert row.evidence and row.unit and bool(row.of) == (row.kind == "rounding")
    assert bool(row.wide) == is_wide(name, row, RECORD), "give a reason, or take it away"
    assert bool(row.fault) != bool(row.no_fault)
    if "::" in row.fault:
        path, test = row.fault.split("::")
        assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE)
    elif row.fault:
        rule, fault = row.fault.split()
        assert any(rule in found["rules"] for found in KILLS[fault].values())


@pytest.mark.parametrize("path", JUDGING, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_limit_is_written_into_code(path: Path) -> None:
    text = path.read_text()
    assert sorted(set(_small(ast.parse(text))) - CONSTANTS.get(path.name, {}).keys()) == []
    named = re.findall(r"Limit\(\"([a-z_.0-9]+)\"", text)
    assert set(named) <= PROMISES.keys()


def _small(tree: ast.AST) -> Iterator[float]:
    """Every number between 0 and 1, written or as a power."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < node.value < 1:
            yield node.value
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and isinstance(node.right, ast.UnaryOp):
            yield 0.0


def test_the_search_sees_numbers_and_powers() -> None:
    assert set(_small(ast.parse("A = 1e-3\nB = 2.0**-9\nC = 2.0"))) == {1e-3, 0.0}


@pytest.mark.parametrize(("wide", "allowed"), [(False, 1.0), (True, 1.1)])
def test_what_is_wider_than_four_times_what_clean_runs_had_is_wide(wide: bool, allowed: float) -> None:
    row = Promise(value=f"{allowed} * 2**-2", unit="", kind="rounding", evidence="")
    runs = Runs(cases=(), software={}, used={"a.b": 1 / WIDE / allowed})
    assert is_wide("a.b", row, {"default": runs}) is wide
    assert is_wide("a.b", row, {}), "nothing was measured"


def test_a_comparison_notes_the_largest_share_and_keeps_no_nan() -> None:
    limit = Limit("parity.terms", 2.0)
    used()
    assert keeps(limit / 2, limit) and keeps(limit / 4, limit) and not keeps(math.nan, limit)
    assert used() == {"parity.terms": 0.5} and not keeps(math.inf, math.inf)
    assert (limit.plus(0.01).name, float(limit.plus(0.01))) == ("parity.terms", pytest.approx(0.05))
