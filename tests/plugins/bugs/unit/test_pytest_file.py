"""Tests of `bug export --pytest`: complete, formatted, and without the functions that their check does not call."""

from __future__ import annotations

import ast
import functools
import tomllib
from pathlib import Path

import pytest

from harness.matrix.caseid import parse_case_id
from harness.plugins.bugs.export import constants, exported_case, with_values
from harness.plugins.bugs.pytest_file import OLDEST, colour_of, formatted, models, pytest_file
from harness.verdict import FailureSignature
from tests.plugins.bugs.unit.test_export import ATP, CRASH, FSDP_TP, MISMATCH, SCALES, SCATTERED, unknown_names

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
def test_a_file_is_complete(kind: str) -> None:
    text = file(kind)
    assert unknown_names(text) == set()
    assert "harness" not in text
    defined = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert sum(name.startswith("test_") for name in defined) == 1


@pytest.mark.parametrize("kind", ["float8 styles", "mismatch"])
def test_a_file_is_formatted(kind: str) -> None:
    assert formatted(file(kind)) == file(kind)


def test_a_file_has_the_functions_that_its_check_calls() -> None:
    small, whole = file("gradients"), file("gradients", "the model of the case")
    assert "ATTENTION = False" in small and "ATTENTION = True" in whole and "LOSS_PARALLEL = True" in whole
    assert "def farthest" in small and "Compare" not in small and "fused_scaled_matmul_reduce_scatter(" not in small
    assert "class Compare" in file("mismatch") and "farthest" not in file("mismatch")
    assert not any("def main" in file(kind) or "sys.argv" in file(kind) for kind in FILES)
    linears = file("row gradients", "the model of the case, and each of its linears")
    assert unknown_names(linears) == set() and "COMPARE_LINEARS = True" in linears


def test_constants_get_values_and_keep_their_comments() -> None:
    source = 'ONE = 1\nNAME = "x"  # why\nOTHER = 2\n    ONE = 3\n'
    values = {"ONE": 7, "NAME": 'a "b"'}
    assert with_values(source, values) == 'ONE = 7\nNAME = "a \\"b\\""  # why\nOTHER = 2\n    ONE = 3\n'


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
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    assert [f"{name}>={version}" for name, version in OLDEST.items()] == project["project"]["optional-dependencies"][
        "train"
    ]
