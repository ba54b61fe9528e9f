"""The checks of memory find every byte and storage that is kept too much or too little, at its step and rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.memory import (
    GROWS,
    MORE_SCALARS,
    OTHER_MODE,
    OUTLIVES,
    SHRINKS,
    TOO_LITTLE,
    TOO_MUCH,
    check_leaks,
    check_live_memory,
    check_memory,
)
from harness.expect.memory import converted_linears, expected_live, expected_saved, expected_scalars, forward_maxima
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.matrix.dims.ddp import alive
from harness.trace.counts import MOMENTS, LiveMemory, LiveTensor, SavedMemory
from harness.verdict import Finding
from tests.builders import make_case, make_trace, make_witnesses, rules, run_of, saved_as
from tests.strategies import EAGER_DENSE_CASES

CASE = make_case(tp=2, recipe="tensorwise", steps=2)
FULL = make_case(tp=2, recipe="tensorwise", steps=2, checkpointing="full")
Records = tuple[SavedMemory, ...]


def records(case: Case, rank: int = 0) -> Records:
    """What a correct run records."""
    return tuple(saved_as(step, expected_saved(case, step=step, rank=rank)) for step in (1, 2))


def check(case: Case, *saved: Records | None) -> list[Finding]:
    run = run_of(*(make_trace(case, rank, saved_memory=recorded) for rank, recorded in enumerate(saved)))
    return check_memory(case, run, make_witnesses(case))


def test_a_dense_block_saves_the_maxima_of_dense_linears() -> None:
    """Of seven weights, of the two inputs that the styles cast once, and of those of `wo` and `w2`."""
    case = parse_case_id("fsdp2-tp2-tensorwise-tpstyle.fp8-ac.op-v2048-f64")
    assert forward_maxima(case, converted_linears(case, 0)) == 7 + 2 + 2
    assert expected_saved(case, step=1, rank=0)["float64"] == 2_491_064  # measured, torch 2.13


@given(
    st.integers(0, 1), st.integers(1, 2), st.integers(-4, 4).filter(bool), st.sampled_from(["float32", "float8_e5m2"])
)
def test_one_byte_is_found_at_its_step_and_rank(rank: int, step: int, off: int, dtype: str) -> None:
    right = records(CASE)
    by_dtype = dict(right[step - 1].by_dtype)
    by_dtype[dtype] = by_dtype.get(dtype, 0) + off
    wrong = tuple(saved_as(step, by_dtype) if record.step == step else record for record in right)
    (finding,) = check(CASE, *((wrong, right) if rank == 0 else (right, wrong)))
    assert (finding.step, finding.rank) == (step, rank)
    assert finding.values["dtype"] == dtype and finding.expected and finding.found


def test_lost_checkpointing_and_float8_that_outlives_forward_are_told_in_plain_words() -> None:
    (finding,) = check(FULL, records(CASE), records(CASE))
    assert finding.rule == OTHER_MODE.name
    assert (finding.values["mode"], finding.values["asked"]) == ("none", "full")
    wrong = tuple(saved_as(step, {**records(CASE)[0].by_dtype, "float8_e4m3fn": 81920}) for step in (1, 2))
    (finding,) = check(CASE, wrong, wrong)
    assert (finding.rule, finding.values["dtype"]) == (OUTLIVES.name, "float8_e4m3fn")
    assert (finding.expected, finding.found) == ("0 bytes", "81920 bytes")


def test_a_step_that_was_not_recorded_is_found() -> None:
    (finding,) = check(CASE, records(CASE)[:1], records(CASE))
    assert (finding.step, finding.rank, finding.found) == (2, 0, "0 bytes")
    for findings in check_live(CENSUS, censuses(CENSUS)[:2], censuses(CENSUS)):
        assert places(findings) == [(0, 3), (0, 3)]
        assert rules(findings) in ({"live_memory/no-scan"}, {"leaks/no-scan"})


STEPS = 4
CENSUS = make_case(tp=2, recipe="tensorwise", checkpointing="full", steps=STEPS)
FSDP = make_case(dp_shard=2, recipe="tensorwise", fp8_all_gather=True, output_layer=True, dtype="bfloat16", steps=STEPS)
KEPT = LiveTensor(dtype="float32", shape=(4, 32, 128), nbytes=65536, holder="layers.1.kept")
PLACES = st.tuples(st.integers(0, 1), st.integers(1, STEPS), st.integers(0, 1))  # rank, step, moment


def censuses(case: Case, rank: int = 0) -> Records:
    """What a correct run records."""
    alive = tuple(
        LiveTensor(dtype=storage.dtype, shape=(storage.nbytes,), nbytes=storage.nbytes, holder="")
        for storage in expected_live(case, rank=rank, moment="forward")
    )
    live = (
        LiveMemory(moment="forward", scalars=expected_scalars(case, moment="forward"), tensors=alive),
        LiveMemory(moment="step", scalars=1, tensors=()),
    )
    steps = range(1, case.train.steps + 1)
    return tuple(SavedMemory(step=step, saved_bytes=0, by_dtype={}, live=live) for step in steps)


def changed(saved: Records, step: int, moment: int, **changes: object) -> Records:
    """The records with another census at one moment of one step."""
    both = [*saved[step - 1].live]
    both[moment] = replace(both[moment], **changes)
    return tuple(replace(record, live=tuple(both)) if record.step == step else record for record in saved)


def check_live(case: Case, *saved: Records | None) -> tuple[list[Finding], list[Finding]]:
    """The findings of both checks."""
    run = run_of(*(make_trace(case, rank, saved_memory=recorded) for rank, recorded in enumerate(saved)))
    return check_live_memory(case, run, make_witnesses(case)), check_leaks(case, run, make_witnesses(case))


def places(findings: list[Finding]) -> list[tuple[int | None, int | None]]:
    return [(finding.rank, finding.step) for finding in findings]


def test_what_the_formulas_say_is_good() -> None:
    for case in (CASE, FULL):
        assert check(case, records(case, 0), records(case, 1)) == []
    for case in (CENSUS, FSDP):
        assert check_live(case, censuses(case, 0), censuses(case, 1)) == ([], [])


@given(PLACES, st.sampled_from(["float32", "float8_e4m3fn", "int64"]), st.integers(2, 100))
def test_one_storage_more_is_found_at_its_step_and_rank(place: tuple[int, int, int], dtype: str, nbytes: int) -> None:
    rank, step, moment = place
    right = censuses(CENSUS)
    more = LiveTensor(dtype=dtype, shape=(nbytes,), nbytes=nbytes, holder="")
    wrong = changed(right, step, moment, tensors=(*right[step - 1].live[moment].tensors, more))
    formula, leaks = check_live(CENSUS, *((wrong, right) if rank == 0 else (right, wrong)))
    assert places(formula) == [(rank, step)]
    assert formula[0].rule == TOO_MUCH.name and dtype in str(formula[0].values["tensors"])
    assert formula[0].expected and formula[0].found
    # Step 1 is not compared with others, and where step 2 is wrong, step 3 is the first that differs from it.
    assert places(leaks) == ([(rank, max(step, 3))] if step > 1 else [])


@given(st.integers(1, STEPS), st.data())
def test_one_storage_less_is_found(step: int, data: st.DataObject) -> None:
    right = censuses(FSDP)
    alive = right[step - 1].live[0].tensors
    lost = data.draw(st.integers(0, len(alive) - 1))
    formula, _ = check_live(FSDP, changed(right, step, 0, tensors=alive[:lost] + alive[lost + 1 :]), right)
    assert places(formula) == [(0, step)]
    purpose = expected_live(FSDP, rank=0, moment="forward")[lost].purpose
    assert (formula[0].rule, formula[0].values["purpose"]) == (TOO_LITTLE.name, purpose)


@given(PLACES, st.sampled_from([-1, 1]))
def test_a_scalar_more_or_less_is_found(place: tuple[int, int, int], off: int) -> None:
    rank, step, moment = place
    right = censuses(CENSUS)
    wrong = changed(right, step, moment, scalars=right[step - 1].live[moment].scalars + off)
    formula, leaks = check_live(CENSUS, *((wrong, right) if rank == 0 else (right, wrong)))
    assert places(formula) == [(rank, step)]
    assert places(leaks) == ([(rank, max(step, 3))] if step > 1 else [])
    if step > 2:
        assert leaks[0].rule == (MORE_SCALARS if off > 0 else SHRINKS).name


def test_the_message_names_the_holder() -> None:
    wrong = censuses(CENSUS)
    for step in range(1, STEPS + 1):
        wrong = changed(wrong, step, 1, scalars=1, tensors=(KEPT,) * step)
    (too_much,), (leak,) = check_live(CENSUS, wrong, wrong)
    assert (too_much.rule, too_much.step) == (TOO_MUCH.name, 1)
    kept = {"tensors": "float32[4, 32, 128] of layers.1.kept", "holder": "layers.1.kept", "when": MOMENTS["step"]}
    assert dict(too_much.values) == kept
    assert (leak.rule, leak.step, leak.found) == (GROWS.name, 3, "196608 bytes, and 1 scalar")
    assert dict(leak.values) == {**kept, "settled": 2}


@pytest.mark.parametrize(
    ("text", "measured"),
    [
        ("fsdp2-bf16-moe8-v2048-gb16-s2-b16", 1_573_184),
        ("fsdp4-reshard.never-ep2-mxfp8-gmm.fp8-moe8-v2048-gb16-s2-b16", 2_526_528),
        ("fsdp4-reshard.never-ep4-tensorwise-moe8-balance-v2048-gb16-s2-accum2-b16", 2_067_776),
        ("hsdp2x2-ep2-bf16-ac.full-moe4-v2048-s2-b16", 796_832),
    ],
)
def test_blocks_with_experts_keep_what_was_measured(text: str, measured: int) -> None:
    """Between forward and backward, torch 2.13."""
    case = parse_case_id(text)
    assert sum(storage.nbytes for storage in expected_live(case, rank=0, moment="forward")) == measured
    (counts,) = expected_live(case, rank=0, moment="step")
    assert (counts.dtype, counts.nbytes) == ("int64", 8 * case.model.experts)


@pytest.mark.parametrize(
    ("text", "measured"),
    [
        ("single-bf16-moe8-v2048-gb4-s2-b16", 6_163_464),
        ("single-bf16-moe8-sigmoid-balance-v2048-gb4-s2-b16", 6_166_536),
        ("single-mxfp8-gmm.fp8-moe8-v2048-s2-b16", 14_616_584),
    ],
)
def test_blocks_with_experts_save_what_was_measured(text: str, measured: int) -> None:
    """In two steps, torch 2.13."""
    case = parse_case_id(text)
    assert sum(sum(expected_saved(case, step=step, rank=0).values()) for step in (1, 2)) == measured


@given(st.lists(st.integers(0, 64), min_size=2, max_size=2))
def test_what_a_rank_saves_follows_from_the_rows_that_it_got(rows: list[int]) -> None:
    """In two blocks: a row is saved as it came, and in a padded tile of 8 with what SwiGLU makes of it."""
    case = make_case(dp_shard=2, ep=2, experts=8, layers=3, dtype="bfloat16")
    none = expected_saved(case, step=1, rank=0, rows=((0,), (0,)))
    some = expected_saved(case, step=1, rank=0, rows=tuple((count,) for count in rows))
    dim, hidden = case.model.shape.dim, case.model.expert_dim
    tiles = sum(-(-count // 8) for count in rows)
    assert some["bfloat16"] - none["bfloat16"] == 2 * (sum(rows) * dim + 8 * tiles * (dim + 4 * hidden))


@given(EAGER_DENSE_CASES, st.integers(0, 7))
def test_the_formula_fits_every_eager_case(case: Case, rank: int) -> None:
    live = expected_live(case, rank=rank, moment="forward")
    assert all(storage.nbytes > 0 and storage.purpose for storage in live)
    wrapped = sum(case.checkpointing.wraps(layer) for layer in range(case.model.shape.layers))
    tensors_of_blocks = (9 + 7 * case.model.bias) * case.model.shape.layers + (not case.model.tied)  # the embedding
    layout = case.layout
    freed = "never" if layout.replicas == "replicate" else layout.reshard_after_forward
    kept = {"always": 0, "default": 2, "never": 2 + tensors_of_blocks}[freed]
    buckets = len(list(alive(case, age=2, moment="forward")))
    assert len(live) == 1 + wrapped + kept * case.uses_fsdp + buckets
