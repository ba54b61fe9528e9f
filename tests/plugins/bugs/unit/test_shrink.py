"""Shrinking: the result fails alike, nothing smaller by one axis does, and neither jobs nor a restart change it.

Sizes of a smaller run keep what faults depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.matrix.axes import axis_values
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.rules import exclusions, expected_refusal
from harness.plugins.bugs.fitting import MAX_RANKS, Sizes, lost, made_smaller, traits
from harness.plugins.bugs.sections import shrunk_document, shrunk_sections
from harness.plugins.bugs.shrink import Shrunk, shrink, smaller_cases, smaller_groups, with_changes
from harness.plugins.bugs.trials import Journal
from harness.report.sections import text_of
from harness.result import CaseResult
from harness.verdict import FailureSignature, Verdict
from tests.builders import a_finding, make_case, make_result
from tests.examples import examples
from tests.strategies import POSSIBLE_CASES

SIGNATURE = FailureSignature(kind="scales/amax", where=("layers.*.wq",), first_step=2)
OTHER = FailureSignature(kind="parity/gradients")
LARGE = make_case(
    tp=4, dp_shard=2, recipe="rowwise", checkpointing="full", vocab_size=2256, pad_vocab_to_multiple_of=128, steps=5
)

Fails = Callable[[Case], FailureSignature | None]


class ModelOfABug:
    """Runs cases without ranks: they fail as a function of the case says."""

    def __init__(self, fails: Fails, *, stop_after: int | None = None) -> None:
        self.fails, self.ran, self.stop_after = fails, [], stop_after  # type: ignore[var-annotated]

    def run(self, cases: Sequence[Case], /) -> list[CaseResult]:
        if self.stop_after is not None and len(self.ran) >= self.stop_after:
            raise KeyboardInterrupt
        self.ran += [case_id(case) for case in cases]
        return [self._result(case) for case in cases]

    def _result(self, case: Case) -> CaseResult:
        signature = self.fails(case)
        verdict = Verdict.PASSED if signature is None else Verdict.INVARIANT
        finding = a_finding(check="graphs", message=f"{case.tokens_per_rank} of 128 rows are wrong")
        findings = () if signature is None else (finding,)
        return make_result(case_id(case), verdict, failure_signature=signature, findings=findings)


def needs(**axes: int | str) -> Fails:
    """Fails with at least these numbers and exactly these words, at step 2."""

    def fails(case: Case) -> FailureSignature | None:
        values = axis_values(case)
        if case.train.steps < 2:
            return None
        enough = (
            values[name] >= least if isinstance(least, int) else values[name] == least  # type: ignore[operator]
            for name, least in axes.items()
        )
        return SIGNATURE if all(enough) else None

    return fails


def shrunk(fails: Fails, folder: Path, *, case: Case = LARGE, jobs: int = 1) -> Shrunk:
    return shrink(case, ModelOfABug(fails).run, Journal(folder / "journal.jsonl"), jobs=jobs)


def test_what_a_failure_needs_is_kept_and_nothing_else(tmp_path: Path) -> None:
    smallest = shrunk(needs(tp=2, recipe="rowwise", global_batch=2), tmp_path)
    assert case_id(smallest.case) == "tp2-rowwise-dim.32-layers.1-heads.2-kvheads.2-ffn.32-v64-gb2-s2-f32"
    assert {next(iter(attempt.changes)) for attempt in smallest.needed} == {"tp", "recipe", "global_batch"}
    assert smallest.complete
    assert smallest.signature == SIGNATURE


@settings(max_examples=3)
@given(
    tp=st.sampled_from([1, 2, 4]),
    dp_shard=st.sampled_from([1, 2]),
    layers=st.sampled_from([1, 2]),
    recipe=st.sampled_from(["rowwise", None]),
)
def test_nothing_smaller_fails_alike(
    tmp_path_factory: pytest.TempPathFactory, tp: int, dp_shard: int, layers: int, recipe: str | None
) -> None:
    wanted: dict[str, int | str] = {"tp": tp, "dp_shard": dp_shard, "layers": layers}
    fails = needs(**wanted, **({} if recipe is None else {"recipe": recipe}))
    folder = tmp_path_factory.mktemp("shrink")
    smallest = shrunk(fails, folder)
    assert fails(smallest.case) == SIGNATURE
    assert all(fails(smaller.case) != SIGNATURE for smaller in smaller_cases(smallest.case, steps=2))
    assert {name: axis_values(smallest.case)[name] for name in wanted} == wanted
    assert shrunk(fails, folder / "again", jobs=3).case == smallest.case


def test_two_axes_that_need_each_other_go_together(tmp_path: Path) -> None:
    def fails(case: Case) -> FailureSignature | None:
        same = (case.layout.tp > 1) == (case.layout.dp_shard > 1)
        return SIGNATURE if same and case.train.steps >= 2 else None

    smallest = shrunk(fails, tmp_path)
    assert (smallest.case.layout.tp, smallest.case.layout.dp_shard) == (1, 1)


def test_a_bound_is_claimed_only_where_the_neighbors_were_tried(tmp_path: Path) -> None:
    case = make_case(dp_shard=3, global_batch=12, layers=5, recipe="tensorwise", fp8_all_gather=True)

    def of_uneven_shards(case: Case) -> FailureSignature | None:
        return SIGNATURE if case.layout.dp_shard == 3 else None

    def report_on(fails: Fails, folder: str) -> str:
        return text_of(shrunk_sections(shrunk(fails, tmp_path / folder, case=case)))

    uneven = report_on(of_uneven_shards, "uneven")
    assert "  dp_shard 3\n    with dp_shard 1: no failure" in uneven
    assert "    with dp_shard 2, global_batch 2: no failure" in uneven
    assert "    with dp_shard 4, global_batch 4: no failure" in uneven
    least = report_on(needs(layers=3), "least")
    assert "  layers 3 or more\n    with layers 1: no failure" in least and "    with layers 4: the same" in least
    # 3 sequences are not for 2 ranks: no number of ranks alone shows it.
    needs_both = report_on(needs(dp_shard=3), "both")
    assert "  dp_shard 3\n" in needs_both and "    with dp_shard 4, global_batch 4: the same" in needs_both

    class ThreeSlots(ModelOfABug):
        def run(self, cases: Sequence[Case], /) -> list[CaseResult]:
            if any(case.world_size > 3 for case in cases):
                raise HarnessError("more than the 3 slots there are.")
            return super().run(cases)

    small = shrink(case, ThreeSlots(of_uneven_shards).run, Journal(tmp_path / "j"))
    shards = [attempt.changes["dp_shard"] for attempt in small.needed if "dp_shard" in attempt.changes]
    assert small.complete and shards == [1, 2]


def test_another_failure_is_not_taken(tmp_path: Path) -> None:
    smallest = shrunk(lambda case: SIGNATURE if case.layout.tp >= 4 else OTHER, tmp_path)
    assert smallest.case.layout.tp == 4
    text = text_of(shrunk_sections(smallest))
    assert "with tp 2: parity/gradients" in " ".join(text.split())
    assert "does not depend on" in text
    assert shrunk_document(smallest)["case"] == case_id(smallest.case)
    assert smallest.message.endswith("of 128 rows are wrong")
    assert f"message  {smallest.message}" in text


def test_a_shrink_that_was_killed_goes_on(tmp_path: Path) -> None:
    fails, journal = needs(tp=2, recipe="rowwise"), tmp_path / "journal.jsonl"
    whole = shrunk(fails, tmp_path / "whole")
    killed = ModelOfABug(fails, stop_after=5)
    with pytest.raises(KeyboardInterrupt):
        shrink(LARGE, killed.run, Journal(journal))
    with journal.open("a") as file:
        file.write('{"case_id": "cut in t')
    again = ModelOfABug(fails)
    smallest = shrink(LARGE, again.run, Journal(journal))
    assert smallest.case == whole.case
    assert not set(killed.ran) & set(again.ran)
    assert shrink(LARGE, ModelOfABug(fails).run, Journal(journal)).ran == 0


def test_a_budget_ends_it_with_the_smallest_so_far_or_without_one(tmp_path: Path) -> None:
    fails = needs(tp=2)
    smallest = shrink(LARGE, ModelOfABug(fails).run, Journal(tmp_path / "j"), budget_s=1e-9)
    assert not smallest.complete
    assert smallest.case == LARGE
    text = text_of(shrunk_sections(smallest))
    assert "not shrunk: the budget ended with the first run" in text and "give a larger --budget-s" in text
    assert "smallest case" not in text
    text = text_of(shrunk_sections(msgspec.structs.replace(shrunk(fails, tmp_path), complete=False)))
    assert "smallest case so far: " in text and "the budget ended it" in text


def test_a_case_that_does_not_fail_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="does not fail, so there is nothing to shrink"):
        shrunk(lambda case: None, tmp_path)


def test_what_the_machine_did_is_no_answer(tmp_path: Path) -> None:
    class Broken(ModelOfABug):
        def _result(self, case: Case) -> CaseResult:
            return make_result(case_id(case), Verdict.INFRA)

    with pytest.raises(HarnessError, match="could not be run"):
        shrink(LARGE, Broken(needs()).run, Journal(tmp_path / "j"))
    assert not (tmp_path / "j").exists()


@given(POSSIBLE_CASES)
def test_smaller_cases_are_cases_that_can_be_run(case: Case) -> None:
    for smaller in (*smaller_cases(case), *smaller_groups(case)):
        assert not exclusions(smaller.case)
        assert (expected_refusal(smaller.case) is None) == (expected_refusal(case) is None)
        assert smaller.case != case
        assert smaller.case.world_size <= case.world_size
        now, before = axis_values(smaller.case), axis_values(case)
        assert {name for name in now if now[name] != before[name]} == set(smaller.changes)


def test_what_depends_on_an_axis_goes_with_it() -> None:
    case = make_case(tp=2, async_tp=True, compile="graph", recipe="tensorwise", tp_styles="float8")
    smaller = with_changes(case, {"tp": 1})
    assert smaller is not None
    assert dict(smaller.changes) == {"tp": 1, "async_tp": False, "tp_styles": "plain"}
    one_head = with_changes(make_case(tp=2), {"heads": 1})
    assert one_head is not None
    assert dict(one_head.changes) == {"heads": 2, "kv_heads": 2}  # one for each rank


def test_sizes_keep_their_remainder() -> None:
    values = {smaller.changes["vocab_size"] for smaller in smaller_cases(LARGE) if "vocab_size" in smaller.changes}
    assert {64, 272, 528, 1104} <= values  # 2256 = 35 * 64 + 16


DEGREES = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 128])
LLAMA_70B = {"dim": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn_dim": 28672, "vocab_size": 128256}


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Any run whose heads split: sizes of every remainder, even and uneven shards."""
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    kv_heads = tp * draw(st.integers(1, 4))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4, 8]))
    return Sizes(
        dim=heads * 2 * draw(st.integers(1, 80)),
        layers=draw(st.integers(1, 126)),
        heads=heads,
        kv_heads=kv_heads,
        ffn_dim=draw(st.integers(1, 60_000)),
        vocab_size=draw(st.integers(tp, 300_000)),
        local_batch=draw(st.integers(1, 64)),
        seq_len=tp * draw(st.integers(1, 4096)),
        dp_replicate=draw(st.sampled_from([1, 2, 8])),
        dp_shard=draw(DEGREES),
        tp=tp,
        every=draw(st.integers(1, 4)),
    )


@given(sizes())
@settings(max_examples=examples(200))
def test_a_smaller_run_keeps_its_conditions_or_says_what_it_does_not_keep(given_sizes: Sizes) -> None:
    """Nothing grows, at most eight ranks are left, and degrees, layers and sequences stay several."""
    small, arithmetic = made_smaller(given_sizes)
    assert small.world_size <= MAX_RANKS
    for name in Sizes.__struct_fields__:
        before, after = getattr(given_sizes, name), getattr(small, name)
        assert 1 <= after <= before
        assert (name in arithmetic) == (before != after)
    assert small.dim % small.heads == 0 and small.dim // small.heads % 2 == 0
    kept, conditions = traits(given_sizes), traits(small)
    assert conditions["degrees"] == kept["degrees"] and conditions["layers"] == kept["layers"]
    assert (small.local_batch > 1) == (given_sizes.local_batch > 1)
    for name in set(lost(given_sizes, small)) & {"dim", "ffn_dim", "vocab_size"} & set(arithmetic):
        assert "not every remainder could be kept" in arithmetic[name]


@given(
    vocabulary=st.integers(2048, 300_000),
    ffn_dim=st.integers(256, 60_000),
    shard=st.sampled_from([1, 2, 3, 4]),
    tp=st.sampled_from([1, 2]),
)
@settings(max_examples=examples(200))
def test_a_run_that_fits_keeps_every_remainder(vocabulary: int, ffn_dim: int, shard: int, tp: int) -> None:
    run = Sizes(
        dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=ffn_dim, vocab_size=vocabulary, local_batch=3,
        seq_len=8192, dp_shard=shard, tp=tp,
    )  # fmt: skip
    small, _ = made_smaller(run)
    assert lost(run, small) == ()
    assert (small.vocab_size - vocabulary) % 16 == 0 and (small.ffn_dim % tp == 0) == (ffn_dim % tp == 0)
    assert small.ffn_dim < 1024 + 1 and small.dim <= 512


def test_a_misaligned_shard_of_the_vocabulary_stays_misaligned() -> None:
    run = Sizes(**{**LLAMA_70B, "vocab_size": 100_296}, local_batch=1, seq_len=8192, dp_shard=16, tp=8)
    small, _ = made_smaller(run)
    assert 100_296 // 8 % 16 == small.vocab_size // small.tp % 16 != 0
    assert (small.dp_shard, small.tp, small.layers) == (2, 4, 2)


def test_a_stack_keeps_uneven_shards() -> None:
    small, _ = made_smaller(Sizes(**LLAMA_70B, local_batch=2, seq_len=64, dp_shard=3))
    assert small.dp_shard == 3 and small.dim % 3 and small.ffn_dim % 3
