"""The ways to train a case in FP8: every recipe as torchtitan uses it, and how fast each is predicted to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from harness.matrix.case import Case, Float8
from harness.matrix.known import KnownFault
from harness.matrix.linears import BLOCK_LINEARS
from harness.matrix.rules import exclusions, expected_refusal
from harness.performance.converting import too_small_for_rowwise
from harness.performance.machine import Machine
from harness.performance.roofline import predicted_step, speed_up


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A way to train in FP8: how many times as fast as in BF16, or the rule that refuses it, with its reason.

    `fault`: the name of a recorded fault that such training runs into.
    """

    name: str
    compiled: float | None = None
    eager: float | None = None
    tokens_s: float | None = None  # of a device, compiled
    refused: str = ""
    reason: str = ""
    fault: str = ""

    @property
    def ratio(self) -> float:
        """Compiled; 0 where it is refused."""
        return self.compiled or 0.0


def variants(case: Case) -> Iterator[tuple[str, Case]]:
    """The case with every recipe, by name: as torchtitan uses them, and with what makes them faster."""
    tp, sharded = case.layout.tp > 1, case.layout.dp_shard > 1
    styles = "float8" if tp else "plain"
    base = replace(case.float8, casts=(), fp8_all_gather=False, precompute_scale=False, tp_styles="plain")
    tensorwise = replace(base, recipe="tensorwise", tp_styles=styles)
    yield "tensorwise", replace(case, float8=tensorwise)
    if sharded:
        gathering = replace(tensorwise, fp8_all_gather=True, precompute_scale=True)
        yield "tensorwise, float8 all-gather", replace(case, float8=gathering)
    rowwise = replace(base, recipe="rowwise")
    yield "rowwise", replace(case, float8=rowwise)
    small = too_small_for_rowwise(case)
    if 0 < len(small) < len(BLOCK_LINEARS):
        kept = replace(rowwise, filter_fqns=(*rowwise.filter_fqns, *small))
        names = ", ".join(name.rpartition(".")[2] for name in small)
        yield f"rowwise, {names} in BF16", replace(case, float8=kept)
    yield "rowwise_with_gw_hp", replace(case, float8=replace(base, recipe="rowwise_with_gw_hp"))


def costed(name: str, case: Case, faults: Sequence[KnownFault], machine: Machine) -> Variant:
    """What a way to train is predicted to bring.

    Rules that exclude the case in BF16 too are about the harness, not about FP8.
    """
    in_bf16 = exclusions(replace(case, float8=Float8()))
    rule = next((rule for rule in exclusions(case) if rule not in in_bf16), expected_refusal(case))
    if rule is not None:
        return Variant(name=name, refused=rule.name, reason=rule.reason)
    graphs, eager = compiled(case), replace(case, compile="none", layout=replace(case.layout, async_tp=False))
    return Variant(
        name=name,
        compiled=speed_up(graphs, machine),
        eager=speed_up(eager, machine),
        tokens_s=tokens_s(graphs, machine),
        fault=faults[0].name if faults else "",
    )


def compiled(case: Case) -> Case:
    """The case with compiled blocks."""
    return case if case.compile != "none" else replace(case, compile="inductor")


def tokens_s(case: Case, machine: Machine) -> float:
    """Tokens a second and device."""
    return case.train.tokens / case.world_size / predicted_step(case, machine).total_s
