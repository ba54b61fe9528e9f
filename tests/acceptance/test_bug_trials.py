"""`fp8-harness bug repro` and `bug shrink`: on real ranks a planted fault is found again, and made small."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from harness.checks.scales import RULES
from harness.matrix.axes import own_axes
from harness.matrix.caseid import parse_case_id

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

CASE = "tp2-tensorwise-ac.full-dim.32-layers.1-heads.4-kvheads.4-ffn.32-v64-gb2-s2-f64"
FAULT = ("--inject", "fault:amax_not_reduced_over_tp")
BUG = f"""[bug]
title = "Scale of a shard"
link = "https://github.com/NVIDIA/Megatron-LM/issues/442"
status = "fixed"
symptom = "wrong_numbers"
hardware = "8 x A100"
detected_by = ["scales"]
planted = ["amax_not_reduced_over_tp"]
[bug.versions]
torch = "2.4.0"
[case]
id = "{CASE}"
"""


FAR, GOOD = (f"fsdp2-tensorwise-v2048-s3-{seed}f32-tol.0.05" for seed in ("seed4-", ""))


def real(project: Command) -> Command:
    """The project, with ranks that run torch."""
    project.environment["FP8_HARNESS_PROGRAM"] = ""
    return project


def write_bug(project: Command, text: str) -> None:
    path = project.folder / "cases" / "bugs" / "megatron-442.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def test_a_bug_is_reproduced_with_its_fault(project: Command) -> None:
    write_bug(project, BUG)
    there = real(project).run("bug", "repro", "megatron-442", "--planted", "-q")
    assert there.returncode == 1, there.stderr
    assert f"found     {RULES.amax.name}" in there.stdout
    assert "hardware: 8 x A100 reported, the virtual FP8 device here" in there.stdout


def test_the_answer_is_an_exit_code(project: Command) -> None:
    bug = BUG.replace(CASE, FAR)
    write_bug(project, bug)
    there = project.call("bug", "repro", "megatron-442", "-q", "--json", "repro.json")
    assert (there.returncode, there.stdout.splitlines()[0]) == (1, f"reproduced: {FAR}"), there.stderr
    assert project.call("bug", "repro", "megatron-442", "-q", "--exit-code").returncode == 1
    signature = json.loads((project.folder / "repro.json").read_text())["found"]["signature"]
    where = ", ".join(f'"{each}"' for each in signature["where"])
    other = f'signature = {{kind = "parity", what = "{signature["what"]}", where = [{where}], first_step = 1}}\n'
    write_bug(project, bug.replace("[bug.versions]", f"{other}[bug.versions]"))
    answer = project.call("bug", "repro", "megatron-442", "-q", "--exit-code")
    assert (answer.returncode, answer.stdout.splitlines()[0]) == (125, f"another failure: {FAR}")
    write_bug(project, BUG.replace(CASE, GOOD))
    gone = project.call("bug", "repro", "megatron-442", "-q", "--exit-code")
    assert (gone.returncode, gone.stdout.splitlines()[0]) == (0, f"not reproduced: {GOOD}"), gone.stderr
    assert project.call("bug", "repro", "no-such-bug", "--exit-code").returncode == 125
    assert project.call("bug", "repro", "no-such-bug").returncode == 2


def test_a_failure_is_made_small_and_what_it_needs_is_told(project: Command) -> None:
    words = ("bug", "shrink", CASE, *FAULT)
    done = real(project).run(*words, "--json", "shrunk.json", "--output", "small.toml")
    assert done.returncode == 0, done.stderr
    found = json.loads((project.folder / "shrunk.json").read_text())
    axes = own_axes(parse_case_id(found["case"]))
    assert (axes["tp"], axes["steps"], "checkpointing" in axes) == (2, 1, False)
    assert "needs\n  tp 2 or more\n    with tp 1: no failure" in done.stdout
    assert "does not depend on" in done.stdout and "checkpointing full -> none" in " ".join(done.stdout.split())
    assert found["case"] in project.call("list", "small.toml").stdout
    again = project.call(*words, "-q")
    assert f"smallest case: {found['case']}" in again.stdout and " 0 run now" in again.stdout
