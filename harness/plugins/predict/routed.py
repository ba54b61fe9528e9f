"""Experts of a case in numbers: parameters that a token meets, rows that experts get, and what an imbalance costs."""

from __future__ import annotations

import msgspec

from harness.expect.expert_traffic import sent_rows
from harness.expect.saved_memory import expected_saved, is_exact
from harness.expect.traffic import transfers_if_balanced
from harness.expect.work import gemms
from harness.matrix.case import Case
from harness.matrix.linears import EXPERTS, active_parameter_count, parameter_count
from harness.plugins.predict.machine import Machine
from harness.plugins.predict.roofline import gemm_s

IMBALANCE = 2  # times as many rows as the mean


class Routed(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank. `rows`: that its experts get in a forward of a block, where tokens are spread evenly.

    `sent_bytes`: by all-to-all in a step, in forward, recomputation and backward. `more_s`, `more_bytes`: what a step
    takes longer, and saves more for backward, on a rank whose experts get `IMBALANCE` times as many rows; None where no
    time is predicted, or where a compiler chooses what is saved.
    """

    parameters: int
    active_parameters: int
    rows: int
    local_experts: int
    sent_bytes: int
    more_s: float | None
    more_bytes: int | None


def routed(case: Case, machine: Machine) -> Routed:
    rows, blocks = sent_rows(case), len(case.model.expert_layers)
    grouped = [gemm for gemm in gemms(case) if EXPERTS in gemm.fqn]
    timed = machine.peak.tflops(case.train.dtype) is not None
    saved = [_saved(case, ((times * rows,),) * blocks) for times in (1, IMBALANCE)] if is_exact(case) else []
    exchanged = (transfer for transfer in transfers_if_balanced(case, step=2, rank=0) if transfer.kind == "all_to_all")
    return Routed(
        parameters=parameter_count(case),
        active_parameters=active_parameter_count(case),
        rows=rows,
        local_experts=case.model.experts // case.layout.ep,
        sent_bytes=sum(transfer.payload_bytes for transfer in exchanged),
        more_s=(IMBALANCE - 1) * sum(gemm_s(gemm, machine) for gemm in grouped) if timed else None,
        more_bytes=saved[1] - saved[0] if saved else None,
    )


def _saved(case: Case, rows: tuple[tuple[int, ...], ...]) -> int:
    return sum(expected_saved(case, step=2, rank=0, rows=rows).values())
