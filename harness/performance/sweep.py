"""The layouts of a case on a number of ranks, the best first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from harness.matrix.axes import axis_values, case_from_axes
from harness.matrix.case import Case, Layout
from harness.matrix.caseid import case_id
from harness.matrix.known import KnownFault
from harness.matrix.layout import DP_AXES, OTHERS, REST, ranks_of
from harness.matrix.rules import exclusions
from harness.performance.machine import Machine
from harness.performance.simulation import Reason, simulate

_MOST = {"tp": 64, "dp_replicate": 16}  # ranks along every axis but that of FSDP, which has the others


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
    """The case with every combination of degrees that are powers of two; FSDP has the other ranks."""
    for chosen in itertools.product(*map(_powers, _MOST.values())):
        mesh = dict(zip(_MOST, chosen, strict=True))
        mesh[REST], rest = divmod(case.world_size, ranks_of(mesh, OTHERS))
        if not rest and (mesh[REST] > 1 or ranks_of(mesh, DP_AXES) == 1):
            styles = case.float8.tp_styles if mesh["tp"] > 1 else "plain"
            yield case_from_axes({**axis_values(case), **mesh, "tp_styles": styles})


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
