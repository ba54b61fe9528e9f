"""`fp8-harness dev independence` on real ranks: clean cases, planted faults, a target of somebody's own."""

from __future__ import annotations

import re

import pytest

from tests.acceptance.conftest import TARGETS, Inside, with_targets
from tests.fork_servers import ForkServers
from tests.worker.runs import sweep

BORDER = re.escape("independence/between [step 1, operand input in forward]: a later token changes the input of")
SCALE = r"independence/scale .*: .*padding changes what layers\.\d\.\w+\.\w+ returns for the same input: its scale"
# By the fault: a case in bfloat16, and what the headline says.
FAULTS = {
    "amax_over_the_batch": ("single-rowwise-v2048-accum2-b16", SCALE.replace(".*padding", "a later token, .*padding")),
    "amax_of_rows_that_pad": ("single-rowwise-v2048-accum2-b16", SCALE),
    "mask_off_by_one_at_a_border": ("fsdp2-cp2-rowwise-v2048-accum2-b16", BORDER + r" layers\.0\.attention\.wo"),
    "padding_takes_places_of_tokens": (
        "fsdp2-ep2-rowwise-moe4-v2048-accum2-b16",
        r"independence/experts \[step 1\]: .*padding changes what layers\.1\.moe returns",
    ),
}
CLEAN = ("single-bf16-v2048-accum2-b16", "single-tensorwise-v2048-accum2-b16", "fsdp2-mxfp8-v2048-accum2-b16")
OTHERS = (
    "tp2-rowwise-v2048-b16",
    "single-blockwise-v2048-accum2-b16",
    *dict.fromkeys(case for case, _ in FAULTS.values()),
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, warm: ForkServers) -> Inside:
    return with_targets(tmp_path_factory.mktemp("independence"), warm, "toy.py")


@pytest.mark.parametrize("fault", [*map(sweep, list(FAULTS)[:-1]), list(FAULTS)[-1]])
def test_a_planted_fault_is_named_in_bfloat16(project: Inside, fault: str) -> None:
    case, headline = FAULTS[fault]
    done = project.run("-q", "dev", "independence", case, "--inject", f"fault:{fault}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(headline, " ".join(done.stdout.split())), done.stdout


def test_clean_cases_keep_their_promises_and_a_tensorwise_number_is_shown(project: Inside) -> None:
    done = project.run("-q", "dev", "independence", *CLEAN)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.endswith(("0", ")"))}
    assert cells["single-bf16-v2048-accum2-b16"] == ["0"] * 5
    later, sequence, microbatch, padding, _ = cells["single-tensorwise-v2048-accum2-b16"]
    assert microbatch == "0" and all(1e-3 < float(cell.strip("()")) < 0.1 for cell in (later, sequence, padding))
    assert cells["fsdp2-mxfp8-v2048-accum2-b16"][:4] == ["0"] * 4


@pytest.mark.sweep
def test_other_clean_cases_keep_theirs(project: Inside) -> None:
    done = project.run("-q", "dev", "independence", *OTHERS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_target_of_ones_own_is_causal_or_is_told_where_it_is_not(project: Inside) -> None:
    text = (TARGETS / "toy.py").read_text()
    (project.folder / "causal.py").write_text(text.replace("x.roll(1, 1)", "F.pad(x, (0, 0, 1, 0))[:, :-1]"))
    for name in ("toy", "causal"):
        project.run("new", f"{name}.toml", "--target", name, "--recipe", "rowwise", "--set", "accumulation=2")
    done = project.run("-q", "dev", "independence", "toy.toml")
    assert done.returncode == 1, "its first token sees the last one"
    assert "a later token changes the input of blocks.0.up" in done.stdout
    done = project.run("-q", "dev", "independence", "causal.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "padding was not checked" in done.stdout and "step() takes no labels" in done.stdout
