"""Torch's judge: the operators that a layout calls on DTensors, and what torch says of the rules for them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.engine.messages import Job, Share
from harness.engine.outcome import conclude
from harness.engine.zygote_engine import ZygoteEngine
from harness.matrix.caseid import parse_case_id
from harness.studies.judges import PROGRAM, VALIDATION
from harness.trace.operator_checks import StrategyQuestion, Validation
from tests.worker.conftest import make_request


def answers(folder: Path, payload: bytes, world_size: int, options: dict[str, str]) -> list[bytes]:
    job = Job(job_id="strategies", world_size=world_size, payload=payload, deadline_s=300)
    with ZygoteEngine(PROGRAM, {"device": "cpu", "warm": "", **options}) as engine:
        share = Share(job=job, count=world_size, folder=str(folder))
        outcome = conclude(job, [engine.run(share, lambda _: None)])
    assert outcome.status == "ok", outcome.message
    return [rank.payload or b"" for rank in outcome.ranks]


def test_a_layout_with_tp_names_the_operators_that_it_calls_on_dtensors(tmp_path: Path) -> None:
    request = make_request(parse_case_id("tp2-rowwise-v2048-s1-b16"))
    used = [set(msgspec.msgpack.decode(each)) for each in answers(tmp_path, msgspec.msgpack.encode(request), 2, {})]
    assert {"embedding", "embedding_dense_backward", "_log_softmax"} <= used[0] == used[1]


@pytest.mark.parametrize("module", [VALIDATION, "torch.no_such_judge"])
def test_torch_validates_operators_that_it_has_samples_of_or_is_said_to_be_missing(tmp_path: Path, module: str) -> None:
    question = StrategyQuestion(module=module, operators=("abs", "no_such_operator"))
    [answer] = answers(tmp_path, msgspec.msgpack.encode(question), 1, {"validation": module})
    found = msgspec.msgpack.decode(answer, type=Validation)
    if module != VALIDATION:
        assert "No module named" in found.unavailable
    else:
        assert list(found.operators) == ["abs"] and found.operators["abs"].right > 0 == found.operators["abs"].wrong
