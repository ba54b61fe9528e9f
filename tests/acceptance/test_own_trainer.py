"""A trainer of a user: `examples/tiny_gpt`, installed in an environment of its own, run outside of the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from harness.checks.loss_vs_golden import DISAGREE
from harness.checks.parity import GRADIENTS, REPLICAS, REPORTED_NORM
from harness.checks.recompute import NOT_RECOMPUTED
from harness.checks.scales import RULES
from tests.acceptance.conftest import REPOSITORY, Command
from tests.lines import read_run

EXAMPLE = REPOSITORY / "examples" / "tiny_gpt"
QUICK = """
[base]
target = "fp8_target"
dtype = "float64"
recipe = "tensorwise"
steps = 2
global_batch = 4
sequence_parallel = false
loss_parallel = false
loss_tolerance = 0.05

[[case]]
axes = {tp = 2}

[[case]]
axes = {dp_shard = 2, fp8_all_gather = true}
"""
TP = "target.fp8_target-tp2-nosp-nolp-tensorwise-v2048-gb4-s2-f64-tol.0.05"
FSDP = "target.fp8_target-fsdp2-tensorwise-ag.fp8-v2048-gb4-s2-f64-tol.0.05"


@dataclass
class User(Command):
    """A user's environment with `tiny_gpt`, and a project with cases and the target module."""

    python: Path = Path(sys.executable)

    def run(self, *arguments: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        return self.execute("-m", "harness", *arguments, timeout_s=timeout_s)

    def execute(self, *words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run the user's interpreter in the project."""
        return self.process(str(self.python), *words, timeout_s=timeout_s)

    def with_change(self, folder: Path, file: str, right: str, wrong: str) -> User:
        """The same user with a changed copy of the package."""
        package = folder / "tiny_gpt"
        shutil.copytree(EXAMPLE / "tiny_gpt", package, ignore=shutil.ignore_patterns("__pycache__"))
        text = (package / file).read_text()
        assert text.count(right) == 1, f"{file} has no {right}"
        (package / file).write_text(text.replace(right, wrong))
        paths = {"PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}"}
        return replace(self, environment=self.environment | paths)


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    folder = tmp_path_factory.mktemp("user")
    source = folder / "source"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    python = make_environment(folder / "env")
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", *offline, str(source)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    project = folder / "project"
    for name in ("cases", "golden"):
        shutil.copytree(EXAMPLE / name, project / name)
    shutil.copy(EXAMPLE / "fp8_target.py", project)
    (project / "cases" / "quick.toml").write_text(QUICK)
    yield User(project, {"FP8_HARNESS_PROGRAM": ""}, python=python)


def make_environment(folder: Path) -> Path:
    """A virtual environment that sees what is installed here, torch above all; returns its interpreter."""
    venv.create(folder, symlinks=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", scheme="venv", vars=paths))
    here = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (packages / "torch.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in sorted(here)))
    return Path(sysconfig.get_path("scripts", scheme="venv", vars=paths)) / "python"


def test_a_sound_trainer_passes_and_planted_faults_are_found(user: User) -> None:
    where = user.execute("-c", "import tiny_gpt; print(tiny_gpt.__file__)").stdout
    assert str(user.python.parents[1]) in where, "the package is the installed one"
    faults = ("--fault", "amax_not_reduced_over_tp", "--fault", "fp8_all_gather_flag_lost")
    done = user.run("dev", "mutate", "quick", *faults, "--cases-per-fault", "1", "--json", "-")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "detected faults by dtype" in done.stderr
    power = json.loads(done.stdout)
    assert {(trial["case_id"], trial["verdict"]) for trial in power["clean"]} == {(TP, "passed"), (FSDP, "passed")}
    assert [(trial["case_id"], trial["verdict"]) for trial in power["trials"]] == [
        (TP, "invariant"),
        (FSDP, "invariant"),
    ]
    first = power["trials"][0]
    assert first["message"].startswith(RULES.amax.says) and "blocks.0.attention.query" in first["message"]
    assert first["first_step"] == 1


@dataclass(frozen=True)
class Bug:
    """A mistake in the user's package: the text that it changes, where it shows, and what a finding has."""

    file: str
    right: str
    wrong: str
    case: str
    told: Mapping[str, str]


PRECOMPUTED = "target.fp8_target-fsdp2-tensorwise-ag.fp8pre-v2048-s3-f64"
HSDP = "target.fp8_target-hsdp2x2-tensorwise-v2048-s2-f64"
BUGS = {
    "every_rank_reports_its_own_loss": Bug(
        "trainer.py", "    dist.all_reduce(total)\n", "", FSDP, {"rule": DISAGREE.name}
    ),
    "losses_of_microbatches_are_not_averaged": Bug(
        "trainer.py", "self._loss(batch) / len(microbatches)", "self._loss(batch)", FSDP, {"rule": GRADIENTS.name}
    ),
    "norm_of_the_shards_of_one_rank": Bug(
        "trainer.py",
        "nn.utils.get_total_norm([parameter.grad for",
        "nn.utils.get_total_norm([getattr(parameter.grad, '_local_tensor', parameter.grad) for",
        FSDP,
        {"rule": REPORTED_NORM.name},
    ),
    "scales_of_the_weights_before_the_update": Bug(
        "trainer.py",
        """        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.config.float8 is not None and self.config.float8.precompute_scale:
            precompute_float8_dynamic_scale_for_fsdp(self.model)
""",
        """        if self.config.float8 is not None and self.config.float8.precompute_scale:
            precompute_float8_dynamic_scale_for_fsdp(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
""",
        PRECOMPUTED,
        {"rule": RULES.amax.name},
    ),
    "hsdp_forgets_the_replicas": Bug(
        "parallel.py",
        'mesh["dp_replicate", "dp_shard"] if config.dp_replicate > 1 else mesh["dp_shard"]',
        'mesh["dp_shard"]',
        HSDP,
        {"rule": REPLICAS.name, "kind": "grad"},
    ),
    "checkpointing_is_lost": Bug(
        "parallel.py",
        "if config.checkpoint_blocks:",
        "if config.checkpoint_blocks and config.tp == 1:",
        "target.fp8_target-tp2-nosp-nolp-tensorwise-ac.full-v2048-s2-f64",
        {"rule": NOT_RECOMPUTED.name},
    ),
    "a_linear_is_not_converted": Bug(
        "parallel.py",
        'kept = ("lm_head", *float8.filter_fqns)',
        'kept = ("lm_head", "value", *float8.filter_fqns)',
        FSDP,
        {"module": "blocks.0.attention.value"},
    ),
}


@pytest.mark.sweep  # `test_pull_request.py` finds a bug of this trainer in every run
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_the_user_is_found(user: User, tmp_path: Path, name: str) -> None:
    bug = BUGS[name]
    changed = user.with_change(tmp_path, bug.file, bug.right, bug.wrong)
    done = changed.run("run", bug.case, "--json", str(tmp_path / "result.json"))
    assert done.returncode == 1, done.stdout + done.stderr
    (case,) = read_run(tmp_path / "result.json")["cases"]
    assert any(bug.told.items() <= {**finding, **finding["values"]}.items() for finding in case["findings"]), (
        done.stdout
    )


@pytest.mark.sweep
@pytest.mark.parametrize("tier", ["smoke", "all"])
def test_every_case_of_the_example_passes(user: User, tier: str) -> None:
    done = user.run("run", tier)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BF16 references that were run here" not in done.stdout, "a golden of the example is not stored"
