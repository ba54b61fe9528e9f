"""How ranks failed: ranks at the same place share a finding, and those that wait for no other come first."""

from __future__ import annotations

from harness.checks.failures import STUCK, failures
from harness.trace import RankFailure
from harness.verdict import Finding
from tests.builders import make_failure, make_trace, run_of
from tests.unit.test_stacks import BACKWARD, FABRIC, REDUCES, TRAIN, dump

SLEEPS = [("/home/me/patch.py", 12, "sleep"), *TRAIN]


def stuck(rank: int, frames: list[tuple[str, int, str]] | None) -> RankFailure:
    stacks = "" if frames is None else dump(frames)
    return make_failure(rank, "did not finish", kind="stuck", traceback=stacks)


def told(*ends: RankFailure) -> list[Finding]:
    return list(failures(run_of(*ends), "hang"))


def ends(finding: Finding) -> str:
    return str(finding.values["end"])


def test_the_rank_that_nobody_waits_with_comes_first_and_says_what_the_others_do() -> None:
    first, others = told(stuck(0, REDUCES), stuck(1, SLEEPS), stuck(2, REDUCES), stuck(3, REDUCES))
    assert ends(first) == (
        "stuck in step 1: in sleep (/home/me/patch.py:12), in no collective; ranks 0, 2-3 wait in all_reduce"
    )
    assert (first.rule, first.ranks, first.expected) == (STUCK.name, (1,), "every rank returns")
    assert (first.found or "").splitlines() == [
        "stuck in sleep (/home/me/patch.py:12),",
        "    called from forward (harness/worker/targets/reference/model.py:50)",
    ]
    assert (others.rule, others.ranks) == (STUCK.name, (0, 2, 3))
    assert ends(others).startswith("stuck in step 1: waiting in all_reduce, called from amax_to_scale")
    assert ";" not in ends(others)


def test_ranks_in_different_collectives_are_told_apart_fewest_first() -> None:
    first, second = told(stuck(0, REDUCES), stuck(1, REDUCES), stuck(2, [*FABRIC, *BACKWARD]))
    assert ends(first).startswith("stuck in step 1, backward: waiting in allreduce")
    assert ends(first).endswith("; ranks 0-1 wait in all_reduce")
    assert (first.ranks, second.ranks) == ((2,), (0, 1))


def test_ranks_that_returned_are_named() -> None:
    ranks = (stuck(0, REDUCES), stuck(1, REDUCES), make_trace(rank=2), make_trace(rank=3))
    (finding,) = failures(run_of(*ranks), "hang")
    assert ends(finding).endswith("; ranks 2-3 returned")


def test_ranks_without_stacks_are_still_told() -> None:
    (finding,) = told(stuck(0, None), stuck(1, None))
    assert (finding.ranks, ends(finding)) == ((0, 1), "stuck in step 1: did not finish")
    assert finding.found == "stuck"
    stopped = make_failure(2, "stopped by a signal", kind="stopped")
    assert [each.rank for each in told(stopped, stuck(0, REDUCES))] == [2, 0]
