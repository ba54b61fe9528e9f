"""`fp8-harness parity` on real ranks: a sound model, and one with a planted fault."""

from __future__ import annotations

import json
import re
import shutil
from xml.etree import ElementTree

import pytest

from harness.evidence.golden import curve_text
from harness.plugins.parity.curves import TextCurve, read_curve
from tests.acceptance.conftest import REPOSITORY, Inside, with_targets
from tests.fork_servers import ForkServers
from tests.plugins.bugs.acceptance.test_bugs import PACKAGE, environment, wheel
from tests.programs import make_commit

OF_SUMS = ("rounding", "drift")  # how far sums over TP ranks are off in bfloat16 depends on the CPU
LAYOUTS = ("--layouts", "single,fsdp2,tp2", "--steps", "2")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, warm: ForkServers) -> Inside:
    """A project without goldens, and with the tolerances that were measured."""
    inside = with_targets(tmp_path_factory.mktemp("parity"), warm)
    shutil.copytree(REPOSITORY / "golden" / "evidence", inside.folder / "golden" / "evidence", dirs_exist_ok=True)
    shutil.copy(REPOSITORY / "golden" / "tolerances.toml", inside.folder / "golden")
    return inside


def test_sound_layouts_are_equal_or_rounded(project: Inside) -> None:
    files = ("--json", "table.json", "--markdown", "table.md", "--html", "table.html", "--junit", "x.xml")
    done = project.run("-q", "parity", *LAYOUTS, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((project.folder / "table.json").read_text())
    words = {row["layout"]: row["word"] for row in table["rows"]}
    assert words.pop("tp2") in OF_SUMS and words == {"single": "equal", "fsdp2": "equal"}
    assert all(len(row["losses"]) == 2 for row in table["rows"])
    (rounded,) = (row["worst_gradient"] for row in table["rows"] if row["layout"] == "tp2")
    assert 0 < rounded["distance"] <= rounded["allowed"]
    logprobs = {row["layout"]: row["logprobs"] for row in table["rows"]}
    assert logprobs["single"] == logprobs["fsdp2"] == [0, 0]
    assert 0 < logprobs["tp2"][1] < logprobs["tp2"][0] < 0.1  # what roundings to bfloat16 and float8 moved on a CPU
    assert "| fsdp2 | equal |" in (project.folder / "table.md").read_text()
    assert "each layout against its single-rank reference" in (project.folder / "table.html").read_text()
    assert len(ElementTree.parse(project.folder / "x.xml").findall(".//testcase")) == 3


def test_a_planted_fault_is_wrong_where_it_is_and_nowhere_else(project: Inside) -> None:
    done = project.run("-q", "parity", *LAYOUTS, "--inject", "fault:amax_not_reduced_over_tp", "--json", "table.json")
    assert done.returncode == 1, done.stdout + done.stderr
    table = json.loads((project.folder / "table.json").read_text())
    rows = {row["layout"]: row for row in table["rows"]}
    assert (rows["single"]["word"], rows["fsdp2"]["word"], rows["tp2"]["word"]) == ("equal", "equal", "wrong")
    assert rows["single"]["logprobs"] == [0, 0] and rows["tp2"]["logprobs"][1] > 0
    first = rows["tp2"]["first"]
    assert (first["step"], first["rank"]) == (1, 1) and first["module"].startswith("layers.0."), first
    assert f"{first['rule']} in {first['module']}, step 1" in done.stdout


def test_each_of_several_cases_is_a_row(project: Inside) -> None:
    """Named by the words that not all ids have, with a fault in the one that it is in."""
    cases = ("single-tensorwise-v2256-s1-b16", "fsdp2-tensorwise-v2256-s1-b16", "tp2-tensorwise-v2256-s1-accum2-b16")
    fault = ("--inject", "fault:amax_not_reduced_over_tp", "--json", "table.json")
    assert project.run("-q", "parity", *cases, *fault).returncode == 1
    table = json.loads((project.folder / "table.json").read_text())
    assert [(row["layout"], row["word"]) for row in table["rows"]] == [
        ("single", "equal"), ("fsdp2", "equal"), ("tp2-accum2", "wrong"),
    ]  # fmt: skip
    assert table["case_id"] == "3 cases" and [row["case_id"] for row in table["rows"]] == [*cases]
    done = project.run("parity", *cases, "--layouts", "single")
    assert done.returncode == 2 and "--layouts: it is of one case, not of 3" in done.stderr
    done = project.run("parity", *cases, "target.torchtitan-single-bf16-v2048-s1-b16", "--against", "HEAD")
    assert done.returncode == 2 and "--against: these cases are of several targets" in done.stderr


def test_logprobs_show_what_a_loss_hides(project: Inside) -> None:
    case = ("parity", "--layouts", "fsdp2-cp2", "--steps", "1", "--json", "table.json")
    assert project.run("-q", *case).returncode == 0
    sound = json.loads((project.folder / "table.json").read_text())["rows"][0]
    assert project.run("-q", *case, "--inject", "fault:mask_lost").returncode == 1
    wrong = json.loads((project.folder / "table.json").read_text())["rows"][0]
    assert sound["logprobs"] == [0, 0]
    assert abs(wrong["losses"][0] - sound["losses"][0]) < 0.01
    assert wrong["logprobs"][0] > 0.3


# By the name of a mistake: the layout, and words of what is first wrong.
LOOPS = {
    "NotAveraged": ("fsdp2", "microbatches are added up without dividing by their number"),
    "DividedTwice": ("fsdp2", "divided by the number of microbatches twice"),
    "Divided": ("fsdp2", "divided by the number of ranks once too often"),
    "SomeLabels": ("fsdp2", "a mean over the labels of each rank or microbatch, of which the target leaves some out"),
    "OwnLabels": ("fsdp2", "a mean over the labels of each rank or microbatch, not over all; labels per rank: 104, 40"),
    "ShardNorm": ("fsdp2", "ranks clip by different norms"),
    "OneRankSteps": ("fsdp2", "the ranks hold|no optimizer updates"),
    "NormOfOwnTokens": ("tp2", "not reduced over tp"),
}


@pytest.mark.sweep  # each needs a fork server of its own
@pytest.mark.parametrize("name", LOOPS)
def test_a_mistake_of_a_training_loop_is_named_first(
    tmp_path_factory: pytest.TempPathFactory, warm: ForkServers, name: str
) -> None:
    own = with_targets(tmp_path_factory.mktemp("loop"), warm, "toy.py", "mistakes.py")
    (own.folder / "loop.py").write_text(f"from mistakes import {name} as build\n")
    layout, words = LOOPS[name]
    options = ("--recipe", "tensorwise", "--dtype", "float64", "--steps", "2", "--set", "loss_tolerance=0.05")
    done = own.run("-q", "parity", "--target", "loop", "--layouts", layout, *options, "--json", "table.json")
    table = json.loads((own.folder / "table.json").read_text())
    wrong = [row for row in (*table["rows"], *table["one_step"]) if row["word"] == "wrong"]
    assert done.returncode == 1 and re.search(words, wrong[0]["why"]), done.stdout


def rounded(curve: TextCurve) -> str:
    """The text of the curve with losses a little off."""
    losses = [point.loss.value + 1e-4 for point in curve.points]
    return curve_text(
        curve.said["config"], losses, [point.grad_norm.value for point in curve.points if point.grad_norm]
    )


def test_a_golden_file_is_judged_by_the_layouts_that_run(project: Inside) -> None:
    """A curve of clean ranks is not wrong, and one with a planted fault is."""
    layouts = ("--layouts", "single,fsdp2,fsdp4,tp2", "--steps", "2")
    bad = project.run("-q", "run", "tp2-rowwise-v2048-s2-b16", "--inject", "fault:norm_of_local_shards")
    assert bad.returncode == 1
    assert project.run("show", "tp2-rowwise-v2048-s2-b16", "--curve", "bad.txt").returncode == 0
    done = project.run("-q", "parity", *layouts, "--golden", "bad.txt", "--json", "bad.json")
    judged = json.loads((project.folder / "bad.json").read_text())
    assert done.returncode == 1 and judged["golden"]["word"] == "wrong", done.stdout
    assert done.stdout.startswith("parity: no layout is wrong; bad.txt is wrong\n")
    assert re.search(r"^  bad\.txt +wrong .* grad_norm, step 1 ", done.stdout, flags=re.MULTILINE), done.stdout
    assert {row["word"] for row in judged["rows"]} <= {"equal", *OF_SUMS}
    assert (judged["golden"]["first"]["kind"], judged["golden"]["first"]["step"]) == ("grad_norm", 1)
    files = []
    for name in ("single", "fsdp2", "fsdp4", "tp2"):
        text = project.run("show", f"{name}-rowwise-v2048-s2-b16", "--curve", "-").stdout
        (project.folder / f"{name}.txt").write_text(text)
        files += ["--golden", f"{name}.txt"]
    (project.folder / "rounded.txt").write_text(rounded(read_curve(project.folder / "tp2.txt")))
    files += ["--golden", "rounded.txt"]  # a fifth, which costs no run
    assert project.run("parity", *files).returncode == 0
    assert project.run("parity", *files, "--golden", "bad.txt", "--json", "all.json").returncode == 1
    words = {row["name"]: row["word"] for row in json.loads((project.folder / "all.json").read_text())}
    assert words.pop("bad.txt") == "wrong" and set(words.values()) <= {"equal", *OF_SUMS}, words
    refused = project.run("parity", "tp2-rowwise-v2048-s3-b16", *files)
    assert refused.returncode == 2 and "nothing runs" in refused.stderr


def test_against_a_revision_a_mistake_that_is_not_committed_is_wrong_now_and_its_base_runs_once(
    tmp_path_factory: pytest.TempPathFactory, warm: ForkServers
) -> None:
    clone = with_targets(tmp_path_factory.mktemp("clone"), warm, "toy.py")
    make_commit(clone.folder, "toy.py")
    target = clone.folder / "toy.py"
    sound = target.read_text()
    end = "/ len(parts)\n            loss.backward()"
    assert end in sound
    target.write_text(sound.replace(end, f"/ self.case.layout.dp {end}"))
    words = ("--target", "toy", "--layouts", "single,fsdp2", "--steps", "2", "--set", "lr=0.004")
    words = (*words, "--recipe", "tensorwise", "--dtype", "float32", "--against", "HEAD", "--json", "table.json")
    done = clone.run("parity", *words, "--markdown", "table.md")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("base ") and "baseline update" not in done.stderr
    rows = {row["layout"]: row for row in json.loads((clone.folder / "table.json").read_text())["rows"]}
    assert {name: (row["word"], row["change"]) for name, row in rows.items()} == {
        "single": ("equal", "same bits"),
        "fsdp2": ("wrong", "now wrong"),
    }
    assert rows["fsdp2"]["base"]["word"] == "equal" and rows["fsdp2"]["base"]["losses"]
    verdict = (clone.folder / "table.md").read_text().partition("\n")[0]
    assert verdict.startswith("## parity: 1 layout is wrong: fsdp2; wrong in one step: fsdp2 with two")
    assert verdict.endswith(" (HEAD): 1 same bits, 1 now wrong")

    target.write_text(sound)
    done = clone.having(AFTER="the mistake").run("parity", *words)  # ranks that import it again
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr.startswith("base ")  # kept
    rows = {row["layout"]: row for row in json.loads((clone.folder / "table.json").read_text())["rows"]}
    assert [row["change"] for row in rows.values()] == ["same bits", "same bits"]


@pytest.mark.sweep  # `test_bugs.py` makes environments in every run
def test_against_a_version_and_a_virtual_environment_what_their_package_changes_is_moved(
    tmp_path_factory: pytest.TempPathFactory, warm: ForkServers
) -> None:
    """The target trains faster where the package is there; here it is not."""
    project = with_targets(tmp_path_factory.mktemp("packages"), warm, "toy.py")
    target = project.folder / "toy.py"
    factor = f"try:\n    from {PACKAGE} import FACTOR\nexcept ImportError:\n    FACTOR = 1\n"
    text = target.read_text().replace("lr=self.case.train.lr", "lr=self.case.train.lr * FACTOR")
    assert "* FACTOR" in text
    target.write_text(text.replace("\n\n\nclass", f"\n\n{factor}\n\nclass", 1))
    wheels = project.folder / "wheels"
    wheels.mkdir()
    wheel(wheels, "0.1", "FACTOR = 2\n")
    links = {"FIND_LINKS": str(wheels), "NO_INDEX": "1"}
    project = project.having(**{f"{tool}_{name}": value for tool in ("PIP", "UV") for name, value in links.items()})
    environment(project.folder / "same", "0.2", "FACTOR = 1\n")
    words = (
        "parity",
        "--target",
        "toy",
        "--layouts",
        "single",
        "--steps",
        "2",
        "--set",
        "lr=0.004",
        "--dtype",
        "float32",
    )
    for against, change in ((f"{PACKAGE}==0.1", "moved"), ("same", "same bits"), (f"{PACKAGE}==0.1", "moved")):
        done = project.run(*words, "--against", against, "--json", "table.json")
        assert done.returncode == 0, done.stdout + done.stderr
        table = json.loads((project.folder / "table.json").read_text())
        (row,) = table["rows"]
        assert (row["word"], row["change"], row["base"]["word"]) == ("equal", change, "equal"), row
        assert table["against"] == against.replace("==", " ")
    assert "installing it" not in done.stderr and "base " not in done.stderr  # kept
    missing = project.run(*words, "--against", f"{PACKAGE}==0.3")
    assert missing.returncode == 2 and f"{PACKAGE}==0.3: it cannot be installed: " in missing.stderr, missing.stderr
    (project.folder / "torn" / "bin").mkdir(parents=True)
    (project.folder / "torn" / "bin" / "python").touch()
    torn = project.run(*words, "--against", "torn")
    assert torn.returncode == 2 and "this is no virtual environment" in torn.stderr, torn.stderr
