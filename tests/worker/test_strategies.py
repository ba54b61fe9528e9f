"""Torch's judge: the operators that a layout calls on DTensors, and what torch says of the rules for them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.engine.messages import Job, Share
from harness.engine.outcome import conclude
from harness.engine.zygote_engine import ZygoteEngine
from harness.matrix.caseid import parse_case_id
from harness.studies.strategies import PROGRAM, VALIDATION
from harness.trace.operator_checks import StrategyQuestion, Validation
from harness.worker.strategies import preload
from tests.worker.conftest import make_request


def answers(engine: ZygoteEngine, folder: Path, payload: bytes, world_size: int) -> list[bytes]:
    job = Job(job_id="strategies", world_size=world_size, payload=payload, deadline_s=300)
    share = Share(job=job, count=world_size, folder=str(folder))
    outcome = conclude(job, [engine.run(share, lambda _: None)])
    assert outcome.status == "ok", outcome.message
    return [rank.payload or b"" for rank in outcome.ranks]


def validation(engine: ZygoteEngine, folder: Path, module: str) -> Validation:
    question = StrategyQuestion(module=module, operators=("abs", "no_such_operator"))
    own = folder / module
    own.mkdir()
    [answer] = answers(engine, own, msgspec.msgpack.encode(question), 1)
    return msgspec.msgpack.decode(answer, type=Validation)


def test_a_layout_with_tp_names_the_operators_that_it_calls_on_dtensors(tmp_path: Path) -> None:
    request = msgspec.msgpack.encode(make_request(parse_case_id("tp2-rowwise-v2048-s1-b16")))
    with ZygoteEngine(PROGRAM, {"device": "cpu"}) as engine:
        used = [set(msgspec.msgpack.decode(answer)) for answer in answers(engine, tmp_path, request, 2)]
    assert {"embedding", "embedding_dense_backward", "_log_softmax"} <= used[0] == used[1]


@pytest.mark.sweep
def test_torch_validates_operators_that_it_has_samples_of_or_is_said_to_be_missing(tmp_path: Path) -> None:
    preload({"validation": "torch.no_such_judge"})
    with ZygoteEngine(PROGRAM, {"validation": VALIDATION}) as engine:
        missing, present = (validation(engine, tmp_path, module) for module in ("torch.no_such_judge", VALIDATION))
    assert "No module named" in missing.unavailable
    assert list(present.operators) == ["abs"] and present.operators["abs"].right > 0 == present.operators["abs"].wrong
