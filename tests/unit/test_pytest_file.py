"""Tests of `bug export --pytest`: short, complete, formatted, and without what their case does not use."""

from __future__ import annotations

import ast
import functools
import tomllib
from pathlib import Path

import pytest

from harness.matrix.caseid import parse_case_id
from harness.plugins.bugs.export import constants, exported_case
from harness.plugins.bugs.pytest_file import MOST_LINES, OLDEST, colour_of, formatted, models, pytest_file
from harness.plugins.bugs.specialised import specialised, with_values
from harness.verdict import FailureSignature
from tests.unit.test_export import ATP, CRASH, FSDP_TP, MISMATCH, SCALES, SCATTERED, unknown_names

pytestmark = pytest.mark.programs

FILES = {
    "gradients": (FSDP_TP, SCALES),
    "row gradients": ("tp2-rowwise-v2048-s1-b16", SCALES),
    "precomputed": ("hsdp2x2-tensorwise-ag.fp8pre-v2048-f64", FailureSignature(kind="scales/amax", first_step=2)),
    "float8 styles": ("tp2-nosp-nolp-tensorwise-tpstyle.fp8-v2048-f32", SCALES),
    "eight ranks": ("hsdp2x2-tp2-rowwise-ac.full-v2048-b16", SCALES),
    "crash": ("tp2-nowait-tensorwise-graph-v2048-s2-f64", CRASH),
    "quotes": (
        "tp2-nowait-tensorwise-graph-v2048-s2-f64",
        FailureSignature(kind="crash", what="AttributeError: 'Tensor' has no attribute '_local_tensor'", first_step=1),
    ),
    "one rank": ("single-tensorwise-v2048-gb1-sl40-s2-f64", CRASH),
    "mismatch": ("fsdp3-tensorwise-ag.fp8-v2048-gb6-s2-f64", MISMATCH),
    "scattered": (ATP, SCATTERED),
}


@functools.cache
def file(kind: str, model: str = "one small MLP") -> str:
    case, signature = FILES[kind]
    values = dict(models(constants(exported_case(parse_case_id(case)), signature)))[model]
    return pytest_file(values, head='"""It fails.\n\nA, B.\nIt fails with C.\n"""')


@pytest.mark.parametrize("kind", FILES)
def test_a_file_is_short_and_complete(kind: str) -> None:
    text = file(kind)
    assert len(text.splitlines()) <= MOST_LINES
    assert unknown_names(text) == set()
    assert "harness" not in text
    defined = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert sum(name.startswith("test_") for name in defined) == 1


@pytest.mark.parametrize("kind", ["float8 styles", "mismatch"])
def test_a_file_is_formatted(kind: str) -> None:
    assert formatted(file(kind)) == file(kind)


def test_a_file_has_what_its_case_uses() -> None:
    small, whole = file("gradients"), file("gradients", "the model of the case")
    assert "scaled_dot_product_attention" not in small and "loss_parallel" not in small
    assert "scaled_dot_product_attention" in whole and "with loss_parallel() if tp is not None" in whole
    assert "fully_shard" not in file("float8 styles")
    assert "build()" in file("one rank") and "DTensor" not in file("one rank") and "def train():" in file("one rank")
    assert "Compare" in file("mismatch") and "farthest" not in file("mismatch")
    linears = file("row gradients", "the model of the case, and each of its linears")
    assert unknown_names(linears) == set() and "pairs |= linears()" in linears


SOURCE = """
A = 1
B = "x"  # a switch
if B == "y":
    one()
elif A > 1:
    two()  # kept comment
else:
    three()
# goes with it
if B != "x":
    four()
with five() if B == "y" and six else contextlib.nullcontext():
    seven()
if six:
    eight(A if B == "x" else nine, {"x": 1, "z": 2}[B], getattr(ten, B), B in given and six)
elif B == "x":
    eleven()
"""
LEFT = """
A = 2
two()  # kept comment
seven()
if six:
    eight(A, 1, ten.x, "x" in given and six)
else:
    eleven()
"""


def test_what_switches_decide_against_is_gone() -> None:
    assert specialised(with_values(SOURCE, {"A": 2}), {"B": "x"}, {"A": 2}) == LEFT


@pytest.mark.parametrize(
    ("output", "colour", "text"),
    [
        (".  [100%]\n1 passed in 3.21s\n", "green", "1 passed in 3.21s"),
        (
            "E   Traceback\nE   AssertionError: it is 0.2\n=== short\n1 failed in 3.21s\n",
            "red",
            "AssertionError: it is 0.2",
        ),
        ("E   test_x.Mismatch: ['a', 'b']\n1 failed, 2 warnings in 3.21s\n", "red", "test_x.Mismatch: ['a', 'b']"),
        ("SKIPPED [1] test_x.py:9: no torchao\n1 skipped in 0.1s\n", "cannot tell", "no torchao"),
        ("ERROR test_x.py\n1 error in 0.1s\n", "cannot tell", "1 error"),
        ("No module named pytest\n", "cannot tell", "No module named pytest"),
    ],
)
def test_the_colour_of_a_run(output: str, colour: str, text: str) -> None:
    answer = colour_of(output)
    assert answer[0] == colour
    assert text in answer[1]


def test_the_oldest_versions_are_those_of_this_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert [f"{name}>={version}" for name, version in OLDEST.items()] == project["project"]["optional-dependencies"][
        "train"
    ]
