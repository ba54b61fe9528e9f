"""The check `traffic` names what planted faults send; `test_clean_runs.py` has what the formula says."""

from __future__ import annotations

import pytest

from harness.checks.check import Rule
from harness.checks.traffic import AMAX_MISSING, GATHERS, VOLUME, check_traffic
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
    without_fix = findings(text, trained(parse_case_id(text), probes=TRAFFIC))
    assert [finding for finding in without_fix if finding.rule == AMAX_MISSING.name and finding.values["axis"] == "tp"]


@pytest.mark.parametrize(
    ("fault", "text", "rule", "values"),
    [
        (
            "weight_amax_not_reduced_over_shards",
            "fsdp2-tensorwise-ag.fp8-v2048-gb4-s1-f32",
            AMAX_MISSING,
            {"axis": "dp_shard"},
        ),
        (
            "fp8_tp_styles_lost",
            "tp2-tensorwise-tpstyle.fp8-v2048-gb4-s1-f32",
            VOLUME,
            {"collective": "all_gather in float8_e4m3fn along tp"},
        ),
        ("weights_kept_after_forward", "fsdp2-rowwise-v2048-gb4-s1-f32", GATHERS, {"often": "seldom"}),
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
