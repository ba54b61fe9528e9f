"""Profiles: what is recorded is what is read, a run whose steps differ makes none, and every change has a line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.evidence.golden import list_goldens
from harness.evidence.profile import (
    Profile,
    compare_profiles,
    list_profiles,
    load_profile,
    make_profile,
    needs_profile,
    seen_in,
    write_profile,
)
from harness.evidence.sealed import Damaged, Missing
from harness.matrix.caseid import parse_case_id
from harness.trace import RankTrace, Run
from harness.trace.graphs import GraphCast, GraphRecord, Unfused
from harness.trace.operands import OperandTrace
from tests.builders import (
    SOFTWARE,
    make_cast,
    make_failure,
    make_fused,
    make_graphs,
    make_saved,
    make_sent,
    make_signed_run,
    make_trace,
    run_of,
    with_rank,
    with_sent,
)

NAME = "target.my_pkg.my_target-fsdp2-tensorwise-v2048-s3-f32"
RUN = make_signed_run(steps=3)


def profile(run: Run = RUN, reason: str = "first one") -> Profile:
    return make_profile(run, case_id=NAME, command="cmd", reason=reason, commit="abc")


def seen(**records: object) -> dict[str, str]:
    """What a rank that left these records did in step 2, but for matmuls."""
    rank_seen = dict(seen_in(make_trace(losses=(8.0, 7.0), calls=4, **records), 2))
    assert rank_seen.pop("scaled matmuls") == "4"
    return rank_seen


def test_every_kind_has_a_line() -> None:
    traffic = (make_sent(1), make_sent(2, sizes={512: 2, 4096: 1}), make_sent(2, kind="all_reduce", op="max"))
    assert seen(traffic=traffic) == {
        "all_gather in uint8 along dp_shard": "3 with 5120 bytes (2 of 512, 1 of 4096 elements)",
        "all_reduce (max) in uint8 along dp_shard": "4 with 2048 bytes (4 of 512 elements)",
    }
    assert seen(saved_memory=(make_saved(1, 64), make_saved(2, 128))) == {
        "float32 bytes saved for backward": "128",
        "float32 tensors of 64 bytes alive between forward and backward": "2",
        "scalars alive at the end of the step": "1",
        "scalars alive between forward and backward": "2",
    }
    casts = (make_cast(step=1), make_cast(step=2), make_cast(step=2, role="weight"))
    assert seen(operands=OperandTrace(casts=casts, matmuls=())) == {
        "casts of input to float8_e4m3fn in forward": "1",
        "casts of weight to float8_e4m3fn in forward": "1",
    }


def test_compiled_runs_have_lines_for_graphs_and_fused_operators() -> None:
    unfused = Unfused(collective="all_gather", axis="tp", shape=(4,), dtype="float32", reason="no matmul")
    graph = GraphRecord(phase="forward", fused=(), unfused=(unfused,) * 2)
    scattered = {"operator": "fused_matmul_reduce_scatter", "collective": "reduce_scatter", "times": 3}
    fused = make_fused(step=2, phase="backward", **scattered)
    numbers = {name: getattr(make_cast(), name) for name in GraphCast.__struct_fields__ if hasattr(make_cast(), name)}
    cast = GraphCast(**{**numbers, "step": 2, "order": 1, "phase": "forward", "is_weight": True})
    graphs = make_graphs(graphs=(graph, graph), calls=(fused, replace(fused, step=1)), casts=(cast,))
    assert seen(graphs=graphs) == {
        "casts of weight to float8_e4m3fn in forward": "1",
        "graphs of forward": "2",
        "all_gather along tp not fused in forward": "4",
        "fused_matmul_reduce_scatter executed in backward": "3",
    }


def test_equal_ranks_are_together_and_later_steps_are_one() -> None:
    more = with_sent(RUN, 1, make_sent(1, op="sum"))
    run_profile = profile(more)
    assert [group.ranks for group in run_profile.first_step] == ["0", "1"]
    assert [group.ranks for group in run_profile.later_steps] == ["0 1"]
    for trace in more.traces:
        for step in (1, 2, 3):
            assert run_profile.seen(step=step, rank=trace.rank) == seen_in(trace, step)
    assert run_profile.seen(step=1, rank=2) == {} and run_profile.seen(step=1, rank=10) == {}


def test_one_step_is_enough() -> None:
    assert profile(make_signed_run(steps=1)).later_steps == ()


def without_traffic(trace: RankTrace) -> RankTrace:
    return replace(trace, traffic=None)


@pytest.mark.parametrize(
    "run",
    [
        run_of(),
        run_of(*RUN.traces, make_failure(2)),
        with_rank(RUN, 1, without_traffic),
        with_rank(RUN, 0, lambda trace: replace(trace, saved_memory=None)),
    ],
)
def test_a_run_that_lacks_something_makes_none(run: Run) -> None:
    with pytest.raises(HarnessError, match="not every rank finished and recorded"):
        profile(run)


def test_a_run_whose_steps_differ_makes_none_and_says_where() -> None:
    late = with_sent(RUN, 1, make_sent(3, op="sum"))
    with pytest.raises(HarnessError) as caught:
        profile(late)
    assert "step 3 of rank 1 is not like step 2: all_gather (sum) in uint8 along dp_shard: 4 with" in caught.value.what
    assert caught.value.what.endswith("instead of none.")


def test_the_file_has_one_line_a_kind_and_is_what_is_read(tmp_path: Path) -> None:
    path = write_profile(tmp_path, profile())
    text = path.read_text()
    assert path.name == f"{NAME}.json" and list(path.parent.iterdir()) == [path]
    assert load_profile(tmp_path, NAME).seen(step=2, rank=1) == seen_in(RUN.traces[1], 2)
    assert '        "all_gather in uint8 along dp_shard": "4 with 2048 bytes (4 of 512 elements)",\n' in text
    assert json.loads(text)["first_step"][0]["ranks"] == "0 1"
    assert json.loads(text)["provenance"]["software"] == SOFTWARE
    again = replace(profile(), provenance=load_profile(tmp_path, NAME).provenance)
    assert write_profile(tmp_path, again).read_text() == text
    assert list_profiles(tmp_path) == (NAME,) and list_goldens(tmp_path) == ()


@pytest.mark.parametrize(
    ("pattern", "by"),
    [("4 with", "5 with"), ('"0 1"', '"0"'), ("first one", "another"), ('"schema": 1', '"schema": 2'), ("ranks", "r")],
)
def test_an_edit_by_hand_is_found_and_named(tmp_path: Path, pattern: str, by: str) -> None:
    path = write_profile(tmp_path, profile())
    path.write_text(re.sub(pattern, by, path.read_text(), count=1))
    with pytest.raises(Damaged) as caught:
        load_profile(tmp_path, NAME)
    assert caught.value.where == str(path)
    assert f"`fp8-harness --root {tmp_path} baseline update --profiles --device cpu {NAME} " in (caught.value.fix or "")


def test_a_renamed_profile_is_damaged_and_a_missing_one_names_the_command(tmp_path: Path) -> None:
    path = write_profile(tmp_path, profile())
    path.rename(path.with_name("other.json"))
    with pytest.raises(Damaged, match=r"renamed by hand\. Fix: restore it or remove it"):
        load_profile(tmp_path, "other")
    with pytest.raises(Missing, match="baseline update --profiles"):
        load_profile(tmp_path, NAME)
    path.mkdir()
    with pytest.raises(Damaged, match="cannot be read"):
        load_profile(tmp_path, NAME)


@pytest.mark.parametrize("reason", ["", " \n", '"…"'])
def test_without_a_reason_nothing_is_stored(tmp_path: Path, reason: str) -> None:
    with pytest.raises(HarnessError, match="no reason is given"):
        write_profile(tmp_path, profile(reason=reason))
    assert list_profiles(tmp_path) == ()


def test_it_says_nothing_of_other_versions() -> None:
    made = profile()
    for same in (SOFTWARE, {"torch": "2.13.0+cu130", "torchao": "0.18.0", "numpy": "9"}, {}):
        assert made.version_gap(same) is None
    assert made.version_gap(SOFTWARE | {"torch": "2.13.1"}) == (
        "the profile was recorded with other versions: torch 2.13.1 is installed, recorded with 2.13.0+cpu"
    )
    assert "torchao 0.17.0 is installed" in (made.version_gap(SOFTWARE | {"torchao": "0.17.0"}) or "")


def test_it_is_for_models_without_formulas_that_train() -> None:
    assert needs_profile(parse_case_id(NAME))
    assert not needs_profile(parse_case_id("fsdp2-tensorwise-v2048-s3-f32"))


def test_old_and_new_are_compared_by_step_and_ranks() -> None:
    assert compare_profiles(profile(), profile()) == ()
    five = (make_sent(2, times=5), make_sent(3, times=5))
    changed = with_rank(RUN, 1, lambda trace: replace(trace, traffic=(make_sent(1), *five)))
    (change,) = compare_profiles(profile(), profile(changed))
    assert (change.step, change.ranks, change.what) == ("later steps", (1,), "all_gather in uint8 along dp_shard")
    assert (change.old, change.new) == (
        "4 with 2048 bytes (4 of 512 elements)",
        "5 with 2560 bytes (5 of 512 elements)",
    )
    every = with_rank(changed, 0, lambda trace: replace(trace, traffic=()))
    assert {change.new for change in compare_profiles(profile(), profile(every)) if change.ranks == (0,)} == {None}
