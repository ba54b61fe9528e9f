"""The check `profile` finds every change of what was recorded, at its step and on its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.catalogue import by_cause
from harness.checks.judge import Judgement, judge
from harness.checks.metamorphic import EXECUTED, MEMORY, check_profile
from harness.evidence.profile import Profile, make_profile
from harness.matrix.caseid import case_id, parse_case_id
from harness.trace import RankTrace, Run
from harness.trace.operands import OperandTrace
from harness.verdict import Finding
from tests.builders import (
    SOFTWARE,
    a_finding,
    make_cast,
    make_sent,
    make_signed_run,
    make_witnesses,
    with_rank,
    with_sent,
)

STEPS = 3
CASE = parse_case_id(f"target.my_pkg.my_target-fsdp2-tensorwise-v2048-s{STEPS}-f32")
RUN = make_signed_run(steps=STEPS)
RECORDED = make_profile(RUN, case_id=case_id(CASE), command="", reason="r", commit="")
COMMAND = "fp8-harness baseline update --profiles"
HINT = f"if it is intended, `{COMMAND}` records it"
SENT = "all_gather in uint8 along dp_shard"
SAVED = "float32 bytes saved for backward"


def witnesses(profile: Profile | None = RECORDED, **given: Any) -> Any:
    return make_witnesses(CASE, profile=profile, update_profile=COMMAND, **given)


def check(run: Run) -> list[Finding]:
    return check_profile(CASE, run, witnesses())


def test_the_run_that_was_recorded_is_good() -> None:
    assert check(RUN) == []


# How a rank may change in one step, and what the finding is about. Each takes the trace and the step.
Change = Callable[[RankTrace, int], RankTrace]


def _steps(trace: RankTrace, step: int) -> RankTrace:
    return replace(trace, steps=tuple(replace(s, scaled_mm_calls=5) if s.step == step else s for s in trace.steps))


def _record(field: str, by: Callable[[Any], Any]) -> Change:
    """Changes the record of a step; None takes it out."""

    def change(trace: RankTrace, step: int) -> RankTrace:
        records = [by(record) if record.step == step else record for record in getattr(trace, field)]
        return replace(trace, **{field: tuple(record for record in records if record is not None)})

    return change


def _cast(trace: RankTrace, step: int) -> RankTrace:
    return replace(trace, operands=OperandTrace(casts=(make_cast(step=step),), matmuls=()))


def _alive(saved: Any) -> Any:
    forward, end = saved.live
    return replace(saved, live=(forward, replace(end, tensors=forward.tensors[:1])))


CHANGES: dict[str, tuple[Change, set[str]]] = {
    "another matmul": (_steps, {"scaled matmuls"}),
    "another cast": (_cast, {"casts of input to float8_e4m3fn in forward"}),
    "no collective": (_record("traffic", lambda sent: None), {SENT}),
    "one more": (_record("traffic", lambda sent: replace(sent, sizes={512: 5}, payload_bytes=2560)), {SENT}),
    "another size": (_record("traffic", lambda sent: replace(sent, sizes={256: 2, 768: 2})), {SENT}),
    "other bytes": (_record("traffic", lambda sent: replace(sent, payload_bytes=1)), {SENT}),
    "another axis": (_record("traffic", lambda sent: replace(sent, axis="tp")), {SENT, SENT.replace("dp_shard", "tp")}),
    "another op": (_record("traffic", lambda sent: replace(sent, op="max")), {SENT, SENT.replace(" in", " (max) in")}),
    "another dtype": (_record("traffic", lambda sent: replace(sent, dtype="int8")), {SENT, SENT.replace("u", "")}),
    "less saved": (_record("saved_memory", lambda saved: replace(saved, by_dtype={"float32": 1})), {SAVED}),
    "kept too long": (_record("saved_memory", _alive), {"float32 tensors of 64 bytes alive at the end of the step"}),
}  # fmt: skip
OF_MEMORY = ("less saved", "kept too long")


@pytest.mark.parametrize("name", CHANGES)
@given(step=st.integers(1, STEPS), rank=st.integers(0, 1))
def test_every_change_is_found_at_its_step_and_rank(name: str, step: int, rank: int) -> None:
    change, kinds = CHANGES[name]
    rule = MEMORY if name in OF_MEMORY else EXECUTED
    findings = check(with_rank(RUN, rank, lambda trace: change(trace, step)))
    assert {(finding.rule, finding.values["what"]) for finding in findings} == {(rule.name, kind) for kind in kinds}
    assert {(finding.step, finding.ranks) for finding in findings} == {(step, (rank,))}
    assert all((finding.expected or "").endswith(", as recorded") for finding in findings)


@given(st.sampled_from(list(CHANGES)))
def test_ranks_and_steps_with_the_same_change_share_a_finding(name: str) -> None:
    change, kinds = CHANGES[name]
    run = RUN
    for rank in (0, 1):
        for step in (2, 3):
            changed = change if name != "another cast" else _cast_in_both
            run = with_rank(run, rank, lambda trace, step=step, changed=changed: changed(trace, step))  # type: ignore[misc]
    findings = check(run)
    assert len(findings) == len(kinds)
    assert {(finding.step, finding.rank) for finding in findings} == {(2, 0)}
    assert {finding.ranks for finding in findings} == {(0, 1)}
    assert [finding.notes for finding in findings] == [(HINT,)] + [()] * (len(findings) - 1)


def _cast_in_both(trace: RankTrace, step: int) -> RankTrace:
    return replace(trace, operands=OperandTrace(casts=(make_cast(step=2), make_cast(step=3)), matmuls=()))


def test_a_step_too_much_and_a_step_too_few_are_found() -> None:
    findings = check(with_sent(RUN, 0, make_sent(STEPS + 1)))
    assert findings and {finding.step for finding in findings} == {STEPS + 1}
    assert check(make_signed_run(steps=STEPS - 1))


# In the judge


def judged(run: Run = RUN, **given: Any) -> Judgement:
    return judge(CASE, run, "ok", witnesses(**given), checks=(check_profile,))


def test_the_judge_executes_it_with_a_profile_of_these_versions() -> None:
    assert judged().checks == (check_profile.name,)
    (skipped,) = judged(profile=None).not_judged
    assert skipped.unverified and skipped.reason == f"no profile is recorded; `{COMMAND}` records one"
    (other,) = judged(make_signed_run(steps=STEPS, software=SOFTWARE | {"torch": "2.99.0"})).not_judged
    assert other.unverified and "torch 2.99.0 is installed" in other.reason and COMMAND in other.reason
    (fixed,) = judged(partner_has_fix=True).not_judged
    assert not fixed.unverified and "with the candidate fix" in fixed.reason


def test_a_llama_is_judged_by_formulas() -> None:
    llama = parse_case_id("fsdp2-tensorwise-v2048-s3-f32")
    judgement = judge(llama, RUN, "ok", make_witnesses(llama))
    assert check_profile.name not in judgement.checks
    assert {skipped.reason for skipped in judgement.not_judged if skipped.check == check_profile.name} == {
        "formulas cover what the model sends, multiplies and saves"
    }


def test_memory_is_an_effect_and_collectives_are_a_cause() -> None:
    wrong = a_finding(rule="parity/gradients", step=1)
    sent, kept = (rule.finding(what=kind, step=1) for rule, kind in ((EXECUTED, SENT), (MEMORY, SAVED)))
    late = replace(sent, step=2)
    assert by_cause((wrong, kept, sent)) == (sent, kept, wrong)
    assert by_cause((late, kept)) == (late, kept), "what is kept is no number that later steps compute with"
