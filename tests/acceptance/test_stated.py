"""`expect` of a user's target under the real command: what it finds that nothing else does, and a wrong formula."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.inside import Inside, Warm

TOY = Path(__file__).parents[1] / "targets" / "toy.py"
FAULT = "fault:float8_weight_kept_for_backward"
# What it states: nothing with seed 1, a wrong formula in float32, and what is right otherwise.
MINE = """
from toy import build

def expect(case, world, step):
    if case.train.seed == 1:
        return {}
    linears = 4 * world.microbatches
    of_each = 2 if case.train.dtype == "float32" else 3
    return {"matmuls": of_each * linears, "saved_bytes": {"float8_e4m3fn": 0}}
"""
STATING = "target.mine-single-tensorwise-v2048-s2-lr0.004-f64-tol.0.004"
WRONG = "target.mine-single-tensorwise-v2048-s2-lr0.004-f32-tol.0.004"
SILENT = "target.mine-single-tensorwise-v2048-s2-lr0.004-seed1-f64-tol.0.004"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Inside:
    folder = tmp_path_factory.mktemp("stated")
    for name in ("cases", "golden"):
        (folder / name).mkdir()
    (folder / "toy.py").write_text(TOY.read_text())
    (folder / "mine.py").write_text(MINE)
    return Inside(folder, {"FP8_HARNESS_PROGRAM": "harness.worker.main"}, warm=warm)


def run(project: Inside, case: str, *words: str) -> tuple[int, str]:
    done = project.run("run", "--case", case, "--verbose", *words)
    return done.returncode, done.stdout


def test_a_fault_is_found_by_what_is_stated_and_by_nothing_else(project: Inside) -> None:
    code, out = run(project, STATING)
    assert code == 0 and "memory in 1 case: no formula for the model of mine; see `stated`" in out, out
    code, out = run(project, STATING, "--inject", FAULT)
    assert code == 1, out
    assert "stated [step 1, rank 0]: not the number of float8_e4m3fn bytes saved for backward that expect()" in out
    assert "expected: 0\n" in out and "return it from expect(); otherwise the run is wrong" in out
    code, out = run(project, SILENT, "--inject", FAULT)
    assert code == 0 and "stated in 1 case: the target states nothing of the case" in out, out


def test_a_wrong_formula_is_told_with_the_number_to_return(project: Inside) -> None:
    code, out = run(project, WRONG)
    assert code == 1, out
    assert "number of scaled matmuls that expect() of mine states on rank 0\n    expected: 8\n    found: 12\n" in out
    assert "return it from expect()" in out
