"""`fp8-harness target check` on a sound target and on broken ones: what it says, and that what it says helps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.acceptance.conftest import Command

TARGETS = Path(__file__).parents[1] / "targets"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A project with the sound target and its mistakes in it, run on the real ranks."""
    folder = tmp_path_factory.mktemp("targets")
    for name in ("cases", "golden"):
        (folder / name).mkdir()
    for name in ("toy.py", "mistakes.py"):
        (folder / name).write_text((TARGETS / name).read_text())
    return Command(folder, {"FP8_HARNESS_PROGRAM": "harness.worker.main"})


def checked(project: Command, name: str, *arguments: str) -> tuple[int, str]:
    """Exit code and the report with every run of spaces as one."""
    done = project.run("target", "check", name, "-q", *arguments, timeout_s=300)
    assert done.stdout, done.stderr
    whole = ("reproduce: ", str(project.folder))  # what is to be copied is never broken
    lines = [line for line in done.stdout.splitlines() if not any(words in line for words in whole)]
    assert all(len(line) <= 60 for line in lines), done.stdout
    return done.returncode, " ".join(done.stdout.split())


def test_a_sound_target_works_and_what_it_refuses_is_not_supported(project: Command) -> None:
    (project.folder / "sound.py").write_text("from mistakes import NoTensorParallelism as build\n")
    out = project.folder / "report.json"
    code, text = checked(project, "sound", "--layout", "fsdp2", "--layout", "tp2", "--json", str(out))
    assert code == 0, text
    assert "fsdp2 tensorwise float64 works" in text
    assert "tp2 tensorwise float64 not supported: no tensor parallelism yet" in text
    assert "5 linears, 4 of them in float8; 10 parameters" in text and "10 of 10 parameters on dp_shard" in text
    assert "no formula for the model of sound" in text and "judged in every run: finite, loss_vs_golden" in text
    assert "probes change nothing in 5 of 5 runs" in text
    assert "sound works under the harness. Not supported by it: tp2." in text
    document = json.loads(out.read_text())
    assert (document["exit_code"], document["problems"]) == (0, [])
    assert document["report"]["file"] == str(project.folder / "sound.py")


# By the text of a module: words of the report.
MODULES = {
    "def buidl(case, world): ...": ("has no function `build`", "fix: define `def build(case, world)`"),
    "import nothing_like_this": ("No module named 'nothing_like_this'", "py:1 in <module>", "fix: install it"),
    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='heartbeat').start()": (
        "it also has: heartbeat",
        "fix: start no thread at import or in preload()",
    ),
}
# By the name of a class: words of the report.
MISTAKES = {
    "OneLoss": ("step() returned a Tensor, not the pair (loss, grad_norm)", "`return loss, None`"),
    "SummedLoss": ("it is 2 times (the data-parallel degree", "fix: the loss is summed over ranks: divide the sum"),
}
SWEPT = {
    "OwnError": ("RuntimeError: disk quota", "in step: raise RuntimeError"),
    "OwnLoss": ("every rank reports a loss of its own batch", "loss /= dist.get_world_size()"),
    "NotAveraged": ("so the reference is wrong", "fix: step() gets the batches of all data-parallel ranks"),
    "SumOfTokens": ("256 times (the tokens of a microbatch", "fix: return the mean over tokens, not the sum"),
    "Divided": ("every gradient is 1/2 (the data-parallel degree", "fix: FSDP2 averages gradients"),
    "Shifted": ("the model is called with the labels", "fix: call the model with `batch[:, :-1]`"),
    "OwnTokens": ("tokens that are not those of this step", "fix: train on the microbatches"),
    "Sliced": ("the model is called with 2 of 4 sequences only", "no data loader, sampler or slice"),
    "RankBuffer": ("buffer tilt differs between rank 0 and rank 1", "fix: initialise buffers the same way"),
    "RankWeights": ("hold alike were built with different values: blocks.0.gain", "fix: seed alike on every rank"),
    "EarlyOptimizer": ("no parameter of the model ever changes", "fix: make the optimizer after fully_shard"),
    "NoUpdate": ("no optimizer ever steps", "fix: end step() with optimizer.step()"),
    "Detached": ("1 of 10 trained parameters got no gradient in any step: embed.weight", "fix: leave it out"),
    "DefaultDtype": ("torch's default dtype changed after build", "fix: set it only for the construction"),
    "OnlyFloat32": ("embed.weight is float32, and the case asks for float64", "fix: convert the model"),
    "GroupGone": ("step() destroyed the process group", "fix: leave out dist.destroy_process_group()"),
    "Dropout": ("two equal runs differ", "fix: seed every source of randomness"),
}


@pytest.mark.parametrize("text", MODULES)
def test_a_module_that_is_no_target(project: Command, text: str) -> None:
    assert_told(project, text, MODULES[text])


@pytest.mark.parametrize("name", [*MISTAKES, *(pytest.param(name, marks=pytest.mark.sweep) for name in SWEPT)])
def test_a_target_with_a_mistake(project: Command, name: str) -> None:
    assert_told(project, f"from mistakes import {name} as build", (MISTAKES | SWEPT)[name])


def assert_told(project: Command, text: str, words: Sequence[str]) -> None:
    """What is wrong, and how to mend it: once, with one thing to mend."""
    (project.folder / "broken.py").write_text(f"{text}\n")
    code, report = checked(project, "broken", "--layout", "tp2" if "RankWeights" in text else "fsdp2")
    assert code == 1, report
    assert [each for each in words if each not in report] == [], report
    assert "1 thing to mend in broken." in report, report


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no_such_module",), "there is no module no_such_module"),
        (("toy.py:build",), "not the name of a target"),
        (("toy", "--layout", "rowwise"), "'rowwise' is no layout"),
        (("toy", "--layout", "fsdp3"), "excludes"),
        (("toy", "--case", "nothing.toml"), "this case file does not exist"),
    ],
)
def test_bad_input_is_one_line(project: Command, arguments: tuple[str, ...], words: str) -> None:
    done = project.run("target", "check", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words in line and "Fix: " in line
