"""Rules for the traffic of any model, which need no formula.

No collective along an unknown group, every gradient reduced over all data-parallel ranks, float8 weights gathered in
float8, an amax reduction for every cast of a tensor that ranks hold shards of, and none for a weight whose scale is
precomputed. How many collectives there are besides is compared with what the target states (`stated.py`) and with a
recorded signature (`signature.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from harness.checks.ranks import first_of_each, merge_ranks
from harness.checks.rule import Rules, Stage
from harness.expect.expectations import Expectations
from harness.expect.scale_groups import scaled_dim
from harness.matrix.layout import peers
from harness.matrix.recipes import ITEM_BYTES
from harness.plural import counted
from harness.trace import RankTrace, Run
from harness.trace.counts import TrafficRecord
from harness.trace.model import Parameter
from harness.trace.operands import CastRecord
from harness.verdict import Finding

NAME = "traffic"

RULES = Rules("traffic")
UNKNOWN_RANKS = RULES("unknown-ranks", Stage.COLLECTIVES, "a collective runs over ranks that no axis of the mesh joins")
NOT_SUMMED = RULES(
    "gradients-not-summed", Stage.COLLECTIVES, "gradients are not summed over all ranks of {axis}", key=("axis",)
)
REDUCE_DTYPE = RULES(
    "reduce-dtype", Stage.COLLECTIVES, "gradients are reduced in {dtypes} instead of {asked}", key=("dtypes", "asked")
)
HIGH_PRECISION = RULES(
    "high-precision", Stage.MODEL, "float8 all-gather is on, but converted weights are gathered in high precision"
)
AMAX_MISSING = RULES(
    "amax-missing",
    Stage.COLLECTIVES,
    "{missing:n amax reduction is|amax reductions are} missing along {axis}: each shard uses its own scale",
    key=("axis",),
)
NOT_PRECOMPUTED = RULES(
    "not-precomputed", Stage.COLLECTIVES, "scales are precomputed, and yet weights reduce an amax of their own"
)


def check_any_model(expect: Expectations, run: Run) -> list[Finding]:
    """One finding for every rule that is broken, at the first step; ranks with the same findings share them."""
    traces = {trace.rank: trace for trace in run.traces}

    def findings(trace: RankTrace) -> Iterator[Finding]:
        for step in range(1, expect.case.train.steps + 1):
            records = [record for record in trace.traffic or () if record.step == step]
            yield from _unknown_groups(step, records)
            yield from _gradients(expect, traces, trace, step, records)
            yield from _gathers(expect, trace, step, records)
            yield from _amax_reductions(expect, trace, step, records)
            yield from _not_precomputed(expect, trace, step)

    return merge_ranks(run, lambda trace: first_of_each(findings(trace)))


def _unknown_groups(step: int, records: list[TrafficRecord]) -> Iterator[Finding]:
    for axis in sorted({record.axis for record in records if record.axis.startswith("ranks")}):
        yield UNKNOWN_RANKS.finding(
            step=step,
            expected="the ranks of one or several mesh axes",
            found=axis,
        )


def _gradients(
    expect: Expectations, traces: dict[int, RankTrace], trace: RankTrace, step: int, records: list[TrafficRecord]
) -> Iterator[Finding]:
    """Every gradient is scattered over shards and summed over replicas, in one or several collectives."""
    layout = expect.case.layout
    for axis, kind in (("dp_shard", "reduce_scatter"), ("dp_replicate", "all_reduce")):
        ranks = peers(layout, trace.rank, ("dp_shard",)) if axis == "dp_shard" else (trace.rank,)
        wanted = sum(
            parameter.local_elements
            for rank in ranks
            for parameter in _parameters(traces.get(rank))
            if parameter.trained and axis in parameter.axes
        )
        found = sum(_elements(record) for record in records if (record.axis, record.kind) == (axis, kind))
        if found < wanted:
            yield NOT_SUMMED.finding(
                axis=axis,
                step=step,
                expected=f"{kind} of at least {wanted} elements, as many as there are parameters",
                found=f"{found} elements",
            )
    asked = expect.case.reduce_dtype
    dtypes = {record.dtype for record in records if (record.axis, record.kind) == ("dp_shard", "reduce_scatter")}
    if dtypes - {asked}:
        kept = {parameter.dtype for parameter in _parameters(trace) if parameter.trained}
        fix = "set reduce_dtype in MixedPrecisionPolicy, or `reduce_dtype` in the case to what you mean."
        yield REDUCE_DTYPE.finding(
            dtypes=", ".join(sorted(dtypes - {asked})),
            asked=asked,
            step=step,
            expected=f"reduce_scatter in {asked}",
            found=", ".join(sorted(dtypes)),
            fix=fix if kept == {expect.case.wide_dtype} else None,  # parameters of another dtype are mended first
        )


def _gathers(expect: Expectations, trace: RankTrace, step: int, records: list[TrafficRecord]) -> Iterator[Finding]:
    """Float8 all-gather sends one byte for every element of a converted weight, and not the two of bfloat16.

    How often weights are gathered is told by their casts, which are not recorded in compiled runs.
    """
    if not expect.case.gathers_float8 or expect.case.layout.dp_shard == 1 or trace.operands is None:
        return
    gathered = {f"{fqn}.weight" for fqn in expect.linears.gathered}
    sharded = [parameter for parameter in _parameters(trace) if "dp_shard" in parameter.axes]
    narrow = sum(parameter.local_elements for parameter in sharded if parameter.fqn in gathered)
    wide = sum(parameter.local_elements for parameter in sharded if parameter.fqn not in gathered)
    casts = _casts(trace, step)
    gathers = max(_times(casts, "all_gather").values(), default=2)
    found = sum(record.payload_bytes for record in records if (record.axis, record.kind) == ("dp_shard", "all_gather"))
    # A shard is padded to that of the first rank, which is at most a row longer.
    most = _PADDING * gathers * (narrow + wide * ITEM_BYTES[expect.case.train.dtype])
    if found > most:
        yield HIGH_PRECISION.finding(
            step=step,
            expected=f"at most {most:.0f} bytes",
            found=f"{found} bytes",
        )


_PADDING = 1.1


def _amax_reductions(
    expect: Expectations, trace: RankTrace, step: int, records: list[TrafficRecord]
) -> Iterator[Finding]:
    """As many reductions by max over TP ranks as casts of a tensor of which each of them holds a shard."""
    casts = [cast for cast in _casts(trace, step) if cast.phase not in ("all_gather", "gathered")]
    scalar = expect.case.float8.traits.one_scale_per_tensor
    wanted = sum(_is_sharded(cast, "tp") for cast in casts)
    found = sum(
        times
        for record in records
        if (record.axis, record.op) == ("tp", "max")
        for size, times in record.sizes.items()
        if size == 1 or not scalar
    )
    if found < wanted:
        yield AMAX_MISSING.finding(
            axis="tp",
            missing=wanted - found,
            step=step,
            expected=f"{counted(wanted, 'reduction')} by max along tp, one for every cast of a shard",
            found=str(found),
        )


def _not_precomputed(expect: Expectations, trace: RankTrace, step: int) -> Iterator[Finding]:
    """With precomputed scales no weight reduces an amax of its own after step 1, whose gathers may come too early.

    What else is reduced by max, number by number, is in step 1 too. Casts are not recorded in compiled runs.
    """
    if not (expect.case.gathers_float8 and expect.case.float8.precompute_scale) or trace.operands is None or step == 1:
        return
    first, found = (_lone_maxima(trace, each) for each in (1, step))
    of_weights = _times(_casts(trace, 1), "all_gather").total()
    allowed = first - of_weights if first >= of_weights else first
    if found > allowed:
        yield NOT_PRECOMPUTED.finding(
            step=step,
            expected=f"at most {counted(allowed, 'reduction')} of one number by max along dp_shard",
            found=str(found),
        )


def _lone_maxima(trace: RankTrace, step: int) -> int:
    """The reductions of one number by max over shards in a step."""
    records = [each for each in trace.traffic or () if (each.step, each.axis, each.op) == (step, "dp_shard", "max")]
    return sum(record.sizes.get(1, 0) for record in records)


def _is_sharded(cast: CastRecord, axis: str) -> bool:
    """True when the ranks along `axis` hold shards of what one scale of this cast spans."""
    dim = scaled_dim(cast)
    wanted = [placement for name, placement in zip(cast.mesh_axes, cast.placements, strict=True) if name == axis]
    return any(
        placement.startswith(("Shard", "_StridedShard")) and (dim is None or placement == f"Shard({dim})")
        for placement in wanted
    )


def _casts(trace: RankTrace, step: int) -> list[CastRecord]:
    return [cast for cast in (trace.operands.casts if trace.operands is not None else ()) if cast.step == step]


def _times(casts: list[CastRecord], phase: str) -> Counter[str]:
    """How often every weight is cast in a phase, by FQN."""
    return Counter(cast.fqn for cast in casts if (cast.phase, cast.role) == (phase, "weight"))


def _elements(record: TrafficRecord) -> int:
    return sum(size * times for size, times in record.sizes.items())


def _parameters(trace: RankTrace | None) -> tuple[Parameter, ...]:
    return () if trace is None or trace.model is None else trace.model.parameters
