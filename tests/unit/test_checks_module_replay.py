"""The check `module_replay` finds every tensor that is further from its replay than rounding explains, and no other."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.module_replay import (
    INCOMPARABLE,
    LOSS,
    NO_REPLAY,
    NORM,
    NOTHING_COMPARED,
    SUM,
    TENSOR,
    check_module_replay,
)
from harness.expect.expectations import Expectations
from harness.expect.model import llama_model
from harness.expect.module_replay import EXACT, Bits, allowed_distance, sums_before
from harness.expect.relations import partner, stands_for_modules
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.matrix.numerics import Numerics, replayed_steps
from harness.promises import Limit
from harness.trace import Run
from harness.trace.model import ModuleDistance, SumTerms
from harness.verdict import Finding, Verdict
from tests.builders import make_distance as distance
from tests.builders import make_run, make_trace, make_witnesses, partly_judged, probes_for, run_of, with_rank, with_step

CASE = parse_case_id("tp2-tensorwise-v2048-s2-b16")
WQ = "layers.0.attention.wq"


SAME, OTHER_SUMS, NONE = Bits(), Bits(summed=False), Bits(same=False)


def allowed(case: Case = CASE, *, bits: Bits = SAME, **changes: object) -> float:
    return allowed_distance(case, distance(**changes), bits=bits)


def test_a_gradient_may_be_rounded_to_the_dtype_of_its_parameter() -> None:
    bits = Bits(reduced=False)
    wide, narrow = (
        allowed(parse_case_id(f"hsdp2x2-tensorwise-v2048-s2-{dtype}b16"), bits=bits, kind="grad", fqn=f"{WQ}.weight")
        for dtype in ("", "param.b16-")
    )
    assert wide < 2.0**-18 and 2.0**-8 < narrow < 2.0**-6


@pytest.mark.parametrize(
    ("words", "linear", "exact"),
    [
        ("tp8-rowwise-bias", "attention.wq", False),  # a CPU sums 16 columns in another order than 128
        ("tp8-rowwise-bias", "attention.wo", True),
        ("tp8-bf16-bias", "attention.wq", True),
        ("fsdp2-rowwise-bias", "attention.wq", True),
    ],
)
def test_columns_of_a_bias_are_summed_in_another_order(words: str, linear: str, exact: bool) -> None:
    of_bias = {"kind": "grad", "fqn": f"layers.0.{linear}.bias", "part": None, "parts": 1}
    assert (allowed(parse_case_id(f"{words}-v2048-f32"), bits=SAME, **of_bias) == EXACT) is exact


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({"kind": "output"}, True),
        ({"kind": "grad_input"}, True),
        ({"kind": "grad", "fqn": f"{WQ}.weight", "part": None, "parts": 1}, True),
        ({"kind": "grad", "fqn": f"{WQ}.bias", "part": None, "parts": 1}, False),
        ({"kind": "grad", "fqn": "head.weight", "part": None, "parts": 1}, False),
        ({"kind": "output", "fqn": "head"}, False),
        ({"kind": "input"}, False),  # whatever is between two modules
    ],
)
def test_a_converted_linear_of_any_model_is_judged_by_its_operands(changes: dict[str, object], exact: bool) -> None:
    case = parse_case_id("target.mine-tp2-tensorwise-v2048-s2-b16")
    model = msgspec.structs.replace(llama_model(CASE), converted=(WQ,))
    limits = [allowed_distance(case, distance(**changes), bits=bits, model=model) for bits in (SAME, NONE)]
    assert (limits[0] == EXACT) is exact and limits[1] > 1e-3


def test_of_any_model_what_is_behind_no_sum_is_exact() -> None:
    """A softmax, an activation or a norm that is 0.3 % off; what follows a sum over TP ranks has its rounding."""
    case = parse_case_id("target.mine-tp2-nosp-tensorwise-v2048-s2-b16")
    model = msgspec.structs.replace(llama_model(CASE), converted=(WQ,))
    words = (
        "output norm 1 0, input wq 1 0, output wq 2 0, input head 1 1, output head 1 1, grad_output head 1 1, "
        "grad_input head 2 1, grad_output wq 1 1, grad_input wq 1 0, input wq 1 0"
    )
    rows = [row.replace("wq", WQ).split() for row in words.split(", ")]
    tensors = [distance(kind=kind, fqn=fqn, parts=int(parts)) for kind, fqn, parts, _ in rows]
    for one, sums, row in zip(tensors, sums_before(tensors, model.converted), rows, strict=True):
        assert sums == int(row[-1])
        assert (allowed_distance(case, one, bits=SAME, model=model, sums=sums) == EXACT) == (not sums)


def replayed(*distances: ModuleDistance, case: Case = CASE) -> Run:
    return run_of(make_trace(case, module_distances=distances))


def check(*distances: ModuleDistance, case: Case = CASE) -> list[Finding]:
    again = replayed(*distances, distance(step=1, fqn="other"), distance(step=2, fqn="other"), case=case)
    return check_module_replay(case, make_run(case, module_tensors=()), make_witnesses(case, replay=again))


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("tp2-tensorwise-v2048-b16", (1, 2, 3, 4, 5)),
        ("tp2-tensorwise-v2048-s2-f32", (1, 2)),
        ("hsdp2x2-tensorwise-v2048-b16", (1, 2, 3, 4, 5)),
        ("tp2-tensorwise-v2048-f64", (1,)),  # parity is exact there: to tell what is wrong
        ("hsdp2x2-tensorwise-v2048-f64", ()),
        ("fsdp2-tensorwise-v2048-b16", ()),
        pytest.param(  # plain tensors under TP
            "target.torchtitan-tp2-rowwise-v2048-b16", (), marks=pytest.mark.plugin("torchtitan")
        ),
        ("target.torchtitan-hsdp2x2-rowwise-v2048-b16", (1, 2, 3, 4, 5)),
        ("tp2-tensorwise-graph-v2048-b16", ()),  # compared bit for bit with its eager partner
        ("single-tensorwise-inductor-v2048-s2-b16", (1, 2)),  # code rounds elsewhere
        ("tp2-tensorwise-inductor-v2048-f64", ()),
        ("target.torchtitan-hsdp2x2-rowwise-inductor-v2048-b16", ()),
        ("tp2-tensorwise-v2048-s12-b16", tuple(range(1, 13))),
        ("tp2-tensorwise-v2048-s50-b16", (1, 2, 3, 4, 5, 6, 13, 20, 28, 35, 42, 50)),
        ("tp2-tensorwise-dim.512-layers.4-ffn.1408-v4096-s50-b16", (1, 2, 50)),  # 150 MB a step
        ("tp8-tensorwise-dim.512-layers.4-ffn.1408-v4096-s50-b16", (1, 50)),  # every rank has the terms of a sum
        ("tp2-tensorwise-llama3.8b.layer-v2048-b16", ()),  # 2 GB a step
    ],
)
def test_steps_of_cases_whose_trajectory_drifts_are_replayed_up_to_the_last(text: str, steps: tuple[int, ...]) -> None:
    assert replayed_steps(parse_case_id(text)) == steps


def test_what_is_not_replayed_has_a_reason_and_of_any_model_ranks_find_out() -> None:
    of = {dtype: parse_case_id(f"target.mine-tp2-tensorwise-v2048-{dtype}") for dtype in ("b16", "f64")}
    assert "module_tensors" in probes_for(of["b16"]) and "module_tensors" in Expectations(of["b16"]).not_recorded
    assert "module_tensors" not in probes_for(of["f64"])
    long, large = (parse_case_id(f"tp2-tensorwise-{part}-b16") for part in ("v2048-s50", "llama3.8b.layer-v2048"))
    left = partly_judged(Expectations(long))["module_replay"]
    assert left.startswith("steps 7-12, 14-19, ") and left.endswith("42, 50: modules are recorded in 12 steps")
    moved = "steps 6-50: the limit was measured over 5 steps"
    assert partly_judged(Expectations(long)) == {"module_replay": left, "underflow": moved}
    assert not partly_judged(Expectations(parse_case_id("tp2-tensorwise-v2048-b16")))
    assert "more than a replay can be given" in Expectations(large).not_recorded["module_tensors"]


@pytest.mark.plugin("torchtitan")
def test_plain_tensors_are_not_replayed() -> None:
    plain = parse_case_id("target.torchtitan-tp2-rowwise-v2048-b16")
    assert "torchtitan computes with plain tensors" in Expectations(plain).not_recorded["module_tensors"]


def test_what_is_exact_with_a_whole_vocabulary_and_without_tensor_parallelism() -> None:
    whole = parse_case_id("tp2-nolp-tensorwise-v2048-s2-b16")
    assert allowed(whole, kind="grad_output", parts=1, fqn="output") == EXACT
    case = parse_case_id("hsdp2x2-bf16-v2048-s2-b16")
    assert allowed(case, kind="input", parts=1) == EXACT
    assert allowed(case, bits=NONE, kind="input", parts=1) > EXACT
    assert 0 < allowed(case, bits=Bits(reduced=False), kind="grad", part=None) < 1e-5


@pytest.mark.parametrize(
    ("bits", "changes", "limit"),
    [
        # sums in rank order
        (SAME, {"kind": "output", "parts": 1, "fqn": "output"}, EXACT),
        (SAME, {"kind": "input", "parts": 1, "fqn": "norm"}, EXACT),  # the residual stream, behind sums over ranks
        (SAME, {"kind": "grad_output", "parts": 1, "fqn": "norm"}, EXACT),
        (SAME, {"parts": 2}, EXACT),  # every part is compared by itself
        (SAME, {"parts": 8, "spread": 4.0}, EXACT),
        (SAME, {"kind": "grad_output", "parts": 1, "fqn": "output", "tail": 1 / 1024}, 6.7e-6),  # the sums of the loss
        (SAME, {"kind": "grad_output", "parts": 1, "fqn": "output", "tail": 1 / 1024, "dtype": "float32"}, 9e-8),
        (SAME, {"kind": "param", "fqn": f"{WQ}.weight"}, EXACT),
        (SAME, {"kind": "grad", "fqn": f"{WQ}.weight", "part": None}, EXACT),
        (SAME, {"kind": "grad", "fqn": "norm.weight", "part": None}, EXACT),
        # sums in another order
        (OTHER_SUMS, {"kind": "output", "parts": 1}, EXACT),
        (OTHER_SUMS, {"kind": "grad_input", "parts": 1}, EXACT),
        (OTHER_SUMS, {"kind": "output", "parts": 1, "fqn": "output"}, 0.007),
        (OTHER_SUMS, {"kind": "input", "parts": 1}, EXACT),  # attention and activation, from exact operands
        (OTHER_SUMS, {"kind": "grad_output", "parts": 1}, EXACT),
        (OTHER_SUMS, {"kind": "output", "parts": 1, "fqn": "norm"}, EXACT),
        (OTHER_SUMS, {"kind": "input", "parts": 1, "fqn": "norm"}, 0.007),  # the residual stream, behind sums
        (OTHER_SUMS, {"kind": "grad_output", "parts": 1, "fqn": "norm"}, 0.007),
        (OTHER_SUMS, {"kind": "grad_output", "parts": 1, "fqn": "layers.1.feed_forward.w2"}, 0.007),
        (OTHER_SUMS, {"kind": "grad_output", "parts": 1, "fqn": "output"}, 0.007),  # the sums of the loss
        (OTHER_SUMS, {"parts": 4}, EXACT),
        (OTHER_SUMS, {"kind": "param", "fqn": f"{WQ}.weight"}, EXACT),
        (OTHER_SUMS, {"kind": "grad", "fqn": f"{WQ}.weight", "part": None}, 2e-6),
        (OTHER_SUMS, {"kind": "grad", "fqn": "norm.weight", "part": None}, 0.007),
        # a kernel may sum otherwise
        (NONE, {"parts": 2}, 0.007),
        (NONE, {"parts": 8}, 0.012),
        (NONE, {"parts": 2, "spread": 4.0}, 0.017),
    ],
)
def test_limits_follow_from_the_bits_that_are_promised(bits: Bits, changes: dict[str, object], limit: float) -> None:
    assert limit / 2 <= allowed(bits=bits, **changes) <= limit


def test_in_float32_limits_are_those_of_float32_unless_matmuls_round_to_bfloat16() -> None:
    for recipe, coarse in {"tensorwise": False, "rowwise": True}.items():
        case = parse_case_id(f"tp2-{recipe}-v2048-s2-f32")
        assert (allowed(case, bits=NONE, dtype="float32") > 1e-3) is coarse
        assert allowed(case, bits=NONE, dtype="float32", fqn="output") < 1e-5


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"kind": "output", "fqn": "layers.1"}, 0.03),
        ({"kind": "grad_output", "fqn": "tok_embeddings"}, 0.05),
        ({"kind": "grad", "fqn": f"{WQ}.weight"}, 0.2),
        ({"kind": "param", "fqn": f"{WQ}.weight"}, EXACT),
        ({"kind": "output", "fqn": "tok_embeddings"}, EXACT),
        ({"kind": "output", "fqn": "norm"}, EXACT),
    ],
)
def test_of_generated_code_blocks_are_replayed_and_the_rest_is_exact(changes: dict[str, object], limit: float) -> None:
    case, wide = (parse_case_id(f"tp2-tensorwise-inductor-v2048-{dtype}") for dtype in ("b16", "f32"))
    assert limit / 2 <= allowed(case, parts=1, **changes) <= limit
    assert allowed(wide, parts=1, **changes) <= limit / 10, "0.5 % of a softmax scale is found in float32"


def test_with_float8_tp_styles_gradients_are_cast_between_modules() -> None:
    styled = parse_case_id("tp2-tensorwise-tpstyle.fp8-v2048-s2-f32")
    behind = ({"kind": "grad_output", "fqn": "layers.0.ffn_norm"}, {"kind": "grad", "fqn": f"{WQ}.weight"})
    for changes in behind:
        assert allowed(styled, bits=NONE, dtype="float32", parts=1, **changes) == Limit("modules.next_to_a_cast")
        plain = parse_case_id("tp2-tensorwise-v2048-s2-f32")
        assert allowed(plain, bits=NONE, dtype="float32", parts=1, **changes) < 2e-6
    narrow = parse_case_id("tp2-tensorwise-tpstyle.fp8-v2048-s2-b16")
    assert allowed(narrow, bits=NONE, kind="grad", fqn=f"{WQ}.weight") < 2e-6
    for changes in ({"kind": "grad", "fqn": "layers.0.ffn_norm.weight"}, {"kind": "input", "fqn": "norm"}):
        assert allowed(styled, bits=NONE, dtype="float32", parts=1, **changes) < 2e-6


@pytest.mark.parametrize("words", ["accum2-reduce.last-b16", "accum2-b16", "accum2-f32"])
def test_the_replay_adds_up_microbatches_before_ranks_as_ranks_do(words: str) -> None:
    case = parse_case_id(f"tp2-tensorwise-v2048-gb4-s2-{words}")
    assert allowed(case, kind="grad", fqn="layers.0.ffn_norm.weight", part=None) == EXACT
    shared = parse_case_id(f"fsdp2-tp2-cp2-tensorwise-v2048-gb4-s2-{words}")
    whole = parse_case_id(f"fsdp2-tp2-cp2-tensorwise-v2048-gb4-s2-{words[-3:]}")
    limits = [allowed(of, kind="grad", fqn="layers.0.ffn_norm.weight", part=None) for of in (shared, whole)]
    assert limits[1] == EXACT and (limits[0] == EXACT) == words.endswith("f32")


def test_a_real_device_promises_no_bits() -> None:
    assert allowed(bits=NONE, kind="output", parts=1) > EXACT
    off = (distance(kind="input", parts=1, distance=1e-3), distance(step=2))  # what attention hands on
    again, run = replayed(*off), make_run(CASE, module_tensors=(), virtual=("scaled_mm",))
    assert check_module_replay(CASE, run, make_witnesses(CASE, replay=again))
    on_cuda = make_witnesses(CASE, replay=again, numerics=Numerics(same_in_parts=False))
    assert not check_module_replay(CASE, run, on_cuda), "the exact matmul there makes attention no other kernel"


KINDS = st.sampled_from(["input", "output", "grad_output", "grad_input", "grad", "param"])


@given(kind=KINDS, parts=st.sampled_from([1, 2, 4, 8]), share=st.floats(0, 3, exclude_min=True), step=st.integers(1, 2))
def test_what_is_too_far_is_found_and_nothing_else(kind: str, parts: int, share: float, step: int) -> None:
    limit = allowed(kind=kind, parts=parts)
    findings = check(distance(step=step, kind=kind, parts=parts, distance=limit * share))
    assert [finding.step for finding in findings] == ([step] if limit * share > limit else [])


def test_a_finding_names_the_first_tensor_in_the_order_of_execution() -> None:
    (finding,) = check(
        distance(distance=0.02),
        distance(fqn="layers.1.ffn_norm", kind="input", distance=0.5),
        distance(distance=0.001),
        distance(distance=0.0),
    )
    assert (finding.verdict, finding.module, finding.size) == (Verdict.NUMERIC, WQ, 0.5)
    told = (finding.rule, finding.values["tensor"], finding.values["part"])
    assert told == (TENSOR.name, "gradient of the input", "")
    assert (finding.values["count"], finding.values["compared"], finding.values["distance"]) == (3, 5, 0.02)
    assert finding.values["allowed"] == EXACT


def test_a_finding_names_the_rank_whose_part_is_off_and_none_where_all_are() -> None:
    (finding,) = check(distance(distance=0.004, of_ranks={0: 0.0, 1: 0.004}))
    assert (finding.rank, finding.values["part"]) == (1, ", partial of rank 1,")
    (finding,) = check(distance(kind="grad", part=None, parts=1, distance=0.005, of_ranks={0: 0.0, 1: 0.005}))
    assert (finding.rank, finding.values["part"]) == (1, ", shard of rank 1,")
    (finding,) = check(distance(kind="grad", part=None, parts=1, distance=0.5, of_ranks={0: 0.5, 1: 0.5}))
    assert (finding.rank, finding.ranks, finding.values["part"]) == (None, (), "") and "on all ranks" in finding.message
    (finding,) = check(distance(kind="grad", part=None, parts=1, distance=0.5, of_ranks={0: 0.5}))
    assert (finding.rank, finding.ranks) == (None, ()) and "shard of" not in finding.message
    case = parse_case_id("fsdp2-tp2-tensorwise-v2048-s2-b16")
    (finding,) = check(distance(part=1, distance=0.5), case=case)
    assert (finding.rule, finding.module, finding.values["part"]) == (TENSOR.name, WQ, " on data-parallel rank 1")


@pytest.mark.parametrize(
    ("of_ranks", "ranks"),
    [
        ({0: 0.0, 1: math.nan}, (1,)),
        ({0: 0.3, 1: 0.0}, (0,)),
        ({0: 0.3, 1: math.nan}, ()),  # rank 1 has neither these bits nor those of the replay: it may be off too
        ({}, ()),
    ],
)
def test_of_unequal_replicas_the_one_that_is_off_is_named_if_others_are_not(
    of_ranks: dict[int, float], ranks: tuple[int, ...]
) -> None:
    (finding,) = check(distance(distance=math.nan, problem="ranks hold different values", of_ranks=of_ranks))
    assert (finding.rule, finding.ranks) == (INCOMPARABLE.name, ranks)


@pytest.mark.parametrize(
    ("weights", "ranks", "ended"),
    [
        ({0: (1.0, 0.0), 1: (0.0, 1.0)}, (), "their local result, on all ranks"),
        ({0: (0.5, 0.5), 1: (0.5, 0.5)}, (), "it is averaged instead of summed, on all ranks"),
        ({0: (2.0, 2.0), 1: (2.0, 2.0)}, (), "it is 2 times the sum, on all ranks"),
        ({0: (1.0, 1.0), 1: (0.0, 1.0)}, (1,), "rank 1 goes on with 0 x rank 0 + 1 x rank 1, on rank 1"),
    ],
)
@pytest.mark.parametrize("problem", [None, "ranks that hold the same tensor hold different values"])
def test_a_sum_over_tp_that_is_not_formed_names_the_module_that_computed_its_parts(
    weights: dict[int, tuple[float, ...]], ranks: tuple[int, ...], ended: str, problem: str | None
) -> None:
    terms = SumTerms(fqn="layers.0.attention.wo", ranks=(0, 1), weights=weights)
    off = distance(fqn="layers.0.ffn_norm", kind="input", parts=1, distance=0.2, terms=terms, problem=problem)
    (finding,) = check(off)
    assert (finding.rule, finding.module, finding.operand) == (SUM.name, "layers.0.attention.wo", "output")
    assert (finding.ranks, finding.step) == (ranks, 1) and finding.message.endswith(ended)


def test_nan_and_what_was_not_compared_never_pass() -> None:
    (finding,) = check(distance(distance=math.nan))
    assert finding.size == math.inf
    (finding,) = check(distance(distance=math.nan, problem="the run did not record it"))
    assert finding.verdict is Verdict.INVARIANT
    assert (finding.rule, finding.values["problem"]) == (INCOMPARABLE.name, "the run did not record it")
    run = make_run(CASE, module_tensors=())
    (finding,) = check_module_replay(CASE, run, make_witnesses(CASE))
    assert (finding.rule, finding.judged) == (NO_REPLAY.name, False)
    (finding, *_) = check_module_replay(CASE, run, make_witnesses(CASE, replay=run_of(make_trace(CASE))))
    assert finding.rule == NOTHING_COMPARED.name


@pytest.mark.parametrize(("name", "off"), [("loss", 1e-5), ("grad_norm", 1e-8), ("loss", math.nan)])
def test_reported_numbers_are_those_of_the_recorded_tensors(name: str, off: float) -> None:
    again = replayed(distance(), distance(step=2))
    value = getattr(make_run(CASE).traces[1].steps[1], name) + off
    run = with_step(make_run(CASE, module_tensors=()), 1, 2, **{name: value})
    (finding,) = check_module_replay(CASE, run, make_witnesses(CASE, replay=again))
    assert (finding.step, finding.rank) == (2, 1)
    assert finding.rule == {"loss": LOSS, "grad_norm": NORM}[name].name
    assert finding.values["number"] == name


def test_a_rank_without_all_steps_is_left_to_other_checks() -> None:
    again = replayed(distance(), distance(step=2))
    short = with_rank(make_run(CASE, module_tensors=()), 1, lambda trace: replace(trace, steps=trace.steps[:1]))
    assert check_module_replay(CASE, short, make_witnesses(CASE, replay=again)) == []


COMPILED = parse_case_id("tp2-tensorwise-graph-v2048-s2-b16")


def test_the_partner_of_a_compiled_case_is_judged_in_its_place() -> None:
    run = make_run(COMPILED)
    of_partner = ("in tp2-tensorwise-v2048-s2-b16", TENSOR.name, "gradient of the input", WQ)
    for far, expected in ((0.0, []), (0.02, [of_partner])):
        other = replayed(distance(distance=far), distance(step=2))
        found = check_module_replay(COMPILED, run, make_witnesses(COMPILED, partner=other))
        assert [(one.within, one.rule, one.values["tensor"], one.module) for one in found] == expected
    (found,) = check_module_replay(COMPILED, run, make_witnesses(COMPILED))
    assert (found.rule, found.judged) == (NO_REPLAY.name, False)
    found, *_ = check_module_replay(COMPILED, run, make_witnesses(COMPILED, partner=make_run(CASE)))
    assert found.rule == NOTHING_COMPARED.name


@pytest.mark.parametrize(
    ("text", "stands"),
    [
        ("tp2-tensorwise-graph-v2048-b16", True),
        ("fsdp2-atp2-rowwise-ac.full-graph-v2048-b16", True),
        ("tp2-tensorwise-ac.full-v2048-b16", False),  # eager: its own modules are replayed
        ("tp2-tensorwise-graph-v2048-f64", False),  # parity is exact
    ],
)
def test_partners_stand_for_the_modules_of_compiled_cases_alone(text: str, stands: bool) -> None:
    case = parse_case_id(text)
    assert stands_for_modules(case, partner(case)) is stands
