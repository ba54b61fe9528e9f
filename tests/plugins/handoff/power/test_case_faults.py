"""Exporters with a mistake, called by the ranks of a case: each is found, and a right one passes, as users run it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from harness.headline import headline_of
from harness.matrix.caseid import parse_case_id
from harness.plugins.handoff.cases import judged_case
from harness.plugins.handoff.library import Also
from harness.plugins.handoff.worker.cases import build
from tests.plugins.handoff import exporters
from tests.worker.runs import sweep

Ranks = Callable[..., list[Any]]
EXPERTS = "fsdp2-ep2-rowwise-gmm.fp8-moe4-v2048-s2-b16"
TP, FSDP, STAGES = (
    "tp2-rowwise-v2048-s2-b16",
    "fsdp2-tensorwise-ag.fp8-v2048-s2-b16",
    "pp2-rowwise-v2048-s2-accum4-reduce.last-b16",
)


class Fault(NamedTuple):
    exporter: Callable[..., Any]
    case: str
    headline: str
    format: str = "fp8_row"


FAULTS = [
    Fault(
        exporters.experts_gathered_in_another_order, EXPERTS, r"handoff/order in .*experts.*the weights of .*experts"
    ),
    Fault(
        exporters.experts_of_this_rank_alone,
        EXPERTS,
        r"handoff/missing in 12 modules .*experts\.w1\[2\].*: each is not exported",
    ),
    Fault(
        exporters.first_stage_alone, STAGES, r"handoff/missing in 11 modules .*attention_norm.*: each is not exported"
    ),
    Fault(
        exporters.layers_by_their_number_on_the_stage,
        STAGES,
        r"handoff/replicas in 9 modules \(layers\.\*\.attention.*: ranks 0-1 hold other values at the same place",
    ),
    Fault(exporters.one_scale_of_each_shard, TP, r"handoff/", "fp8_tensor"),
    Fault(exporters.columns_taken_for_rows, TP, r"handoff/shape in .*exported as 256x64, and must be 128x128"),
    Fault(exporters.cached, FSDP, r"handoff/stale in .*wq\.weight.*: .* still the one of the first hand-off"),
    Fault(exporters.norms_not_copied, TP, r"handoff/aliased in .*norm.*changed when the source was updated"),
]


def found(fp8_ranks: Ranks, exporter: Callable[..., Any], case_id: str, form: str) -> tuple[str, int]:
    """Return the first line of what is found of a case that is exported by a function, and how many weights are."""
    case = parse_case_id(case_id)
    given = case_id, [form], f"{exporter.__module__}:{exporter.__name__}", []
    ranks = fp8_ranks(build, case.world_size, *given, [])
    (one_rank,) = fp8_ranks(build, 1, *given, [made["source"] for made in ranks])
    judged = judged_case(case, form, ranks, one_rank, {"also": Also()})
    return "\n".join(headline_of(judged.findings, command="", ranks=1).texts), judged.quantized


# A fault by the state of experts, of shards, and of time is planted in every run.
OFTEN = (exporters.one_scale_of_each_shard,)


@pytest.mark.parametrize("fault", [fault if fault.exporter in OFTEN else sweep(fault) for fault in FAULTS])
def test_an_exporter_with_a_mistake_is_found(fault: Fault, fp8_ranks: Ranks) -> None:
    headline, _ = found(fp8_ranks, fault.exporter, fault.case, fault.format)
    assert re.match(fault.headline, headline), headline


@pytest.mark.parametrize("case_id", [EXPERTS, *map(sweep, (TP, FSDP, STAGES))])
def test_a_right_exporter_passes(case_id: str, fp8_ranks: Ranks) -> None:
    headline, quantized = found(fp8_ranks, exporters.right, case_id, "fp8_row")
    assert not headline and quantized >= 14
