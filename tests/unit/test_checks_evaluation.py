"""The check `evaluation`: the loss of a batch is that of training on it. What an evaluation adds, and to which runs."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from harness.checks.reported import OTHER_LOSS, check_evaluation
from harness.expect.traffic import expected_transfers
from harness.matrix.caseid import case_id, family_id, parse_case_id, reference_case, solo_case, twin_case
from harness.verdict import Finding
from tests.builders import make_case, make_steps, make_trace, make_witnesses, not_judged, run_of

CASE = make_case(evaluate=True, dtype="float64", steps=2)


def check(evaluated: float | None, *, rank: int = 0) -> list[Finding]:
    fine = tuple(replace(step, evaluation_loss=step.loss) for step in make_steps([8.0, 7.9]))
    wrong = (fine[0], replace(fine[1], evaluation_loss=evaluated))
    traces = [make_trace(rank=each, losses=[8.0, 7.9]) for each in (0, 1)]
    traces = [replace(trace, steps=wrong if trace.rank == rank else fine) for trace in traces]
    return check_evaluation(CASE, run_of(*traces), make_witnesses(CASE))


def test_the_loss_of_training_has_no_findings() -> None:
    assert check(7.9) == []


@pytest.mark.parametrize("evaluated", [math.nextafter(7.9, 8), 8.0, math.nan, None])
@pytest.mark.parametrize("rank", [0, 1])
def test_any_other_loss_is_found(evaluated: float | None, rank: int) -> None:
    (finding,) = check(evaluated, rank=rank)
    assert (finding.step, finding.rank, finding.expected) == (2, rank, "7.9")
    assert finding.rule == OTHER_LOSS.name


def test_without_an_evaluation_nothing_is_judged() -> None:
    assert "evaluation" in not_judged(make_case(dtype="float64"))
    assert "evaluation" not in not_judged(CASE)


def test_witnesses_and_goldens_evaluate_nothing() -> None:
    case = parse_case_id("fsdp2-tensorwise-v2048-s2-eval-b16")
    plain = parse_case_id("fsdp2-tensorwise-v2048-s2-b16")
    for made in (solo_case, twin_case, reference_case):
        assert made(case) == made(plain)
    assert family_id(case) == family_id(plain)
    assert case_id(case) != case_id(plain)


@pytest.mark.parametrize(
    "text", ["tp2-nolp-tensorwise-tpstyle.fp8-v2048-eval-f64", "hsdp2x2-tp2-nosp-rowwise-head.fp8-v2048-eval-f64"]
)
def test_an_evaluation_sends_no_gradient_and_every_weight_and_activation_once_more(text: str) -> None:
    def sent(text: str) -> dict[str, int]:
        transfers = expected_transfers(parse_case_id(text), step=2, rank=0)
        return {f"{each.purpose} {each.kind} {each.axis}": each.times for each in transfers}

    more, fewer = sent(text), sent(text.replace("-eval", ""))
    added = {purpose for purpose, times in more.items() if times > fewer[purpose]}
    assert all(times - fewer[purpose] <= fewer[purpose] for purpose, times in more.items())
    assert not {purpose for purpose in added if "gradient" in purpose or "dgrad" in purpose}
    assert not {purpose for purpose in more.keys() - added if "outputs of" in purpose or "weights of" in purpose}
