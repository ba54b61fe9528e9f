"""Limits of local parity that are not zero: each names its rounding, and none is far above what clean runs show."""

from __future__ import annotations

from collections import defaultdict

import pytest

from harness.expect.local_parity import Bits, allowed_distance
from harness.matrix.caseid import parse_case_id
from tests.worker.test_clean_runs import CASES, COMPARED

WIDE = 4.0  # times the largest distance of clean runs

# By kind of tensor and dtype: why a limit is wider than that.
OF_LAST_BIT = "one last bit of a master weight: SGD without AVX2, and the end of a shard, seldom round otherwise"
OF_SUMS = "sums in another order, of terms that may cancel: a fault in float64 is larger than 2**-40"
REASONS = {
    ("grad_output", "float32"): "a loss over a sharded vocabulary: the last bit of its sums, which seldom differs",
    ("grad_output", "bfloat16"): "the same, where it decides how few elements are rounded",
    ("grad", "float32"): "clipped by a norm that ranks add up in another order: 1.2e-5 in other cases",
    ("param", "float32"): OF_LAST_BIT,
    ("param", "bfloat16"): OF_LAST_BIT,
    **{(kind, "float64"): OF_SUMS for kind in ("input", "output", "grad_output", "grad_input", "grad", "param")},
}
MORE = [
    "tp2-rowwise-v2048-gb4-s3-b16",
    "tp4-nolp-tensorwise-v2050-gb4-s2-b16",
    "tp2-tensorwise-tpstyle.fp8-v2048-gb4-s3-f32",
    "fsdp3-tp2-rowwise-bias-v2048-gb6-s3-sgd-lr0.1-b16",
    "hsdp2x3-tensorwise-bias-v2050-gb6-s3-f32",
    "hsdp2x2-tensorwise-v2050-gb4-s3-sgd-lr0.1-param.b16-b16",
    "fsdp2-tp2-rowwise-v2048-gb4-s3-reduce.b16-b16",
    "fsdp2-tensorwise-v2048-gb4-s3-clip0.25-b16",
]


@pytest.mark.sweep
def test_no_limit_is_wide(train, trained):
    floors, limits = defaultdict(float), defaultdict(float)
    for case in map(parse_case_id, dict.fromkeys((*CASES, *COMPARED, *MORE))):
        recorded = trained(case, probes=("sketches", "module_tensors"))
        ranks = tuple(trace.module_tensors or () for trace in recorded.traces)
        for tensor in train(case, replayed=ranks)[0].module_distances if any(ranks) else ():
            key, limit = (tensor.kind, tensor.dtype), allowed_distance(case, tensor, bits=Bits())
            assert tensor.distance <= limit, (case, tensor)
            if limit:
                floors[key], limits[key] = max(floors[key], tensor.distance), max(limits[key], limit)
    wide = {key for key, limit in limits.items() if limit > WIDE * floors[key]}
    assert wide == REASONS.keys()
