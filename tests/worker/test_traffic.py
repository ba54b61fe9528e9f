"""The check `traffic` sees what planted faults send; `test_clean_runs.py` has what the formula says."""

from __future__ import annotations

import pytest

from harness.checks.rule import Rule
from harness.checks.traffic import AMAX_ELSEWHERE, AMAX_MISSING, GATHERS, HIGH_PRECISION, VOLUME, check_traffic
from harness.matrix.caseid import parse_case_id
from harness.trace import Run
from harness.verdict import Finding
from tests.builders import make_witnesses
from tests.worker.runs import WHOLE_WEIGHT, assert_named

TRAFFIC = ("traffic",)


def findings(text: str, run: Run) -> list[Finding]:
    case = parse_case_id(text)
    return check_traffic(case, run, make_witnesses(case))


@pytest.mark.sweep  # `test_operands.py` has another case in every run
@pytest.mark.parametrize(
    "text",
    [
        "fsdp2-tp2-tensorwise-ag.fp8pre-v2048-gb4-s2-f32",
        "fsdp2-tp2-tensorwise-ag.fp8-head.fp8-filter.layers.0+wk-v2048-gb4-s2-b16",
    ],
)
def test_under_fsdp_and_tp_the_amax_of_a_gathered_weight_is_reduced_over_both_once_it_is_fixed(trained, text: str):
    assert findings(text, trained(parse_case_id(text), probes=TRAFFIC, injections=(WHOLE_WEIGHT,))) == []
    found = findings(text, trained(parse_case_id(text), probes=TRAFFIC))
    assert [each for each in found if each.rule == AMAX_MISSING.name and each.values["axis"] == "tp"]


@pytest.mark.parametrize(
    ("fault", "text", "rule", "values"),
    [
        ("amax_not_reduced_over_tp", "tp2-tensorwise-v2048-gb4-s1-f32", AMAX_MISSING, {"axis": "tp"}),
        (
            "weight_amax_not_reduced_over_shards",
            "fsdp2-tensorwise-ag.fp8-v2048-gb4-s1-f32",
            AMAX_MISSING,
            {"axis": "dp_shard"},
        ),
        ("weight_amax_over_replicas", "hsdp2x2-tensorwise-ag.fp8-v2048-gb4-s1-f32", AMAX_ELSEWHERE, {}),
        ("fp8_all_gather_subclass_dropped", "fsdp2-tensorwise-ag.fp8-v2048-gb4-s1-f32", HIGH_PRECISION, {}),
        (
            "fp8_tp_styles_lost",
            "tp2-tensorwise-tpstyle.fp8-v2048-gb4-s1-f32",
            VOLUME,
            {"collective": "all_gather in float8_e4m3fn along tp"},
        ),
        (
            "norm_gradients_not_reduced",
            "tp2-bf16-v2048-gb4-s1-f32",
            VOLUME,
            {"collective": "all_reduce (sum) in float32 along tp"},
        ),
        (
            "replicas_reduced_over_shards",
            "hsdp2x2-tensorwise-ag.fp8pre-v2048-gb4-s1-f32",
            VOLUME,
            {"collective": "all_reduce (sum) in float32 along dp_replicate"},
        ),
        (
            "gradients_reduced_after_every_microbatch",
            "fsdp2-rowwise-v2048-gb4-s1-accum2-reduce.last-f32",
            VOLUME,
            {"kind": "reduce_scatter", "op": "sum", "dtype": "float32"},
        ),
        ("weights_kept_after_forward", "fsdp2-rowwise-v2048-gb4-s1-f32", GATHERS, {"often": "seldom"}),
        (
            "weights_freed_after_forward",
            "fsdp2-reshard.never-rowwise-v2048-gb4-s1-b16",
            GATHERS,
            {"often": "often"},
        ),
        (
            "gradients_reduced_in_another_dtype",
            "fsdp2-tensorwise-ag.fp8pre-ac.layer2-v2048-gb4-s1-b16",
            VOLUME,
            {"kind": "reduce_scatter", "op": "sum", "dtype": "bfloat16"},
        ),
        (
            "gradients_reduced_in_another_dtype",
            "fsdp2-tensorwise-v2048-gb4-s1-reduce.b16-b16",
            VOLUME,
            {"kind": "reduce_scatter", "op": "sum", "dtype": "float32"},
        ),
    ],
)
def test_planted_faults_are_found_and_named(trained, fault: str, text: str, rule: Rule, values: dict[str, str]):
    run = trained(parse_case_id(text), probes=TRAFFIC, injections=(f"fault:{fault}",))
    assert_named(findings(text, run), rule, **values)
