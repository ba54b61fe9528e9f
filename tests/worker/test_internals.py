"""Private parts of torch and torchao: the installed ones are as declared, and one that is gone costs a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.checks.check import Witnesses
from harness.checks.judge import judge, run_from_outcome
from harness.engine.fork_server_engine import ForkServerEngine
from harness.engine.messages import JobOutcome
from harness.expect.expectations import Expectations
from harness.internals import State, read_parts
from harness.matrix.caseid import parse_case_id
from harness.matrix.upstream import CHANGES, UpstreamChange
from harness.running.machine import internals_here
from harness.sources import installed_versions, is_since, is_unreleased, package_paths
from tests.builders import probes_for
from tests.jobs import run_request
from tests.worker.conftest import make_request

EAGER = parse_case_id("fsdp2-tensorwise-v2048-s1-b16")
COMPILED = parse_case_id("single-tensorwise-graph-v2048-s1-f64")
OF_MEMORY = "torch.utils.checkpoint._VersionWrapper"  # torch itself uses it for selective checkpointing alone
OF_COMPILED = "torch._inductor.fx_passes.post_grad.view_to_reshape"


@pytest.fixture(scope="module")
def state() -> State:
    return internals_here()


def test_every_private_part_is_as_declared_with_the_installed_versions(state: State) -> None:
    assert set(state.gaps) == set(read_parts())
    assert {part: gaps for part, gaps in state.gaps.items() if gaps} == {}
    assert state.versions == installed_versions(("torch", "torchao"))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_the_sources_of_the_installed_torch_tell_its_changes(change: UpstreamChange) -> None:
    found = change.ask(package_paths(change.package))
    assert found is not None, "look how torch does it now, and what tells it"
    version = installed_versions([change.package])[change.package]
    assert is_unreleased(version) or found is is_since(version, change.since)


def test_the_check_takes_milliseconds(state: State) -> None:
    assert state.milliseconds < 200, "it took 12 ms on an idle machine"


def line(name: str, lost: str) -> str:
    return f"torch {installed_versions(['torch'])['torch']}: {name} is gone: {lost}"


def without(names: str, *cases: object, folder: Path) -> tuple[list[str], list[JobOutcome]]:
    """What is said at the start, and how these cases end, with a torch that lacks these names."""
    notes: list[str] = []
    options = {"device": "cpu", "compile": "on", "without": names}
    with ForkServerEngine("tests.worker.brokenprogram", options, note=notes.append) as engine:
        outcomes = []
        for number, case in enumerate(cases):
            job = folder / str(number)
            job.mkdir()
            outcomes.append(run_request(engine, job, make_request(case, probes=probes_for(case))))  # type: ignore[arg-type]
    return notes, outcomes


def test_a_part_that_is_gone_costs_its_checks_and_the_cases_that_need_it(tmp_path: Path) -> None:
    notes, (eager, compiled) = without(f"{OF_MEMORY} {OF_COMPILED}", EAGER, COMPILED, folder=tmp_path)
    of_memory = line(OF_MEMORY, read_parts()["saved_memory"].without)
    of_compiled = line(OF_COMPILED, read_parts()["compiled"].without)
    assert len(notes) == 2 and of_memory in notes
    assert any(note.startswith(of_compiled) for note in notes)
    assert compiled.status == "crash" and compiled.message.endswith(f"RuntimeError: {of_compiled}")
    assert eager.status == "ok", eager.message
    run = run_from_outcome(eager)
    judgement = judge(EAGER, run, eager.status, Witnesses(expect=Expectations(EAGER), records=probes_for(EAGER)))
    reasons = {skipped.check: skipped.reason for skipped in judgement.not_judged if skipped.unverified}
    assert reasons == dict.fromkeys(("memory", "live_memory", "leaks"), of_memory)
    assert {"scales", "traffic", "fp8_on"} <= set(judgement.checks)
    assert all(trace.saved_memory is None and trace.operands is not None for trace in run.traces)
