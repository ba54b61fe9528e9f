"""The first divergence names the first step, rank, module and operand that is not the solo witness's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from harness.checks.check import Rule
from harness.checks.divergence import COUNT, LOSS, OPERAND, with_operands
from harness.checks.parity import GRADIENTS
from harness.matrix.case import Case, Layout
from harness.matrix.numerics import VIRTUAL_DEVICE, Numerics
from harness.trace import RankTrace, Run
from harness.trace.operands import CastRecord, OperandTrace
from harness.verdict import Finding
from tests.builders import (
    a_finding,
    make_case,
    make_cast,
    make_matmul,
    make_scale,
    make_trace,
    run_of,
    with_casts,
    with_step,
)

FQNS = ("layers.0.attention.wq", "layers.0.attention.wk")
STEPS = 2
WEIGHT = make_cast(role="weight", amax=448.0)


def case(layout: Layout, *, recipe: str = "tensorwise", **axes: object) -> Case:
    return replace(make_case(recipe=recipe, steps=STEPS, **axes), layout=layout)


def recorded(rank: int, casts: Iterable[CastRecord], first: int = 0) -> RankTrace:
    """What a rank does from event `first` on: these casts, and behind each of them its matmul."""
    in_order = [replace(one, index=first + 2 * place) for place, one in enumerate(casts)]
    matmuls = (make_matmul(one, WEIGHT, index=one.index + 1) for one in in_order)
    return make_trace(rank=rank, operands=OperandTrace(casts=tuple(in_order), matmuls=tuple(matmuls)))


def trace(rank: int, dp_ranks: tuple[int, ...], placements: tuple[str, ...] = ()) -> RankTrace:
    axes: tuple[str, ...] = ("tp",) if placements else ()
    return recorded(
        rank,
        (
            make_cast(
                step=step,
                fqn=fqn,
                amax=1.0 + dp_rank,
                placements=placements,
                mesh_axes=axes,
                data_digest=f"{fqn} {step} {dp_rank}",
            )
            for step in range(1, STEPS + 1)
            for dp_rank in dp_ranks
            for fqn in FQNS
        ),
    )


def runs(of: Case, placements: tuple[str, ...] = ()) -> tuple[Run, Run]:
    """A run and its witness, which replays every data-parallel rank."""
    tp = of.layout.tp
    run = run_of(*(trace(rank, (rank // tp,), placements) for rank in range(of.world_size)))
    return run, run_of(trace(0, tuple(range(of.layout.dp))))


def whole(layout: Layout) -> tuple[str, ...]:
    """The placements of a tensor that every TP rank holds whole."""
    return ("Replicate()",) if layout.tp > 1 else ()


def first_divergence(of: Case, run: Run, witness: Run, **how: Any) -> Finding | None:
    return next(iter(with_operands((), of, run, witness, **how)), None)


def changed(run: Run, rank: int, *, step: int, fqn: str, **changes: Any) -> Run:
    def change(one: CastRecord) -> CastRecord:
        return replace(one, **changes) if (one.step, one.fqn) == (step, fqn) else one

    return with_casts(run, change, rank=rank)


LAYOUTS = [Layout(), Layout(tp=2), Layout(dp_shard=3), Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=2, tp=2)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_what_the_witness_does_does_not_diverge(layout: Layout, dtype: str) -> None:
    of = case(layout, dtype=dtype)
    assert first_divergence(of, *runs(of, whole(layout))) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_is_named_by_step_rank_and_module(layout: Layout) -> None:
    of = case(layout, dtype="float64")
    run, witness = runs(of, whole(layout))
    rank = of.world_size - 1
    later = changed(run, 0, step=2, fqn=FQNS[0], data_digest="y")
    both = changed(later, rank, step=1, fqn=FQNS[1], data_digest="x")
    (finding,) = with_operands((), of, both, witness)
    assert (finding.step, finding.rank, finding.module) == (1, rank, FQNS[1])
    assert (finding.rule, finding.found, finding.operand) == (OPERAND.name, "x", "input in forward")
    assert finding.values["number"] == "float8 data"


@pytest.mark.plugin("torchtitan")
def test_plain_shards_are_not_compared_with_whole_tensors() -> None:
    of = case(Layout(tp=2), target="torchtitan", dtype="float64", recipe="rowwise")
    run, witness = runs(of)
    smaller = changed(run, 0, step=1, fqn=FQNS[0], amax=0.5)
    assert first_divergence(of, smaller, witness) is None
    assert first_divergence(replace(of, target="reference"), smaller, witness) is not None


NOT_IN_RANK_ORDER = Numerics(in_rank_order=False)


@pytest.mark.parametrize(
    ("layout", "dtype", "numerics", "step", "factor", "diverges"),
    [
        (Layout(dp_shard=2), "float32", VIRTUAL_DEVICE, 2, 1 + 1e-7, True),
        (Layout(dp_shard=3), "float32", VIRTUAL_DEVICE, 2, 1.001, True),
        (Layout(dp_shard=3), "float32", NOT_IN_RANK_ORDER, 2, 1.001, False),
        (Layout(dp_shard=3), "float32", NOT_IN_RANK_ORDER, 1, 1.001, True),
        (Layout(dp_replicate=2, dp_shard=2), "float32", VIRTUAL_DEVICE, 1, 1 + 1e-7, True),
        (Layout(dp_replicate=2, dp_shard=2), "float32", VIRTUAL_DEVICE, 2, 1 + 1e-7, False),
        (Layout(tp=2), "float64", VIRTUAL_DEVICE, 2, 1 + 1e-7, False),
        (Layout(tp=2), "float64", VIRTUAL_DEVICE, 2, 1 + 1e-5, True),
        (Layout(tp=2), "float32", VIRTUAL_DEVICE, 1, 1.005, False),
        (Layout(tp=2), "float32", VIRTUAL_DEVICE, 1, 1.05, True),
        (Layout(tp=2), "float32", VIRTUAL_DEVICE, 2, 1.05, False),
        (Layout(tp=2), "float32", VIRTUAL_DEVICE, 2, 1.5, True),
        (Layout(tp=2), "bfloat16", VIRTUAL_DEVICE, 1, 1.05, False),
        (Layout(tp=2), "float64", VIRTUAL_DEVICE, 1, math.nan, True),
        (Layout(), "float32", VIRTUAL_DEVICE, 1, math.nan, True),
        (Layout(tp=2), "float32", VIRTUAL_DEVICE, 2, math.inf, True),
    ],
)
def test_how_close_is_close_enough(
    layout: Layout, dtype: str, numerics: Numerics, step: int, factor: float, diverges: bool
) -> None:
    of = case(layout, dtype=dtype)
    run, witness = runs(of, ("Shard(0)",) if layout.tp > 1 else ())
    for rank in range(layout.tp):  # every piece: the largest magnitude counts
        run = changed(run, rank, step=step, fqn=FQNS[0], amax=factor)
    assert (first_divergence(of, run, witness, numerics=numerics) is not None) is diverges


@pytest.mark.parametrize("far", [{}, {"amax": 0.5}, {"scale": make_scale(0.5, digest="half")}])
def test_of_bits_that_are_promised_the_one_above_a_rounding_is_named_and_no_tolerance(far: dict[str, Any]) -> None:
    of = case(Layout(dp_shard=2), dtype="float32")
    run, witness = runs(of)
    near = changed(run, 0, step=1, fqn=FQNS[0], amax=1 + 1e-7)
    (finding,) = with_operands((), of, changed(near, 0, step=2, fqn=FQNS[1], **far), witness)
    assert (finding.module, finding.step) == ((FQNS[1], 2) if far else (FQNS[0], 1))
    assert "±" not in (finding.expected or "")


@pytest.mark.parametrize("rank", [0, 1])
def test_nan_in_one_part_diverges_and_in_both_runs_it_does_not(rank: int) -> None:
    of = case(Layout(tp=2), dtype="float32")
    run, witness = runs(of, ("Shard(0)",))
    nan = {"step": 2, "fqn": FQNS[0], "amax": math.nan, "scale": make_scale(math.nan, digest="nan")}
    here, there = changed(run, rank, **nan), changed(witness, 0, **nan)
    (finding,) = with_operands((), of, here, witness)
    assert (finding.step, finding.found) == (2, "nan")
    assert first_divergence(of, changed(here, 1 - rank, **nan), there) is None


def test_infinity_in_the_witness_diverges_and_a_part_without_the_largest_magnitude_does_not() -> None:
    of = case(Layout(tp=2), dtype="float64")
    run, witness = runs(of, ("Shard(0)",))
    (finding,) = with_operands((), of, run, changed(witness, 0, step=2, fqn=FQNS[0], amax=math.inf))
    assert finding.step == 2
    assert first_divergence(of, changed(run, 1, step=1, fqn=FQNS[0], amax=0.5), witness) is None


def test_matmuls_of_the_same_nan_do_not_diverge() -> None:
    of = case(Layout(dp_shard=2))
    nan = make_scale(math.nan, digest="nan")
    run, witness = (with_matmuls(side, a_scale=nan, b_scale=nan) for side in runs(of))
    assert first_divergence(of, run, witness) is None
    assert first_divergence(of, run, runs(of)[1]) is not None


def test_operands_that_one_side_lacks() -> None:
    of = case(Layout())
    run, witness = runs(of)
    empty = run_of(make_trace(operands=OperandTrace(casts=(), matmuls=())))
    (finding,) = with_operands((), of, empty, witness)
    assert (finding.step, finding.module) == (1, FQNS[0])
    assert "was the linear converted" in (finding.found or "")
    (finding,) = with_operands((), of, run, empty)
    assert (finding.step, finding.module, finding.found) == (1, FQNS[0], "a cast")


def test_rows_are_compared_by_their_mean_exponent() -> None:
    of = case(Layout(tp=2), dtype="float64", recipe="rowwise")
    run, witness = runs(of, ("Shard(0)",))
    rows, shards = make_scale(2.0, (4, 1), log2_total=4.0), make_scale(2.0, (2, 1), log2_total=2.0)
    witness = changed(witness, 0, step=1, fqn=FQNS[0], scale=rows, axiswise_dim=-1)
    for log2_total, diverges in ((2.0, False), (3.0, True), (math.nan, True)):
        wrong = replace(shards, log2_total=log2_total)
        pieces = changed(run, 0, step=1, fqn=FQNS[0], scale=shards, axiswise_dim=-1)
        pieces = changed(pieces, 1, step=1, fqn=FQNS[0], scale=wrong, axiswise_dim=-1)
        assert (first_divergence(of, pieces, witness) is not None) is diverges


def test_replays_are_counted_by_what_the_witness_casts() -> None:
    """Float8 styles cast an output gradient once where the witness casts it for either matmul."""
    of = case(Layout(dp_shard=2, tp=2), dtype="float64", tp_styles="float8")
    run, witness = runs(of, ("Replicate()",))
    mine = witness.traces[0].operands
    assert mine is not None
    twice = tuple(again for one in mine.casts for again in (one, one))
    doubled = run_of(make_trace(operands=OperandTrace(casts=twice, matmuls=mine.matmuls)))
    assert first_divergence(of, run, doubled) is None


@pytest.mark.parametrize(
    ("target", "factor", "diverges"),
    [("mine", 1.0, False), ("mine", 2.0, False), ("mine", 1.5, True), ("reference", 2.0, True)],
)
def test_gradients_that_fsdp_averages_are_larger_by_the_number_of_ranks(
    target: str, factor: float, diverges: bool
) -> None:
    """Then the loss of a rank is divided by the number of its own tokens, and that of the witness by all."""
    of = case(Layout(dp_shard=2), target=target)
    run, witness = (with_backward(side) for side in runs(of))

    def backward(one: CastRecord, by: float) -> CastRecord:
        if one.phase != "backward":
            return one
        amax = by * one.amax
        return replace(one, amax=amax, scale=make_scale(448 / amax, digest=f"{amax}"), data_digest=f"{by}")

    for rank in range(2):
        run = with_casts(run, lambda one: backward(one, factor), rank=rank)
    witness = with_casts(witness, lambda one: backward(one, 1.0), rank=0)
    finding = first_divergence(of, run, witness, has_formulas=target == "reference")
    assert (finding is not None) is diverges
    if factor == 2:  # the number of ranks
        assert finding is None or (finding.rule, finding.module, finding.values["times"]) == (COUNT.name, "loss", 2)
    else:
        assert finding is None or (finding.values["number"], finding.operand) == ("amax", "grad_output in backward")


@pytest.mark.parametrize("compared", ["with logits", "without logits", "no matmul"])
@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
@pytest.mark.parametrize(("loss", "rule"), [(8.5, LOSS), (math.nan, LOSS), (8.0, OPERAND)])
def test_where_backward_starts_from_another_gradient_and_the_loss_differs_it_is_the_loss(
    loss: float, rule: Rule, ranks: tuple[int, ...], compared: str
) -> None:
    """The loss alone is blamed where the operands of the logits were compared, else what is behind the last matmul."""
    of = case(Layout(dp_shard=2), dtype="float64")
    run, witness = (with_backward(side) for side in runs(of))
    if compared == "with logits":
        witness = with_matmuls(witness, n=of.model.padded_vocab_size)
    elif compared == "no matmul":
        run, witness, rule = without_matmuls(run), without_matmuls(witness), OPERAND
    for rank in ranks:
        run = with_step(starts_otherwise(run, rank), rank, 1, loss=loss)
    (first,) = with_operands((), of, run, with_step(witness, 0, 1, loss=8.0))
    assert (first.rule, first.step) == (rule.name, 1)
    if rule is LOSS:
        assert (first.values["last"], first.values["compared"]) == (FQNS[1], 2)
        assert (first.module == "loss") is (compared == "with logits")
        assert first.ranks == (ranks if len(ranks) == 1 else ())


@pytest.mark.parametrize(
    ("gemm", "change", "module", "noted"),
    [
        ("wgrad", {}, f"{FQNS[1]}.weight", True),
        ("wgrad", {}, "layers.0.attention_norm.weight", False),
        ("wgrad", {"a_digest": "other"}, f"{FQNS[1]}.weight", False),
        ("wgrad", {"b_dtype": "float8_e5m2"}, f"{FQNS[1]}.weight", False),
        ("dgrad", {}, f"{FQNS[1]}.weight", False),
    ],
)
def test_a_gradient_of_equal_operands_says_what_is_left_only_where_they_were_compared(
    gemm: str, change: dict[str, Any], module: str, noted: bool
) -> None:
    finding = a_finding(rule=GRADIENTS.name, step=1, module=module)
    of = case(Layout(dp_shard=2))
    run, witness = (with_matmuls(side, gemm=gemm) for side in runs(of))
    returned, *_ = with_operands([finding], of, with_matmuls(run, **change), witness)
    assert bool(returned.notes) is noted
    assert not noted or returned.notes[0].startswith(
        "2 weight-gradient matmuls have operands that are bitwise identical"
    )
    lacking = run_of(run.traces[0], *without_matmuls(run).traces[1:])
    assert with_operands([finding], of, lacking, witness)[0] == finding
    other = case(Layout(tp=2))
    assert with_operands([finding], other, run, witness)[0] == finding


def test_a_matmul_that_reads_its_operand_as_another_dtype_is_named() -> None:
    of = case(Layout(dp_shard=2))
    run, witness = runs(of)
    (finding,) = with_operands((), of, with_matmuls(run, a_dtype="float8_e5m2"), witness)
    assert finding.module == FQNS[0]
    assert (finding.values["number"], finding.operand, finding.found) == (
        "dtype",
        "input of matmul forward",
        "float8_e5m2",
    )


@pytest.mark.parametrize(("layout", "shared"), [(Layout(dp_shard=2), False), (Layout(dp_shard=2, cp=2), True)])
@pytest.mark.parametrize("compared", [True, False])
def test_attention_is_named_where_the_linears_before_match(layout: Layout, shared: bool, compared: bool) -> None:
    of = case(layout)
    run, witness = runs(of)
    if not compared:
        run, witness = without_matmuls(run), without_matmuls(witness)
    (finding,) = with_operands((), of, changed(run, 0, step=1, fqn=FQNS[1], data_digest="x"), witness)
    assert bool(finding.notes) is compared
    if compared:
        assert finding.notes[0].startswith("wq: 1 matmul agrees, so check what is between them and wk: RoPE")
        assert ("what ranks 0-1 send each other" in finding.notes[0]) is shared
    (first,) = with_operands((), of, changed(run, 0, step=1, fqn=FQNS[0], data_digest="x"), witness)
    assert first.notes == ()


@pytest.mark.parametrize(
    ("index", "change", "what", "noted"),
    [
        (1, {"amax": 7.0}, "input in forward", True),  # the tensor is another: its cast is not the cause
        (1, {"target_dtype": "float8_e5m2"}, "dtype of input in forward", False),  # the tensor may be the same
        (0, {"amax": 7.0}, "amax of input in forward", False),  # nothing in front of it was compared
    ],
)
def test_attention_is_told_where_a_tensor_behind_it_is_another_and_not_where_its_cast_is(
    index: int, change: dict[str, Any], what: str, noted: bool
) -> None:
    of = case(Layout(dp_shard=2))
    run, witness = runs(of)
    (finding,) = with_operands((), of, changed(run, 0, step=1, fqn=FQNS[index], **change), witness)
    assert (finding.values["what"], bool(finding.notes)) == (what, noted)


def test_of_a_pipeline_the_stage_that_computes_first_is_named_with_microbatch_and_sender() -> None:
    """Whatever the numbers of events on the two ranks are."""
    of = replace(case(Layout(pp=2), accumulation=2), layout=Layout(pp=2))
    stages = ("layers.0.attention.wq", "layers.1.attention.wq")
    witness = run_of(of_stage(0, stages, first=0))
    run = run_of(*(of_stage(rank, stages[rank : rank + 1], first=9 * (1 - rank)) for rank in (0, 1)))
    assert first_divergence(of, run, witness) is None

    def second(one: CastRecord) -> CastRecord:
        return replace(one, data_digest="x") if one.data_digest == f"{one.fqn} 1" else one

    later = with_casts(run, second, rank=1)
    (finding,) = with_operands((), of, later, witness)
    assert (finding.rank, finding.values["microbatch"]) == (1, 2)
    assert finding.notes[0] == "stage 0 on rank 0 sent it, where 1 forward matmul agrees"
    (both,) = with_operands((), of, with_casts(later, second, rank=0), witness)
    assert (both.rank, both.notes) == (0, ())


def of_stage(rank: int, fqns: tuple[str, ...], first: int) -> RankTrace:
    places = ((fqn, microbatch) for fqn in fqns for microbatch in range(2))
    return recorded(rank, (make_cast(fqn=fqn, data_digest=f"{fqn} {number}") for fqn, number in places), first)


def edited(run: Run, change: Callable[[OperandTrace], OperandTrace]) -> Run:
    return run_of(*(replace(one, operands=change(one.operands)) for one in run.traces if one.operands is not None))


def with_backward(run: Run) -> Run:
    """The run with a gradient of the last linear behind the forward of every replay of every step."""

    def change(held: OperandTrace) -> OperandTrace:
        ends = (one for one in held.casts if one.fqn == FQNS[-1])
        gradients = (replace(one, role="grad_output", phase="backward", index=one.index + 1000) for one in ends)
        return replace(held, casts=(*held.casts, *gradients))

    return edited(run, change)


def starts_otherwise(run: Run, rank: int) -> Run:
    """The run whose backward starts from another gradient on a rank."""

    def change(one: CastRecord) -> CastRecord:
        return replace(one, data_digest="x") if (one.step, one.phase) == (1, "backward") else one

    return with_casts(run, change, rank=rank)


def with_matmuls(run: Run, **changes: Any) -> Run:
    return edited(run, lambda held: replace(held, matmuls=tuple(replace(one, **changes) for one in held.matmuls)))


def without_matmuls(run: Run) -> Run:
    return edited(run, lambda held: replace(held, matmuls=()))
