"""Where does a run first diverge from its single-rank reference? Compares operands in execution order.

The reference runs the same recipe on one rank and replays the data-parallel shards one after another: its n-th replay
corresponds to the n-th data-parallel rank. The result explains a parity failure; it does not set a verdict. Every hint
is a claim about operands that were compared, and says how many.

What must be equal, and how closely:

- Where the layout sums in the same order as one rank, and in float64, where rounding differs too little to change a
  float8 value, every operand that a rank holds whole is bitwise equal: scales and float8 data, at every step.
- In float64, scales and amaxes of tensors that are sharded over TP agree within one rounding to float32.
- In lower precision, sums over TP ranks and gradients over HSDP replicas round differently, so single elements land on
  the other side of a float8 rounding: scales and amaxes agree within TOLERANCES.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from harness.checks.assembly import factor, largest, same_number
from harness.checks.casts import CastKey, MatmulKey, casts_by_key, matmuls_by_key, on_ranks
from harness.checks.check import Mismatch, Rules, Stage, about_ranks
from harness.checks.parity import FLOAT32_LOSS, GRADIENTS
from harness.expect.model import scaled_dim
from harness.matrix.case import Case
from harness.matrix.dims.pp import holds, stage_of, stages_of
from harness.matrix.layout import dp_rank, peers
from harness.matrix.linears import OUTPUT_FQN
from harness.matrix.numerics import (
    VIRTUAL_DEVICE,
    Numerics,
    activations_differ,
    averages_gradients,
    has_plain_shards,
    sums_in_order,
)
from harness.promises import Limit
from harness.text import counted, format_ranks
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
    "the loss gradient is {times:.6g}x the single-rank reference although the forward matches ({compared:n "
    "matmul|matmuls}): wrong token count",
    numeric=True,
)
LOSS = _rule(
    "loss",
    "forward matches the single-rank reference up to {last} ({compared:n matmul|matmuls}), but loss and first gradient "
    "do not: it is the {module} (look at labels, mask and token count)",
    numeric=True,
)

# Relative distance of a scale or an amax: later, and in the first step.
TOLERANCES = {role: Limit(f"operands.{role}") for role in ("weight", "input", "grad_output")}
FIRST_STEP_TOLERANCES = {"weight": 0.0, **{role: Limit(f"operands.first_{role}") for role in ("input", "grad_output")}}
ROUNDING = Limit("operands.rounding")

AnyKey = CastKey | MatmulKey
Key = TypeVar("Key", CastKey, MatmulKey)
Unequal = tuple[str, str, str, str]  # (value, operand, expected, found)


class _Place(NamedTuple):
    """What differs first on a rank, and in which microbatch of the step, from 0."""

    wrong: Mismatch
    key: AnyKey
    occurrence: int
    microbatch: int


def with_operands(
    findings: Sequence[Finding],
    case: Case,
    run: Run,
    witness: Run,
    *,
    has_formulas: bool = True,
    numerics: Numerics = VIRTUAL_DEVICE,
) -> tuple[Finding, ...]:
    """Return the findings and the first operand, in execution order and then by rank, that is not the reference's.

    Findings about a gradient say so where all operands of its matmuls equal those of the single-rank reference. Nothing
    is added where operands are plain shards, which cannot be compared with those of one rank.
    """
    if not (run.complete and witness.complete) or has_plain_shards(case):
        return tuple(findings)
    comparison = _Comparison(case, run, witness.traces[0], numerics, has_formulas=has_formulas)
    first = comparison.first()
    return (*map(comparison.noted, findings), *([] if first is None else [first]))


class _Comparison:
    """A run next to its single-rank reference, both by key and occurrence."""

    def __init__(self, case: Case, run: Run, witness: RankTrace, numerics: Numerics, *, has_formulas: bool) -> None:
        self._case = case
        self._ordered = sums_in_order(case, numerics)
        self._same_activations = not activations_differ(case, numerics)
        self._has_formulas = has_formulas
        self._run, self._witness = run, witness
        self._casts = {trace.rank: casts_by_key(trace) for trace in run.traces}
        self._matmuls = {trace.rank: matmuls_by_key(trace) for trace in run.traces}
        self._counts = {rank: _counted(casts, self._matmuls[rank]) for rank, casts in self._casts.items()}
        self._scales_per_tp_rank = case.layout.tp > 1 and self._gathers_unequal_scales()
        self._sharp = case.train.dtype == "float64" and not self._scales_per_tp_rank
        self._witness_casts, self._witness_matmuls = casts_by_key(witness), matmuls_by_key(witness)
        self._factor = self._gradient_factor()
        # casts may be fewer on a rank than in a replay: float8 styles cast an output gradient once for both matmuls
        self._witness_counts = _counted(self._witness_casts, self._witness_matmuls)

    def _gathers_unequal_scales(self) -> bool:
        """Return True if ranks gather shards of one weight by different scales, as torchao does under TP."""
        scales: dict[tuple[CastKey, int], set[str]] = defaultdict(set)
        for casts in self._casts.values():
            for key, cast in casts.items():
                if key[0].phase in ("all_gather", "gathered"):
                    scales[key].add(cast.scale.digest)
        return any(len(digests) > 1 for digests in scales.values())

    def first(self) -> Finding | None:
        """Return the finding about the first difference, or None."""
        places = self._first_of_ranks(ROUNDING) or self._first_of_ranks(0.0)
        if not places:
            return None
        first = min(places, key=self._causal_order)
        ranks = [place.wrong.rank for place in places if place.wrong[:2] == first.wrong[:2]]
        return self._start_of_backward(first, ranks) or self._of_operand(first)

    def _causal_order(self, place: _Place) -> tuple[int, ...]:
        """Stages of a pipeline execute other operands: there causes precede by microbatch, direction and stage."""
        wrong, key, stage = place.wrong, place.key, stage_of(self._case, place.key.fqn)
        direction = (1, -stage) if _is_backward(key) else (0, stage)
        of_stages = ("evaluation" not in key, place.microbatch, *direction) if self._case.layout.pp > 1 else ()
        return (wrong.step, *of_stages, wrong.order, wrong.rank)

    def _of_operand(self, place: _Place) -> Finding:
        several, at_attention = self._case.train.accumulation > 1, self._at_attention(place)
        finding = place.wrong.finding(
            ", microbatch {microbatch}" if several else "",
            notes=filter(None, (self._sent_by(place), at_attention)),
            microbatch=place.microbatch + 1,
        )
        if not (at_attention and finding.values["number"] == "amax"):
            return finding
        return replace(finding, values={**finding.values, "what": place.wrong.operand})  # its cast is not the cause

    def _matching(self, rank: int, place: _Place, *, backward: bool) -> list[str]:
        """Return the linears whose matmuls precede a place in this direction of its microbatch: each was compared."""
        return [
            key.fqn
            for (key, occurrence), matmul in self._matmuls[rank].items()
            if (key.step, _is_backward(key)) == (place.wrong.step, backward)
            and key.gemm != "recompute"
            and (key.gemm == "evaluation") == ("evaluation" in place.key)
            and self._microbatch(rank, key, occurrence) == place.microbatch
            and (matmul.index < place.wrong.order or rank != place.wrong.rank)
        ]

    def _agree(self, number: int, what: str, place: _Place) -> str:
        allowed = self._tolerance("grad_output" if _is_backward(place.key) else "input", place.wrong.step)
        return counted(number, f"{what} agrees", f"{what}s agree") + (
            f" within {allowed:g}" if allowed > ROUNDING else ""
        )

    def _sent_by(self, place: _Place) -> str:
        """Say of the first operand of a stage which stage sent it, where the matmuls there match."""
        case, rank, backward = self._case, place.wrong.rank, _is_backward(place.key)
        stage, role = stage_of(case, place.key.fqn), "grad_output" if backward else "input"
        sender = stage + (1 if backward else -1)
        before = [fqn for fqn in self._matching(rank, place, backward=backward) if stage_of(case, fqn) == stage]
        ranks = [peer for peer in peers(case.layout, rank, ("pp",)) if sender in stages_of(case, peer)]
        if case.layout.pp == 1 or before or not ranks or not place.wrong.operand.startswith(role):
            return ""
        number = sum(stage_of(case, fqn) == sender for fqn in self._matching(ranks[0], place, backward=backward))
        agree = self._agree(number, f"{'backward' if backward else 'forward'} matmul", place)
        return f"stage {sender} on rank {ranks[0]} sent it, where {agree}" if number else ""

    def _at_attention(self, place: _Place) -> str:
        """Say what is left where the other linears of an attention module match, up to the one that differs."""
        owner, _, name = place.key.fqn.rpartition(".")
        names = [*dict.fromkeys(key.fqn for key, _ in self._witness_matmuls if key.fqn.rpartition(".")[0] == owner)]
        backward = place.wrong.operand == "grad_output in backward"
        before = [fqn for fqn in self._matching(place.wrong.rank, place, backward=backward) if fqn in names]
        wanted = set(names[-1:] if backward else names[:-1])
        is_place = backward or place.wrong.operand in ("input in forward", "input in evaluation")
        in_attention = "att" in owner.rpartition(".")[2].lower() and is_place and place.key.fqn not in before
        of_cast = dict(place.wrong.values)["number"] in ("scale", "dtype")  # what is cast is the same
        if of_cast or not (in_attention and before and wanted <= set(before)):
            return ""
        linears = ", ".join(sorted({fqn.rpartition(".")[2] for fqn in before}))
        cp = peers(self._case.layout, place.wrong.rank, ("cp",)) if self._case.layout.cp > 1 else ()
        shared = f", or {'gradients' if backward else 'what'} {format_ranks(cp)} send each other" if cp else ""
        attention = f"RoPE, the mask, the softmax scale and attention itself{shared}"
        agree = self._agree(len(before), "matmul", place)
        return f"{linears}: {agree}, so check what is between them and {name}: {attention}"

    def _start_of_backward(self, first: _Place, ranks: list[int]) -> Finding | None:
        """Return the finding about the loss where the first gradient of backward differs; None for any other place."""
        wrong, key, rank = first.wrong, first.key, first.wrong.rank
        forward = self._matching(rank, first, backward=False)
        starts = wrong.operand == "grad_output in backward" and not self._matching(rank, first, backward=True)
        same_order = self._sharp or self._sums_in_order(wrong.step)
        if not (starts and forward and same_order and holds(self._case, rank, OUTPUT_FQN) and isinstance(key, CastKey)):
            return None
        place = (key, first.occurrence)
        expected = self._witness_casts.get(self._replayed(rank, *place))
        times, same = 0.0, False
        if expected is not None and expected.amax > 0:
            times = largest(shard.amax for shard in self._shards(rank, place)) / expected.amax
            same = self._casts[rank][place].data_digest == expected.data_digest and abs(times - 1) > ROUNDING
        losses = [trace.steps[wrong.step - 1].loss for trace in (*self._run.traces, self._witness)]
        values: dict[str, Value] = {"times": times, "compared": len(forward), "last": forward[-1]}
        rule, module = COUNT, "loss"
        if not same and factor(times, 1.0, self._case, within=ROUNDING) is None:
            if largest(abs(loss - losses[-1]) for loss in losses) <= FLOAT32_LOSS:  # NaN differs
                return None
            head = self._witness_matmuls.get((MatmulKey(wrong.step, forward[-1], "forward"), 0))
            at_logits = head is not None and head.n == self._case.model.padded_vocab_size
            between = "experts, final norm" if self._case.model.experts else "final norm"
            rule, module = LOSS, "loss" if at_logits else f"{between}, output layer or loss"
        finding = rule.finding(
            step=wrong.step, module=module, expected=wrong.expected, found=wrong.found, values=values
        )
        return about_ranks(finding, ranks, self._run)

    def noted(self, finding: Finding) -> Finding:
        """Return a finding about a gradient with what its operands tell; any other as it is."""
        key = MatmulKey(finding.step or 0, (finding.module or "").removesuffix(".weight"), "wgrad")
        if finding.rule != GRADIENTS.name or self._factor != 1 or not self._sums_in_order(key.step):
            return finding
        compared, wrong = set[int](), False
        for rank, counts in self._counts.items():
            for occurrence in range(counts[key]):
                wrong = wrong or any(self._matmul(rank, key, occurrence, 0.0))
                compared.add(self._replayed(rank, key, occurrence)[1])
        if wrong or not compared or len(compared) != self._witness_counts[key]:
            return finding
        which = counted(len(compared), "weight-gradient matmul has", "weight-gradient matmuls have")
        left = "this matmul, or how its gradient is accumulated, reduced or scaled"
        note = f"{which} operands that are bitwise identical to the single-rank reference: check {left}"
        return replace(finding, notes=(*finding.notes, note))

    def _gradient_factor(self) -> float:
        """By what gradients of outputs are larger than in the reference, which divides its loss by `dp` as well.

        Ranks divide by it too, or leave that to FSDP2, which averages gradients of parameters: the first tells. Those
        of a Llama divide by all tokens.
        """
        if self._has_formulas and not averages_gradients(self._case):
            return 1.0
        for key, occurrence in self._casts[0]:
            expected = self._witness_casts.get((key, occurrence))
            if key.role == "grad_output" and expected is not None and expected.amax > 0:
                ratio = largest(shard.amax for shard in self._shards(0, (key, occurrence))) / expected.amax
                return min((1.0, float(self._case.layout.dp)), key=lambda factor: abs(ratio - factor))
        return 1.0

    def _first_of_ranks(self, least: float) -> list[_Place]:
        """Return the first mismatch on each rank that has one; where numbers must be equal, one larger than `least`.

        A smaller one is not the cause: what depends on it has the same float8 values.
        """
        firsts = (next(self._of(trace, least), None) for trace in self._run.by_rank)
        return [first for first in firsts if first is not None]

    def _of(self, trace: RankTrace, least: float) -> Iterator[_Place]:
        rank, missing = trace.rank, ("a scaled matmul", "none: was the linear converted?")
        in_order: list[tuple[int, AnyKey, int, Iterator[Unequal]]] = [
            (cast.index, key, occurrence, self._cast(rank, key, occurrence, least))
            for (key, occurrence), cast in self._casts[rank].items()
            if key.phase != "all_gather"
        ]
        in_order += [
            (matmul.index, key, occurrence, self._matmul(rank, key, occurrence, least))
            for (key, occurrence), matmul in self._matmuls[rank].items()
        ]
        in_order += [
            (matmul.index, key, 0, iter([("", f"matmul {key.gemm}", *missing)]))
            for (key, occurrence), matmul in self._witness_matmuls.items()
            if occurrence == 0 and key not in self._counts[rank] and holds(self._case, rank, key.fqn)
        ]
        for order, key, occurrence, unequal in sorted(in_order, key=lambda item: item[0]):
            for number, operand, expected, found in unequal:
                values = (("number", number), ("what", f"{number} of {operand}" if number else operand))
                wrong = Mismatch(key.step, order, rank, key.fqn, OPERAND, expected, found, operand, values)
                yield _Place(wrong, key, occurrence, self._microbatch(rank, key, occurrence))

    def _microbatch(self, rank: int, key: AnyKey, occurrence: int) -> int:
        """Return which microbatch of its step an occurrence on a rank belongs to, from 0."""
        microbatches = self._case.train.accumulation
        return min(occurrence // max(1, self._counts[rank][key] // microbatches), microbatches - 1)

    def _replayed(self, rank: int, key: Key, occurrence: int) -> tuple[Key, int]:
        """Return what the reference does where this rank does this: the key and its occurrence there."""
        count, replay, key = self._counts[rank][key], dp_rank(self._case.layout, rank), _in_witness(key)
        if isinstance(key, CastKey) and key.phase == "gathered" and self._case.train.evaluate:
            occurrence = max(0, occurrence - 1)  # evaluation reads it first
        microbatches = self._case.train.accumulation
        microbatch, within = divmod(occurrence, max(1, count // microbatches))
        of_witness = self._witness_counts[key] // (self._case.layout.dp * microbatches)
        within = min(within, max(0, of_witness - 1))  # checkpointing gathers a weight once more
        slice_, piece = divmod(replay, self._case.layout.cp)  # pieces of a microbatch are computed one after the other
        turn = (slice_ * microbatches + microbatch) * self._case.layout.cp + piece
        return key, turn * of_witness + within

    def _cast(self, rank: int, key: CastKey, occurrence: int, least: float) -> Iterator[Unequal]:
        found = self._casts[rank][key, occurrence]
        expected = self._witness_casts.get(self._replayed(rank, key, occurrence))
        operand = f"{key.role} in {key.phase}"
        if expected is None:
            if self._case.float8.tp_styles == "plain":
                yield "", operand, "no such cast", "a cast"
            return
        if found.target_dtype != expected.target_dtype:
            yield "dtype", operand, expected.target_dtype, found.target_dtype
        shards, factor = self._shards(rank, (key, occurrence)), self._factor_of(found.role)
        tolerance = self._tolerance(found.role, found.step)
        allowed = max(tolerance, least)
        if found.phase != "gathered":
            amax = largest(shard.amax for shard in shards)
            if not _near(amax, factor * expected.amax, allowed):
                yield "amax", operand, f"{factor * expected.amax!r}{_give(tolerance)}", f"{amax!r}"
        if factor != 1:
            return  # scales and data follow from it: from another number, they are rounded to others
        if scaled_dim(found) is not None:
            exponent = Limit("operands.exponent") if tolerance > ROUNDING else 0.0
            yield from _exponents(found, expected, shards, operand, exponent)
        elif not _near(found.scale.maximum, expected.scale.maximum, allowed):
            yield "scale", operand, f"{expected.scale}{_give(tolerance)}", str(found.scale)
        if self._same_data(found) and found.data_digest != expected.data_digest:
            yield "float8 data", operand, expected.data_digest, found.data_digest

    def _sums_in_order(self, step: int) -> bool:
        """Return True if the layout sums in the order of one rank, so that every bit is equal."""
        return self._ordered or (self._same_activations and step == 1)

    def _same_data(self, cast: CastRecord) -> bool:
        """True if the float8 data must be the reference's: the tensor is replicated, and its rounding is the same."""
        whole = cast.phase != "gathered" and all(placement == "Replicate()" for placement in cast.placements)
        return whole and (self._sums_in_order(cast.step) or self._sharp)

    def _tolerance(self, role: str, step: int) -> float:
        if self._sums_in_order(step):
            return 0.0
        if self._sharp:
            return ROUNDING
        first = step == 1 and self._case.train.dtype == "float32" and not self._scales_per_tp_rank
        return (FIRST_STEP_TOLERANCES if first else TOLERANCES)[role]

    def _factor_of(self, role: str) -> float:
        return self._factor if role == "grad_output" else 1.0

    def _shards(self, rank: int, key: tuple[CastKey, int]) -> list[CastRecord]:
        """Return the cast on every TP rank that holds a shard of the tensor; on this rank alone if replicated."""
        whole = all(placement == "Replicate()" for placement in self._casts[rank][key].placements)
        others = (rank,) if whole else peers(self._case.layout, rank, ("tp",))
        return list(on_ranks(self._casts, others, key).values())

    def _matmul(self, rank: int, key: MatmulKey, occurrence: int, least: float) -> Iterator[Unequal]:
        found = self._matmuls[rank][key, occurrence]
        expected = self._witness_matmuls.get(self._replayed(rank, key, occurrence))
        if expected is None:
            yield "", f"matmul {key.gemm}", "no such matmul", "a matmul"
            return
        for side, role in zip("ab", GEMM_OPERANDS[key.gemm], strict=True):
            operand = f"{role} of matmul {key.gemm}"
            dtypes = (expected.a_dtype, found.a_dtype) if side == "a" else (expected.b_dtype, found.b_dtype)
            if dtypes[0] != dtypes[1]:
                yield "dtype", operand, *dtypes
            values = self._operand(side, role, found, expected, least) if self._factor_of(role) == 1 else None
            if values:
                yield "", operand, *values

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


def _counted(casts: Iterable[tuple[CastKey, int]], matmuls: Iterable[tuple[MatmulKey, int]]) -> Counter[AnyKey]:
    counts: Counter[AnyKey] = Counter(key for key, _ in casts)
    counts.update(key for key, _ in matmuls)
    return counts


def _is_backward(key: AnyKey) -> bool:
    return key[-1] in ("backward", "recompute", "dgrad", "wgrad")


def _near(found: float, expected: float, tolerance: float) -> bool:
    near = math.isfinite(expected) and abs(found - expected) <= tolerance * abs(expected)
    return near or same_number(found, expected)


def _give(tolerance: float) -> str:
    return f" ± {tolerance:g} of it" if tolerance else ""


def _in_witness(key: Key) -> Key:
    """Return where the reference, which evaluates and recomputes nothing, does it: in forward of the same batch."""
    if isinstance(key, CastKey):
        return key._replace(phase="forward") if key.phase in ("evaluation", "recompute") else key
    return key._replace(gemm="forward") if key.gemm in ("evaluation", "recompute") else key


def _exponents(
    found: CastRecord, expected: CastRecord, shards: list[CastRecord], operand: str, tolerance: float
) -> Iterator[Unequal]:
    """Row scales by their mean exponent over all rows: those of this rank, or of all ranks where rows are sharded."""
    sharded = found.placements[-1:] not in ((f"Shard({scaled_dim(found)})",), ("Replicate()",), ())
    wrong = _mean_exponent([shard.scale for shard in shards] if sharded else [found.scale])
    right = _mean_exponent([expected.scale])
    rounding = Limit("operands.mean_exponent")
    if not (same_number(wrong, right) or abs(wrong - right) <= max(tolerance, rounding)):
        yield "mean exponent of the scales", operand, f"{right:.4f} ± {tolerance:g}", f"{wrong:.4f}"


def _mean_exponent(scales: list[ScaleSummary]) -> float:
    return sum(scale.log2_total for scale in scales) / sum(math.prod(scale.shape) for scale in scales)


def _bits(scale: ScaleSummary, data_digest: str) -> tuple[object, ...]:
    return scale.shape, scale.dtype, scale.digest, data_digest
