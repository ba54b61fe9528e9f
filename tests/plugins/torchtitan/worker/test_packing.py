"""torchtitan's validator and packed documents on real ranks: the loss of each alone, and faults at its own seams."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from harness.checks.packing import GRAD_NORM, LOSS, check_packing
from harness.checks.parity import check_parity
from harness.checks.reported import OTHER_LOSS, check_evaluation
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.trace import Run
from harness.verdict import Finding
from tests.builders import make_tolerance, make_witnesses
from tests.worker.conftest import Trained

SEAMS = Path(__file__).with_name("packing_faults.py")
BFLOAT16 = parse_case_id("target.torchtitan-fsdp2-bf16-v2048-gb4-s1-eval-packed.padded-b16")
FLOAT64 = parse_case_id("target.torchtitan-fsdp2-rowwise-v2048-gb4-s1-eval-packed-f64")


@pytest.fixture
def solo(trained: Trained) -> Trained:
    """The reference, which evaluates nothing."""
    return lambda case, **asked: trained(replace(case, train=replace(case.train, evaluate=False)), solo=True, **asked)


def judged(case: Case, run: Run, solo: Run) -> list[list[Finding]]:
    witnesses = make_witnesses(case, solo=solo, parity_tolerance=make_tolerance(1e-11))
    return [[*check(case, run, witnesses)] for check in (check_parity, check_packing, check_evaluation)]


@pytest.mark.parametrize("case", [BFLOAT16, FLOAT64])
def test_documents_have_the_loss_of_each_alone_and_of_the_validator(
    trained: Trained, solo: Trained, case: Case
) -> None:
    alone = solo(case)
    assert alone.traces[0].documents_alone is not None
    assert judged(case, trained(case), alone) == [[], [], []]


@pytest.mark.plugin("faults")
@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (BFLOAT16, f"{SEAMS}:document_mask_lost"),
        (FLOAT64, f"{SEAMS}:document_mask_lost"),
        (BFLOAT16, f"{SEAMS}:positions_not_restarted"),  # float8 rounds it away in float64
        (BFLOAT16, f"{SEAMS}:borders_counted"),
        (FLOAT64, f"{SEAMS}:borders_counted"),
        (BFLOAT16, "fault:labels_of_padding_counted"),
    ],
)
def test_what_the_reference_shares_is_seen_in_documents_alone(
    trained: Trained, solo: Trained, case: Case, fault: str
) -> None:
    alone = solo(case, injections=(fault,))
    parity, packing, _ = judged(case, trained(case, injections=(fault,)), alone)
    assert parity == []
    assert LOSS.name in {finding.rule for finding in packing} <= {LOSS.name, GRAD_NORM.name}


@pytest.mark.parametrize("case", [BFLOAT16, FLOAT64])
@pytest.mark.parametrize("fault", ["validation_count_not_reduced", "validation_without_positions"])
def test_a_validator_that_computes_another_loss_is_named(
    trained: Trained, solo: Trained, case: Case, fault: str
) -> None:
    *others, of_validator = judged(case, trained(case, injections=(f"{SEAMS}:{fault}",)), solo(case))
    assert others == [[], []]
    assert [finding.rule for finding in of_validator] == [OTHER_LOSS.name]
