"""Bad input is one line on stderr (where, what, how to fix) and exit code 2, before any rank starts.

The same on systems that ranks cannot run on, where what only reads works.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from harness.hints import INSTALL_FOR_CPU, START_CONTAINER
from harness.store import run_lines
from tests.acceptance.conftest import CASES, REPOSITORY, Command, empty_project
from tests.builders import make_measured, make_result, make_results

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

FILES = {
    "malformed": ("[base\n", "bad.toml:1"),
    "unknown axis": ('[[case]]\naxes = {recipee = "rowwise"}\n', "recipe"),
    "impossible layout": ("[[case]]\naxes = {tp = 3}\n", "tp"),
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


CASE = "tp2-rowwise-v2048-f32"
SYSTEMS = {"darwin": "Darwin on arm64", "windows": "Windows on AMD64"}
READING = """
--help
--version
list smoke
explain tp2-rowwise-v2048-f32
explain --list checks
new my.toml --tp 2
runs import a.jsonl
runs list
show a.jsonl
compare a.jsonl b.jsonl
predict speedup tp2-rowwise-v2048-f32
bug list
baseline show
"""
STARTING = """
run smoke
parity tp2-rowwise-v2048-f32
check-target my_model
baseline update smoke --reason x --allow-dirty
bug check
bug shrink tp2-rowwise-v2048-f32
dev conformance
dev mutate
dev evidence proof smoke
predict layouts tp2-rowwise-v2048-f32 --verify
predict measure tp2-rowwise-v2048-f32
"""


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Answers = dict[str, Answer]


def answers(system: str, folder: Path, commands: str) -> Answers:
    """What each command says in a project on the pretended system. Text without an encoding is an error of ours."""
    project = Command(empty_project(folder))
    project.tier("smoke", CASES)
    for name in ("a", "b"):
        run = make_results(make_result(CASE, checks=("finite",), measured=make_measured()), name=name)
        (folder / f"{name}.jsonl").write_bytes(run_lines(run))
    lines = [*filter(None, commands.splitlines())]
    words = json.dumps([[*line.split()] for line in lines])
    program = str(REPOSITORY / "tests" / "acceptance" / "pretended.py")
    done = project.process(sys.executable, "-X", "warn_default_encoding", program, system, words)
    assert done.returncode == 0, done.stderr
    return {line: Answer(*answer) for line, answer in zip(lines, json.loads(done.stdout), strict=True)}


@pytest.mark.parametrize("system", SYSTEMS)
def test_only_what_starts_ranks_needs_linux_and_says_in_one_line_how_to_go_on(system: str, tmp_path: Path) -> None:
    found = answers(system, tmp_path, READING + STARTING)
    reading = {line: found.pop(line) for line in READING.split("\n") if line}
    assert {line: answer.err for line, answer in reading.items() if answer.code} == {}
    assert SYSTEMS[system].split()[-1] in reading["--version"].out
    assert CASE in reading["show a.jsonl"].out
    assert "tp2" in (tmp_path / "my.toml").read_text()
    refusal = f"fp8-harness: error: ranks need Linux on x86_64 or aarch64, and this is {SYSTEMS[system]}."
    for line, answer in found.items():
        assert (line, answer.code, answer.out, answer.err[: len(refusal)]) == (line, 2, "", refusal)
        assert START_CONTAINER in answer.err
        assert INSTALL_FOR_CPU in answer.err
        assert len(answer.err.splitlines()) == 1


def test_the_page_has_the_commands_of_the_error() -> None:
    page = (REPOSITORY / "docs" / "platforms.md").read_text()
    assert f"```sh\n{START_CONTAINER}\n{INSTALL_FOR_CPU}\nfp8-harness run smoke\n```" in page


def test_a_kernel_without_the_system_calls_is_named(tmp_path: Path) -> None:
    refused = answers("old", tmp_path, "run smoke")["run smoke"]
    assert (refused.code, refused.out) == (2, "")
    assert "Linux 5.3 or later" in refused.err
    assert "Function not implemented: 'pidfd_open'" in refused.err
