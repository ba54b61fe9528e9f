"""Nightlies of torchao in a folder of wheels: compared with each other, and run alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.running.environments import Versions
from harness.running.plan import DEFAULT_PROGRAM
from tests.acceptance.conftest import Command, empty_project
from tests.wheels import HALF_SCALES, SENT_TWICE, repacked

CASE = "fsdp2-tensorwise-ag.fp8-v2048-s2-f64"
NIGHTS = {"20261124": None, "20261125": None, "20261126": SENT_TWICE, "20261127": SENT_TWICE, "20261128": HALF_SCALES}
LINKS = ("--index", "wheels")

pytestmark = pytest.mark.sweep  # 100 CPU seconds; `tests/unit` has every answer


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Command:
    folder = empty_project(tmp_path_factory.mktemp("nights"))
    (folder / "wheels").mkdir()
    for night, edits in NIGHTS.items():
        repacked("torchao", version(night), folder / "wheels", edits)
    return Command(folder, environment={"FP8_HARNESS_PROGRAM": DEFAULT_PROGRAM})


def version(night: str) -> str:
    return f"0.19.0.dev{night}+cpu"


def compare(nights: Command, before: str, after: str) -> tuple[int, str]:
    versions = f"torchao={version(before)},{version(after)}"
    done = nights.run("compare", "--versions", versions, CASE, *LINKS, timeout_s=300)
    return done.returncode, done.stdout + done.stderr


def environment_of(nights: Command, night: str) -> Path:
    """The environment that the commands use too."""
    versions = Versions("torchao", nights.folder / "state" / "versions", index=str(nights.folder / "wheels"))
    place = versions.environment(version(night))
    assert place.folder is not None
    return place.folder


def run_with(nights: Command, night: str, *words: str) -> subprocess.CompletedProcess[str]:
    python = environment_of(nights, night) / "bin" / "python"
    return nights.process(str(python), "-m", "harness", *words, timeout_s=300)


def test_what_came_overnight_is_no_go_and_stays_told(nights: Command) -> None:
    code, text = compare(nights, "20261125", "20261126")
    assert code == 1 and text.count("passed -> changed") and "calls of all_reduce (max) in float64" in text, text
    code, text = compare(nights, "20261126", "20261127")
    assert code == 0 and "GO: torchao-0.19.0.dev20261127+cpu against" in text, text
    code, text = compare(nights, "20261127", "20261128")
    assert code == 1 and "changed -> invariant" in text and "scale does not match the amax" in text, text


def test_alone_a_nightly_says_it_once_and_a_fault_fails(nights: Command) -> None:
    differs = run_with(nights, "20261126", "run", CASE)
    assert differs.returncode == 0, differs.stderr
    assert "  traffic in 1 case, first in" in differs.stdout and "is not a release" in differs.stdout
    faulty = run_with(nights, "20261128", "run", CASE)
    assert faulty.returncode == 1 and "it is the right scale times 2**-1" in faulty.stdout


@pytest.mark.parametrize(("head", "base", "code"), [("20261126", "20261125", 5), ("20261127", "20261126", 0)])
def test_layouts_are_held_against_the_night_before(nights: Command, head: str, base: str, code: int) -> None:
    words = ("parity", "--layouts", "fsdp2", "--recipe", "tensorwise", "--set", "fp8_all_gather=true", "--steps", "2")
    done = run_with(nights, head, *words, "--against", str(environment_of(nights, base)))
    assert done.returncode == code, done.stdout + done.stderr
    assert ("now differs" if code else "same bits") in done.stdout


@pytest.mark.parametrize(("night", "code"), [("20261125", 0), ("20261126", 1)])
def test_a_case_is_reproduced_with_a_night(nights: Command, night: str, code: int) -> None:
    words = ("bug", "repro", CASE, "--exit-code", "--with", f"torchao=={version(night)}", *LINKS)
    done = nights.run(*words, timeout_s=300)
    assert done.returncode == code, done.stdout + done.stderr
