"""Real ranks keep for backward exactly what the formula says, and the memory check sees what they keep besides."""

from __future__ import annotations

import pytest

from harness.checks.memory import BYTES, OTHER_MODE, OUTLIVES, check_memory
from harness.checks.rule import Rule
from harness.matrix.caseid import parse_case_id
from harness.trace import Run
from harness.verdict import Finding
from tests.builders import make_witnesses
from tests.worker.runs import assert_named, sweep

MEMORY = ("saved_memory",)


def findings(text: str, run: Run) -> list[Finding]:
    case = parse_case_id(text)
    return check_memory(case, run, make_witnesses(case))


@pytest.mark.parametrize("dtype", ["f32", sweep("b16")])
def test_checkpointing_keeps_what_the_formula_says_and_full_less_than_selective(trained, dtype: str):
    saved = {}
    for mode in ("", "-ac.full", "-ac.op", "-ac.layer2"):
        text = f"single-tensorwise{mode}-v2048-gb4-s1-{dtype}"
        run = trained(parse_case_id(text), probes=MEMORY)
        assert findings(text, run) == []
        saved[mode] = run.traces[0].saved_memory[0].saved_bytes
    assert saved["-ac.full"] < min(saved["-ac.op"], saved["-ac.layer2"])
    assert max(saved["-ac.op"], saved["-ac.layer2"]) < saved[""]


@pytest.mark.parametrize(
    ("fault", "text", "rule", "values"),
    [
        ("checkpointing_lost", "single-tensorwise-ac.full-v2048-gb4-s1-f32", OTHER_MODE, {"mode": "none"}),
        (
            "float8_weight_kept_for_backward",
            "fsdp2-tensorwise-v2048-gb4-s1-f32",
            OUTLIVES,
            {"dtype": "float8_e4m3fn"},
        ),
        ("abs_saved_for_backward", "single-tensorwise-ac.op-v2048-gb4-s1-f32", BYTES, {"dtype": "float32"}),
    ],
)
def test_planted_faults_are_found_and_named(trained, fault: str, text: str, rule: Rule, values: dict[str, str]):
    run = trained(parse_case_id(text), probes=MEMORY, injections=(f"fault:{fault}",))
    assert_named(findings(text, run), rule, **values)
