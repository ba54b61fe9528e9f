"""What ranks of DDP send, by the age of the target: buckets, their order, and the buffers of the first rank."""

import pytest

from harness.expect.memory import in_buckets
from harness.expect.traffic import sent
from harness.matrix.caseid import parse_case_id
from harness.matrix.dims.ddp import buckets
from harness.matrix.linears import parameter_count
from harness.matrix.upstream import NONE

PLAIN = "ddp2-rowwise-v2048-s4-accum2-reduce.last-f64"
STATIC = "ddp2-rowwise-v2048-s4-f64"


@pytest.mark.parametrize("words", [PLAIN, STATIC, STATIC.replace("-v", "-tied-v"), STATIC.replace("-v", "-bias-v")])
def test_buckets_hold_every_gradient_once(words: str) -> None:
    case = parse_case_id(words)
    first, later = buckets(case, age=1), buckets(case, age=3)
    assert len(first) == 1 and len(later) > 1
    assert {sum(first), sum(later)} == {parameter_count(case)}


@pytest.mark.parametrize(("words", "rebuilt"), [(PLAIN, 2), (STATIC, 3)])
def test_ranks_agree_on_new_buckets_once(words: str, rebuilt: int) -> None:
    case = parse_case_id(words)
    kinds = {step: [(one.kind, one.dtype) for one in sent(case, 0, step, NONE, ())] for step in range(1, 5)}
    assert [step for step, found in kinds.items() if ("broadcast", "int32") in found] == [rebuilt]
    assert all(("broadcast", "float64") in found for found in kinds.values())
    assert [found.count(("all_reduce", "float64")) for found in kinds.values()] == [
        len(buckets(case, age=step)) for step in kinds
    ]


def test_a_resumed_target_begins_with_one_bucket_again() -> None:
    case = parse_case_id("ddp2-rowwise-v2048-s4-accum2-reduce.last-resume-f64")
    sizes = [len(list(in_buckets(case, step, "step"))) for step in range(1, 5)]
    assert sizes[0] == sizes[2] == 1 < sizes[1] == sizes[3]
    assert [len(list(in_buckets(case, step, "forward"))) for step in (1, 3)] == [0, 0]
