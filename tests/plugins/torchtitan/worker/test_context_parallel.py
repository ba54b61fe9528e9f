"""Context parallelism of torchtitan: one rank computes what all of them do, and faults at its seams are found."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from harness.checks.assembly import largest
from harness.checks.divergence import with_operands
from harness.checks.parity import check_parity, worst_distances
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id, solo_case
from harness.matrix.dims.cp import CP
from harness.matrix.dims.dimension import Sender
from tests.builders import make_tolerance, make_witnesses
from tests.worker.conftest import Trained

SEAMS = Path(__file__).with_name("context_faults.py")
DEFINED = (node.name for node in ast.parse(SEAMS.read_text()).body if isinstance(node, ast.FunctionDef))
FAULTS = [name for name in DEFINED if not name.startswith("_")]
CASES = [
    parse_case_id(f"target.torchtitan-{rest}")
    for rest in (
        "fsdp2-cp2-bf16-v2048-gb1-s2-b16",
        "fsdp2-cp2-rowwise-v2048-gb2-s2-accum2-b16",
        "fsdp2-cp2-rowwise-v2048-gb1-s2-f64",
        "hsdp2x2-cp2-contiguous-mxfp8-ac.op-v2048-gb2-sl64-s2-b16",
    )
]
OF_REPLICAS = 2.0**-24  # HSDP rounds sums of shards, and of replicas, to float32: measured 5.03e-8
PROBES = ("sketches", "operands")
FOUND = 1e-8  # below what any fault changes: without one gradients have the same bits


@pytest.mark.parametrize("case", CASES)
def test_one_rank_computes_the_same(trained: Trained, case: Case) -> None:
    run, solo = trained(case, probes=PROBES), trained(solo_case(case), probes=PROBES, solo=True)
    assert with_operands((), case, run, solo) == ()
    distances = worst_distances(run, solo, steps=range(1, case.train.steps + 1))
    assert largest(distances) <= (OF_REPLICAS if case.layout.dp_replicate > 1 else 0)


@pytest.mark.parametrize("case", CASES[:2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_a_seam_is_found(trained: Trained, case: Case, fault: str) -> None:
    solo = trained(solo_case(case), probes=PROBES, solo=True)
    run = trained(case, probes=PROBES, injections=(f"{SEAMS}:{fault}",))
    tolerance = make_tolerance(*[FOUND] * case.train.steps, name="parity")
    found = check_parity(case, run, make_witnesses(case, solo=solo, parity_tolerance=tolerance))
    assert found and found[0].step == 1


@pytest.mark.parametrize("mode", ["", "ac.full-"])
def test_keys_and_values_are_sent_one_by_one_as_many_bytes_as_the_formula_says(trained: Trained, mode: str) -> None:
    case = parse_case_id(f"target.torchtitan-fsdp4-cp2-rowwise-{mode}v2048-gb2-s2-b16")
    expected = {(term.axis, term.kind, term.op, term.dtype): term for term in CP.of_microbatch(Sender(case, rank=0))}
    sent = [record for record in trained(case, probes=("traffic",)).traces[0].traffic or () if record.axis == "cp"]
    assert len(expected) == 2 and len(sent) == case.train.steps * len(expected)
    for record in sent:
        term = expected[record.axis, record.kind, record.op, record.dtype]
        assert record.sizes == {term.elements // 2: 2 * term.times}
