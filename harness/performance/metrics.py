"""The metrics of a case by its formulas: what one rank multiplies, casts, sends and saves in one step."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from harness.errors import HarnessError
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.measured import Multiplied, Sent, sent_by
from harness.performance.flops import Work, executed, flops_per_token_by_precision, work


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank and step. `step`: 2, because scales that are computed at once are those of the step before.

    `refusal`: why torch must refuse the case; None where it trains.
    """

    case_id: str
    world_size: int
    rank: int
    step: int
    tokens: int  # of a data-parallel rank
    refusal: str | None
    work: tuple[Work, ...]
    executed: Mapping[str, Multiplied]  # by part and precision, as it is measured
    flops_per_token: Mapping[str, float]  # by precision, as torchtitan counts
    casts: int  # to float8, by linears
    wire: Mapping[str, Sent]  # by kind, dtype and mesh axis
    wire_of_axis: Mapping[str, Sent]  # all of them, by mesh axis
    saved_bytes: int | None  # for backward; None where a compiler chooses


def metrics(case: Case, *, rank: int = 0, saves_attention: bool = True) -> Metrics:
    """What the formulas say. `saves_attention` as in `flops.work`.

    Raises `HarnessError` for a target without formulas, and for a rank that the case does not have.
    """
    expect = Expectations(case)
    if not expect.has_formulas:
        what = f"there is no formula for the model of {case.target}."
        raise HarnessError(what, where=case_id(case), fix="give --run, which measures it.")
    if not 0 <= rank < case.world_size:
        raise HarnessError(f"the case has ranks 0 to {case.world_size - 1}.", where=f"--rank {rank}")
    step = min(2, case.train.steps)
    terms = expect.transfers(step=step, rank=rank)
    return Metrics(
        case_id=case_id(case),
        world_size=case.world_size,
        rank=rank,
        step=step,
        tokens=case.local_batch * case.train.seq_len,
        refusal=None if expect.refusal is None else expect.refusal.reason,
        work=work(case, rank=rank, saves_attention=saves_attention),
        executed=executed(case, rank=rank, saves_attention=saves_attention),
        flops_per_token=flops_per_token_by_precision(case),
        casts=expect.cast_calls,
        wire=sent_by((term.words, term.times, term.payload_bytes) for term in terms),
        wire_of_axis=sent_by((term.axis, term.times, term.payload_bytes) for term in terms),
        saved_bytes=sum(expect.saved_bytes(step=step, rank=rank).values()) if expect.saves_exactly else None,
    )
