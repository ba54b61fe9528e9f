"""The check `traffic` finds every collective that is wrong: by formula, and by the rules that hold for any model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks import traffic
from harness.checks.check import Rule, Witnesses
from harness.checks.traffic import CollectiveKey, Limits, check_traffic, count_limits
from harness.expect.expectations import Expectations
from harness.expect.model import found_model
from harness.matrix.axes import axis_values, case_from_axes
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.trace.counts import TrafficRecord
from harness.trace.model import Linear, ModelRecord, Parameter
from harness.trace.operands import CastRecord, OperandTrace
from harness.verdict import Finding
from tests.builders import make_case, make_cast, make_sent, make_trace, make_witnesses, rules, run_of, traffic_of

TP = parse_case_id("tp2-tensorwise-v2048-s3-f32")
GATHERED = parse_case_id("fsdp2-tensorwise-ag.fp8-v2048-s3-f32")
HSDP = parse_case_id("hsdp2x2-tensorwise-ag.fp8-v2048-s3-f32")
PRECOMPUTED = parse_case_id("fsdp2-tensorwise-ag.fp8pre-v2048-s3-f32")
Records = tuple[TrafficRecord, ...]
Casts = tuple[CastRecord, ...]


def check(case: Case, *traffic: Records | None) -> list[Finding]:
    run = run_of(*(make_trace(case, rank, traffic=recorded) for rank, recorded in enumerate(traffic)))
    return check_traffic(case, run, make_witnesses(case))


def changed(case: Case, key: CollectiveKey, **changes: object) -> Records:
    """A correct record with one kind of traffic changed in every step."""
    records = tuple(
        replace(record, **changes) if (record.axis, record.kind, record.op, record.dtype) == key else record
        for record in traffic_of(case)
    )
    assert records != traffic_of(case)
    return records


def without(case: Case, key: CollectiveKey) -> Records:
    return tuple(r for r in traffic_of(case) if (r.axis, r.kind, r.op, r.dtype) != key)


@pytest.mark.parametrize("case", [TP, GATHERED, PRECOMPUTED], ids=["tp", "gathered", "precomputed"])
def test_what_the_formula_says_is_good(case: Case) -> None:
    assert check(case, traffic_of(case, 0), traffic_of(case, 1)) == []


@given(st.data(), st.sampled_from(["payload_bytes", "sizes", "kind", "op", "dtype", "axis"]))
def test_every_change_of_every_record_is_found_at_its_step_and_rank(data: st.DataObject, field: str) -> None:
    case = data.draw(st.sampled_from([TP, GATHERED, PRECOMPUTED]))
    right = traffic_of(case)
    index, rank = data.draw(st.integers(0, len(right) - 1)), data.draw(st.integers(0, 1))
    old = getattr(right[index], field)
    new = {int: lambda: old + 1, dict: lambda: old | {5: 1}, str: lambda: f"other {old}"}[type(old)]()
    wrong = (*right[:index], replace(right[index], **{field: new}), *right[index + 1 :])
    findings = check(case, *((wrong, right) if rank == 0 else (right, wrong)))
    assert findings
    assert {(finding.step, finding.rank) for finding in findings} == {(right[index].step, rank)}
    assert all(finding.expected and finding.found for finding in findings)


def test_a_record_too_much_or_missing_or_none_is_found() -> None:
    extra = replace(traffic_of(TP)[0], kind="broadcast", step=2)
    (finding,) = check(TP, (*traffic_of(TP), extra), traffic_of(TP))
    assert (finding.step, finding.rank, finding.expected) == (2, 0, "none")
    late = replace(traffic_of(TP)[0], step=4)
    assert check(TP, (*traffic_of(TP), late), traffic_of(TP))[0].step == 4
    assert check(TP, (), ())
    assert check(make_case(), ()) == []  # one rank sends nothing, and said so


def test_weights_that_travel_in_high_precision_are_told_in_plain_words() -> None:
    """All 7 gathers in float32, as without float8 all-gather: 2.0 of the bytes of bfloat16."""
    wrong = traffic_of(parse_case_id("fsdp2-tensorwise-v2048-s3-f32"))
    first, *rest = check(GATHERED, wrong, wrong)
    assert (first.rule, first.ranks) == (traffic.HIGH_PRECISION.name, (0, 1))
    assert (first.step, first.expected, first.found) == (1, "at most 0.51 of the bytes of bfloat16", "2.00")
    assert [finding.rule for finding in rest] == [traffic.VOLUME.name] * 3


@pytest.mark.parametrize(("asked", "done", "word"), [("reshard.never-", "", "often"), ("", "reshard.never-", "seldom")])
def test_weights_that_are_gathered_another_number_of_times_are_told_in_plain_words(asked, done, word) -> None:
    case, other = (parse_case_id(f"fsdp2-{option}tensorwise-ag.fp8-v2048-s3-f32") for option in (asked, done))
    first, *rest = check(case, traffic_of(other), traffic_of(other))
    assert (first.rule, first.ranks) == (traffic.GATHERS.name, (0, 1))
    assert dict(first.values) == {"often": word, "axis": "dp_shard"}
    assert not {traffic.AMAX_MISSING.name, traffic.HIGH_PRECISION.name} & rules(rest)


def test_keys_that_are_not_gathered_are_no_weights_that_are_gathered_too_seldom() -> None:
    """Both travel along one axis."""
    case, other = (parse_case_id(f"fsdp2-{option}tensorwise-v2048-s3-f32") for option in ("cp2-", ""))
    of_weights = traffic_of(other)
    wrong = tuple(
        next((one for one in of_weights if record.kind == "all_gather" and _kind(one) == _kind(record)), record)
        for record in traffic_of(case)
    )
    findings = check(case, wrong, wrong)
    assert findings[0].rule == traffic.VOLUME.name and "keys and values of attention" in findings[0].message
    assert {finding.rule for finding in findings} == {traffic.VOLUME.name}


def _kind(record: TrafficRecord) -> tuple[object, ...]:
    return record.step, record.axis, record.kind, record.op, record.dtype


def test_amax_reductions_that_are_missing_or_over_the_wrong_ranks_are_told_in_plain_words() -> None:
    wrong = without(TP, CollectiveKey("tp", "all_reduce", "max", "float64"))
    first, second = check(TP, wrong, wrong)
    assert (first.rule, second.rule) == (traffic.AMAX_MISSING.name, traffic.VOLUME.name)
    assert dict(first.values) == {"axis": "tp", "missing": 56}
    assert (first.expected, first.found) == ("57 reductions by max along tp", "1")
    assert "amax of weight of layers.0.attention.wq" in second.message
    key = CollectiveKey("dp_shard", "all_reduce", "max", "float32")
    wrong = changed(HSDP, key, axis="world")
    first, *_ = check(HSDP, *[wrong] * 4)
    assert (first.rule, first.values["axis"], first.ranks) == (traffic.AMAX_ELSEWHERE.name, "dp_shard", (0, 1, 2, 3))
    assert first.found == "0 along dp_shard, 28 too many along world"


REDUCED = CollectiveKey("dp_shard", "reduce_scatter", "sum", "float32")


@pytest.mark.parametrize(
    ("changes", "rule", "said"),
    [
        ({"dtype": "bfloat16"}, "reduce-dtype", "bfloat16 instead of float32, by reduce_scatter (sum) along dp_shard"),
        ({"axis": "dp_replicate"}, "instead", "reduce_scatter (sum) in float32 along dp_replicate instead of reduce_"),
        (
            {"kind": "all_reduce"},
            "instead",
            "all_reduce (sum) in float32 along dp_shard instead of reduce_scatter (sum)",
        ),
        ({"op": "avg"}, "instead", "reduce_scatter (avg) in float32 along dp_shard instead of reduce_scatter (sum)"),
        ({"op": "avg", "axis": "dp_replicate"}, "volume", "wrong number or size of reduce_scatter"),
    ],
)
def test_what_is_sent_instead_is_paired_where_one_thing_differs(changes: dict[str, str], rule: str, said: str) -> None:
    wrong = changed(HSDP, REDUCED, **changes)
    findings = check(HSDP, *[wrong] * 4)
    assert [finding.rule for finding in findings] == [f"traffic/{rule}"] * (2 if rule == "volume" else 1)
    assert said in findings[0].message
    assert rule == "volume" or "gradients of tok_embeddings, layers.0, layers.1, 1 more" in findings[0].message
    fewer = changed(HSDP, REDUCED, **changes, sizes={7: 1})  # of other inputs: nothing is known to replace another
    assert rules(check(HSDP, *[fewer] * 4)) == {traffic.VOLUME.name}


def test_gradients_that_are_not_reduced_are_named_where_the_parameters_are_recorded() -> None:
    (dim,) = {size for record in traffic_of(TP) if record.op == "sum" for size in record.sizes if size < 256}
    fqns = ("layers.0.ffn_norm.weight", "layers.0.attention.wq.bias")
    norm, bias = (
        Parameter(fqn=fqn, shape=(dim,), dtype="float32", local_elements=dim, axes=("tp",), trained=True)
        for fqn in fqns
    )
    wrong = tuple(
        replace(record, sizes={size: times for size, times in record.sizes.items() if size != dim})
        if record.op == "sum"
        else record
        for record in traffic_of(TP)
    )
    for parameters, named in (((norm, bias), "layers.0.ffn_norm"), ((), "norms")):
        model = replace(MODEL, parameters=parameters)
        traces = (make_trace(TP, rank, traffic=wrong, model=model) for rank in (0, 1))
        (finding,) = check_traffic(TP, run_of(*traces), make_witnesses(TP))
        assert f": 15 missing (gradients of {named}) on ranks" in finding.message


def test_a_compiled_run_may_cast_once_for_several_uses_or_twice_for_one() -> None:
    """Compilers merge equal casts and repeat cheap ones: the number of their amax reductions has limits."""
    case = parse_case_id("tp2-tensorwise-graph-v2048-s3-f32")
    key, limits = the_limits(case)
    assert (key.op, key.axis) == ("max", "tp")
    assert list(limits.fewest) == list(limits.most) == [1]
    fewest, most = limits.fewest[1], limits.most[1]
    (right,) = {record.sizes[1] for record in traffic_of(case) if record.dtype == key.dtype and record.op == "max"}
    assert fewest < right < most
    for count, good in ((fewest, True), (most, True), (fewest - 1, False), (most + 1, False)):
        wrong = changed(case, key, sizes={1: count}, payload_bytes=8 * count)
        assert (check(case, wrong, wrong) == []) is good
    assert count_limits(Expectations(TP), step=1, rank=0) == {}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_in_a_compiled_run_every_amax_has_the_size_of_one_that_is_expected(recipe: str) -> None:
    case = parse_case_id(f"tp2-{recipe}-graph-v2048-s3-f32")
    key, _ = the_limits(case)
    right = next(record for record in traffic_of(case) if (record.axis, record.kind, record.op, record.dtype) == key)
    first, *others = right.sizes
    longer = {first + 3: right.sizes[first]} | {size: right.sizes[size] for size in others}
    wrong = changed(case, key, sizes=longer)
    (finding,) = [finding for finding in check(case, wrong, wrong) if finding.rule == traffic.VOLUME.name]
    assert f"{right.sizes[first]} of {first + 3}" in (finding.found or "") or "..." in (finding.found or "")


def the_limits(case: Case) -> tuple[CollectiveKey, Limits]:
    """The only kind of collective whose number may vary."""
    ((key, limits),) = count_limits(Expectations(case), step=1, rank=0).items()
    return key, limits


def test_a_stale_scale_shows_as_amax_of_step_one_repeated() -> None:
    """Without the precomputed scales every gather reduces its own amax in every step."""
    wrong = tuple(
        replace(record, step=step) for step in (1, 2, 3) for record in traffic_of(PRECOMPUTED) if record.step == 1
    )
    assert {finding.step for finding in check(PRECOMPUTED, wrong, traffic_of(PRECOMPUTED))} == {2}


ANY_MODEL = parse_case_id("target.mine-hsdp2x2-tp2-tensorwise-ag.fp8-v2048-s1-f32")
SHARD = 64  # elements of the one weight on every rank


def sent(axis: str, kind: str, elements: int, *, op: str = "", dtype: str = "float32", times: int = 1) -> TrafficRecord:
    nbytes = elements * times * (1 if dtype == "uint8" else 4)
    return make_sent(1, axis=axis, kind=kind, op=op, dtype=dtype, payload_bytes=nbytes, sizes={elements: times})


MODEL = ModelRecord(
    linears=(Linear(fqn="up", in_features=16, out_features=32, converted=True),),
    parameters=(
        Parameter(
            fqn="up.weight",
            shape=(32, 16),
            dtype="float32",
            local_elements=SHARD,
            axes=("dp_replicate", "dp_shard", "tp"),
            trained=True,
        ),
    ),
    checkpointed=(),
    compiled=(),
    calls={"up": 2},
    recomputed={},
)
GOOD = (
    sent("dp_shard", "reduce_scatter", 2 * SHARD, op="sum"),
    sent("dp_replicate", "all_reduce", SHARD, op="sum"),
    sent("dp_shard", "all_gather", SHARD, dtype="uint8", times=2),
    sent("tp", "all_reduce", 1, op="max", dtype="float64"),
    sent("world", "all_reduce", 1, op="sum"),
)


CAST = make_cast(fqn="up", role="input", phase="forward", placements=("Shard(1)",), mesh_axes=("tp",))
BEFORE_GATHER = make_cast(fqn="up", role="weight", phase="all_gather")


def check_rules(
    records: Records = GOOD, case: Case = ANY_MODEL, casts: Casts | None = (CAST, BEFORE_GATHER, BEFORE_GATHER)
) -> list[Finding]:
    """What is found where every rank sends these records; `casts`: None in a compiled run."""
    operands = None if casts is None else OperandTrace(casts=casts, matmuls=())
    traces = (make_trace(rank=rank, traffic=records, operands=operands, model=MODEL) for rank in range(8))
    expect = Expectations(case, found_model(case, replace(MODEL, calls={"up": 8}), MODEL))
    return check_traffic(case, run_of(*traces), Witnesses(expect=expect))


def with_record(index: int, **changes: object) -> Records:
    return (*GOOD[:index], replace(GOOD[index], **changes), *GOOD[index + 1 :])


def test_what_must_be_sent_is_enough() -> None:
    assert check_rules() == []
    assert check_rules((*GOOD, sent("dp_shard+tp", "broadcast", 3))) == []
    often = with_record(2, payload_bytes=8 * SHARD)
    assert check_rules(often, casts=None) == [], "a compiled run does not say how often weights are gathered"


@pytest.mark.parametrize(
    ("index", "changes", "rule", "values"),
    [
        (0, {"sizes": {2 * SHARD - 1: 1}}, traffic.NOT_SUMMED, {"axis": "dp_shard"}),
        (0, {"dtype": "bfloat16"}, traffic.REDUCE_DTYPE, {"dtypes": "bfloat16", "asked": "float32"}),
        (1, {"sizes": {}}, traffic.NOT_SUMMED, {"axis": "dp_replicate"}),
        (2, {"dtype": "float32", "payload_bytes": 8 * SHARD}, traffic.HIGH_PRECISION, {}),
        (3, {"sizes": {}}, traffic.AMAX_MISSING, {"axis": "tp", "missing": 1}),
        (3, {"sizes": {256: 1}}, traffic.AMAX_MISSING, {"axis": "tp", "missing": 1}),  # the largest logits of tokens
        (4, {"axis": "ranks 0,3"}, traffic.UNKNOWN_RANKS, {}),
    ],
)
def test_what_is_wrong_for_any_model_is_found(
    index: int, changes: dict[str, object], rule: Rule, values: dict[str, object]
) -> None:
    (finding,) = check_rules(with_record(index, **changes))
    assert (finding.rule, dict(finding.values), finding.ranks) == (rule.name, values, tuple(range(8)))


def test_activations_that_are_scattered_without_sequence_parallelism_are_found() -> None:
    records = (*GOOD, sent("tp", "reduce_scatter", 64, op="sum"))
    assert check_rules(records) == []
    (finding,) = check_rules(records, case_from_axes(axis_values(ANY_MODEL) | {"sequence_parallel": False}))
    assert (finding.rule, finding.found) == (traffic.SCATTERED.name, "1 call")


DYNAMIC_SCALES = parse_case_id("target.mine-hsdp2x2-tp2-tensorwise-ag.fp8-v2048-s1-f32")


@pytest.mark.parametrize(
    ("axis", "times", "gathered_along", "found"),
    [
        ("dp_shard", 2, "dp_shard", []),
        ("world", 2, "dp_shard", [traffic.AMAX_ELSEWHERE.name]),
        ("dp_shard+tp", 2, "dp_shard", [traffic.AMAX_ELSEWHERE.name]),
        ("dp_replicate+tp", 2, "dp_shard", []),  # shards are not joined along it
        ("world", 1, "dp_shard", []),  # the amaxes of both weights at once
        ("dp_shard+tp", 2, "dp_shard+tp", []),  # as wide as the gathers
    ],
)
def test_the_amax_of_a_gathered_weight_is_reduced_over_no_more_ranks_than_gather_it(
    axis: str, times: int, gathered_along: str, found: list[str]
) -> None:
    gathers = replace(GOOD[2], axis=gathered_along)
    records = (*GOOD[:2], gathers, *GOOD[3:], sent(axis, "all_reduce", 1, op="max", times=times))
    assert [finding.rule for finding in check_rules(records, DYNAMIC_SCALES)] == found


PRECOMPUTED_SCALES = parse_case_id("target.mine-hsdp2x2-tp2-tensorwise-ag.fp8pre-v2048-s2-f32")
WEIGHTS = 4  # casts of weights before a gather, in each step


def maxima(*in_steps: int) -> list[Finding]:
    """What is found of a run in which a rank reduces so many amaxes one by one in its steps."""
    records = (
        replace(record, step=step)
        for step, count in enumerate(in_steps, 1)
        for record in (*GOOD, sent("dp_shard", "all_reduce", 1, op="max", times=count))
    )
    casts = (replace(BEFORE_GATHER, step=step) for step in (1, 2) for _ in range(WEIGHTS))
    return check_rules(tuple(records), PRECOMPUTED_SCALES, tuple(casts))


@pytest.mark.parametrize("own", [0, 2])
def test_a_weight_that_reduces_an_amax_although_its_scale_is_precomputed_is_found(own: int) -> None:
    assert maxima(WEIGHTS + own, own) == [], "the target may reduce numbers by max too"
    assert maxima(own, own) == [], "scales may be precomputed before the first step"
    (finding,) = maxima(WEIGHTS + own, own + 1)
    assert (finding.rule, finding.ranks) == (traffic.NOT_PRECOMPUTED.name, tuple(range(8)))
