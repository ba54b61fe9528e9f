"""Is every tensor cast to float8 with the correct scale, and does the cast lose as many values as on one rank?

A scale has a form and a value, ranks agree on it, and matmuls use it. It belongs to a logical tensor. Ranks that hold
the same tensor, or shards of it, must share its scale, computed from the amax over all of them. Ranks that hold
different tensors must not share one.

A cast to float8 loses small values, and large ones saturate. How many follows from the values and their scale alone,
whatever the layout: every shard of a tensor is cast with the scale of the tensor. So the shares over all ranks are
those of the single-rank reference, which replays the data-parallel ranks one after another. Results keep them for every
operand, linear and step.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

from msgspec.structs import replace

from harness.checks.assembly import largest, same_number
from harness.checks.casts import (
    Broken,
    CastKey,
    CastRules,
    Casts,
    cast_sources,
    casts_by_key,
    earlier_casts,
    implied_by_power,
    implied_source,
    inverse,
    least_share,
    on_ranks,
)
from harness.checks.check import Mismatch, Rule, Rules, Stage, Witnesses, findings_by_rule, finished
from harness.checks.failures import unfinished
from harness.expect.expectations import CASTS, Expectations
from harness.expect.model import CastForm, CastSite, replica_axes, scale_axes, scaled_dim
from harness.matrix.case import Case
from harness.matrix.layout import DP_AXES, peers
from harness.matrix.numerics import Numerics, activations_differ, clips_by_a_rounded_norm, sums_in_order
from harness.promises import Limit
from harness.registry import computes_on_plain_shards
from harness.text import counted, format_numbers
from harness.trace import RankTrace, Run
from harness.trace.operands import GEMM_OPERANDS, CastRecord, CastShare, MatmulRecord, ScaleSummary
from harness.verdict import Finding

_rule = Rules(
    "scales",
    Stage.SCALES,
    located=True,
    only={"a damaged trace": "scale-dtype scale-shape", "an own target": "not-styled"},
)
RULES = CastRules(_rule)
DIFFERENT = _rule("different-per-rank", "ranks that hold the same tensor use different scales")
SHARED = _rule("shared", "ranks that hold different tensors share all scales")
REPLICAS = _rule("replicas", "replicas of a tensor have different float8 data", stage=Stage.OPERAND)
NOT_STYLED = _rule("not-styled", "no linear has a float8 TP style")
DIM = _rule("dim", "scaled along the wrong dim")
SOURCE_DTYPE = _rule("source-dtype", "cast from the wrong dtype")
LOCAL = _rule("local-tensor", "local tensor was cast instead of its DTensor")
NO_CAST = _rule("no-cast", "matmul operand has no preceding cast", stage=Stage.VALUES)
MATMUL_SCALE = _rule("matmul-scale", "matmul uses the wrong scale for its operand", stage=Stage.VALUES)
MATMUL_SCALES = _rule("matmul-scales", "a matmul uses other block scales than its operand has", stage=Stage.VALUES)
MATMUL_DATA = _rule("matmul-data", "the matmul operand differs from the float8 data that was cast", stage=Stage.VALUES)


def _not_judged(expect: Expectations, device: str) -> str:
    on_plain_shards = computes_on_plain_shards(expect.case.target) and expect.case.layout.tp > 1
    if not on_plain_shards or expect.case.float8.traits.block:  # a block is whole in every shard
        return ""
    return "modules get plain tensors under TP, which do not tell which part of an operand they are"


@_rule.judged_by(
    blind="Casts in generated code; a high-precision operand that was wrong before its cast.",
    not_judged=_not_judged,
    records=("operands",),
    formula=CASTS,
    needs_linears=True,
)
def check_scales(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Is every tensor cast to float8 with the correct scale, and multiplied with it?"""
    expect = witnesses.expect
    casts = {trace.rank: casts_by_key(trace) for trace in run.by_rank}
    return findings_by_rule(
        [
            *_counts(expect, casts),
            *_forms(expect, casts),
            *_shared_scales(case, casts),
            *_separate_scales(case, casts),
            *(mismatch for trace in run.by_rank for mismatch in _matmuls(expect, trace)),
        ],
        partial(_source, case, casts),
    )


def _source(case: Case, casts: Casts, wrong: Mismatch) -> str:
    """Return what a scale was made from instead of the right amax, or of which block it is; empty if nothing fits."""
    if wrong.rule not in (RULES.amax, RULES.scale_range, DIFFERENT):
        return ""
    place, cast = next(item for item in casts[wrong.rank].items() if item[1].index == wrong.order)
    group = _group(case, casts, wrong.rank, place)
    if case.float8.traits.power_of_two_scales or case.float8.traits.block:
        lowest, highest = _scaled_amaxes(cast, list(group.values()))
        earlier = earlier_casts(casts, wrong.rank, place)
        power = implied_by_power(case.float8.traits, cast, lowest, highest, earlier)
        return power or _furthest_block(case, cast)
    right = largest(part.amax for part in group.values())
    sources = cast_sources(case, casts, wrong.rank, place, group)
    return implied_source(cast.target_dtype, cast.scale.maximum, right, sources)


def _furthest_block(case: Case, cast: CastRecord) -> str:
    """Return where the block is whose amax * scale is furthest from the middle of where it must be."""
    if not cast.extreme_blocks:
        return ""
    traits = case.float8.traits
    middle = 256 * 512 if traits.rounds_scales_down else 448**2 * least_share(traits)  # squared
    is_high = not cast.scaled_amax_minimum * cast.scaled_amax_maximum < middle
    line, block = divmod(cast.extreme_blocks[is_high], cast.scale.shape[-1])
    return f"furthest off is block {block} of {'row' if cast.axiswise_dim else 'column'} {line}"


def _counts(expect: Expectations, casts: Casts) -> Iterator[Mismatch]:
    """Yield every linear is cast as often as the recipe demands, in every step, and nothing else is cast."""
    if expect.case.float8.tp_styles == "float8" and not expect.linears.styled:
        yield Mismatch(1, 0, 0, "the model", NOT_STYLED, "at least 1", "none")
    for rank, by_key in casts.items():
        found, expected = Counter(key for key, _ in by_key), expect.of(rank).casts
        for step in range(1, expect.case.train.steps + 1):
            sites = {CastSite(*key[1:]) for key in found if key.step == step} | set(expected)
            for site in sorted(sites):
                count, forms = found[CastKey(step, *site)], expected.get(site, ())
                if site.role == "weight" and site.fqn in expect.linears.own_forward and count < len(forms):
                    continue  # it may keep a cast within a step; `lifetime` says for how long
                if count != len(forms) and not (site.phase == "all_gather" and count > len(forms) > 0):
                    index = next((cast.index for (key, _), cast in by_key.items() if key.step == step), 0)
                    wanted, got = (
                        f"{counted(number, f'{site.role} cast')} in {site.phase}" for number in (len(forms), count)
                    )
                    operand, values = f"{site.role} in {site.phase}", (("of", ""),)
                    yield Mismatch(step, index, rank, site.fqn, RULES.number, wanted, got, operand, values)


def _forms(expect: Expectations, casts: Casts) -> Iterator[Mismatch]:
    for rank, by_key in casts.items():
        expected = expect.of(rank).casts
        for (key, occurrence), cast in by_key.items():
            forms = expected.get(CastSite(*key[1:]), ())
            form = forms[min(occurrence, len(forms) - 1)] if forms else None
            for broken in _form_rules(expect, cast, form):
                yield _mismatch(rank, cast, *broken)


def _form_rules(expect: Expectations, cast: CastRecord, form: CastForm | None) -> Iterator[Broken]:
    if form is not None:
        cast_form = CastForm(cast.axiswise_dim, cast.source_dtype, cast.target_dtype)
        for rule, right, wrong in zip((DIM, SOURCE_DTYPE, RULES.target_dtype), form, cast_form, strict=True):
            if right != wrong:
                yield rule, f"{right}", f"{wrong}"
    if _is_on_tp(expect, cast.fqn) and "tp" not in cast.mesh_axes:
        yield LOCAL, "a DTensor over tp", "a plain tensor"
    if cast.scale.shape not in _scale_shapes(cast):
        yield RULES.scale_shape, " or ".join(map(str, _scale_shapes(cast))), str(cast.scale.shape)
    yield from RULES.of_numbers(expect.case, cast)


def _is_on_tp(expect: Expectations, fqn: str) -> bool:
    """Return True if a linear computes with DTensors of TP ranks."""
    if expect.case.layout.tp == 1 or computes_on_plain_shards(expect.case.target):
        return False
    return expect.has_formulas or fqn in expect.linears.on_tp


def _scale_shapes(cast: CastRecord) -> tuple[tuple[int, ...], ...]:
    dim = scaled_dim(cast)
    if dim is None:
        return (), (1,)
    if cast.block[1]:
        lines = cast.local_shape if dim else cast.local_shape[::-1]
        return (tuple(size // part for size, part in zip(lines, cast.block, strict=True)),)
    return (tuple(1 if axis == dim else size for axis, size in enumerate(cast.local_shape)),)


def _shared_scales(case: Case, casts: Casts) -> Iterator[Mismatch]:
    """Yield ranks that hold one tensor share its scale, which follows from the amax over these ranks.

    Where scales of replicas differ, and each follows from what its own ranks hold, the tensor differed before its cast.
    """
    for rank, by_key in casts.items():
        for key, cast in by_key.items():
            group = _group(case, casts, rank, key)
            first, replicas = min(group), peers(case.layout, rank, replica_axes(cast))
            differs = cast.scale.digest != group[first].scale.digest
            broken = list(_amax_rules(case, cast, _shards(case, casts, rank, key))) if differs or rank == first else []
            if differs:
                wrong = broken or first not in replicas
                wrong = wrong or any(_amax_rules(case, group[first], _shards(case, casts, first, key)))
                expected = f"the scale of rank {first}: {group[first].scale}"
                yield _mismatch(rank, cast, DIFFERENT if wrong else REPLICAS, expected, str(cast.scale))
            replica = min(replicas)
            if cast.data_digest != group.get(replica, cast).data_digest:
                expected = f"the data of rank {replica}: {group[replica].data_digest}"
                yield _mismatch(rank, cast, REPLICAS, expected, cast.data_digest)
            if rank == first:
                yield from (_mismatch(rank, cast, *violation) for violation in broken)


def _group(case: Case, casts: Casts, rank: int, place: tuple[CastKey, int]) -> dict[int, CastRecord]:
    """Return the cast on every rank that must share its scale."""
    ranks = peers(case.layout, rank, scale_axes(case, casts[rank][place]))
    return on_ranks(casts, ranks, place)


def _shards(case: Case, casts: Casts, rank: int, place: tuple[CastKey, int]) -> list[CastRecord]:
    """Return the cast on the ranks that hold the tensor together with this one, without its replicas."""
    cast = casts[rank][place]
    axes = set(scale_axes(case, cast)) - set(replica_axes(cast))
    return list(on_ranks(casts, peers(case.layout, rank, axes), place).values())


def _amax_rules(case: Case, cast: CastRecord, group: list[CastRecord]) -> Iterator[Broken]:
    """Yield the scale follows from the amax of the whole tensor or row, whose parts `group` holds."""
    traits = case.float8.traits
    if traits.power_of_two_scales or traits.block:
        yield from RULES.of_powers(traits, cast.target_dtype, *_scaled_amaxes(cast, group))
    else:
        yield from RULES.of_tensor(cast, largest(other.amax for other in group))


def _scaled_amaxes(cast: CastRecord, group: list[CastRecord]) -> tuple[float, float]:
    """Return the smallest and the largest amax * scale of the tensor, or its rows, whose parts `group` holds."""
    # EXEMPT: rows of zeros, which the probe leaves out; and the smallest row where rows are sharded, because the amax
    # of each row may be on another rank.
    dim = scaled_dim(cast)
    highest = largest(other.scaled_amax_maximum for other in group)
    sharded = dim is None or any(placement == f"Shard({dim})" for placement in cast.placements)
    return highest if sharded else min(other.scaled_amax_minimum for other in group), highest


def _separate_scales(case: Case, casts: Casts) -> Iterator[Mismatch]:
    """Activations of data-parallel ranks are different tensors: sharing all scales cannot be a coincidence."""
    if case.layout.dp == 1 or 0 not in casts:
        return
    dp_ranks = peers(case.layout, 0, DP_AXES)
    first: CastRecord | None = None
    for key, cast in casts[0].items():
        if cast.role == "weight":
            continue
        group = on_ranks(casts, dp_ranks, key).values()
        if len({other.data_digest for other in group}) > 1:
            if len({other.scale.digest for other in group}) > 1:
                return
            first = first or cast
    if first is not None:
        expected = "different scales on data-parallel ranks, because their data differ"
        yield _mismatch(0, first, SHARED, expected, str(first.scale))


def _matmuls(expect: Expectations, trace: RankTrace) -> Iterator[Mismatch]:
    """Yield every matmul uses the data and the scales of the latest casts of its operands."""
    assert trace.operands is not None
    records: Iterable[CastRecord | MatmulRecord] = sorted(
        (*trace.operands.casts, *trace.operands.matmuls), key=lambda record: record.index
    )
    latest: dict[tuple[str, str], CastRecord] = {}
    for record in records:
        if isinstance(record, CastRecord):
            latest[record.fqn, record.role] = record
            continue
        for side, role in zip("ab", GEMM_OPERANDS[record.gemm], strict=True):
            site = expect.linears.input_sites.get(record.fqn, record.fqn) if role == "input" else record.fqn
            place = record.step, record.index, trace.rank, record.fqn
            for broken in _operand_rules(expect.case, record, side, latest.get((site, role))):
                yield Mismatch(*place, *broken, f"{role} of matmul {record.gemm}")


def _operand_rules(case: Case, matmul: MatmulRecord, side: str, cast: CastRecord | None) -> Iterator[Broken]:
    if cast is None:
        yield NO_CAST, "a cast", "none"
        return
    is_a = side == "a"
    scale, digest = (matmul.a_scale, matmul.a_digest) if is_a else (matmul.b_scale, matmul.b_digest)
    expected = _matmul_scales(case, matmul, cast.scale)
    if not all(map(same_number, (scale.minimum, scale.maximum), expected)):
        yield MATMUL_SCALE, f"{expected}", str(scale)
    size = matmul.m * matmul.k if is_a else matmul.k * matmul.n
    whole = cast.elements == size and (
        matmul.gemm in ("evaluation", "forward", "recompute") or (matmul.gemm == "dgrad" and is_a) or cast.block[1] > 0
    )
    if cast.block[1] and scale.digest != cast.scale.digest:
        yield MATMUL_SCALES, cast.scale.digest, scale.digest
    if whole and cast.phase != "gathered" and digest != cast.data_digest:
        yield MATMUL_DATA, cast.data_digest, digest


def _matmul_scales(case: Case, matmul: MatmulRecord, scale: ScaleSummary) -> tuple[float, float]:
    """Return the smallest and largest scale that a matmul must be given for an operand cast with `scale`.

    Rowwise gradients run without fast accumulation, where torchao multiplies without scales and divides afterwards.
    """
    if case.float8.traits.block:
        return scale.minimum, scale.maximum
    if matmul.gemm in ("dgrad", "wgrad") and case.float8.traits.scales_rows(matmul.gemm):
        return 1.0, 1.0
    return inverse(scale)


def _mismatch(rank: int, cast: CastRecord, rule: Rule, expected: str, found: str) -> Mismatch:
    operand = f"{cast.role} in {cast.phase}"
    return Mismatch(cast.step, cast.index, rank, cast.fqn, rule, expected, found, operand)


# How far a share may be from the single-rank one.
EXACT, OF_REPLICAS = Limit("underflow.exact"), Limit("underflow.replicas")
ROUNDED, ROUNDED_DOWN = Limit("underflow.rounded"), Limit("underflow.rounded_down")
# ROUNDED and ROUNDED_DOWN were measured over so many steps. Later, rounding has driven two runs too far apart.
MEASURED_STEPS = 5

_underflow = Rules("underflow", Stage.OPERAND, located=True)
NO_REFERENCE = _underflow.no_reference()
NOTHING_COMPARED = _underflow(
    "nothing-compared",
    "no casts in common with the single-rank reference",
    stage=Stage.RUN,
    located=False,
    judged=False,
)
_MOVED = (
    "{found:.3g} of the values of {operand} of {module} {become}, and {expected:.3g} in the single-rank reference: "
    "difference {distance:.2g}, tolerance {allowed:.2g} ({count} of {compared} operands)"
)
FLUSHED = _underflow("flushed", _MOVED, numeric=True)
SATURATED = _underflow("saturated", _MOVED, numeric=True)


def _partly(expect: Expectations, device: str) -> str:
    steps, judged = expect.case.train.steps, judged_steps(expect.case, expect.numerics)
    later = [*range(judged + 1, steps + 1)]
    return f"{format_numbers('step', later)}: the limit was measured over {judged} steps" if later else ""


@_underflow.judged_by(
    partly=_partly,
    blind="A recipe that loses as much on one rank; casts in compiled blocks, whose losses are not recorded.",
    not_judged=lambda expect, device: "" if expect.case.float8.enabled else "nothing is cast to float8",
    records=("operands",),
    needs_linears=True,
)
def check_underflow(case: Case, run: Run, witnesses: Witnesses) -> Iterator[Finding]:
    """Do casts flush to zero, and saturate, the same share of every operand as on one rank?"""
    solo = finished(witnesses.solo)
    if solo is None:
        yield unfinished(NO_REFERENCE, "the single-rank reference", witnesses.solo, run)
        return
    of_solo = {share.operand: share for share in solo.traces[0].cast_shares or ()}
    judged = judged_steps(case, witnesses.expect.numerics)
    mine = (share for share in cast_shares(run.traces) if share.step <= judged)
    both = [(share, of_solo[share.operand]) for share in mine if share.operand in of_solo]
    if not both:
        yield NOTHING_COMPARED.finding(expected="casts of the same operands")
    allowed = allowed_share(case, witnesses.expect.numerics)
    flushed = [(cast, cast.flushed / cast.elements, one.flushed / one.elements) for cast, one in both]
    saturated = [(cast, cast.saturated / cast.elements, one.saturated / one.elements) for cast, one in both]
    yield from _moved(FLUSHED, "become zero", flushed, allowed)
    yield from _moved(SATURATED, "saturate", saturated, allowed)


def allowed_share(case: Case, numerics: Numerics) -> float:
    """Return how far the share of an operand may be from the single-rank one."""
    if sums_in_order(case, numerics) or case.train.dtype == "float64":
        return EXACT
    moves = (
        activations_differ(case, numerics) or clips_by_a_rounded_norm(case) or case.float8.traits.power_of_two_scales
    )
    rounded = ROUNDED_DOWN if case.float8.traits.rounds_scales_down else ROUNDED
    return rounded if moves else OF_REPLICAS


def judged_steps(case: Case, numerics: Numerics) -> int:
    """Return how many steps are checked: all, where no rounding accumulates."""
    exact = allowed_share(case, numerics) in (EXACT, OF_REPLICAS)
    return case.train.steps if exact else min(case.train.steps, MEASURED_STEPS)


def _moved(rule: Rule, become: str, lost: list[tuple[CastShare, float, float]], allowed: float) -> Iterator[Finding]:
    """Yield the first operand that loses another share. `lost`: of every one, with its share here and on one rank."""
    apart = [(cast, found, expected, abs(found - expected)) for cast, found, expected in lost]
    wrong = [item for item in apart if not item[-1] <= allowed]
    if wrong:
        cast, found, expected, distance = min(wrong, key=lambda item: item[0].step)
        yield rule.finding(
            step=cast.step,
            module=cast.fqn,
            operand=cast.role,
            expected=f"{expected:.6g} of the values",
            found=f"{found:.6g}",
            size=max(item[-1] for item in wrong),
            become=become,
            distance=distance,
            allowed=allowed,
            count=len(wrong),
            compared=len(lost),
            values={"found": found, "expected": expected},
        )


def cast_shares(traces: Iterable[RankTrace]) -> tuple[CastShare, ...]:
    """Return how many values casts lost over all ranks and phases: one record per form of each operand and step."""
    sums: dict[tuple[object, ...], list[CastRecord]] = {}
    for cast in (cast for trace in traces if trace.operands is not None for cast in trace.operands.casts):
        sums.setdefault((cast.step, cast.fqn, cast.role, cast.axiswise_dim, cast.target_dtype), []).append(cast)
    return tuple(_added(casts) for casts in sums.values() if any(cast.elements for cast in casts))


def _added(casts: list[CastRecord]) -> CastShare:
    return CastShare(
        **{name: getattr(casts[0], name) for name in ("step", "fqn", "role", "axiswise_dim", "target_dtype")},
        **{name: sum(getattr(cast, name) for cast in casts) for name in ("elements", "flushed", "saturated")},
    )


def with_cast_shares(run: Run) -> Run:
    """Return a single-rank reference with the losses of its casts instead of its operands, which fill memory."""
    (trace,) = run.traces
    if trace.operands is None:
        return run
    return replace(run, traces=(replace(trace, operands=None, cast_shares=cast_shares(run.traces)),))
