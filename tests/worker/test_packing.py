"""Packed documents: the loss of each alone, and faults of which the single-rank reference would say nothing."""

from __future__ import annotations

import pytest

from harness.checks.packing import GRAD_NORM, LOSS, check_packing
from harness.checks.parity import check_parity
from harness.matrix.caseid import parse_case_id
from tests.builders import make_tolerance, make_witnesses
from tests.worker.runs import sweep

CASE = parse_case_id("single-bf16-v2048-gb4-s2-accum2-packed.padded-b16")
SHARED = ["document_mask_lost", "labels_of_padding_counted", sweep("document_border_off_by_one")]


def judged(case, run, solo):
    witnesses = make_witnesses(case, solo=solo, parity_tolerance=make_tolerance(*(1e-11,) * case.train.steps))
    return [check(case, run, witnesses) for check in (check_parity, check_packing)]


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        parse_case_id("fsdp2-rowwise-pad-v2048-gb4-sl37-s2-packed-f64"),
        parse_case_id("fsdp2-mxfp8-v2048-gb4-s2-packed.padded-b16"),
        *map(sweep, map(parse_case_id, ["hsdp2x2-blockwise-v2048-gb16-sl64-s2-packed-b16"])),
    ],
)
def test_packed_documents_have_the_loss_of_each_alone(trained, case):
    solo = trained(case, solo=True)
    assert solo.traces[0].documents_alone is not None
    assert judged(case, trained(case), solo) == [[], []]


OWN = "target.tests.targets.masked_llama"


@pytest.mark.parametrize("words", ["bf16-v2048-gb4-s2-packed.padded-b16", sweep("rowwise-v2048-gb4-s2-packed-f32")])
def test_a_mask_over_whole_sequences_is_as_good(trained, words):
    case = parse_case_id(f"{OWN}-single-{words}")
    assert judged(case, trained(case), trained(case, solo=True)) == [[], []]


@pytest.mark.plugin("faults")
@pytest.mark.parametrize("fault", SHARED)
def test_what_the_reference_shares_is_seen_in_documents_alone(trained, fault):
    both = {"injections": (f"fault:{fault}",)}
    parity, packing = judged(CASE, trained(CASE, **both), trained(CASE, solo=True, **both))
    assert parity == []
    assert {LOSS.name} <= {finding.rule for finding in packing} <= {LOSS.name, GRAD_NORM.name}


def test_nothing_is_promised_where_a_scale_is_of_several_tokens(trained):
    solo = trained(parse_case_id("single-tensorwise-v2048-gb4-s1-packed.padded-b16"), solo=True)
    assert solo.traces[0].documents_alone is None
