"""A rank program without torch: what it does to a tensorwise case is written in the seed of the case.

Seed 1 raises, 2 never returns, 3 has a NaN loss, 4 is far from its golden, 5 exits, 6 is slow; other seeds and all
other recipes train well.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location

import msgspec

from harness.engine.program import RankContext
from harness.request import RunRequest
from harness.spec.case import Case
from harness.spec.gemms import converted_fqns, scaled_mm_calls
from harness.spec.rules import expected_refusal
from harness.trace import RankTrace, StepTrace

REFUSAL = "Expected both dimensions of mat2 to be divisible by 16 but got torch.Size([128, 1128])"
RAISES, HANGS, NAN, FAR, EXITS, SLOW = 1, 2, 3, 4, 5, 6


def preload(options: Mapping[str, str]) -> None:
    assert "torch" not in sys.modules


def rank_main(context: RankContext) -> bytes:
    request = msgspec.msgpack.decode(context.payload, type=RunRequest)
    for injection in request.injections:
        _inject(injection)
    if expected_refusal(request.case) is not None:
        raise RuntimeError(REFUSAL)
    _behave(request.case, context.rank)
    return msgspec.msgpack.encode(_trace(request.case, context.rank))


def _inject(text: str) -> None:
    path, _, function = text.rpartition(":")
    spec = spec_from_file_location("injected", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        getattr(module, function)()
    except Exception as error:
        raise RuntimeError(f"injection {text} raised {error!r}") from error


def _behave(case: Case, rank: int) -> None:
    if case.float8.recipe != "tensorwise":
        return
    seed = case.train.seed
    if seed == RAISES:
        raise ValueError("planted failure")
    if seed == HANGS and rank == 0:
        time.sleep(3600)
    if seed == EXITS:
        os._exit(7)
    if seed == SLOW:
        time.sleep(1.0)


def _trace(case: Case, rank: int) -> RankTrace:
    fp8 = case.float8.recipe != "bf16"
    steps = tuple(
        StepTrace(
            step=step,
            loss=_loss(case, step, fp8=fp8),
            grad_norm=1.0 / step,
            scaled_mm_calls=scaled_mm_calls(case),
            seconds=0.01,
        )
        for step in range(1, case.train.steps + 1)
    )
    return RankTrace(
        rank=rank,
        steps=steps,
        converted_fqns=converted_fqns(case),
        unmatched_filters=(),
        peak_memory_bytes=1,
        data_digest=f"data-{case.model.vocab_size}-{case.train.seed}",
        software={"torch": "0", "python": "3"},
        device="cpu",
        virtual=("collectives", "scaled_mm"),
    )


def _loss(case: Case, step: int, *, fp8: bool) -> float:
    loss = 8.0 - 0.5 * step
    if case.float8.recipe == "tensorwise" and case.train.seed == NAN and step == 2:
        return math.nan
    if case.float8.recipe == "tensorwise" and case.train.seed == FAR:
        return loss + 0.3
    return loss + (0.001 * case.layout.world_size if fp8 else 0.0)
