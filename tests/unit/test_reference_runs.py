"""The witness cache: a witness is run once, kept by what computes it, and never trusted when damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import msgspec
import pytest

from harness.engine.messages import JobOutcome, JobStatus, RankOutcome
from harness.evidence.references import (
    bf16_reference,
    noisy_reference,
    operands_reference,
    partner_reference,
    solo_reference,
)
from harness.expect.expectations import Expectations
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.linears import converted_fqns
from harness.request import RunRequest
from harness.running.executor import Executor
from harness.running.plan import Injection
from harness.running.references import ReferenceLost, ReferenceRunner
from harness.trace import RankTrace
from harness.trace.operands import OperandTrace
from tests.builders import make_cast, make_distance, make_trace, run_of

RAISED = RankOutcome(rank=0, status="raised", message="KeyError: 1")
CASE = parse_case_id("hsdp2x2-tensorwise-ag.fp8pre-ac.full-v2048-b16")


def ok(trace: RankTrace | None = None) -> JobOutcome:
    payload = msgspec.msgpack.encode(trace or make_trace())
    return JobOutcome(job_id="j", status="ok", ranks=(RankOutcome(rank=0, status="returned", payload=payload),))


class FakeExecutor:
    """Answers every request with `outcome` and remembers what was asked."""

    def __init__(self, outcome: JobOutcome | None = None, before: Callable[[], object] = lambda: None) -> None:
        self.outcome = outcome
        self.before = before
        self.replayed: JobOutcome | None = None
        self.asked: list[tuple[str, str, tuple[str, ...]]] = []

    def serve(self, request: RunRequest) -> JobOutcome | None:
        kind, noise = "solo" if request.solo else "plain", request.noise
        if noise is not None:
            kind = f"noise {noise.draws} in {len(noise.float8_fqns)} with {noise.grad_output_dtype}"
        kind = " with ".join([kind, *(injection.text for injection in request.injections)])
        if request.replayed:
            self.asked.append(("replay", case_id(request.case), ()))
            return self.replayed
        self.asked.append((kind, case_id(request.case), request.probes))
        self.before()
        return self.outcome


def cache(executor: FakeExecutor, folder: Path, *, content: str = "these packages") -> ReferenceRunner:
    return ReferenceRunner(cast("Executor", executor), folder, lambda _: content)


def test_each_kind_of_witness_is_run_in_its_own_way(tmp_path: Path) -> None:
    executor = FakeExecutor(ok())
    witnesses = cache(executor, tmp_path)
    assert (
        witnesses.get(solo_reference(CASE))
        == witnesses.get(partner_reference(Expectations(CASE)))
        == run_of(make_trace())
    )
    assert executor.asked == [
        ("solo", "fsdp4-tensorwise-ag.fp8pre-v2048-b16", ("sketches", "logprobs", "operands")),
        ("plain", "hsdp2x2-tensorwise-ag.fp8-v2048-b16", ("sketches",)),
    ]
    executor = FakeExecutor(ok())
    assert cache(executor, tmp_path).get(bf16_reference(CASE)) == run_of(make_trace())
    assert executor.asked == [("plain", "single-bf16-v2048-b16", ("sketches",))]


def test_noisy_references_are_of_the_recipe(tmp_path: Path) -> None:
    executor = FakeExecutor(ok(make_trace(draws=(make_trace(),))))
    witnesses = cache(executor, tmp_path)
    others = ("fsdp2-tensorwise-v2048-b16", "tp2-tensorwise-head.fp8-v2048-b16", "single-rowwise-v2048-b16")
    for case in (CASE, *map(parse_case_id, others)):
        assert witnesses.get(noisy_reference(case, converted_fqns(case))) is not None
    noises = [kind for kind, _, _ in executor.asked]
    assert noises == [  # the second case shares the errors of the first
        "noise (1, 2, 3, 4) in 14 with float8_e5m2",
        "noise (1, 2, 3, 4) in 15 with float8_e5m2",
        "noise (1, 2, 3, 4) in 14 with float8_e4m3fn",
    ]
    assert {(case, probes) for _, case, probes in executor.asked} == {("single-bf16-v2048-b16", ("sketches",))}


def test_draws_that_are_not_independent_run_in_processes_of_their_own(tmp_path: Path) -> None:
    class Apart(FakeExecutor):
        def serve(self, request: RunRequest) -> JobOutcome | None:
            super().serve(request)
            draws = () if request.noise is None else request.noise.draws
            return ok() if len(draws) > 1 else ok(make_trace(losses=(8.0 + sum(draws),)))

    executor = Apart()
    run = cache(executor, tmp_path).get(noisy_reference(CASE, ()))
    assert run is not None and run.complete
    (plain,) = run.traces
    assert [trace.steps[0].loss for trace in (plain, *(plain.draws or ()))] == [8.0, 9.0, 10.0, 11.0, 12.0]
    kinds = [kind.partition(" in ")[0] for kind, _, _ in executor.asked]
    assert kinds == ["noise (1, 2, 3, 4)", "plain", "noise (1,)", "noise (2,)", "noise (3,)", "noise (4,)"]


@pytest.mark.parametrize("finished", [True, False])
def test_a_partner_that_stands_for_the_modules_of_a_compiled_case_is_replayed(tmp_path: Path, finished: bool) -> None:
    compiled, eager = parse_case_id("tp2-tensorwise-graph-v2048-b16"), "tp2-tensorwise-v2048-b16"
    recorded = make_trace(module_tensors=())
    executor = FakeExecutor(ok(recorded))
    distance = make_distance()
    executor.replayed = ok(make_trace(module_distances=(distance,))) if finished else None
    partner = cache(executor, tmp_path).get(partner_reference(Expectations(compiled)))
    assert partner == (run_of(make_trace(module_distances=(distance,))) if finished else None)
    assert executor.asked == [
        ("plain", eager, ("sketches", "module_tensors")),
        ("replay", eager, ()),
    ]
    again = FakeExecutor(ok(recorded))
    assert cache(again, tmp_path).get(partner_reference(Expectations(compiled))) == partner
    assert (again.asked == []) is finished


def test_the_partner_of_a_run_with_a_fix_runs_with_it_and_is_kept_by_the_content_of_the_fix(tmp_path: Path) -> None:
    executor = FakeExecutor(ok())
    for source in (b"first", b"first", b"second"):
        fix = Injection(text="fix.py:apply", target="/fix.py:apply", source=source)
        assert (
            cache(executor, tmp_path).get(partner_reference(Expectations(CASE), fixes={fix.content: fix.patch}))
            is not None
        )
    partner = "hsdp2x2-tensorwise-ag.fp8-v2048-b16"
    assert executor.asked == [("plain with /fix.py:apply", partner, ("sketches",))] * 2


def test_operands_of_a_solo_witness_are_read_again_and_not_kept_in_memory(tmp_path: Path) -> None:
    recorded = make_trace(operands=OperandTrace(casts=(make_cast(),), matmuls=()))
    executor = FakeExecutor(ok(recorded))
    witnesses = cache(executor, tmp_path)
    light = witnesses.get(solo_reference(CASE))
    assert light is not None and light.traces[0].operands is None and len(light.traces[0].cast_shares or ()) == 1
    assert witnesses.get(operands_reference(CASE)) == run_of(recorded)
    assert [probes for _, _, probes in executor.asked] == [("sketches", "logprobs", "operands")]
    next(tmp_path.iterdir()).unlink()
    assert witnesses.get(operands_reference(CASE)) == run_of(recorded)
    assert len(executor.asked) == 2, "where nothing could be stored it is run again"


def test_cases_with_the_same_reference_share_it(tmp_path: Path) -> None:
    executor = FakeExecutor(ok())
    witnesses = cache(executor, tmp_path)
    layouts = ("fsdp4", "hsdp2x2", "fsdp4-tp2", "hsdp2x2-tp2-nosp")
    runs = [witnesses.get(solo_reference(parse_case_id(f"{layout}-tensorwise-v2048-b16"))) for layout in layouts]
    assert len(executor.asked) == 1 and all(run == runs[0] for run in runs)


@pytest.mark.parametrize(("content", "runs"), [("these packages", 0), ("other packages", 1)])
def test_a_witness_is_kept_over_caches_for_what_computed_it(tmp_path: Path, content: str, runs: int) -> None:
    first, second = FakeExecutor(ok()), FakeExecutor(ok())
    kept = cache(first, tmp_path).get(solo_reference(CASE))
    assert cache(second, tmp_path, content=content).get(solo_reference(CASE)) == kept
    assert (len(first.asked), len(second.asked)) == (1, runs)


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x80", b"\xa3\xff\xff\xff", None])
def test_a_damaged_file_is_absent_and_replaced(tmp_path: Path, damage: bytes | None) -> None:
    whole = cache(FakeExecutor(ok()), tmp_path).get(solo_reference(CASE))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5] if damage is None else damage)
    executor = FakeExecutor(ok())
    assert cache(executor, tmp_path).get(solo_reference(CASE)) == whole
    assert len(executor.asked) == 1
    unused = FakeExecutor()
    assert cache(unused, tmp_path).get(solo_reference(CASE)) == whole and unused.asked == []


def test_one_wrong_bit_is_damage_wherever_it_is(tmp_path: Path) -> None:
    cache(FakeExecutor(ok()), tmp_path).get(solo_reference(CASE))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for position in range(0, len(whole), 41):
        path.write_bytes(bytes(byte ^ (at == position) for at, byte in enumerate(whole)))
        executor = FakeExecutor(ok())
        cache(executor, tmp_path).get(solo_reference(CASE))
        assert len(executor.asked) == 1 and path.read_bytes() == whole


@pytest.mark.parametrize(
    ("status", "ranks", "why"),
    [
        ("crash", (RAISED,), "KeyError: 1"),
        ("hang", ok().ranks, "it ended as hang and left no trace"),
        ("ok", (RankOutcome(rank=0, status="returned", payload=b"\xc1"),), "its result cannot be read"),
        ("ok", (), "it ended as ok and left no trace"),
    ],
    ids=["crash", "hang", "garbled", "empty"],
)
def test_one_that_did_not_finish_says_why_and_is_not_stored(
    tmp_path: Path, status: JobStatus, ranks: tuple[RankOutcome, ...], why: str
) -> None:
    executor = FakeExecutor(JobOutcome(job_id="j", status=status, ranks=ranks))
    witnesses = cache(executor, tmp_path)
    ended = witnesses.get(solo_reference(CASE))
    assert ended is not None and ended.traces == () and why in ended.failures[0].message
    assert list(tmp_path.iterdir()) == []
    executor.outcome = ok()
    assert witnesses.get(solo_reference(CASE)) == ended
    assert len(executor.asked) == 1, "another case that wants it gets the same answer"
    assert cache(executor, tmp_path).get(solo_reference(CASE)) == run_of(make_trace()), "and the next run tries again"


def test_a_witness_that_was_stopped_is_none_and_not_kept(tmp_path: Path) -> None:
    executor = FakeExecutor(None)
    witnesses = cache(executor, tmp_path)
    assert witnesses.get(solo_reference(CASE)) is None and list(tmp_path.iterdir()) == []
    executor.outcome = ok()
    assert witnesses.get(solo_reference(CASE)) is not None


def test_threads_that_need_one_witness_run_it_once(tmp_path: Path) -> None:
    executor = FakeExecutor(ok(), before=lambda: threading.Event().wait(0.05))
    witnesses = cache(executor, tmp_path)
    with ThreadPoolExecutor(8) as threads:
        runs = list(threads.map(witnesses.get, [solo_reference(CASE)] * 16))
    assert len(executor.asked) == 1 and all(run is runs[0] and run is not None for run in runs)


def test_threads_that_need_different_witnesses_do_not_wait_for_each_other(tmp_path: Path) -> None:
    rendezvous = threading.Barrier(2, timeout=20)
    witnesses = cache(FakeExecutor(ok(), before=rendezvous.wait), tmp_path)
    with ThreadPoolExecutor(2) as threads:
        runs = list(threads.map(witnesses.get, (solo_reference(CASE), partner_reference(Expectations(CASE)))))
    assert None not in runs


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    witnesses = cache(FakeExecutor(ok()), blocked / "witnesses")
    assert witnesses.get(solo_reference(CASE)) is not None
    assert witnesses.get(solo_reference(CASE)) is not None
    assert [(made.ran, made.stored) for made in witnesses.log] == [(1, False)]


LOST = JobOutcome(job_id="j", status="infra", ranks=(), message="node b is gone.", cpu_s=2.0)


def test_a_witness_that_the_machine_ended_is_no_witness_that_failed(tmp_path: Path) -> None:
    witnesses = cache(FakeExecutor(LOST), tmp_path)
    kinds = (solo_reference, operands_reference, bf16_reference)
    others = (partner_reference(Expectations(CASE)), noisy_reference(CASE, ()))
    for reference in (*(kind(CASE) for kind in kinds), *others):
        with pytest.raises(ReferenceLost, match=r"with which this case is compared: node b is gone\."):
            witnesses.get(reference)
    assert list(tmp_path.iterdir()) == []


def test_what_the_machine_ended_before_a_witness_was_made_is_kept_with_it(tmp_path: Path) -> None:
    witnesses = cache(FakeExecutor(msgspec.structs.replace(ok(), cpu_s=3.0, earlier=(LOST,))), tmp_path)
    assert witnesses.get(bf16_reference(CASE)) == run_of(make_trace())
    (made,) = witnesses.log
    assert (made.retried, made.cpu_s, made.stored) == (("node b is gone.",), 5.0, True)
    again = cache(FakeExecutor(), tmp_path)
    assert again.get(bf16_reference(CASE)) is not None
    assert [(made.ran, made.stored) for made in again.log] == [(0, False)]
