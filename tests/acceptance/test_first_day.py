"""What a new user does on the first day, on real ranks: patches torchao, brings a model of one's own."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.checks.module_replay import TENSOR
from tests.acceptance.conftest import REPOSITORY, Command, empty_project
from tests.lines import read_run

FP8, BF16 = "single-tensorwise-v2048-gb4-s2-f64", "single-bf16-v2048-gb4-s2-f64"
UTILS = "float8/float8_utils.py"
OWN = "tp2-tensorwise-dim.96-layers.1-ffn.160-v1280-gb4-s2-seed7-b16"  # no golden and no tolerance
LONG = "tp2-tensorwise-dim.512-layers.4-ffn.1408-v4096-s50-seed7-b16"


class Project(Command):
    """An empty project with real ranks, whose commands may run with an edited copy of torchao."""

    def edit(self, file: str, old: str, new: str) -> None:
        """Copy torchao where Python looks first, with one line of it changed."""
        spec = find_spec("torchao")
        assert spec is not None and spec.origin is not None
        installed = Path(spec.origin).parent
        edited = self.folder / "edited" / "torchao"
        shutil.rmtree(edited, ignore_errors=True)
        shutil.copytree(installed, edited, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        path = edited / file
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} in {file}"
        path.write_text(text.replace(old, new))

    def judged(self, *words: str) -> tuple[int, list[dict[str, Any]], str]:
        """Exit code, cases of the JSON report, and what a user sees."""
        done = self.run("run", "--device", "cpu", "--json", "result.json", *words, timeout_s=1800)
        return done.returncode, read_run(self.folder / "result.json")["cases"], done.stdout


def failed_checks(case: dict[str, Any]) -> set[str]:
    return {finding["rule"].partition("/")[0] for finding in case["findings"]}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    folder = empty_project(tmp_path)
    paths = os.pathsep.join((str(folder / "edited"), str(REPOSITORY)))
    return Project(folder, {"FP8_HARNESS_PROGRAM": "", "PYTHONPATH": paths})


def test_a_torchao_that_cannot_be_imported_is_the_crash_of_every_case(project: Project) -> None:
    project.edit(UTILS, "@torch.no_grad()\ndef amax_to_scale(", "import no_such_module\n\n\ndef amax_to_scale(")
    code, cases, _ = project.judged(FP8, BF16)
    assert code == 1
    assert {case["verdict"] for case in cases} == {"crash"}
    assert "No module named 'no_such_module'" in cases[0]["failures"][0]["message"]


def test_a_model_of_ones_own_is_judged_over_any_number_of_steps(project: Project) -> None:
    code, (case,), text = project.judged(OWN)
    assert (code, case["verdict"]) == (0, "passed"), case["findings"]
    assert case["golden"] == "run here" and case["derived"] == ["loss_vs_golden", "parity"]
    assert {"loss_vs_golden", "parity", "module_replay", "scales", "traffic", "memory"} <= set(case["checks"])
    assert "1 case checked with tolerances derived" in text


@pytest.mark.sweep  # ten minutes: what the references cost is paid once
def test_fifty_steps_of_a_larger_model_pass_clean_and_fail_with_a_fault(project: Project) -> None:
    code, (case,), _ = project.judged(LONG)
    assert (code, case["verdict"]) == (0, "passed"), case["findings"]
    skipped = {not_judged["check"]: not_judged["reason"] for not_judged in case["not_judged"]}
    assert skipped["module_replay"] == "steps 3-49, and the update of step 50: modules are recorded in 3 steps"
    code, (case,), _ = project.judged(LONG, "--inject", "fault:one_row_of_a_gradient_scaled")
    assert (code, case["verdict"]) == (1, "numeric")
    assert case["findings"][0]["rule"] == TENSOR.name
    assert case["findings"][0]["module"] == "layers.3.feed_forward.w1.weight"


@pytest.mark.sweep
def test_a_fault_in_a_model_of_ones_own_is_found(project: Project) -> None:
    code, (case,), _ = project.judged(OWN, "--inject", "fault:amax_not_reduced_over_tp")
    assert code == 1
    assert {"scales", "module_replay"} <= failed_checks(case)
