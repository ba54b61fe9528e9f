"""The tokens that the model is called with, and the state that a resumed run goes on from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from msgspec.structs import replace

from harness.checks.check import Rule
from harness.checks.data import FOREIGN, LABELS, NOT_LOADED, OTHER_RANK, OTHER_STATE, SOME, check_resume, check_tokens
from harness.matrix.case import Layout
from harness.matrix.caseid import (
    case_id,
    family_id,
    layout_id,
    other_layout,
    parse_case_id,
    reference_case,
    resumed_in,
    solo_case,
    twin_case,
)
from harness.matrix.rules import exclusions
from harness.trace import Run
from harness.trace.model import Resumed, State, StepInputs
from harness.verdict import Finding
from tests.builders import make_case, make_trace, make_witnesses, not_judged, run_of
from tests.strategies import POSSIBLE_CASES

CASE = make_case(dp_shard=2, tp=2, global_batch=8)  # rank // 2 is the data-parallel rank, with 4 sequences


def inputs(sequences: Any, **changes: Any) -> StepInputs:
    values: dict[str, Any] = {"labels": (), "covered": 1.0, "shapes": ((4, 32),), "step": 1}
    return StepInputs(inputs=tuple(sequences), **{**values, **changes})


def own(rank: int) -> range:
    return range(rank // 2 * 4, rank // 2 * 4 + 4)


def run(wrong: dict[int, StepInputs] | None = None) -> Run:
    wrong = wrong or {}
    return run_of(*(make_trace(rank=rank, inputs=(wrong.get(rank) or inputs(own(rank)),)) for rank in range(4)))


def check(checked_run: Run, reference: StepInputs | None = None) -> list[Finding]:
    solo = run_of(make_trace(inputs=(reference or inputs(range(8)),)))
    return check_tokens(CASE, checked_run, make_witnesses(CASE, solo=solo))


def test_every_rank_on_its_own_part_has_no_findings() -> None:
    assert check(run()) == []


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (inputs((), labels=range(4, 8)), LABELS),
        (inputs(range(4)), OTHER_RANK),
        (inputs((4, 5)), SOME),
        (inputs((), covered=0.1), FOREIGN),
    ],
)
def test_other_tokens_are_named_with_what_to_do(wrong: StepInputs, rule: Rule) -> None:
    (finding,) = check(run({2: wrong, 3: wrong}))
    assert (finding.rule, finding.ranks, finding.values["who"]) == (rule.name, (2, 3), "ranks 2-3")
    assert rule is not SOME or (finding.values["got"], finding.values["wanted"]) == (2, 4)
    assert (finding.step, finding.rank, finding.expected) == (1, 2, "sequences 4-7 of the global batch")
    assert finding.fix


def test_the_reference_is_looked_at_too() -> None:
    (finding,) = check(run(), inputs(range(4)))
    assert (finding.rule, finding.values["who"]) == (SOME.name, "the single-rank reference")
    assert (finding.rank, finding.ranks) == (None, ())


def test_tokens_in_another_form_are_no_finding() -> None:
    assert check(run(dict.fromkeys(range(4), inputs((), covered=1.0)))) == [], "packed, or with special tokens"
    pieces = dict.fromkeys(range(4), inputs((), covered=15 / 31))
    assert check(run(pieces)) == [], "every tensor-parallel rank has a half of each sequence"


RESUMED = make_case(tp=2, resume="resharded", steps=4)
SAVED: State = {"norm.weight": "float32 [4] a", "norm.weight step": "2.0", "wq.weight": "float32 [4, 4] b"}


def resumed(*by_rank: Resumed) -> list[Finding]:
    traces = (make_trace(rank=rank, losses=[8.0, 7.9], resumed=record) for rank, record in enumerate(by_rank))
    return check_resume(RESUMED, run_of(*traces), make_witnesses(RESUMED))


def loaded_by(*loaded: State, rank: int = 1) -> list[Finding]:
    fine = Resumed(after_step=2, saved=SAVED, loaded=(SAVED, SAVED))
    return resumed(*(replace(fine, loaded=loaded) if of == rank else fine for of in (0, 1)))


def test_the_saved_state_has_no_findings_and_without_resuming_nothing_is_judged() -> None:
    assert loaded_by(SAVED, SAVED) == []
    assert "resume" in not_judged(make_case())
    assert "resume" not in not_judged(RESUMED)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("layout", "loaded"),
    [("fsdp2", ({**SAVED, "norm.weight step": "0.0"}, SAVED)), ("tp2", (SAVED, {**SAVED, "norm.weight step": "0.0"}))],
)
def test_a_value_that_differs_is_named_with_the_layout_that_loaded_it(
    layout: str, loaded: tuple[State, ...], rank: int
) -> None:
    (finding,) = loaded_by(*loaded, rank=rank)
    assert finding.rule == OTHER_STATE.name
    assert dict(finding.values) == {"layout": layout, "parts": "step of 1 parameter", "what": "step"}
    assert (finding.step, finding.rank, finding.module) == (3, rank, "norm.weight")
    assert (finding.expected, finding.found) == ("2.0", "0.0")


@pytest.mark.parametrize(("wrong", "ranks"), [((0,), (0,)), ((1,), (1,)), ((0, 1), ()), ((), ())])
def test_the_rank_that_holds_what_was_not_saved_is_named(wrong: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    off = {**SAVED, "wq.weight": "float32 [4, 4] c"}  # the whole tensor, which every rank sees
    record = Resumed(after_step=2, saved=SAVED, loaded=(SAVED, off))
    names = [("wq.weight",) if rank in wrong else () for rank in (0, 1)]
    (finding,) = resumed(*(replace(record, wrong=((), of_rank)) for of_rank in names))
    assert (finding.rule, finding.module, finding.ranks) == (OTHER_STATE.name, "wq.weight", ranks)
    assert finding.message.endswith(f"on rank {ranks[0]}" if ranks else "on all ranks")


def test_what_is_only_saved_or_only_loaded_differs() -> None:
    (finding,) = loaded_by({"norm.weight": "float32 [4] a", "new.weight": "float32 [1] c"}, SAVED)
    assert (finding.rule, finding.module, finding.values["what"]) == (OTHER_STATE.name, "new.weight", "the values")
    assert finding.values["parts"] == "the values of 2 parameters, step of 1 parameter"
    assert (finding.expected, finding.found) == ("nothing", "float32 [1] c")


def test_a_state_that_is_not_loaded_everywhere_is_found() -> None:
    (finding,) = loaded_by(SAVED)
    assert (finding.rule, finding.values["layout"]) == (NOT_LOADED.name, "tp2")
    trace = make_trace(rank=0, losses=[8.0])
    (finding,) = check_resume(RESUMED, run_of(trace), make_witnesses(RESUMED))
    assert (finding.rule, finding.values["layout"]) == (NOT_LOADED.name, "fsdp2")


def test_witnesses_and_goldens_are_not_resumed_and_evaluate_nothing() -> None:
    plain = parse_case_id("fsdp2-tp2-rowwise-v2048-s2-b16")
    for word in ("resume", "resume.resharded", "eval"):
        case = parse_case_id(f"fsdp2-tp2-rowwise-v2048-s2-{word}-b16")
        for made in (solo_case, twin_case, reference_case):
            assert made(case) == made(plain)
        assert family_id(case) == family_id(plain) and case_id(case) != case_id(plain)


@pytest.mark.parametrize(
    ("layout", "other"),
    [
        (Layout(tp=2), "fsdp2"),
        (Layout(dp_shard=2, tp=2), "fsdp4"),
        (Layout(dp_replicate=2, dp_shard=2), "fsdp4"),
        (Layout(dp_shard=4), "hsdp2x2"),
        (Layout(dp_shard=2), None),
        (Layout(), None),
    ],
)
def test_the_other_layout(layout: Layout, other: str | None) -> None:
    resume_layout = other_layout(layout)
    assert (None if resume_layout is None else layout_id(resume_layout)) == other


@given(POSSIBLE_CASES)
def test_state_is_loaded_by_possible_cases_of_the_same_ranks_and_last_by_the_case(case: object) -> None:
    assert isinstance(case, type(RESUMED))
    targets = resumed_in(case)
    assert len(targets) == {"none": 0, "same": 1, "resharded": 2}[case.train.resume]
    assert targets[-1:] in ((), (case,))
    for other in targets[:-1]:
        assert other.world_size == case.world_size
        assert other.layout != case.layout
        assert not resumed_in(other)
        assert not exclusions(other), case_id(other)
