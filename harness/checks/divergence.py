"""Where does a run first diverge from its solo witness? Compares operands in execution order, by step, rank and module.

The solo witness runs the same recipe on one rank and replays the data-parallel shards one after another: its n-th
replay corresponds to the n-th data-parallel rank. The result explains a parity failure; it does not set a verdict.

What must be equal, and how closely:

- Where the layout sums in the same order as one rank, and in float64, where rounding differs too little to change a
  float8 value, every operand that a rank holds whole is bitwise equal: scales and float8 data, at every step.
- In float64, scales and amaxes of tensors that are sharded over TP agree within one rounding to float32.
- In lower precision, sums over TP ranks and gradients over HSDP replicas round differently, so single elements land on
  the other side of a float8 rounding: scales and amaxes agree within TOLERANCES.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeVar

from msgspec.structs import replace

from harness.checks.assembly import factor, largest, same_number
from harness.checks.casts import CastKey, MatmulKey, casts_by_key, matmuls_by_key, on_ranks
from harness.checks.check import Mismatch, Rule, Rules, Stage, about_ranks
from harness.checks.parity import FLOAT32_LOSS, GRADIENTS
from harness.expect.model import scaled_dim
from harness.matrix.case import Case
from harness.matrix.layout import dp_rank, peers
from harness.matrix.linears import holds
from harness.matrix.numerics import VIRTUAL_DEVICE, Numerics, activations_differ, sums_in_order
from harness.promises import Limit
from harness.registry import computes_on_plain_shards
from harness.trace import RankTrace, Run
from harness.trace.operands import GEMM_OPERANDS, CastRecord, MatmulRecord, ScaleSummary
from harness.verdict import Finding, Value

RULES = _rule = Rules("divergence", Stage.OPERAND, located=True)
OPERAND = _rule(
    "operand",
    "first operand that diverges from the single-rank reference: {what} of {module} at step {step} on rank {rank}",
    numeric=True,
    key=("number",),
)
COUNT = _rule(
    "count",
    "forward equals one rank's, and backward starts from {times:.6g} times its gradient: the loss is divided by "
    "another count",
    numeric=True,
)
LOSS = _rule(
    "loss",
    "forward equals one rank's up to {last}, but neither its loss nor the gradient that backward starts from does: it "
    "is what comes behind, the loss, its labels, their mask or their count",
    numeric=True,
)

# Relative distance of a scale or an amax: later, and in the first step.
TOLERANCES = {role: Limit(f"operands.{role}") for role in ("weight", "input", "grad_output")}
FIRST_STEP_TOLERANCES = {"weight": 0.0, **{role: Limit(f"operands.first_{role}") for role in ("input", "grad_output")}}
ROUNDING = Limit("operands.rounding")

Key = TypeVar("Key", CastKey, MatmulKey)
Difference = tuple[str, str, str]  # (value, expected, found)


def first_divergence(
    case: Case, run: Run, witness: Run, *, has_formulas: bool = True, numerics: Numerics = VIRTUAL_DEVICE
) -> Finding | None:
    """The first operand, in execution order and then by rank, that differs from the solo witness; None if none does.

    None too where operands are plain shards, which cannot be compared with those of one rank.
    """
    if not (run.complete and witness.complete) or (case.layout.tp > 1 and computes_on_plain_shards(case.target)):
        return None
    comparison = _Comparison(case, run, witness.traces[0], numerics, has_formulas=has_formulas)
    mismatches = comparison.first_of_ranks(ROUNDING) or comparison.first_of_ranks(0.0)
    if not mismatches:
        return None
    first = min(mismatches, key=lambda mismatch: mismatch.place)
    ranks = [mismatch.rank for mismatch in mismatches if mismatch[:2] == first[:2]]
    return comparison.start_of_backward(first, ranks) or _at_attention(case, first.finding())


_AT_ATTENTION = {
    "input in forward": "wq, wk and wv got what they get on one rank: it is attention, or the positions, order, mask, "
    "keys or values that ranks of context parallelism give it",
    "grad_output in backward": "wo got the gradient that it gets on one rank: it is what backward of attention gives "
    "for queries, keys and values, or the sum of the latter over ranks of context parallelism",
}
_BEHIND_ATTENTION = {"input in forward": ("wo",), "grad_output in backward": ("wq", "wk", "wv")}


def _at_attention(case: Case, finding: Finding) -> Finding:
    """The finding; of ranks that share sequences with what is between the linears of attention, if it begins there."""
    name = (finding.module or "").rpartition(".")[2]
    if case.layout.cp == 1 or name not in _BEHIND_ATTENTION.get(finding.operand, ()):
        return finding
    return replace(finding, notes=(*finding.notes, _AT_ATTENTION[finding.operand]))


def with_equal_operands(
    findings: Sequence[Finding], case: Case, numerics: Numerics, first: Finding | None
) -> tuple[Finding, ...]:
    """The findings; those about gradients whose matmuls all had the right operands say what is left to be wrong."""
    before = math.inf if first is None else first.step or 0
    note = "every operand of this step equals one rank's: gradients are added up, reduced or scaled in another way"
    return tuple(
        replace(finding, notes=(*finding.notes, note))
        if finding.rule == GRADIENTS.name and sums_in_order(case, numerics) and (finding.step or 0) < before
        else finding
        for finding in findings
    )


class _Comparison:
    """A run next to its solo witness, both by key and occurrence."""

    def __init__(self, case: Case, run: Run, witness: RankTrace, numerics: Numerics, *, has_formulas: bool) -> None:
        self._case = case
        self._ordered = sums_in_order(case, numerics)
        self._same_activations = not activations_differ(case, numerics)
        self._has_formulas = has_formulas
        self._run, self._witness = run, witness
        self._casts = {trace.rank: casts_by_key(trace) for trace in run.traces}
        self._scales_per_tp_rank = case.layout.tp > 1 and self._gathers_unequal_scales()
        self._sharp = case.train.dtype == "float64" and not self._scales_per_tp_rank
        self._witness_casts, self._witness_matmuls = casts_by_key(witness), matmuls_by_key(witness)
        self._factor = self._gradient_factor()
        # casts may be fewer on a rank than in a replay: float8 styles cast an output gradient once for both matmuls
        self._witness_counts: Counter[CastKey | MatmulKey] = Counter(key for key, _ in self._witness_casts)
        self._witness_counts.update(key for key, _ in self._witness_matmuls)

    def _gathers_unequal_scales(self) -> bool:
        """Return True when ranks gather shards of one weight by different scales, as torchao does under TP."""
        scales: dict[tuple[CastKey, int], set[str]] = defaultdict(set)
        for casts in self._casts.values():
            for key, cast in casts.items():
                if key[0].phase in ("all_gather", "gathered"):
                    scales[key].add(cast.scale.digest)
        return any(len(digests) > 1 for digests in scales.values())

    def start_of_backward(self, first: Mismatch, ranks: list[int]) -> Finding | None:
        """The finding about the loss where a run diverges at the first gradient of backward; None for any other."""
        of_step = ("grad_output", "backward", first.step)
        casts = self._casts[first.rank].items()
        gradients = [entry for entry in casts if (entry[0][0].role, entry[0][0].phase, entry[0][0].step) == of_step]
        if not gradients or not (self._sharp or self._sums_in_order(first.step)):
            return None
        key, cast = min(gradients, key=lambda entry: entry[1].index)
        if cast.index != first.order:
            return None
        replay = dp_rank(self._case.layout, first.rank)
        count = sum(other == key[0] for other, _ in self._casts[first.rank])
        expected = self._witness_casts.get((key[0], self._replayed(key[0], key[1], count, replay)))
        losses = [trace.steps[first.step - 1].loss for trace in (*self._run.traces, self._witness)]
        if expected is not None and expected.amax > 0:
            times = largest(shard.amax for shard in self._shards(first.rank, key)) / expected.amax
            same = cast.data_digest == expected.data_digest and abs(times - 1) > ROUNDING
            if same or factor(times, 1.0, self._case, within=ROUNDING) is not None:
                return self._of_loss(COUNT, first, ranks, times=times)
        differs = not largest(abs(loss - losses[-1]) for loss in losses) <= FLOAT32_LOSS  # NaN differs
        return self._of_loss(LOSS, first, ranks, last=key[0].fqn) if differs else None

    def _of_loss(self, rule: Rule, first: Mismatch, ranks: list[int], **values: Value) -> Finding:
        finding = rule.finding(
            step=first.step, module="loss", expected=first.expected, found=first.found, values=values
        )
        return about_ranks(finding, ranks, self._run)

    def _gradient_factor(self) -> float:
        """By what gradients of outputs are larger than in the witness, which divides its loss by `dp` as well.

        Ranks divide by it too, or leave that to FSDP2, which averages gradients of parameters: the first tells. Those
        of a Llama divide by all tokens.
        """
        if self._has_formulas:
            return 1.0
        for key, occurrence in self._casts[0]:
            expected = self._witness_casts.get((key, occurrence))
            if key.role == "grad_output" and expected is not None and expected.amax > 0:
                ratio = largest(shard.amax for shard in self._shards(0, (key, occurrence))) / expected.amax
                return min((1.0, float(self._case.layout.dp)), key=lambda factor: abs(ratio - factor))
        return 1.0

    def first_of_ranks(self, least: float) -> list[Mismatch]:
        """The first mismatch on each rank that has one; where numbers must be equal, the first larger than `least`.

        A smaller one is not the cause: what depends on it has the same float8 values.
        """
        firsts = (next(self.of(trace, least), None) for trace in self._run.by_rank)
        return [first for first in firsts if first is not None]

    def of(self, trace: RankTrace, least: float) -> Iterator[Mismatch]:
        casts, matmuls = self._casts[trace.rank], matmuls_by_key(trace)
        replay = dp_rank(self._case.layout, trace.rank)
        counts: Counter[CastKey | MatmulKey] = Counter(key for key, _ in casts)
        counts.update(key for key, _ in matmuls)
        present, missing = {key for key, _ in matmuls}, ("a scaled matmul", "none: was the linear converted?")

        def at(key: Key, occurrence: int) -> int:
            return self._replayed(_in_witness(key), occurrence, counts[key], replay)

        in_order: list[tuple[int, Iterator[Mismatch]]] = [
            (cast.index, self._cast(trace.rank, key, occurrence, at(key, occurrence), least))
            for (key, occurrence), cast in casts.items()
        ]
        in_order += [
            (matmul.index, self._matmul(trace.rank, key, matmul, at(key, occurrence), least))
            for (key, occurrence), matmul in matmuls.items()
        ]
        in_order += [
            (matmul.index, iter([_mismatch(key, matmul.index, trace.rank, "", f"matmul {key.gemm}", *missing)]))
            for (key, occurrence), matmul in self._witness_matmuls.items()
            if occurrence == 0 and key not in present and holds(self._case, trace.rank, key.fqn)
        ]
        for _, mismatches in sorted(in_order, key=lambda item: item[0]):
            yield from mismatches

    def _replayed(self, key: CastKey | MatmulKey, occurrence: int, count: int, replay: int) -> int:
        """Return the occurrence in the witness of this one of `count` on the data-parallel rank `replay`."""
        if isinstance(key, CastKey) and key.phase == "gathered" and self._case.train.evaluate:
            occurrence = max(0, occurrence - 1)  # evaluation reads it first
        microbatches = self._case.train.accumulation
        microbatch, within = divmod(occurrence, max(1, count // microbatches))
        of_witness = self._witness_counts[key] // (self._case.layout.dp * microbatches)
        within = min(within, max(0, of_witness - 1))  # checkpointing gathers a weight once more
        slice_, piece = divmod(replay, self._case.layout.cp)  # pieces of a microbatch are computed one after the other
        turn = (slice_ * microbatches + microbatch) * self._case.layout.cp + piece
        return turn * of_witness + within

    def _cast(self, rank: int, key: CastKey, occurrence: int, at: int, least: float) -> Iterator[Mismatch]:
        found, expected = self._casts[rank][key, occurrence], self._witness_casts.get((_in_witness(key), at))
        if key.phase == "all_gather":
            return
        operand = f"{key.role} in {key.phase}"
        if expected is None:
            if self._case.float8.tp_styles == "plain":
                yield _mismatch(key, found.index, rank, "", operand, "no such cast", "a cast")
            return
        for name, right, wrong in self._differences(found, expected, self._shards(rank, (key, occurrence)), least):
            yield _mismatch(key, found.index, rank, name, operand, right, wrong)

    def _sums_in_order(self, step: int) -> bool:
        """Return True when the layout sums in the order of one rank, so that every bit is equal."""
        return self._ordered or (self._same_activations and step == 1)

    def _same_data(self, cast: CastRecord) -> bool:
        """True when the float8 data must be the witness's: the tensor is replicated, and its rounding is the same."""
        whole = cast.phase != "gathered" and all(placement == "Replicate()" for placement in cast.placements)
        return whole and (self._sums_in_order(cast.step) or self._sharp)

    def _tolerance(self, role: str, step: int) -> float:
        if self._sums_in_order(step):
            return 0.0
        if self._sharp:
            return ROUNDING
        first = step == 1 and self._case.train.dtype == "float32" and not self._scales_per_tp_rank
        return (FIRST_STEP_TOLERANCES if first else TOLERANCES)[role]

    def _differences(
        self, found: CastRecord, expected: CastRecord, shards: list[CastRecord], least: float
    ) -> Iterator[Difference]:
        tolerance, factor = self._tolerance(found.role, found.step), self._factor_of(found.role)
        allowed = max(tolerance, least)
        if found.phase != "gathered":
            amax = largest(shard.amax for shard in shards)
            if not _near(amax, factor * expected.amax, allowed):
                yield "amax", f"{factor * expected.amax!r}{_give(tolerance)}", f"{amax!r}"
        if factor != 1:
            return  # scales and data follow from it: from another number, they are rounded to others
        if scaled_dim(found) is None and not _near(found.scale.maximum, expected.scale.maximum, allowed):
            yield "scale", f"{expected.scale}{_give(tolerance)}", str(found.scale)
        if scaled_dim(found) is not None:
            yield from _exponents(found, expected, shards, Limit("operands.exponent") if tolerance > ROUNDING else 0.0)
        if self._same_data(found) and found.data_digest != expected.data_digest:
            yield "float8 data", expected.data_digest, found.data_digest

    def _factor_of(self, role: str) -> float:
        return self._factor if role == "grad_output" else 1.0

    def _shards(self, rank: int, key: tuple[CastKey, int]) -> list[CastRecord]:
        """The cast on every TP rank that holds a shard of the tensor; on this rank alone where it is replicated."""
        whole = all(placement == "Replicate()" for placement in self._casts[rank][key].placements)
        others = (rank,) if whole else peers(self._case.layout, rank, ("tp",))
        return list(on_ranks(self._casts, others, key).values())

    def _matmul(self, rank: int, key: MatmulKey, found: MatmulRecord, at: int, least: float) -> Iterator[Mismatch]:
        expected = self._witness_matmuls.get((_in_witness(key), at))
        if expected is None:
            yield _mismatch(key, found.index, rank, "", f"matmul {key.gemm}", "no such matmul", "a matmul")
            return
        for side, role in zip("ab", GEMM_OPERANDS[key.gemm], strict=True):
            values = self._operand(side, role, found, expected, least) if self._factor_of(role) == 1 else None
            if values:
                yield _mismatch(key, found.index, rank, "", f"{role} of matmul {key.gemm}", *values)

    def _operand(
        self, side: str, role: str, found: MatmulRecord, expected: MatmulRecord, least: float
    ) -> tuple[str, str] | None:
        right, wrong = (
            (one.a_scale, one.a_digest) if side == "a" else (one.b_scale, one.b_digest) for one in (expected, found)
        )
        if self._sums_in_order(found.step):
            if least and right[1] == wrong[1] and _near(wrong[0].maximum, right[0].maximum, least):
                return None
            texts = f"{right[0]} x {right[1]}", f"{wrong[0]} x {wrong[1]}"
            return None if _bits(*right) == _bits(*wrong) else texts
        if (role == "weight" and self._scales_per_tp_rank) or not self._case.float8.traits.one_scale_per_tensor:
            return None  # EXEMPT: see `_gathers_unequal_scales`; row scales are compared at their cast
        tolerance = self._tolerance(role, found.step)
        if _near(wrong[0].maximum, right[0].maximum, max(tolerance, least)):
            return None
        return f"scale {right[0]}{_give(tolerance)}", f"scale {wrong[0]}"


def _near(found: float, expected: float, tolerance: float) -> bool:
    near = math.isfinite(expected) and abs(found - expected) <= tolerance * abs(expected)
    return near or same_number(found, expected)


def _give(tolerance: float) -> str:
    return f" ± {tolerance:g} of it" if tolerance else ""


def _mismatch(  # noqa: PLR0913, PLR0917  what differs, where, and from what
    key: CastKey | MatmulKey, order: int, rank: int, number: str, operand: str, expected: str, found: str
) -> Mismatch:
    values = (("number", number), ("what", f"{number} of {operand}" if number else operand))
    return Mismatch(key.step, order, rank, key.fqn, OPERAND, expected, found, operand, values)


def _in_witness(key: Key) -> Key:
    """Where the witness, which evaluates and recomputes nothing, does the same: in the forward of the same batch."""
    if isinstance(key, CastKey):
        return key._replace(phase="forward") if key.phase in ("evaluation", "recompute") else key
    return key._replace(gemm="forward") if key.gemm in ("evaluation", "recompute") else key


def _exponents(
    found: CastRecord, expected: CastRecord, shards: list[CastRecord], tolerance: float
) -> Iterator[Difference]:
    """Row scales by their mean exponent over all rows: those of this rank, or of all ranks where rows are sharded."""
    sharded = found.placements[-1:] not in ((f"Shard({scaled_dim(found)})",), ("Replicate()",), ())
    wrong = _mean_exponent([shard.scale for shard in shards] if sharded else [found.scale])
    right = _mean_exponent([expected.scale])
    rounding = Limit("operands.mean_exponent")
    if not (same_number(wrong, right) or abs(wrong - right) <= max(tolerance, rounding)):
        yield "mean exponent of the scales", f"{right:.4f} ± {tolerance:g}", f"{wrong:.4f}"


def _mean_exponent(scales: list[ScaleSummary]) -> float:
    return sum(scale.log2_total for scale in scales) / sum(math.prod(scale.shape) for scale in scales)


def _bits(scale: ScaleSummary, data_digest: str) -> tuple[object, ...]:
    return scale.shape, scale.dtype, scale.digest, data_digest
