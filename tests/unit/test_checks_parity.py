"""Parity, and witnesses that did not finish."""

from __future__ import annotations

import math
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.check import Rule, finished
from harness.checks.failures import unfinished, why_unfinished
from harness.checks.parity import (
    ELEMENTS,
    FLOAT32_LOSS,
    GRAD_NORM,
    GRADIENTS,
    INITIAL,
    LOSS,
    NO_REFERENCE,
    NO_TOLERANCE,
    NOTHING_COMPARED,
    ONE_SIDE,
    PARAMETERS,
    REPLICAS,
    REPORTED_NORM,
    TOKENS,
    check_parity,
    errors,
    same_bits,
    worst_distances,
)
from harness.evidence.tolerance import NONE_DERIVED, SAME_ORDER
from harness.matrix.case import Dtype
from harness.promises import Limit
from harness.trace import Run
from harness.trace.model import SKETCH_SIZE, TensorSketch
from harness.verdict import Finding, Verdict
from tests.builders import (
    make_case,
    make_failure,
    make_sketch,
    make_tolerance,
    make_trace,
    make_witnesses,
    run_of,
    with_sketches,
    with_step,
)

ALLOWED = (1e-3, 2e-3)
FQNS = ("a", "b")


def places() -> list[tuple[str, int, str]]:
    trained = [(fqn, step, kind) for kind in ("grad", "param") for step in (1, 2) for fqn in FQNS]
    return [*((fqn, 1, "initial") for fqn in FQNS), *trained]


def run(**off: float) -> Run:
    """Two ranks that hold a half of every tensor each. `off`: values of tensors by `kind_fqn_step`."""
    values = {place: off.get(f"{place[2]}_{place[0]}_{place[1]}", 1.0) for place in places()}
    halves = (
        tuple(make_sketch(*place, value=value, part=rank, parts=2) for place, value in values.items())
        for rank in range(2)
    )
    return run_of(*(make_trace(rank=rank, losses=(8.0, 8.0), sketches=half) for rank, half in enumerate(halves)))


def solo(**off: float) -> Run:
    """The same on one rank, which holds everything."""
    first, second = run(**off).traces
    return run_of(replace(first, sketches=(*first.sketches, *second.sketches)))


def is_lost(sketch: TensorSketch, lost: tuple[str, int]) -> bool:
    return (sketch.kind, sketch.step) == lost and sketch.fqn == "b"


def check(
    found: Run, expected: Run | None, *, dtype: Dtype = "float64", allowed: tuple[float, ...] | None = ALLOWED
) -> list[Finding]:
    case = make_case(tp=2, steps=2, dtype=dtype)
    tolerance = None if allowed is None else make_tolerance(*allowed, name="parity")
    return check_parity(case, found, make_witnesses(case, solo=expected, parity_tolerance=tolerance))


def test_what_one_rank_computes_has_no_findings() -> None:
    assert check(run(), solo()) == []


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("fqn", FQNS)
@pytest.mark.parametrize(("kind", "rule"), [("grad", GRADIENTS), ("param", PARAMETERS)])
def test_one_gradient_or_updated_parameter_is_found_and_named(kind: str, rule: Rule, fqn: str, step: int) -> None:
    (finding,) = check(run(**{f"{kind}_{fqn}_{step}": 1.01}), solo())
    assert (finding.step, finding.module, finding.verdict) == (step, fqn, Verdict.NUMERIC)
    assert (finding.rule, finding.values["count"], finding.values["compared"]) == (rule.name, 1, 2)
    allowed = ALLOWED[step - 1] if rule is GRADIENTS else ALLOWED[-1]
    assert (finding.expected, finding.found) == (f"distance <= {allowed:.2g}", "0.01")


@given(st.sampled_from([1, 2]), st.floats(0, 0.02))
def test_each_step_has_its_own_tolerance(step: int, distance: float) -> None:
    findings = check(run(**{f"grad_a_{step}": 1 + distance}), solo())
    assert bool(findings) == (distance > ALLOWED[step - 1] + 1e-15) or distance == pytest.approx(ALLOWED[step - 1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_passes(bad: float) -> None:
    for place in ("grad_a_1", "grad_b_2", "param_a_2"):
        assert check(run(**{place: bad}), solo()), place
        assert check(run(), solo(**{place: bad})), place
        assert check(run(**{place: bad}), solo(**{place: bad})), place


def test_the_worst_gradient_is_named_and_nan_and_one_that_must_not_be_are_the_worst() -> None:
    (finding,) = check(run(), solo(grad_a_1=0.0))
    assert finding.module == "a" and finding.found == "inf"
    (finding,) = check(run(grad_a_1=1.01, grad_b_1=1.02), solo())
    assert (finding.rule, finding.module) == (GRADIENTS.name, "b")
    assert (finding.values["count"], finding.values["compared"]) == (2, 2)
    (finding,) = check(run(grad_a_1=math.nan, grad_b_1=5.0), solo())
    assert finding.module == "a"


@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0, 0.0])
def test_what_adamw_hides_is_found(factor: float) -> None:
    """A constant factor of all gradients changes no parameter and no loss."""
    factors = {f"grad_{fqn}_{step}": factor for fqn in FQNS for step in (1, 2)}
    (finding,) = check(run(**factors), solo())
    assert finding.step == 1  # the first step that is off; the next are off because of it


@pytest.mark.parametrize(("key", "broken"), [("tiny-bf16-replicas-bfloat16", []), (SAME_ORDER, [PARAMETERS.name])])
def test_a_weight_may_be_a_last_bit_off_where_replicas_add_up_in_another_order(key: str, broken: list[str]) -> None:
    case, last_bit = make_case(dp_shard=1, dp_replicate=2, steps=2, dtype="bfloat16"), Limit("parity.last_bit")
    given = make_witnesses(case, solo=solo(), parity_tolerance=make_tolerance(1e-8, 1e-8, name="parity", key=key))
    for change, rules in ((1 + last_bit / 2, broken), (1 + 4 * last_bit, [PARAMETERS.name])):
        assert [finding.rule for finding in check_parity(case, run(param_b_2=change), given)] == rules


@pytest.mark.parametrize(("recipe", "broken"), [("tensorwise", []), ("bf16", [GRADIENTS.name])])
def test_a_derived_tolerance_says_nothing_of_distances_that_its_own_runs_ignore(recipe: str, broken: list[str]) -> None:
    case = make_case(tp=2, steps=2, dtype="float32", recipe=recipe)
    small = {"grad_a_1": 1.0, "grad_b_1": 2.0**-13}
    expected = solo(**small)
    tolerance = replace(make_tolerance(*ALLOWED, name="parity", key="tiny-tensorwise-float32"), derived=True)
    for allowed, rules in ((tolerance, broken), (replace(tolerance, derived=False), [GRADIENTS.name])):
        witnesses = make_witnesses(case, solo=expected, parity_tolerance=allowed)
        off = run(**{**small, "grad_b_1": 1.5 * 2.0**-13})
        assert [finding.rule for finding in check_parity(case, off, witnesses)] == rules


@pytest.mark.parametrize(("beyond", "broken"), [(0.5, []), (2.0, [GRADIENTS.name])])
def test_what_derived_runs_ignore_is_allowed_besides_and_no_more(beyond: float, broken: list[str]) -> None:
    """Where a gradient is as small as what they ignore, its distance has no cliff there."""
    case, norm = make_case(tp=2, steps=2, dtype="bfloat16"), 2.0**-12
    tolerance = replace(make_tolerance(*ALLOWED, name="parity", key="tiny-tensorwise-bfloat16"), derived=True)
    off = run(grad_a_1=1.0, grad_b_1=norm * (2 + beyond * ALLOWED[0]))
    for allowed, rules in ((tolerance, broken), (replace(tolerance, derived=False), [GRADIENTS.name])):
        witnesses = make_witnesses(case, solo=solo(grad_a_1=1.0, grad_b_1=norm), parity_tolerance=allowed)
        assert [finding.rule for finding in check_parity(case, off, witnesses)] == rules


@pytest.mark.parametrize(
    ("tensor", "rule"), [("initial_b_1", INITIAL), ("grad_b_1", GRADIENTS), ("param_b_1", PARAMETERS)]
)
@pytest.mark.parametrize("wrong", [(0,), (1,)])
def test_the_ranks_whose_own_part_is_wrong_are_named(tensor: str, rule: Rule, wrong: tuple[int, ...]) -> None:
    parts = zip(run().traces, run(**{tensor: 1.01}).traces, strict=True)
    (finding,) = check(run_of(*(pair[pair[0].rank in wrong] for pair in parts)), solo())
    assert (finding.rule, finding.ranks, finding.rank) == (rule.name, wrong, wrong[0])
    (finding,) = check(run(**{tensor: 1.01}), solo())
    assert (finding.ranks, finding.rank) == ((), None) and finding.message.endswith("on all ranks")


def test_no_rank_is_named_where_one_rank_has_no_such_pieces() -> None:
    whole = with_sketches(solo(), lambda s: replace(s, local_shape=(4, 4), offset=(0, 0)) if s.offset[0] == 0 else None)
    halves = with_sketches(whole, lambda s: replace(s, norm_squared=1.0, sums=double(s.sums)))
    (finding,) = check(run(grad_b_1=1.01), halves)
    assert (finding.rule, finding.ranks, finding.rank) == (GRADIENTS.name, (), None)


def double(sums: bytes) -> bytes:
    numbers = struct.unpack(f"<{SKETCH_SIZE}d", sums)
    return struct.pack(f"<{SKETCH_SIZE}d", *(2 * number for number in numbers))


@pytest.mark.parametrize(("step", "rank"), [(1, 0), (2, 1)])
def test_a_loss_is_compared_on_every_rank(step: int, rank: int) -> None:
    allowed = ALLOWED[step - 1] * Limit("parity.loss_share")
    (finding,) = check(with_step(run(), rank, step, loss=8.0 + 1.1 * allowed), solo())
    assert (finding.step, finding.rank, finding.expected) == (step, rank, "8.0")
    assert check(with_step(run(), rank, step, loss=8.0 + 0.9 * allowed), solo()) == []
    assert check(with_step(run(), rank, step, loss=math.nan), solo())


@pytest.mark.parametrize(("number", "rule"), [("loss", LOSS), ("grad_norm", GRAD_NORM)])
def test_a_number_of_all_ranks_names_none(number: str, rule: Rule) -> None:
    """Sketches cannot see a norm that counts replicas twice: only what the ranks report does."""
    wrong = with_step(with_step(run(), 0, 1, **{number: 9.0}), 0, 2, **{number: 9.0})
    for off, ranks in ((wrong, (0,)), (with_step(wrong, 1, 1, **{number: 9.0}), ())):
        (finding,) = check(off, solo())
        assert (finding.rule, finding.step, finding.ranks) == (rule.name, 1, ranks)


def test_a_float32_loss_may_be_a_few_units_of_its_last_place_off() -> None:
    off = with_step(run(), 0, 1, loss=8.0 + FLOAT32_LOSS / 2)
    assert check(off, solo(), dtype="bfloat16", allowed=(1e-9, 1e-9)) == []
    assert len(check(off, solo(), allowed=(1e-9, 1e-9))) == 1


@pytest.mark.parametrize("lost", [("grad", 1), ("grad", 2), ("param", 2)])
def test_a_lost_half_of_a_tensor_and_one_on_one_side_alone_are_found(lost: tuple[str, int]) -> None:
    findings = check(with_sketches(run(), lambda s: None if is_lost(s, lost) else s, rank=1), solo())
    (finding,) = [finding for finding in findings if finding.verdict is Verdict.INVARIANT]
    assert (finding.rule, finding.step, finding.module) == (ELEMENTS.name, lost[1], "b")
    assert dict(finding.values) == {"elements": 8, "shape": "(4, 4)"}

    def without(whole: Run) -> Run:
        return with_sketches(whole, lambda s: None if is_lost(s, lost) else s)

    (missing,) = check(without(run()), solo())
    (unknown,) = check(run(), without(solo()))
    for finding, side in ((missing, "this run"), (unknown, "the single-rank reference")):
        assert (finding.rule, finding.step, finding.module) == (ONE_SIDE.name, lost[1], "b")
        assert dict(finding.values) == {"kind": lost[0], "side": side, "count": 1}


@pytest.mark.parametrize("kind", ["grad", "param"])
def test_comparing_nothing_never_passes(kind: str) -> None:
    def without(whole: Run) -> Run:
        return with_sketches(whole, lambda s: None if s.kind == kind else s)

    for finding in check(without(run()), without(solo())):
        assert (finding.rule, finding.verdict) == (NOTHING_COMPARED.name, Verdict.INVARIANT)
    assert len(check(without(run()), without(solo()))) == 1


def test_replicas_that_differ_are_found() -> None:
    """Two ranks hold the same half, as under HSDP; what the second one has is not what counts."""
    copies = with_sketches(run(grad_a_2=1.5), lambda s: replace(s, owner=False)).traces[0]
    both = run_of(*run().traces, replace(copies, rank=2))
    (finding,) = check(both, solo())
    assert (finding.step, finding.module, finding.verdict) == (2, "a", Verdict.INVARIANT)
    assert finding.rule == REPLICAS.name
    assert finding.found == "rank 0: 0 1.0, rank 2: 0 1.5"


@pytest.mark.parametrize(
    ("parts", "note"),
    [
        ((0.25, 0.75), "the sum over tp of ranks 0-1 equals the reference: it is not reduced over tp"),
        ((0.5, 1.5), "the mean over tp of ranks 0-1 equals the reference: it is not reduced over tp"),
        ((1.0, 1.5), None),
        ((1.0, 1.002), None),  # a little off: the mean is close to the reference, as each of them is
        ((0.999, 1.001), None),
    ],
)
def test_terms_of_a_gradient_that_was_not_reduced_are_told(parts: tuple[float, float], note: str | None) -> None:
    def has(rank: int, value: float) -> TensorSketch:
        return make_sketch("a", value=value, owner=rank == 0)

    others = [with_sketches(run(), lambda s: None if s.fqn == "a" else s).traces[rank] for rank in (0, 1)]
    both = (
        replace(trace, sketches=(*(trace.sketches or ()), has(trace.rank, part)))
        for trace, part in zip(others, parts, strict=True)
    )
    (finding,) = [finding for finding in check(run_of(*both), solo()) if finding.rule == REPLICAS.name]
    assert (finding.module, finding.step, finding.ranks) == ("a", 1, (0, 1))
    assert finding.notes == (() if note is None else (note,))


def test_without_a_witness_or_a_tolerance_nothing_passes() -> None:
    (no_solo,) = check(run(), None)
    (no_tolerance,) = check(run(), solo(), allowed=None)
    assert (no_solo.rule, no_solo.judged) == (NO_REFERENCE.name, False)
    assert "single-rank reference" in str(no_solo.values["who"])
    assert (no_tolerance.rule, no_tolerance.judged) == (NO_TOLERANCE.name, False)
    assert no_tolerance.values["why"] == NONE_DERIVED


def test_the_worst_distance_of_a_step_is_what_tolerances_are_fitted_to_and_nan_is_the_worst() -> None:
    off = run(grad_a_1=1.25, grad_b_1=1.5, grad_a_2=1.125)
    assert worst_distances(off, solo(), steps=(1, 2, 3)) == pytest.approx((0.5, 0.125, math.nan), nan_ok=True)
    for off in (run(grad_a_1=math.nan), run(grad_b_1=math.nan)):
        assert math.isnan(*worst_distances(off, solo(), steps=(1,)))


@pytest.mark.parametrize(
    ("digests", "words"),
    [
        (("one", "zero"), "tokens of data-parallel rank 1"),
        (("other", "one"), "tokens of no data-parallel rank"),
        ((None, "one"), "tokens of no data-parallel rank"),
    ],
)
def test_tokens_of_another_data_parallel_rank_are_found(digests: tuple[str | None, ...], words: str) -> None:
    case = make_case(dp_shard=2, steps=2, dtype="float64")
    witness = run_of(replace(solo().traces[0], batch_digests=("zero", "one")))

    def trained(*rank_digests: str | None) -> list[Finding]:
        traces = [
            replace(trace, batch_digests=() if mine is None else (mine,))
            for trace, mine in zip(run().traces, rank_digests, strict=True)
        ]
        tolerance = make_tolerance(*ALLOWED, name="parity")
        return check_parity(case, run_of(*traces), make_witnesses(case, solo=witness, parity_tolerance=tolerance))

    assert trained("zero", "one") == []
    (finding,) = trained(*digests)
    assert (finding.rule, finding.rank) == (TOKENS.name, 0)
    assert (finding.expected, finding.found) == ("tokens of data-parallel rank 0", words)


@pytest.mark.parametrize("norm", [1.1, math.nan, None])
def test_a_norm_that_a_target_reports_is_compared_with_the_one_on_one_rank(norm: float | None) -> None:
    def reporting(changed: Run, value: float | None) -> Run:
        for rank in range(len(changed.traces)):
            for step in (1, 2):
                changed = with_step(changed, rank, step, reported_grad_norm=1.0 if step == 1 else value)
        return changed

    expected = reporting(solo(), 1.0)
    assert check(reporting(run(), 1.001), expected) == []
    assert check(reporting(run(), 1.00001), expected, allowed=(1e-8, 1e-8)) == [], "its own sum rounds in float32"
    findings = check(reporting(run(), norm), expected)
    assert [finding.rule for finding in findings] == [REPORTED_NORM.name]


def test_the_parts_of_a_replicated_shard_are_the_shards_of_one_rank() -> None:
    solo = [make_sketch("a", value=float(part), part=part, parts=4) for part in range(4)]
    first, second, third, fourth = (sketch.digest for sketch in solo)
    reference = run_of(replace(make_trace(), sketches=tuple(solo)))

    def compared(*parts: tuple[str, ...]) -> bool | None:
        halves = (replace(make_sketch("a", part=rank, parts=2), parts=of) for rank, of in enumerate(parts))
        traces = (replace(make_trace(), rank=rank, sketches=(half,)) for rank, half in enumerate(halves))
        return same_bits(run_of(*traces), reference)

    assert compared((first, second), (third, fourth)) is True
    assert compared((first, second), (third, third)) is False
    assert compared((second, first), (third, fourth)) is False
    assert compared((), ()) is False  # shards that do not divide evenly


TRACEBACK = """Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", line 12, in reset
    self.unsharded_accumulated_grad = None
AttributeError: property 'unsharded_accumulated_grad' of 'FSDPParam' object has no setter
"""
RAISED = make_failure(message="AttributeError: no setter\nmore of it", traceback=TRACEBACK)
CASE_RUN = run_of(make_trace(software={"torch": "2.15.0", "torchao": "0.18.0", "numpy": "2.0"}))


def test_it_says_what_was_raised_where_and_with_which_versions() -> None:
    finding = unfinished(NO_REFERENCE, "the single-rank reference", run_of(RAISED), CASE_RUN)
    assert (finding.rule, finding.judged) == (NO_REFERENCE.name, False)
    who, why = "the single-rank reference", ": AttributeError: no setter"
    assert dict(finding.values) == {"who": who, "why": why}
    assert finding.found is not None
    first, *calls = finding.found.splitlines()
    assert first == "rank 0 raised in step 1, with torch 2.15.0, torchao 0.18.0"
    assert calls == ["  in reset (torch/distributed/fsdp/_fully_shard/_fsdp_param.py:12)"]


def test_the_rank_that_caused_it_is_named_and_only_a_run_that_finished_is_compared_with() -> None:
    waited = make_failure(0, "RuntimeError: the other rank is gone", consequence=True)
    assert why_unfinished(run_of(waited, make_failure(1))) == ": ValueError: x"
    assert why_unfinished(run_of(waited)) == ": RuntimeError: the other rank is gone"
    whole = run_of(make_trace())
    assert finished(whole) is whole and finished(run_of(RAISED)) is None and finished(None) is None


def test_a_witness_of_which_nothing_is_known_could_not_be_run_either() -> None:
    for run in (None, Run(traces=(), failures=())):
        finding = unfinished(NO_REFERENCE, "the replay", run, CASE_RUN)
        assert (finding.rule, finding.judged, finding.found) == (NO_REFERENCE.name, False, None)
        assert dict(finding.values) == {"who": "the replay", "why": ""}


def test_errors_are_stored_whatever_limits_their_steps_have() -> None:
    found = errors([(1, "w", 0.1), (1, "w", 0.2), (2, "w", 0.3)], [Limit("norms.float32"), 0.5, 0.5])
    assert msgspec.to_builtins(found) == {"steps": (1, 2), "rows": {"w": (0.2, 0.3)}, "tolerance": (4e-05, 0.5)}
