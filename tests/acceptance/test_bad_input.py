"""Bad input is one line on stderr (where, what, how to fix) and exit code 2, before any rank starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

FILES = {
    "malformed": ("[base\n", "bad.toml:1"),
    "unknown axis": ('[[case]]\naxes = {recipee = "rowwise"}\n', "recipe"),
    "impossible layout": ("[[case]]\naxes = {tp = 3}\n", "tp"),
    "vocab 0": ("[[case]]\naxes = {vocab_size = 0}\n", "vocab_size"),
    "steps 0": ("[[case]]\naxes = {steps = 0}\n", "steps"),
    "NaN tolerance": ("[[case]]\naxes = {loss_tolerance = nan}\n", "loss_tolerance"),
}

ARGUMENTS = {
    "missing file": (("run", "no/such.toml"), "no/such.toml"),
    "unknown tier": (("run", "smok"), "did you mean smoke"),
    "unknown option": (("run", "--jsonn", "x"), "--json"),
    "unknown command": (("rum",), "rum"),
    "bad case id": (("run", "tp4-nonsense"), "tp4-nonsense"),
    "bad selector": (("run", "smoke", "--select", "tpp=4"), "tp"),
    "bad root": (("--root", "/no/such/folder", "run"), "--root /no/such/folder"),
    "json folder": (("run", "smoke", "--json", "/no/such/folder/x.json"), "/no/such/folder"),
    "inject form": (("run", "smoke", "--inject", "patch"), "FILE.py:FUNCTION"),
    "inject file": (("run", "smoke", "--inject", "nowhere.py:apply"), "nowhere.py"),
    "golden without reason": (("baseline", "update", "smoke"), "--reason"),
    "unknown family": (("baseline", "update", "smoke", "--family", "x", "--reason", "y"), "--family x"),
    "too few slots": (("run", "smoke", "--device", "cpu", "--slots", "1"), "--slots"),
    "inject function": (("run", "smoke", "--inject", "patch.py:aply"), "it defines apply"),
    "inject syntax": (("run", "smoke", "--inject", "broken.py:apply"), "broken.py:1"),
    "unknown axis": (("explain", "recip=rowwise"), "recipe"),
}


def check_line(project: Command, arguments: tuple[str, ...], words: str, *, code: int = 2) -> None:
    done = project.call(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("fp8-harness: error: ")
    assert words in lines[0]
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("name", FILES)
def test_bad_case_file(project: Command, name: str) -> None:
    text, words = FILES[name]
    project.tier("bad", text)
    check_line(project, ("run", "bad", "--device", "cpu"), words)
    check_line(project, ("list", "bad"), words)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_bad_arguments(shared: Command, name: str) -> None:
    (shared.folder / "patch.py").write_text("def apply():\n    pass\n")
    (shared.folder / "broken.py").write_text("def apply(:\n")
    check_line(shared, *ARGUMENTS[name])


def test_a_rerun_is_narrowed_by_a_tier(project: Command) -> None:
    project.call("run", "smoke", "--device", "cpu", "--select", "recipe=bf16", "--timeout-s", "0.001")
    project.cases("other", 'recipe = "rowwise"')
    done = project.call("run", "other", "--lf")
    assert done.returncode == 3 and "none of these failed in the last run" in done.stderr
    assert "1 case:" in project.call("run", "smoke", "--lf").stdout


def test_nothing_selected(shared: Command) -> None:
    check_line(shared, ("run", "smoke", "--select", "tp=8"), "no case is selected", code=3)


def test_damaged_golden_is_named_before_anything_runs(project: Command) -> None:
    golden = next((project.folder / "golden" / "cpu").glob("*.json"))
    golden.write_text(golden.read_text().replace("7.5", "7.4", 1))
    check_line(project, ("run", "smoke", "--device", "cpu"), golden.name)
    check = project.call("baseline", "check", "smoke")
    assert check.returncode == 1
    assert golden.name in check.stdout


def test_state_folder_that_cannot_be_made(project: Command) -> None:
    project.environment["FP8_HARNESS_STATE"] = "/proc/nowhere"
    check_line(project, ("run", "smoke", "--device", "cpu"), "FP8_HARNESS_STATE")
