"""What `expect` of a target may return, and what is said of any other answer."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from harness.trace.counts import Sent, Stated
from harness.worker.targets.contract import TargetMisfit, stated_by
from harness.worker.targets.target import World
from tests.builders import make_case

CASE = make_case(target="a_target_of_tests", steps=2)
WORLD = World(device=torch.device("cpu"), fsdp=False, dp_rank=0, microbatches=1, local_batch=8)
AMAX = "all_reduce (max) in float32 along dp_shard+tp"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType(CASE.target)
    monkeypatch.setitem(sys.modules, CASE.target, made)
    return made


def stated(module: ModuleType, answer: Any) -> tuple[Stated, ...] | None:
    module.expect = lambda case, world, step: answer  # type: ignore[attr-defined]
    return stated_by(CASE, WORLD)


def test_a_module_without_expect_and_one_that_returns_nothing_state_nothing(module: ModuleType) -> None:
    assert stated_by(CASE, WORLD) is None
    assert stated(module, {}) is None


def test_every_step_is_asked_for_with_case_and_world(module: ModuleType) -> None:
    asked = []
    module.expect = lambda *given: asked.append(given) or {"matmuls": given[2]}  # type: ignore[attr-defined]
    assert stated_by(CASE, WORLD) == (Stated(step=1, matmuls=1), Stated(step=2, matmuls=2))
    assert asked == [(CASE, WORLD, 1), (CASE, WORLD, 2)]


def test_the_whole_answer_is_read(module: ModuleType) -> None:
    saved = {"float8_e4m3fn": 0, "bfloat16": 64}
    statements = stated(module, {"matmuls": 0, "saved_bytes": saved, "traffic": {AMAX: (2, 8)}})
    sent = Sent(calls=2, payload_bytes=8)
    assert statements == tuple(Stated(step=step, matmuls=0, saved_bytes=saved, traffic={AMAX: sent}) for step in (1, 2))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "expect() returned None. Fix: return a dict with any of the keys matmuls, saved_bytes, traffic"),
        ([24], "expect() returned [24]. Fix: return a dict"),
        ({"matmul": 24}, "expect() states 'matmul'. Fix: state matmuls, saved_bytes or traffic."),
        ({"matmuls": 24.0}, "expect() states 24.0 as the scaled matmuls of a step. Fix: state a whole number, with //"),
        ({"matmuls": -1}, "expect() states -1 as"),
        ({"matmuls": True}, "expect() states True as"),
        ({"saved_bytes": 128}, 'expect() states saved_bytes as 128. Fix: return bytes by dtype, such as {"float8'),
        ({"saved_bytes": {"fp8": 0}}, "names a dtype 'fp8' in 'fp8'. Fix: name it as torch does"),
        ({"saved_bytes": {"bfloat16": "64"}}, "expect() states '64' as the bytes of bfloat16."),
        ({"traffic": [AMAX]}, 'Fix: return calls and bytes by collective, such as {"all_reduce (max) in'),
        ({"traffic": {"all_reduce": (1, 8)}}, "names a collective 'all_reduce'. Fix: name kind, reduction, dtype and"),
        ({"traffic": {AMAX.replace("float32", "fp32"): (1, 4)}}, "names a dtype 'fp32' in 'all_reduce (max) in fp32"),
        ({"traffic": {AMAX.replace("tp", "fsdp"): (1, 4)}}, "names an axis 'dp_shard+fsdp' in"),
        ({"traffic": {AMAX: 8}}, f"expect() states 8 of '{AMAX}'. Fix: state a pair: how often"),
        ({"traffic": {AMAX: (1, 2, 3)}}, "Fix: state a pair"),
        ({"traffic": {AMAX: (1, 0.5)}}, f"expect() states 0.5 as the bytes of '{AMAX}'."),
    ],
)
def test_any_other_answer_is_told_with_what_to_return(module: ModuleType, answer: Any, words: str) -> None:
    with pytest.raises(TargetMisfit) as caught:
        stated(module, answer)
    assert words in str(caught.value)


@pytest.mark.parametrize("axis", ["tp", "world", "self", "dp_replicate+dp_shard"])
def test_the_axes_are_those_of_findings(module: ModuleType, axis: str) -> None:
    assert stated(module, {"traffic": {f"broadcast in int64 along {axis}": (0, 0)}}) is not None
