"""A reference whose rank is killed, on real ranks and before the real judge: never a failure of its case."""

from pathlib import Path
from typing import cast

import msgspec

from harness.engine.messages import JobOutcome
from harness.matrix.caseid import parse_case_id
from harness.project import find_project
from harness.request import RunRequest
from harness.running.case_judge import prepare_judge
from harness.running.case_runner import CaseRunner
from harness.running.executor import Executor
from harness.running.plan import make_plan
from harness.running.references import ReferenceRunner
from harness.trace.record import Patch
from harness.verdict import Verdict

CASE = parse_case_id("fsdp2-tensorwise-ag.fp8-v2048-f64")
KILL = b"import os, signal\ndef apply():\n    os.kill(os.getpid(), signal.SIGKILL)\n"


class KillsReferences:
    """An executor whose references are killed whenever they run."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def serve(self, request: RunRequest) -> JobOutcome | None:
        patch = Patch(text="kill.py:apply", source=KILL)
        return self._executor.serve(msgspec.structs.replace(request, injections=(patch,)))


def test_a_case_without_its_reference_is_infra_and_says_which(executor: Executor, tmp_path: Path) -> None:
    project = find_project()
    plan = msgspec.structs.replace(make_plan(device="cpu"), probed=True)
    references = ReferenceRunner(cast("Executor", KillsReferences(executor)), tmp_path, lambda _: "")
    runner = CaseRunner(plan, executor.with_plan(plan), prepare_judge(project, [CASE], plan), references)
    result = runner.run(CASE)
    assert result is not None and (result.verdict, len(result.attempts)) == (Verdict.INFRA, 1)
    (finding,) = result.findings
    assert finding.message.startswith("solo ") and "killed by SIGKILL" in finding.message
    assert [len(reference.retried) for reference in references.log] == [1]
