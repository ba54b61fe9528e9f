"""`fp8-harness new`: a case of one's own, from options to a run."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import jsonschema
import pytest

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

SIZES = ("--set", "dim=512", "--set", "layers=4", "--set", "ffn_dim=1408")
OWN = ("--tp", "2", "--recipe", "rowwise", *SIZES, "--steps", "3")


def test_a_case_from_options_is_written_and_its_command_runs_it(project: Command) -> None:
    done = project.call("new", "my cases.toml", *OWN, "--dtype", "bfloat16", "--set", "loss_tolerance=0.05")
    assert done.returncode == 0, done.stderr
    text = (project.folder / "my cases.toml").read_text()
    assert "schema" not in text and str(project.folder) not in text, "it is right on another machine"
    assert "tp = 2  " in text and "# seq_len = 32  " in text
    command = next(line for line in done.stdout.splitlines() if line.startswith("run it: ")).split(maxsplit=2)[2]
    assert command == "fp8-harness run 'my cases.toml'"
    ran = project.call(*shlex.split(command)[1:], "--device", "cpu")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "tp2-rowwise-dim.512-layers.4-ffn.1408-v2048-s3-b16-tol.0.05  passed" in ran.stdout


def test_a_case_from_axes_runs_without_a_file(project: Command) -> None:
    axes = ("--set", "tp=2", "--set", "recipe=rowwise", *SIZES, "--set", "loss_tolerance=0.05")
    ran = project.call("run", *axes, "--device", "cpu")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "tp2-rowwise-dim.512-layers.4-ffn.1408-v2048-f32-tol.0.05  passed" in ran.stdout


def test_a_file_is_not_replaced_unasked(project: Command) -> None:
    file = project.folder / "my.toml"
    file.write_text("precious")
    done = project.call("new", "my.toml", *OWN)
    assert done.returncode == 2 and "this file exists" in done.stderr
    assert file.read_text() == "precious"
    assert project.call("new", "my.toml", *OWN, "--force").returncode == 0
    assert "tp = 2" in file.read_text()


def test_the_id_alone(shared: Command) -> None:
    done = shared.call("new", "--id", *OWN, "--set", "loss_parallel=false", "--set", "filter_fqns=wq,wk")
    assert done.stdout == "tp2-nolp-rowwise-filter.wk+wq-dim.512-layers.4-ffn.1408-v2048-s3-f32\n"
    assert shared.call("new", "--id", "--set", "model=llama3-8b-layer").stdout == (
        "single-bf16-llama3.8b.layer-v2048-f32\n"
    )


def test_the_schema_is_one(shared: Command) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(shared.call("new", "--schema").stdout))


def test_a_refusal_is_announced(project: Command) -> None:
    options = ("--recipe", "tensorwise", "--tp", "2", "--set", "output_layer=true", "--vocab-size", "2256")
    done = project.call("new", "refused.toml", *options)
    assert done.returncode == 0
    assert "expected error: " in done.stdout and "not a multiple of 16" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dp-shard", "3"), "rule batch_divides_dp excludes fsdp3-bf16-v2048-f32: "),
        (("--dp-shard", "3"), "Fix: change dp_shard (to 1, 2, 4, 8)."),
        (("--set", "pad_inner_dim=true"), "this case ignores pad_inner_dim"),
        (("--set", "dim=100"), "dim 100 does not split into 8 heads"),
        (("--tp", "0"), "tp = 0"),
        (("--set", "cp=2"), "rule cp_divides_shards excludes cp2-bf16-v2048-f32: "),
        (("--etp", "2"), "no such option: --etp. expert tensor parallelism is out of scope"),
        (("--recipe", "rowwize"), "rowwise"),
        (("--lr", "0.1"), "no such option: --lr. Fix: give --set lr=0.001: lr (a number)."),
        (("--set", "no_axis=1"), "--set no_axis=1: unknown axis 'no_axis'. Fix: "),
        (("--set", "recipe=rowwize"), "--set recipe=rowwize: recipe = rowwize: "),
        (("--set", "recipe=rowwize"), "Fix: did you mean rowwise"),
        (("--set", "stpes=3"), "--set stpes=3: unknown axis 'stpes'. Fix: did you mean steps"),
        (("--set", "lr"), "--set lr: lr has no value. Fix: write lr=0.001."),
        (("--set", "seed=1", "--set", "seed=2"), "--set seed=2: seed is given twice."),
        (("--tp", "2", "--set", "tp=4"), "--set tp: --tp 2 says it. Fix: leave it out."),
    ],
)
def test_impossible_options_are_explained_and_nothing_is_written(
    project: Command, options: tuple[str, ...], words: str
) -> None:
    done = project.call("new", "bad.toml", *options)
    assert done.returncode == 2
    assert words in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (project.folder / "bad.toml").exists()


def test_a_file_must_be_named(shared: Command) -> None:
    assert "give FILE.toml, or --id" in shared.call("new", *OWN).stderr


CONFIG = """
[model]
flavor = "8B"
converters = ["quantize.linear.float8"]
[parallelism]
tensor_parallel_degree = 2
[quantize.linear.float8]
filter_fqns = ["output"]
"""


def test_a_configuration_becomes_a_case_and_says_what_differs(project: Command) -> None:
    (project.folder / "8b.toml").write_text(CONFIG)
    name = "fsdp4-tp2-tensorwise-ac.layer2-kvheads.4-v2048-b16"
    done = project.call("new", "ours.toml", "--from", "8b.toml", "--ranks", "64")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"ours.toml: {name}" and any("32 made smaller: 4" in line for line in lines)
    assert lines[-1] == "run it:        fp8-harness run ours.toml"
    assert project.call("list", "ours.toml").stdout.split() == ["8", name]


def test_flags_become_a_case_with_the_axes_that_are_given(shared: Command) -> None:
    flags = "--parallelism.tensor_parallel_degree 2 --activation_checkpoint.mode=none"
    done = shared.call("new", "--id", "--from", flags, "--ranks", "2", "--recipe", "rowwise", "--set", "seq_len=64")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "tp2-rowwise-v2048-gb2-sl64-b16\n"
    done = shared.call("new", "--id", "--from", flags, "--ranks", "2", "--target", "torchtitan")
    assert done.stdout == "target.torchtitan-tp2-bf16-v2048-gb2-b16\n"


def test_questions_come_before_a_file(project: Command) -> None:
    flags = "--parallelism.tensor_parallel_degree 2 --parallelism.rings 3"
    done = project.call("new", "ours.toml", "--from", flags)
    assert done.returncode == 2 and "fix: give --dp-shard, --ignore parallelism.rings." in done.stderr.lower()
    assert not (project.folder / "ours.toml").exists()
    done = project.call("new", "ours.toml", "--from", flags, "--dp-shard", "2", "--ignore", "parallelism.rings")
    assert done.returncode == 0 and "parallelism.rings: --ignore" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("nope.toml", "cannot be read"),
        ("--parallelism.expert_tensor_parallel_degree 2", "no case has expert tensor parallelism"),
    ],
)
def test_a_configuration_that_no_case_has_is_an_error_of_one_line(shared: Command, config: str, expected: str) -> None:
    done = shared.call("new", "--id", "--from", config)
    assert done.returncode == 2 and expected in done.stderr and len(done.stderr.splitlines()) == 1
