"""What a finding says of a witness that did not finish: the exception, the calls that it ended in, the versions."""

from __future__ import annotations

from harness.checks.check import finished, unfinished, why_unfinished
from harness.checks.parity import NO_REFERENCE
from harness.trace import Run
from tests.builders import make_failure, make_trace, run_of

TRACEBACK = """Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", line 12, in reset
    self.unsharded_accumulated_grad = None
AttributeError: property 'unsharded_accumulated_grad' of 'FSDPParam' object has no setter
"""
RAISED = make_failure(message="AttributeError: no setter\nmore of it", traceback=TRACEBACK)
CASE_RUN = run_of(make_trace(software={"torch": "2.15.0", "torchao": "0.18.0", "numpy": "2.0"}))


def test_it_says_what_was_raised_where_and_with_which_versions() -> None:
    finding = unfinished(NO_REFERENCE, "the single-rank reference (solo witness)", run_of(RAISED), CASE_RUN)
    assert (finding.rule, finding.judged) == (NO_REFERENCE.name, False)
    who, why = "the single-rank reference (solo witness)", ": AttributeError: no setter"
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
