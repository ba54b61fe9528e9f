"""A rank program without torch: what it does to a tensorwise case is written in the seed of the case.

Seed 1 raises, 2 never returns, 3 has a NaN loss, 4 is far from its golden, 5 exits, 6 is slow, 7 runs another number
of matmuls, 8 waits until the file GO of the environment is there, 9 raises where torchtitan is 9.1; other seeds and
all other recipes train well.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from harness.engine.program import RankContext
from harness.matrix.case import Case
from harness.matrix.rules import expected_refusal
from harness.registry import REFERENCE, is_llama
from harness.request import RunRequest
from harness.sources import installed_version
from harness.trace import RankTrace
from harness.trace.record import Patch
from tests.builders import make_saved, make_sent, make_trace

REFUSAL = "Expected both dimensions of mat2 to be divisible by 16 but got torch.Size([128, 1128])"
RAISES, HANGS, NAN, FAR, EXITS, SLOW, ONE_CALL, WAITS, BROKEN = 1, 2, 3, 4, 5, 6, 7, 8, 9


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


def _inject(patch: Patch) -> None:
    module: dict[str, Any] = {}
    exec(compile(patch.source, patch.text, "exec"), module)
    try:
        module[patch.text.rpartition(":")[2]]()
    except Exception as error:
        raise RuntimeError(f"injection {patch.text} raised {error!r}") from error


def _planted(case: Case) -> int:
    """What goes wrong in this case; 0 for nothing."""
    return case.train.seed if case.float8.recipe == "tensorwise" else 0


def _behave(case: Case, rank: int) -> None:
    planted = _planted(case)
    if planted == RAISES:
        raise ValueError("planted failure")
    if planted == BROKEN and installed_version("torchtitan") == "9.1":
        raise ValueError("broken by torchtitan 9.1")
    if planted == HANGS and rank == 0:
        time.sleep(3600)
    if planted == EXITS:
        os._exit(7)
    if planted == SLOW:
        time.sleep(0.5)
    while planted == WAITS and not Path(os.environ["GO"]).exists():
        time.sleep(0.01)


def _trace(case: Case, rank: int) -> RankTrace:
    return make_trace(
        msgspec.structs.replace(case, target=REFERENCE),
        rank,
        losses=[_loss(case, step) for step in range(1, case.train.steps + 1)],
        calls=1 if _planted(case) == ONE_CALL else None,
        data_digest=f"data-{case.model.vocab_size}-{case.train.seed}",
        **({} if is_llama(case.target) else _records(case.train.steps)),
    )


def _records(steps: int) -> dict[str, object]:
    """What a signature is made of; with MORE_TRAFFIC in the environment, one collective more."""
    numbers = range(1, steps + 1)
    times = 5 if "MORE_TRAFFIC" in os.environ else 4
    return {
        "traffic": tuple(make_sent(step, times=times) for step in numbers),
        "saved_memory": tuple(make_saved(step, 128) for step in numbers),
    }


def _loss(case: Case, step: int) -> float:
    loss = 8.0 - 0.5 * step
    if _planted(case) == NAN and step == 2:
        return math.nan
    if _planted(case) == FAR:
        return loss + 0.3
    return loss + (0.001 * case.world_size if case.float8.enabled else 0.0)
