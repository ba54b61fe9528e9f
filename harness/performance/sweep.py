"""The layouts of a case on a number of ranks, the best first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from harness.matrix.axes import axis_values, case_from_axes
from harness.matrix.case import Case, Layout
from harness.matrix.caseid import case_id
from harness.matrix.known import KnownFault
from harness.matrix.rules import exclusions
from harness.performance.machine import Machine
from harness.performance.simulation import Reason, simulate

MAX_TP, MAX_REPLICAS = 64, 16


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """One layout. Without numbers where a rule excludes it.

    `sent_bytes`: of a rank and step; `between_nodes_bytes`: of them those along axes that leave a node.
    """

    case: str
    layout: Layout
    refused: tuple[Reason, ...]
    warnings: tuple[Reason, ...] = ()
    fits: bool = False
    peak_bytes: int = 0
    sent_bytes: int = 0
    between_nodes_bytes: int = 0
    step_s: float = 0.0
    tokens_s: float = 0.0


def sweep(case: Case, machine: Machine, *, known: Sequence[KnownFault] = ()) -> tuple[Ranked, ...]:
    """Every layout of the ranks of a case, which all train its global batch.

    Those that are refused come last, before them those whose peak does not fit; the others by predicted time, then by
    memory and wire.
    """
    found = [_ranked(each, machine, known) for each in layouts(case)]
    return tuple(sorted(found, key=_order))


def layouts(case: Case) -> Iterator[Case]:
    """The case with every TP degree and number of replicas that are powers of two; FSDP has the other ranks."""
    values, world = axis_values(case), case.world_size
    for tp in _powers(MAX_TP):
        for replicas in _powers(MAX_REPLICAS):
            shards, rest = divmod(world, tp * replicas)
            if not rest and (shards > 1 or replicas == 1):
                styles = case.float8.tp_styles if tp > 1 else "plain"
                degrees = {"tp": tp, "dp_replicate": replicas, "dp_shard": shards, "tp_styles": styles}
                yield case_from_axes({**values, **degrees})


def _powers(largest: int) -> Iterator[int]:
    size = 1
    while size <= largest:
        yield size
        size *= 2


def _ranked(case: Case, machine: Machine, known: Sequence[KnownFault]) -> Ranked:
    if rules := exclusions(case):
        reasons = tuple(Reason(name=rule.name, text=rule.reason) for rule in rules)
        return Ranked(case=case_id(case), layout=case.layout, refused=reasons)
    found = simulate(case, machine, known=known)
    return Ranked(
        case=case_id(case),
        layout=case.layout,
        refused=found.refused,
        warnings=found.warnings,
        fits=found.fits,
        peak_bytes=found.peak_bytes,
        sent_bytes=sum(each.sent_bytes for each in found.wire),
        between_nodes_bytes=sum(each.sent_bytes for each in found.wire if each.crosses_nodes),
        step_s=found.step_s,
        tokens_s=found.tokens_s,
    )


def _order(found: Ranked) -> tuple[object, ...]:
    return bool(found.refused), not found.fits, found.step_s, found.peak_bytes, found.sent_bytes
