"""`fp8-harness check-target` on a sound target and on broken ones: what it says, and that what it says helps."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from tests.acceptance.conftest import Inside, with_targets
from tests.fork_servers import ForkServers

SHORT = "single-tensorwise-v2048-s2-lr0.004-f64-tol.0.004"  # what is wrong shows in two steps
# Every rank reads the last line of this target anew: the fork server that it is forked from has imported it once.
LATE = """
def __getattr__(name):
    found = {}
    if name == "build":
        exec(open(__file__).read().rpartition("# ")[2], found)
    if name not in found:
        raise AttributeError(name)
    return found[name]

# """


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, warm: ForkServers) -> Inside:
    """A project with the sound target and its mistakes in it, run on the real ranks."""
    return with_targets(tmp_path_factory.mktemp("targets"), warm, "toy.py", "mistakes.py")


def checked(project: Inside, name: str, *arguments: str) -> tuple[int, str]:
    """Exit code and the report with every run of spaces as one."""
    done = project.run("-q", "check-target", name, *arguments)
    assert done.stdout, done.stderr
    return done.returncode, " ".join(done.stdout.split())


def test_a_sound_target_works_and_what_it_refuses_is_not_supported(project: Inside) -> None:
    (project.folder / "late.py").write_text(f"{LATE}from mistakes import NoTensorParallelism as build\n")
    out = project.folder / "report.json"
    layouts = ("--layout", "fsdp2", "--layout", "tp2")
    code, text = checked(project, "late", *layouts, SHORT, "--json", str(out))
    assert code == 0, text
    assert "fsdp2 tensorwise float64 works" in text
    assert "tp2 tensorwise float64 not supported: no tensor parallelism yet" in text
    assert "5 linears, 4 of them in float8; 10 parameters" in text and "10 of 10 parameters on dp_shard" in text
    assert "no formula for the model of late" in text and "checked in every run: finite, loss_vs_golden" in text
    assert "probes change nothing in 5 of 5 runs" in text
    assert "fsdp2 with two microbatches bf16 float64 works" in text
    assert "fsdp2 with clipping bf16 float64 not supported: gradients are the same without case.train.max_norm" in text
    assert "fsdp2 with unequal labels bf16 float64 not supported: step() takes no labels" in text
    assert "late works under the harness. Not supported by it: tp2, fsdp2 with clipping, single with" in text
    document = json.loads(out.read_text())
    assert (document["exit_code"], document["problems"]) == (0, [])
    assert document["report"]["file"] == str(project.folder / "late.py")


# By the name of a module: its text, and words of the report.
MODULES = {
    "lacking": (
        "from nothing_like_this import build",
        ("No module named 'nothing_like_this'", "py:1 in <module>", "fix: install it"),
    ),
    "threaded": (
        "import threading\nbuild = threading.Thread(target=threading.Event().wait, daemon=True, name='beat').start()",
        ("it also has: beat", "fix: start no thread at import or in preload()"),
    ),
}
# By the text of a target: words of the report.
MISTAKES = {
    "build = None": ("has no function `build`", "fix: define `def build(case, world)`"),
    "OneLoss": ("step() returned a Tensor, not the pair (loss, grad_norm)", "`return loss, None`"),
}
SWEPT = {
    "SummedLoss": ("the loss is 2 times the reference's", "summed over ranks", "fix: average over ranks once"),
    "OwnError": ("RuntimeError: disk quota", "in step: raise RuntimeError"),
    "OwnLoss": ("every rank reports a loss of its own batch", "loss /= dist.get_world_size()"),
    "NotAveraged": ("microbatches are added up without dividing", "fix: divide the loss of every microbatch by"),
    "SumOfTokens": ("256 times (the tokens of a microbatch", "fix: return the mean over tokens, not the sum"),
    "Divided": (
        "every gradient is 1/2 of the reference's: divided by the number of ranks",
        "fix: average over ranks once: FSDP2 averages",
    ),
    "Shifted": ("the model is called with the labels", "fix: call the model with `batch[:, :-1]`"),
    "OwnTokens": ("tokens that are not those of this step", "fix: train on the microbatches"),
    "Sliced": ("the model is called with 2 of 4 sequences only", "no data loader, sampler or slice"),
    "RankBuffer": ("buffer tilt differs between rank 0 and rank 1", "fix: initialise buffers the same way"),
    "RankWeights": ("hold alike were built with different values: blocks.0.gain", "fix: seed alike on every rank"),
    "EarlyOptimizer": ("no parameter of the model ever changes", "fix: make the optimizer after fully_shard"),
    "NoUpdate": ("no optimizer ever steps", "fix: end step() with optimizer.step()"),
    "Detached": ("1 of 10 trained parameters got no gradient in any step: embed.weight", "fix: leave it out"),
    "DefaultDtype": ("torch's default dtype changed after build", "fix: set it only for the construction"),
    "OnlyFloat32": ("embed.weight is float32, and the case asks for float64", "fix: convert parameters to the dtype"),
    "GroupGone": ("step() destroyed the process group", "fix: leave out dist.destroy_process_group()"),
    "SmallSum": ("reduced in float32 instead of float64", "fix: set reduce_dtype=getattr(torch, case.reduce_dtype) in"),
    "ScattersTokens": ("activations are scattered over", "only where `case.layout.sequence_parallel` says so"),
    "Dropout": ("two equal runs differ", "fix: seed every source of randomness"),
}


@pytest.mark.sweep  # each needs a fork server of its own
@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_is_no_target(project: Inside, name: str) -> None:
    text, words = MODULES[name]
    (project.folder / f"{name}.py").write_text(f"{text}\n")
    assert_told(project, name, "fsdp2", words)


@pytest.mark.parametrize("name", [*MISTAKES, *(pytest.param(name, marks=pytest.mark.sweep) for name in SWEPT)])
def test_a_target_with_a_mistake(project: Inside, name: str) -> None:
    text = f"from mistakes import {name} as build" if name.isidentifier() else name
    (project.folder / "late.py").write_text(f"{LATE}{text}\n")
    layout = {"RankWeights": "tp2", "ScattersTokens": "tp2-nosp"}.get(name, "fsdp2")
    assert_told(project, "late", layout, (MISTAKES | SWEPT)[name])


def assert_told(project: Inside, target: str, layout: str, words: Sequence[str]) -> None:
    """What is wrong, and how to fix it: once, with one thing to fix."""
    code, report = checked(project, target, "--layout", layout, SHORT)
    assert code == 1, report
    assert [word for word in words if word not in report] == [], report
    assert f"1 thing to fix in {target}." in report, report


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no_such_module",), "there is no module no_such_module"),
        (("toy.py:build",), "not the name of a target"),
        (("toy", "--layout", "rowwise"), "'rowwise' is no layout"),
        (("toy", "--layout", "fsdp3"), "excludes"),
        (("toy", "nothing.toml"), "this case file does not exist"),
        (("typing_error",), "module typing_error has no function `build`"),
    ],
)
def test_bad_input_is_one_line(project: Inside, arguments: tuple[str, ...], words: str) -> None:
    (project.folder / "typing_error.py").write_text("def buidl(case, world): ...\n")
    done = project.run("check-target", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words in line and "Fix: " in line
