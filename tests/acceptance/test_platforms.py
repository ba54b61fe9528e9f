"""Systems that ranks cannot run on: what only reads works there, what starts ranks says at once what is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.hints import INSTALL_FOR_CPU, START_CONTAINER
from harness.store import run_lines
from tests.acceptance.conftest import CASES, REPOSITORY, Command, empty_project
from tests.builders import make_measured, make_result, make_results

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
