"""Are operands that a trainer owns those of the current weight, from the gather to the last matmul that reads them?

A trainer that quantizes weights when FSDP2 has gathered them holds the operands until the next reshard: for backward,
recomputation and the microbatches of a pipeline. In the next unshard it writes into the same tensors. What is not
written then, or is used past its time, gives numbers of another weight and no error.
"""

from collections.abc import Iterator

from harness.checks.check import Mismatch, Rules, Stage, Witnesses, findings_by_rule
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.registry import REFERENCE
from harness.trace import RankTrace, Run
from harness.trace.unshards import HeldOperand, Unshard
from harness.verdict import Finding

_OWN = "dtype arrived padding refill partly casts again outdated overwritten unread beside held"
_rule = Rules("unshards", Stage.SCALES, located=True, only={"an own target": _OWN})
DTYPE = _rule("dtype", "a weight is gathered in another dtype than its trainer documents")
ARRIVED = _rule("arrived", "what was gathered is not the weight that the ranks have")
PADDED = _rule("padding", "the padding of uneven shards is in the operands of a weight")
REFILL = _rule("refill", "a weight is gathered, but its operands are not what quantizing it anew gives")
PARTLY = _rule("partly", "a weight is gathered, but one of its operands is not what quantizing it anew gives")
CASTS = _rule("casts", "a weight is quantized more often than its operands need in one unshard")
AGAIN = _rule("again", "a weight is quantized again, without a reshard in between")
OUTDATED = _rule("outdated", "a matmul reads an operand from before the last update of its weight")
OVERWRITTEN = _rule("overwritten", "a matmul reads an operand whose bytes have changed since its unshard")
UNREAD = _rule("unread", "operands of a weight are made, but no matmul reads them", stage=Stage.MODEL)
BESIDE = _rule("beside", "a weight stays in memory beside the operands that were made of it", stage=Stage.MEMORY)
HELD = _rule("held", "operands of a weight stay in memory after their last reader", stage=Stage.MEMORY)


def _not_judged(expect: Expectations, device: str) -> str:
    if not expect.case.float8.enabled or not expect.case.uses_fsdp:
        return "no trainer makes operands of gathered weights"
    return "the built-in Llama leaves its operands to torchao" if expect.case.target == REFERENCE else ""


@_rule.judged_by(
    blind="Operands without FSDP2; weights that are cut along columns; a quantization that is wrong every time.",
    not_judged=_not_judged,
    also_reads=("unshards",),
    unasked="unshards",
    absent="no trainer makes operands of a gathered weight",
)
def check_unshards(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Are owned operands those of the current weight, made once an unshard, read while they are right, then freed?"""
    return findings_by_rule(mismatch for trace in run.by_rank for mismatch in mismatches(trace))


def mismatches(trace: RankTrace) -> Iterator[Mismatch]:
    """Yield all that is wrong with the owned operands of one rank."""
    if trace.unshards is None:  # a stage of a pipeline may have no such weight
        return
    for unshard in trace.unshards.unshards:
        yield from _of_gather(trace.rank, unshard)
        yield from _of_operands(trace.rank, unshard)
    for use in trace.unshards.uses:
        rule = OVERWRITTEN if use.changed else OUTDATED
        expected, found = f"an operand of step {use.step}", f"one made in step {use.made}"
        if use.changed:
            expected, found = "the bytes of its unshard", "others"
        yield Mismatch(use.step, use.index, trace.rank, use.fqn, rule, expected, found, f"operand {use.operand}")
    for fqn in sorted({*trace.unshards.weights} - {*trace.unshards.read}):
        yield Mismatch(1, 0, trace.rank, fqn, UNREAD, "a matmul with each", "none")
    for kept in trace.unshards.held:
        rule = HELD if kept.what.startswith("operand") else BESIDE
        yield Mismatch(kept.step, 0, trace.rank, kept.fqn, rule, "freed by the reshard", kept.what)


def _of_gather(rank: int, unshard: Unshard) -> Iterator[Mismatch]:
    place = unshard.step, unshard.index, rank, unshard.fqn
    if unshard.sent != unshard.asked:
        yield Mismatch(*place, DTYPE, unshard.asked, unshard.sent)
    elif not unshard.arrived:
        yield Mismatch(*place, ARRIVED, "the shards of all ranks", "other values")
    if unshard.padded:
        yield Mismatch(*place, PADDED, "the same operands whatever the padding", "others")
    if unshard.casts > unshard.fresh_casts:
        yield Mismatch(*place, CASTS, f"{unshard.fresh_casts} casts", f"{unshard.casts}")
    if unshard.again:
        yield Mismatch(*place, AGAIN, "the operands of the last unshard", "a second quantization")
    if unshard.holds_gathered:
        yield Mismatch(*place, BESIDE, "freed when its operands are made", "what was gathered")


def _of_operands(rank: int, unshard: Unshard) -> Iterator[Mismatch]:
    place, right = (unshard.step, unshard.index, rank, unshard.fqn), [held.right for held in unshard.operands]
    for at, held in enumerate(unshard.operands):
        if not held.right:
            rule = PARTLY if any(right) else REFILL
            found = f"the operand of step {held.since}" if held.since else "other bytes"
            yield Mismatch(*place, rule, "an operand of the current weight", found, _name(at, held))


def _name(at: int, held: HeldOperand) -> str:
    return f"operand {at} ({held.dtype} {list(held.shape)})"
