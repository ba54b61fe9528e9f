"""The commands that make goldens and evidence of noise."""

from __future__ import annotations

import json
import shutil

import pytest
from msgspec.structs import replace

from harness.evidence.golden import load_golden, write_golden
from tests.acceptance.conftest import Command
from tests.programs import make_commit


def test_golden_update_shows_old_and_new_and_stores_nothing_that_it_must_not(project: Command) -> None:
    done = project.call("baseline", "update", "smoke", "--device", "cpu", "--reason", "again")
    assert done.returncode == 0
    assert "unchanged" in done.stdout
    assert "old loss" in done.stdout
    assert project.call("baseline", "update", "smoke", "--missing", "--reason", "more").returncode == 3
    family = project.call("baseline", "show").stdout.split()[1]
    shown = project.call("baseline", "show", family)
    assert "reason    again" in shown.stdout
    assert "7.5" in shown.stdout
    refused = project.call("baseline", "update", "smoke", "--device", "cpu", "--hardware", "sm90", "--reason", "x")
    assert refused.returncode == 2 and "Fix: give one of cpu." in refused.stderr
    project.cases("new", 'recipe = "rowwise", steps = 4')
    done = project.call("baseline", "update", "new", "--device", "cpu", "--reason", "look", "--dry-run")
    assert done.returncode == 0
    assert "not stored" in done.stdout
    check = project.call("baseline", "check", "new", "--device", "cpu")
    assert check.returncode == 1
    assert "missing" in check.stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_goldens_are_not_made_from_a_changed_tree_unless_asked(project: Command) -> None:
    update = ("baseline", "update", "smoke", "--device", "cpu", "--reason", "again")
    make_commit(project.folder, "cases", "golden")
    assert project.call(*update).returncode == 0
    assert project.call(*update).returncode == 0, "goldens that are not committed yet are no reason"
    tier = project.folder / "cases" / "smoke.toml"
    tier.write_text(tier.read_text() + "# a remark\n")
    refused = project.call(*update)
    assert refused.returncode == 2
    where = f"fp8-harness: error: {project.folder}: 1 tracked file differs from the commit: cases/smoke.toml."
    assert refused.stderr.startswith(where) and refused.stderr.rstrip().endswith("or give --allow-dirty.")
    assert project.call(*update, "--dry-run").returncode == 0
    allowed = project.call(*update, "--allow-dirty")
    assert allowed.returncode == 0 and "warning" in allowed.stderr
    verified = project.call("baseline", "check", "--device", "cpu")
    assert "made from trees that differed from their commit: 1" in verified.stdout and verified.returncode == 0
    shelve = refused.stderr.partition("`")[2].partition("`")[0]
    assert project.shell(shelve).returncode == 0
    assert project.call(*update).returncode == 0


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_golden_diff_and_the_text_of_the_commit_say_what_changed(project: Command) -> None:
    make_commit(project.folder, "cases", "golden")
    assert project.call("baseline", "show", "--against", "HEAD").stdout == "1 golden unchanged against HEAD\n"
    family = "tiny-v2048-s3-gb8-sl32-lr0.001-seed0"
    stored = load_golden(project.folder, "cpu", family)
    write_golden(project.folder, replace(stored, losses=(9.0, *stored.losses[1:])))
    shown = project.call("baseline", "show", "--against", "HEAD").stdout
    assert f"1 golden changed: {stored.provenance.reason}" in shown and "0 goldens unchanged" in shown
    done = project.call("baseline", "update", "smoke", "--device", "cpu", "--reason", "torch 2.14")
    text = done.stdout.partition("For the message of the commit:\n\n")[2]
    assert text.startswith(f"1 golden changed: torch 2.14\n\n{family}  cpu  changed")
    assert project.call("baseline", "show", "--against", str(project.folder)).stdout.startswith("1 golden unchanged")
    assert "neither a revision nor a project" in project.call("baseline", "show", "--against", "nothing").stderr


def test_golden_update_of_what_failed_in_the_last_run(project: Command) -> None:
    only = ("baseline", "update", "--only-failing", "--device", "cpu", "--reason", "torch 2.14")
    assert project.call(*only).returncode == 2, "there is no run"
    assert project.call("run", "smoke", "--device", "cpu").returncode == 0
    assert project.call(*only).returncode == 3
    family = "tiny-v2048-s3-gb8-sl32-lr0.001-seed0"
    stored = load_golden(project.folder, "cpu", family)
    write_golden(project.folder, replace(stored, losses=(9.0, *stored.losses[1:])))
    assert project.call("run", "smoke", "--device", "cpu").returncode == 1
    done = project.call(*only)
    assert done.returncode == 0 and "1 golden stored, 0 references failed" in done.stdout, done.stdout + done.stderr
    assert load_golden(project.folder, "cpu", family).losses == stored.losses
    assert "kept: this golden is not why a loss is off" in project.call(*only).stdout
    assert project.call(*only, "--select", "tp=2").returncode == 3


def test_tolerance_measure_writes_evidence_and_keeps_the_samples_of_the_other_cases(project: Command) -> None:
    project.cases("noise", *(f'recipe = "rowwise", dp_shard = {size}, steps = 3' for size in (1, 2, 4)))
    measure = ("baseline", "tolerance", "--measure", "noise", "--device", "cpu", "--seeds")
    stored = []
    for words in (("8",), ("9", "--select", "dp_shard=2")):
        done = project.call(*measure, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        samples = json.loads((project.folder / "golden/evidence/loss_vs_golden.json").read_text())["samples"]
        stored.append(sorted((sample["layout"], sample["seed"]) for sample in samples))
    assert stored[0] == [(layout, seed) for layout in ("fsdp2", "fsdp4", "single") for seed in range(8)]
    assert stored[1] == sorted([*stored[0], ("fsdp2", 8)])
    shown = project.call("baseline", "tolerance")
    assert "tiny-rowwise-float32: 25 samples, 9 seeds, 3 layouts, 3 steps" in shown.stdout


def test_tolerance_measure_leaves_out_cases_with_recorded_faults_by_name(project: Command) -> None:
    project.cases("noise", *(f'recipe = "rowwise", dp_shard = {size}, steps = 3' for size in (1, 2)))
    project.record("lost-rows", where="dp_shard=2", verdict="numeric", rule="loss_vs_golden/*")
    measure = ("baseline", "tolerance", "--measure", "noise", "--device", "cpu", "--seeds", "2")
    done = project.call(*measure)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "lost-rows" in line]
    assert line.startswith("left out: fsdp2-rowwise-")
    assert line.endswith("known issue lost-rows: It is lost-rows.")
    evidence = json.loads((project.folder / "golden/evidence/loss_vs_golden.json").read_text())
    assert {sample["layout"] for sample in evidence["samples"]} == {"single"}
    nothing = project.call(*measure, "--select", "dp_shard=2")
    assert nothing.returncode == 3
    assert "no case is left to measure" in nothing.stderr.splitlines()[-1]
