"""`expect` of a user's target under the real command: what it finds that nothing else does, and a wrong formula."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.conftest import Command

TOY = Path(__file__).parents[1] / "targets" / "toy.py"
FAULT = "fault:float8_weight_kept_for_backward"
EXPECT = """
from toy import build

def expect(case, world, step):
    linears = 4 * world.microbatches
    return {"matmuls": %s, "saved_bytes": {"float8_e4m3fn": 0}}
"""
TARGETS = {"silent": "from toy import build\n", "stating": EXPECT % "3 * linears", "wrong": EXPECT % "2 * linears"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Command:
    folder = tmp_path_factory.mktemp("stated")
    for name in ("cases", "golden"):
        (folder / name).mkdir()
    (folder / "toy.py").write_text(TOY.read_text())
    for name, text in TARGETS.items():
        (folder / f"{name}.py").write_text(text)
    return Command(folder, {"FP8_HARNESS_PROGRAM": "harness.worker.main"})


def run(project: Command, target: str, *words: str) -> tuple[int, str]:
    case = f"target.{target}-single-tensorwise-v2048-s3-lr0.004-f64-tol.0.004"
    done = project.run("run", "--case", case, "--verbose", *words)
    return done.returncode, done.stdout


def test_a_fault_is_found_by_what_is_stated_and_by_nothing_else(project: Command) -> None:
    code, out = run(project, "stating")
    assert code == 0 and "memory in 1 case: no formula for the model of stating; see `stated`" in out, out
    code, out = run(project, "stating", "--inject", FAULT)
    assert code == 1, out
    assert "stated [step 1, rank 0]: not the number of float8_e4m3fn bytes saved for backward that expect()" in out
    assert "expected: 0\n" in out and "return it from expect(); otherwise the run is wrong" in out
    code, out = run(project, "silent", "--inject", FAULT)
    assert code == 0 and "stated in 1 case: the target states nothing of the case" in out, out


def test_a_wrong_formula_is_told_with_the_number_to_return(project: Command) -> None:
    code, out = run(project, "wrong")
    assert code == 1, out
    assert "number of scaled matmuls that expect() of wrong states on rank 0\n    expected: 8\n    found: 12\n" in out
    assert "return it from expect()" in out
