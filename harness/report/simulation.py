"""A simulated case, and layouts that were ranked, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from harness.matrix.layout import MESH_AXES
from harness.performance.layouts import Matmul, Ranked, Shard, Simulation
from harness.plural import binary_bytes, counted
from harness.report.wording import aligned
from harness.studies.simulation import Verification


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the formulas say of a case, and what simulated ranks were found to do."""

    simulation: Simulation
    verification: Verification | None = None


def simulation_text(report: SimulationReport) -> str:
    """All tables, refusals first."""
    return "\n\n".join(_parts(report.simulation, report.verification)) + "\n"


def _parts(found: Simulation, verification: Verification | None) -> Iterator[str]:
    nodes = f"{counted(found.nodes, 'node')} of {found.gpus_per_node} {found.device}"
    tokens = f"{counted(found.tokens, 'token')} of a data-parallel rank and step"
    yield f"{found.case}\n{counted(found.world_size, 'rank')} on {nodes}, {tokens}: by formula, nothing was run"
    yield from _reasons(found)
    yield _matmul_table(found.matmuls)
    yield _shard_table(found.shards)
    yield _wire_table(found)
    yield _memory_table(found)
    if found.step_s is None:
        yield f"no time is predicted: the data sheet of {found.device} has no peak in the dtype of this case"
    else:
        yield f"predicted: {found.step_s:.3g} s a step, {found.tokens_s:,.0f} tokens/s and device"
    yield "\n".join(f"assumed: {each}" for each in found.assumptions)
    if verification is not None:
        yield _verification_text(verification)


def _verification_text(found: Verification) -> str:
    ranks = ", ".join(map(str, found.ranks))
    differing = found.differing
    equal = f"{counted(len(found.compared), 'number')} of ranks {ranks} compared in {found.seconds:.0f} s"
    lines = [f"simulated: {equal}, {len(differing) or 'none'} differ"]
    lines += [
        f"{f'as recorded in {each.known}' if each.known else 'DIFFERS'}: rank {each.rank}, {each.what}: "
        f"{each.found:,}, formula {each.formula:,}"
        for each in found.compared
        if each.differs or each.known
    ]
    if found.peaks:
        shares = ", ".join(f"{peak:.2f}" for peak in found.peaks)
        lines.append(f"peak over its lower bound: {shares} (not compared)")
    return "\n".join(lines)


def _reasons(found: Simulation) -> Iterator[str]:
    lines = [f"REFUSED {each.name}: {each.text}" for each in found.refused]
    lines += [f"warning {each.name}: {each.text}" for each in found.warnings]
    if lines:
        yield "\n".join(lines)


def _matmul_table(matmuls: Sequence[Matmul]) -> str:
    rows: list[tuple[str, ...]] = [("matmul", "role", "m", "n", "k", "precision", "16", "layers", "TP ranks")]
    rows += [
        (
            each.linear,
            each.role,
            *(str(size) for size in (each.m, each.n, each.k)),
            each.precision,
            "REFUSED" if each.refused else "yes" if each.aligned else "no",
            str(each.layers),
            str(each.tp_ranks),
        )
        for each in matmuls
    ]
    return aligned(rows, right=(2, 3, 4, 7, 8))


def _shard_table(shards: Sequence[Shard]) -> str:
    rows: list[tuple[str, ...]] = [("weight", "rows on TP ranks", "columns", "rows on FSDP ranks", "padding", "empty")]
    rows += [
        (
            each.weight,
            _sizes(each.tp_rows),
            str(each.columns),
            _sizes(each.fsdp_rows),
            f"{each.padding:.1%}" if each.padding else "",
            str(each.empty_ranks) if each.empty_ranks else "",
        )
        for each in shards
    ]
    return aligned(rows, right=(2, 4, 5))


def _sizes(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"uneven: {', '.join(map(str, sizes))}"


def _wire_table(found: Simulation) -> str:
    if not found.wire:
        return "sent: nothing"
    rows: list[tuple[str, ...]] = [("sent along", "ranks", "calls", "of amax", "inputs", "sent in rings", "")]
    rows += [
        (
            each.axis,
            str(each.ranks),
            f"{each.calls:,}",
            f"{each.amax_reductions:,}",
            binary_bytes(each.payload_bytes),
            binary_bytes(each.sent_bytes),
            "between nodes" if each.crosses_nodes else "",
        )
        for each in found.wire
    ]
    return aligned(rows, right=(1, 2, 3, 4, 5))


def _memory_table(found: Simulation) -> str:
    rows = [("memory", *(f"rank {each.rank}" for each in found.memory), "")]
    for name, field, note in (
        ("parameters", "parameters", "as FSDP2 pads them"),
        ("optimizer", "optimizer", "its states"),
        ("saved for backward", "saved", "eager blocks"),
        ("logits, weights that stay gathered", "kept", ""),
        ("between forward and backward", "before_backward", "exact"),
        ("gradients", "gradients", "after backward"),
        ("peak", "peak", f"at least, of {binary_bytes(found.device_bytes)}"),
    ):
        rows.append((name, *(binary_bytes(getattr(each, field)) for each in found.memory), note))
    return aligned(rows, right=range(1, len(found.memory) + 1))


_COLUMNS = {axis: {"dp_replicate": "replicas", "dp_shard": "FSDP", "tp": "TP"}.get(axis, axis) for axis in MESH_AXES}


def sweep_text(ranked: Sequence[Ranked]) -> str:
    """The layouts that nothing refuses as a table, those that are refused by their reasons, and all reasons."""
    rows: list[tuple[str, ...]] = [
        (*_COLUMNS.values(), "predicted s", "tokens/s", "peak at least", "sent", "between nodes", "")
    ]
    rows += [_layout_row(each) for each in ranked if not each.refused]
    reasons = {reason.name: reason.text for each in ranked for reason in (*each.refused, *each.warnings)}
    told = "\n".join(f"{name}: {text}" for name, text in reasons.items())
    parts = [aligned(rows, right=range(len(_COLUMNS) + 5)), "\n".join(_refused_lines(ranked)), told]
    return "\n\n".join(part for part in parts if part) + "\n"


def _layout_row(each: Ranked) -> tuple[str, ...]:
    notes = [*(() if each.fits else ("does not fit",)), *(reason.name for reason in each.warnings)]
    return (
        *map(str, each.layout.mesh.values()),
        f"{each.step_s:.3g}" if each.step_s else "-",
        f"{each.tokens_s:,.0f}" if each.tokens_s else "-",
        *map(binary_bytes, (each.peak_bytes, each.sent_bytes, each.between_nodes_bytes)),
        ", ".join(notes),
    )


def _refused_lines(ranked: Sequence[Ranked]) -> Iterator[str]:
    """One line for equal reasons at one degree of the innermost axis."""
    groups: dict[tuple[int, str], list[str]] = {}
    for each in ranked:
        if each.refused:
            names = ", ".join(reason.name for reason in each.refused)
            *outer, inner = each.layout.mesh.values()
            groups.setdefault((inner, names), []).append(" x ".join(map(str, outer)))
    *outside, inside = _COLUMNS.values()
    for (degree, names), found in groups.items():
        yield f"REFUSED {inside} {degree} with {' x '.join(outside)} {', '.join(found)}: {names}"
