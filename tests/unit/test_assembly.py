"""What explains a wrong tensor: pieces put together wrongly, and factors."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.assembly import (
    Assembled,
    SketchKey,
    assemble,
    explain_gradients,
    explain_loss,
    explain_scale,
    factor,
    relative_distance,
    relative_distances,
    unequal_replicas,
)
from harness.matrix.case import Case
from harness.trace import RankTrace, Run
from harness.trace.model import SKETCH_SIZE, TensorSketch
from tests.builders import make_case, make_model, make_parameter, make_run, make_sketch, make_trace, run_of, with_step

Matrix = npt.NDArray[np.float64]
ROWS, COLUMNS = 12, 5
_SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], size=(2, SKETCH_SIZE, max(ROWS, COLUMNS)))


def sketch(
    values: Matrix, *, row: int = 0, fqn: str = "w", step: int = 1, owner: bool = True, digest: str = "d"
) -> TensorSketch:
    """The sketch of some rows, from `row` on, of a matrix of ROWS x COLUMNS."""
    signs = np.einsum("sr,sc->src", _SIGNS[0, :, row : row + len(values)], _SIGNS[1, :, :COLUMNS])
    return TensorSketch(
        fqn=fqn,
        kind="grad",
        step=step,
        shape=(ROWS, COLUMNS),
        offset=(row, 0),
        local_shape=values.shape,
        owner=owner,
        norm_squared=float(np.square(values).sum()),
        sums=np.einsum("src,rc->s", signs, values).astype("<f8").tobytes(),
        digest=digest,
    )


def trace(rank: int, *sketches: TensorSketch) -> RankTrace:
    return make_trace(rank=rank, sketches=sketches)


def whole(values: Matrix) -> Assembled:
    return assemble([trace(0, sketch(values))])[SketchKey(1, "grad", "w")]


def values_of(seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).normal(size=(ROWS, COLUMNS))


@given(st.integers(0, 99), st.lists(st.integers(0, ROWS), max_size=4), st.booleans())
def test_pieces_add_up_to_the_tensor_however_it_is_cut(seed: int, cuts: list[int], replicated: bool) -> None:
    values = values_of(seed)
    edges = [0, *sorted(cuts), ROWS]
    pieces = [(begin, values[begin:end]) for begin, end in itertools.pairwise(edges)]
    traces = [trace(rank, sketch(piece, row=begin)) for rank, (begin, piece) in enumerate(pieces)]
    if replicated:  # as under HSDP: the second half of the world holds the same and owns nothing
        copies = [trace(rank, sketch(piece, row=row, owner=False)) for rank, (row, piece) in enumerate(pieces, 9)]
        traces += copies
    (assembled,) = assemble(traces).values()
    assert assembled.complete and assembled.elements == values.size
    assert relative_distance(assembled, whole(values)) < 1e-15
    assert assembled.norm == pytest.approx(np.linalg.norm(values), rel=1e-15)


def test_a_lost_and_a_doubled_piece_are_not_complete() -> None:
    values = values_of()
    top, bottom = sketch(values[:6]), sketch(values[6:], row=6)
    assert not assemble([trace(0, top)])[SketchKey(1, "grad", "w")].complete
    (doubled,) = assemble([trace(0, top), trace(1, bottom), trace(2, bottom)]).values()
    assert not doubled.complete and doubled.elements == values.size + 6 * COLUMNS


def test_tensors_come_in_order_and_are_kept_apart_and_without_sketches_there_is_none() -> None:
    values = values_of()
    made = [sketch(values, fqn=fqn, step=step) for step in (2, 1) for fqn in ("b", "a")]
    assert list(assemble([trace(0, *made)])) == [SketchKey(step, "grad", fqn) for step in (1, 2) for fqn in ("a", "b")]
    assert assemble([]) == {}
    assert assemble([trace(0)]) == {}


@given(st.integers(0, 99), st.floats(1e-9, 10))
def test_the_distance_is_estimated_within_a_factor_of_two(seed: int, size: float) -> None:
    """32 sums are within a quarter with a chance of 19 in 20, and never so far off that a fault is missed."""
    values, noise = values_of(seed), values_of(seed + 1000)
    true = size * np.linalg.norm(noise) / np.linalg.norm(values)
    assert relative_distance(whole(values + size * noise), whole(values)) == pytest.approx(true, rel=0.6)


def test_equal_tensors_are_at_no_distance_and_nothing_is_close_to_zero_but_zero() -> None:
    values = values_of()
    assert relative_distance(whole(values), whole(values)) == 0.0
    assert relative_distance(whole(0 * values), whole(0 * values)) == 0.0
    values = values_of()
    assert relative_distance(whole(values), whole(0 * values)) == math.inf


def distances(found: dict[str, Matrix], expected: dict[str, Matrix], *, ignored: float) -> list[float]:
    sides = ({SketchKey(1, "grad", fqn): whole(values) for fqn, values in side.items()} for side in (found, expected))
    return list(relative_distances(*sides, ignored=ignored).values())


def test_a_distance_below_a_share_of_all_norms_is_none() -> None:
    """Terms of a sum cancel, and what is left is rounding: one side may be anything, if it is small."""
    values, noise, other = values_of(), 1e-9 * values_of(1), 1e-9 * values_of(2)
    expected, found = {"a": values, "b": noise}, {"a": values, "b": other}
    assert distances(found, expected, ignored=1e-8) == [0.0, 0.0]
    exact, far = distances(found, expected, ignored=1e-10)
    assert exact == 0.0 and far > 0.5
    assert distances({"a": 1.1 * values, "b": noise}, expected, ignored=1e-8)[0] == pytest.approx(0.1, rel=0.5)


def test_no_share_of_what_is_not_finite_is_ignored() -> None:
    broken, noise, other = values_of(), 1e-9 * values_of(1), 1e-9 * values_of(2)
    broken[0, 0] = math.inf
    all_distances = distances({"a": broken, "b": other}, {"a": broken, "b": noise}, ignored=1e-8)
    assert not any(distance <= 0.5 for distance in all_distances)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e160, 1e300])
@pytest.mark.parametrize("both", [False, True])
def test_what_is_not_finite_or_too_large_to_be_squared_is_close_to_nothing(bad: float, both: bool) -> None:
    values = values_of()
    values[3, 2] = bad
    with np.errstate(invalid="ignore", over="ignore"):
        other = whole(values) if both else whole(values_of())
        assert not relative_distance(whole(values), other) <= 1e30
        assert not relative_distance(other, whole(values)) <= 1e30


def test_replicas_that_differ_are_named_and_pieces_of_other_places_are_none() -> None:
    values = values_of()
    traces = [trace(rank, sketch(values, owner=rank == 0, digest="ab"[rank // 2])) for rank in range(3)]
    assert unequal_replicas(traces) == [(SketchKey(1, "grad", "w"), (0, 0), {0: "a", 1: "a", 2: "b"})]
    assert unequal_replicas(traces[:2]) == []
    values = values_of()
    traces = [trace(rank, sketch(values[6 * rank :][:6], row=6 * rank, digest=str(rank))) for rank in range(2)]
    assert unequal_replicas(traces) == []
    # A rank that holds more than its replica is not complete, which parity reports.
    values = values_of()
    (assembled,) = assemble([trace(0, sketch(values)), trace(1, sketch(values[:6]))]).values()
    assert not assembled.complete


CASE = make_case(dp_shard=2, tp=4, global_batch=6, seq_len=32, steps=1)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (16.0, "2 times (the data-parallel degree)"),
        (2.0, "1/4 (the tensor-parallel degree)"),
        (64.0, "8 times (the number of ranks)"),
        (8.0 / 3, "1/3 (the sequences of a microbatch)"),
        (8.0 * 192, "192 times (the tokens of the global batch)"),
    ],
)
def test_numbers_of_the_case_are_named(found: float, words: str) -> None:
    assert str(factor(found, 8.0, CASE)) == words


@pytest.mark.parametrize("found", [8.0, 8.1, 40.0, 0.0, -8.0, float("nan"), float("inf")])
def test_other_numbers_are_not(found: float) -> None:
    assert factor(found, 8.0, CASE) is None


def explained(case: Case, run: Run, golden: float = 8.0, solo: float = 8.0) -> str:
    explanation = explain_loss(case, run, run_of(make_trace(losses=[solo])), 1, [golden])
    return "" if explanation is None else f"{explanation.what}: {explanation.fix}"


def test_losses_of_each_rank_are_told_from_a_wrong_mean_and_from_a_wrong_reference() -> None:
    case = make_case(dp_shard=2, steps=1)
    own = with_step(make_run(case, losses=[7.0]), 1, 1, loss=9.0)
    assert "the loss of its local batch: the mean over ranks equals the reference" in explained(case, own)
    shares = with_step(make_run(case, losses=[3.0]), 1, 1, loss=5.0)
    assert "the sum over ranks equals the reference" in explained(case, shares)
    assert "2 times the reference's: summed over ranks" in explained(case, make_run(case, losses=[16.0]))
    assert explained(case, make_run(case, losses=[8.3])) == ""
    text = explained(case, make_run(case, losses=[8.0]), solo=16.0)
    assert "microbatches are added up without dividing" in text and "len(microbatches)" in text


def gradients(*factors: float) -> Run:
    sketches = tuple(make_sketch(fqn, value=value) for fqn, value in zip("abc", factors, strict=False))
    return run_of(make_trace(sketches=sketches))


def explained_gradients(case: Case, *found: float, reference: float | None = None, tp: str = "") -> str:
    """The explanation of gradients of this size, where those of the reference are 1 or its norm `reference` times."""
    run, solo = gradients(*found), gradients(*(1.0 for _ in found))
    held = (make_parameter(fqn, axes=("tp",) if fqn in tp else ()) for fqn in "abc")
    run = run_of(replace(run.traces[0], model=make_model(*held)))
    norm = math.hypot(*(tensor.norm for tensor in assemble(solo.traces).values()))
    golden = None if reference is None else norm / reference
    explanation = explain_gradients(case, run, solo, 1, golden)
    return "" if explanation is None else f"{explanation.what} FIX {explanation.fix}"


ADDED, TWICE, RANKS = "added up without dividing", "microbatches twice", "number of ranks once too often"
SUMMED = "summed over ranks, not averaged"


@pytest.mark.parametrize(
    ("axes", "found", "reference", "causes", "fix"),
    [
        ({"dp_shard": 2}, 0.5, 1, [RANKS], "FIX average over ranks once: FSDP2"),
        ({"dp_shard": 2}, 0.5, 2, [ADDED], "FIX divide the loss of every microbatch"),
        ({"dp_shard": 2, "accumulation": 2}, 0.5, 4, [ADDED], "FIX divide the loss of every microbatch"),
        ({"dp_shard": 2}, 0.5, None, [ADDED, RANKS], "-accum2-"),
        ({"dp_shard": 2}, 2, 0.5, [TWICE], "FIX divide the loss of every microbatch"),
        ({"dp_shard": 2}, 2, 1, [SUMMED], "FIX average over ranks once"),
        ({"dp_shard": 2}, 2, None, [TWICE, SUMMED], "-accum2-"),
        ({"dp_shard": 2, "accumulation": 2}, 0.5, 1, [RANKS, TWICE], "FIX run `fp8-harness run fsdp2-"),
        ({"tp": 2, "accumulation": 2}, 2, None, [ADDED, SUMMED], "FIX run `fp8-harness run tp2-"),
        ({"dp_shard": 2, "ignored_tokens": "half"}, 0.5, 1, [RANKS, "labels per rank: 128, 0"], "-accum2-"),
        ({"dp_shard": 2}, 0.5, 7, [], "FIX "),
    ],
)
def test_every_mistake_that_explains_a_factor_is_named_and_one_alone_has_a_fix(
    axes: dict[str, object], found: float, reference: float | None, causes: list[str], fix: str
) -> None:
    text = explained_gradients(make_case(steps=1, **axes), found, found, reference=reference)
    assert text.startswith("every gradient is ") and fix in text, text
    assert all(cause in text for cause in causes), text
    named = [cause for cause in (ADDED, TWICE, RANKS, SUMMED, "labels per rank") if cause in text]
    assert len(named) == len(causes), text
    assert not fix.endswith("FIX ") or text.endswith("FIX "), text


def test_gradients_that_differ_otherwise_have_no_factor() -> None:
    case = make_case(dp_shard=2, steps=1)
    assert explained_gradients(case, 1.3, 1.2) == ""
    assert explained_gradients(case, 0.5, 1.2, 1.3) == ""
    turned = replace(make_sketch("a", value=2.0), sums=make_sketch("a", value=-2.0).sums)
    assert explain_gradients(case, run_of(make_trace(sketches=(turned,))), gradients(1), 1, None) is None


def test_only_parameters_of_one_kind_under_tp_are_reduced_otherwise_over_tp() -> None:
    case, over_tp = make_case(tp=2, steps=1), "over tensor-parallel ranks"
    assert explained_gradients(case, 1, 2, 1, tp="ac").startswith("1 of 3 are 2 times (the tensor-parallel degree")
    assert over_tp in explained_gradients(case, 1, 2, 1, tp="ac")
    assert over_tp not in explained_gradients(case, 1, 2, 2, tp="c")  # one kind and the other
    assert over_tp not in explained_gradients(case, 2, 2, 1.3)  # a loss that is doubled, and a gradient that rounds
    assert "every gradient but 1 is 2 times" in explained_gradients(case, 2, 2, 1.3)
    assert "shard them with fully_shard" in explained_gradients(make_case(dp_shard=2, steps=1), 1, 2, 1)
    assert explained_gradients(make_case(dp_shard=2, tp=2, steps=1), 1, 2, 1).endswith("FIX ")


def test_a_first_loss_that_looks_like_a_sum() -> None:
    case = make_case(global_batch=8, seq_len=32, vocab_size=2048)
    explanation = explain_scale(case, 2000.0)
    assert explanation is not None and "256 times" in explanation.what and "not the sum" in explanation.fix
    assert explain_scale(case, 8.3) is None
    assert explain_scale(case, float("nan")) is None
