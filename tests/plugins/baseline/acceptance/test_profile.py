"""Recorded profiles as a user of their own target meets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from harness.checks.metamorphic import EXECUTED, MEMORY
from tests.acceptance.conftest import Inside
from tests.fork_servers import ForkServers
from tests.lines import read_run

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

CASE = "target.mine-fsdp2-rowwise-v2048-s3-f32-tol.0.05"
UPDATE = ("baseline", "update", "--profiles", "mine", "--device", "cpu", "--reason")


@pytest.fixture
def mine(project: Command, warm: ForkServers) -> Inside:
    """The project with a tier of one case that a module of the user trains."""
    (project.folder / "mine.py").write_text("from harness.worker.targets.reference.build import build as build\n")
    axes = 'recipe = "rowwise", dp_shard = 2, steps = 3, loss_tolerance = 0.05, target = "mine"'
    project.cases("mine", axes)
    return Inside(project.folder, fork_servers=warm)


def result(project: Inside, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a run of the case, and its result."""
    done = project.run("run", "mine", "--device", "cpu", "--json", "result.json", *options)
    (case,) = read_run(project.folder / "result.json")["cases"]
    return done.returncode, case


def test_without_a_profile_the_check_is_not_judged_by_name(mine: Inside) -> None:
    done = mine.run("run", "mine", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 profile not recorded, so traffic and memory there are not checked." in done.stderr
    assert "profile in 1 case: no profile is recorded; `fp8-harness baseline update --profiles" in done.stdout
    check = mine.run("baseline", "check", "mine")
    assert check.returncode == 1 and f"\nmissing: {CASE}\n" in check.stdout
    assert "0 damaged, 1 missing" in check.stdout


def test_what_is_recorded_is_what_later_runs_are_compared_with(mine: Inside) -> None:
    first = mine.run(*UPDATE, "first", "--missing")
    assert first.returncode == 0, first.stdout + first.stderr
    assert f"{CASE}: new\n  stored in " in first.stdout and "1 profile stored, 0 cases failed" in first.stdout
    last = mine.run("baseline", "check", "mine").stdout.splitlines()[-1]
    assert last == "1 profile, 0 damaged, 0 missing, 0 of other versions"
    *_, listed = mine.run("baseline", "show").stdout.splitlines()
    assert listed.startswith(f"profile  {CASE}  20") and listed.endswith("  torch 2.13.0+cpu  first")
    code, good = result(mine)
    assert (code, good["verdict"]) == (0, "passed") and "profile" in good["checks"]
    code, bad = result(mine.having(MORE_TRAFFIC="1"))
    assert (code, bad["verdict"]) == (1, "invariant")
    (finding,) = bad["findings"]
    assert (finding["rule"], finding["step"], finding["rank"], finding["ranks"]) == (EXECUTED.name, 1, 0, [0, 1])
    assert finding["expected"] == "4 with 2048 bytes (4 of 512 elements), as recorded"
    assert finding["found"] == "5 with 2560 bytes (5 of 512 elements)"
    (note,) = finding["notes"]
    assert note.startswith("if it is intended, `fp8-harness baseline update --profiles")


def test_an_update_shows_what_changes(mine: Inside) -> None:
    assert mine.run(*UPDATE, "first").returncode == 0
    stored = next((mine.folder / "golden" / "profiles").iterdir())
    before, changed = stored.read_text(), mine.having(MORE_TRAFFIC="1")
    shown = changed.run(*UPDATE, "look", "--dry-run")
    assert shown.returncode == 0 and stored.read_text() == before
    line = "ranks 0-1: all_gather in uint8 along dp_shard: 4 with 2048 bytes (4 of 512 elements) -> 5 with 2560"
    assert f"{CASE}: changed\n  step 1, {line}" in shown.stdout and f"\n  later steps, {line}" in shown.stdout
    assert "1 profile not stored (--dry-run), 0 cases failed" in shown.stdout
    assert changed.run(*UPDATE, "it is meant to").returncode == 0
    assert result(changed)[0] == 0 and result(mine)[0] == 1
    assert f"{CASE}: unchanged" in changed.run(*UPDATE, "again").stdout


def test_what_fails_another_check_is_not_recorded(mine: Inside) -> None:
    axes = 'recipe = "tensorwise", seed = 4, steps = 3, loss_tolerance = 0.05, target = "mine"'
    mine.cases("mine", axes)
    done = mine.run(*UPDATE, "first")
    assert done.returncode == 1
    assert "loss_vs_golden" in done.stdout and "0 profiles stored, 1 case failed" in done.stdout
    assert "profile" not in mine.run("baseline", "show").stdout


def test_errors_are_one_line_with_a_fix(mine: Inside) -> None:
    assert mine.run(*UPDATE, "first").returncode == 0
    for words, code, message in (
        (("update", "mine"), 2, "--reason is missing. Fix: add --reason"),
        (("update", "mine", "--missing", "--device", "cpu", "--reason", "x"), 3, "no profile is missing."),
        (("update", "smoke", "--device", "cpu", "--reason", "x"), 3, "formulas describe the models"),
        (("update", "mine", "--target", "none", "--device", "cpu", "--reason", "x"), 2, "there is no module none."),
    ):
        done = mine.run("baseline", words[0], "--profiles", *words[1:])
        assert done.returncode == code and message in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_damaged_profile_ends_a_run_before_it_begins(mine: Inside) -> None:
    assert mine.run(*UPDATE, "first").returncode == 0
    stored = next((mine.folder / "golden" / "profiles").iterdir())
    stored.write_text(stored.read_text().replace("4 with", "5 with"))
    done = mine.run("run", "mine", "--device", "cpu")
    assert done.returncode == 2 and "was changed after the tool wrote it" in done.stderr
    assert "1 damaged, 0 missing" in mine.run("baseline", "check", "mine").stdout
    again = mine.run(*UPDATE, "repaired")
    assert again.returncode == 0 and "replaces a damaged profile" in again.stdout
    assert result(mine)[0] == 0


KEEPS_WEIGHTS = """
from harness.worker.targets.reference import parallel

def apply():
    stock = parallel.fully_shard
    parallel.fully_shard = lambda *args, **given: stock(*args, **{**given, "reshard_after_forward": False})
"""


@pytest.mark.sweep  # the others have ranks without torch
def test_real_ranks_that_keep_gathered_weights_are_found_by_what_they_send_and_keep(mine: Inside) -> None:
    """No number is wrong, and no rule that holds for every model is broken."""
    real = mine.having(FP8_HARNESS_PROGRAM="")
    (mine.folder / "keeps.py").write_text(KEEPS_WEIGHTS)
    axes = 'recipe = "rowwise", dp_shard = 2, steps = 3, global_batch = 4, loss_tolerance = 0.05, target = "mine"'
    mine.cases("mine", axes)
    done = real.run(*UPDATE, "first")
    assert done.returncode == 0, done.stdout + done.stderr
    assert result(real)[1]["verdict"] == "passed"
    code, case = result(real, "--inject", "keeps.py:apply")
    assert (code, {finding["rule"] for finding in case["findings"]}) == (1, {EXECUTED.name, MEMORY.name})
    kinds = {finding["values"]["what"] for finding in case["findings"]}
    assert "all_gather in float32 along dp_shard" in kinds
    assert any("alive between forward and backward" in kind for kind in kinds)
