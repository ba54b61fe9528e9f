"""Context parallelism of torchtitan: one rank computes what all of them do, and faults at its seams are found."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.checks.assembly import largest
from harness.checks.divergence import with_operands
from harness.checks.parity import check_parity, worst_distances
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id, solo_case
from harness.matrix.dims.cp import CP
from harness.matrix.dims.dimension import Sender
from harness.trace import Run
from tests.builders import make_tolerance, make_witnesses, run_of
from tests.fork_servers import EAGER, ForkServers
from tests.jobs import run_request, traces_of
from tests.worker.conftest import make_request

SEAMS = Path(__file__).with_name("seams.py")
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
FOUND = 1e-8  # below what any fault changes: without one gradients have the same bits

Ranks = Callable[..., Run]


@pytest.fixture(scope="module")
def ranks(fork_servers: ForkServers, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Trains a case on ranks that have torchtitan before they are forked; every run once."""
    engine = fork_servers.engine({**EAGER, "target": "torchtitan", "path": ""})

    @functools.cache
    def trained(case: Case, probes: tuple[str, ...] = ("sketches", "operands"), **asked: Any) -> Run:
        request = make_request(case, probes=probes, **asked)
        return run_of(*traces_of(run_request(engine, tmp_path_factory.mktemp("job"), request)))

    return trained


@pytest.mark.parametrize("case", CASES)
def test_one_rank_computes_the_same(ranks: Ranks, case: Case) -> None:
    run, solo = ranks(case), ranks(solo_case(case), solo=True)
    assert with_operands((), case, run, solo) == ()
    distances = worst_distances(run, solo, steps=range(1, case.train.steps + 1))
    assert largest(distances) <= (OF_REPLICAS if case.layout.dp_replicate > 1 else 0)


@pytest.mark.parametrize("case", CASES[:2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_a_seam_is_found(ranks: Ranks, case: Case, fault: str) -> None:
    run, solo = ranks(case, injections=(f"{SEAMS}:{fault}",)), ranks(solo_case(case), solo=True)
    tolerance = make_tolerance(*[FOUND] * case.train.steps, name="parity")
    found = check_parity(case, run, make_witnesses(case, solo=solo, parity_tolerance=tolerance))
    assert found and found[0].step == 1


@pytest.mark.parametrize("mode", ["", "ac.full-"])
def test_keys_and_values_are_sent_one_by_one_as_many_bytes_as_the_formula_says(ranks: Ranks, mode: str) -> None:
    case = parse_case_id(f"target.torchtitan-fsdp4-cp2-rowwise-{mode}v2048-gb2-s2-b16")
    expected = {(term.axis, term.kind, term.op, term.dtype): term for term in CP.of_microbatch(Sender(case, rank=0))}
    sent = [record for record in ranks(case, ("traffic",)).traces[0].traffic or () if record.axis == "cp"]
    assert len(expected) == 2 and len(sent) == case.train.steps * len(expected)
    for record in sent:
        term = expected[record.axis, record.kind, record.op, record.dtype]
        assert record.sizes == {term.elements // 2: 2 * term.times}
