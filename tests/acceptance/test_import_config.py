"""`fp8-harness target import-config`: what a user of torchtitan has becomes a case."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

CONFIG = """
[model]
flavor = "8B"
converters = ["quantize.linear.float8"]
[parallelism]
tensor_parallel_degree = 2
[quantize.linear.float8]
filter_fqns = ["output"]
"""
NAME = "target.torchtitan-fsdp4-tp2-tensorwise-ac.layer2-v2048-b16"


def test_a_file_becomes_a_case_and_says_what_it_leaves_out(project: Command) -> None:
    (project.folder / "8b.toml").write_text(CONFIG)
    done = project.call("target", "import-config", "8b.toml", "--ranks", "64", "--output", "ours.toml")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == NAME and "  dp_shard 32 is 4 here" in lines
    assert lines[-1] == "run it: fp8-harness run ours.toml"
    assert project.call("list", "ours.toml").stdout.split() == ["8", NAME]


def test_flags_become_a_case(shared: Command) -> None:
    flags = ("--parallelism.tensor_parallel_degree", "2", "--activation_checkpoint.mode=none", "--ranks", "2")
    done = shared.call("target", "import-config", *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("target.torchtitan-tp2-bf16-v2048-b16\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nope.toml",), "cannot be read"),
        (("a.toml", "b.toml"), "more than one file"),
        (("--parallelism.context_parallel_degree", "2"), "no case has context parallelism"),
    ],
)
def test_what_no_case_has_is_an_error_of_one_line(shared: Command, words: tuple[str, ...], expected: str) -> None:
    done = shared.call("target", "import-config", *words)
    assert done.returncode == 2 and expected in done.stderr and len(done.stderr.splitlines()) == 1
