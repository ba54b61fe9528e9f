"""Torch's own judges beside the checks: what they say of the layouts of one case.

`torch`: torch's validation of sharding strategies, for the operators that the layout calls on DTensors.
`spmd_types`: the types of a target that carries them. A judge that cannot judge says why; none changes the verdict.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from harness.engine.cluster import Cluster
from harness.engine.messages import Job, JobOutcome
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.plural import counted
from harness.project import Project
from harness.request import RunRequest
from harness.running.executor import local_node, open_executor
from harness.running.plan import Plan
from harness.trace.operator_checks import StrategyQuestion, Validated, Validation
from harness.trace.record import Patch

PROGRAM = "harness.worker.strategies"
VALIDATION = "torch.distributed.tensor._ops.strategy_validation"  # needs the package expecttest
JUDGES = ("torch", "spmd_types")
DEADLINE_S = 600.0
TYPED = "torchtitan_0_3"  # the target whose trainer has types

JudgeWord = Literal["agrees", "objects", "nothing to judge", "not available"]


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What one judge says of one layout. `operators`: those with rules that it calls wrong, and how many."""

    word: JudgeWord
    why: str = ""
    judged: int = 0  # operators
    operators: Mapping[str, int] = {}

    @property
    def text(self) -> str:
        wrong = ", ".join(f"{name}: {counted(count, 'rule')} wrong" for name, count in self.operators.items())
        return f"{self.word}: {self.why or wrong or counted(self.judged, 'operator')}"


def ask(
    judges: Sequence[str], project: Project, cases: Sequence[Case], plan: Plan
) -> Mapping[str, Mapping[str, Judged]]:
    """What each judge says of each case, by case id and judge."""
    said: dict[str, dict[str, Judged]] = {case_id(case): {} for case in cases}
    for judge in judges:
        answers = torch_says(project, cases, plan) if judge == "torch" else map(spmd_types_says, cases)
        for case, answer in zip(cases, answers, strict=True):
            said[case_id(case)][judge] = answer
    return said


def spmd_types_says(case: Case) -> Judged:
    if TYPED not in case.target:
        return Judged(word="nothing to judge", why=f"{case.target} carries no types")
    if importlib.util.find_spec("spmd_types") is None:
        return Judged(word="not available", why="spmd_types is not installed")
    return Judged(word="not available", why="the target does not run its trainer with type checking")


def torch_says(project: Project, cases: Sequence[Case], plan: Plan) -> Iterator[Judged]:
    """One step of every layout, to see its operators; then torch validates all of them at once."""
    used: list[list[str] | str] = []
    patches = tuple(injection.patch for injection in plan.injections)
    with open_executor(msgspec.structs.replace(plan, program=PROGRAM), project) as executor:
        for case in cases:
            once = msgspec.structs.replace(case, train=msgspec.structs.replace(case.train, steps=1, resume="none"))
            used.append(_payload(executor.serve(RunRequest(case=once, injections=patches))))
    names = sorted({name for payload in used if not isinstance(payload, str) for name in payload})
    validation = Validation()
    if names:
        with open_validation(project, plan) as engine:
            validation = validate(engine, names, patches)
    for payload in used:
        yield Judged(word="not available", why=payload) if isinstance(payload, str) else judged(payload, validation)


def judged(used: Sequence[str], validation: Validation) -> Judged:
    """The verdict on a layout that calls these operators on DTensors."""
    if not used:
        return Judged(word="nothing to judge", why="no operator takes a DTensor")
    if validation.unavailable:
        return Judged(word="not available", why=validation.unavailable)
    validated: dict[str, Validated] = {
        name: validation.operators[name] for name in used if name in validation.operators
    }
    wrong = {name: operator.wrong for name, operator in validated.items() if operator.wrong}
    if not validated:
        return Judged(word="nothing to judge", why=f"torch has no samples of {', '.join(used)}")
    return Judged(word="objects" if wrong else "agrees", judged=len(validated), operators=wrong)


def _payload(outcome: JobOutcome | None) -> list[str] | str:
    """The operators of all ranks; a text where the run failed."""
    if outcome is None or outcome.status != "ok":
        return "stopped" if outcome is None else outcome.message
    return sorted(
        {name for rank in outcome.ranks for name in msgspec.msgpack.decode(rank.payload or b"", type=list[str])}
    )


def open_validation(project: Project, plan: Plan) -> Cluster:
    """This machine with ranks that `validate` asks; close it by `with`."""
    on_cpu = msgspec.structs.replace(plan, program=PROGRAM, engine="zygote", device="cpu")
    return Cluster([local_node(on_cpu, project, lambda _: None)])


def validate(engine: Cluster, operators: Sequence[str], injections: Sequence[Patch]) -> Validation:
    """What torch says of its rules for these operators, with what is injected."""
    question = StrategyQuestion(module=VALIDATION, operators=tuple(operators), injections=tuple(injections))
    outcome = engine.run(
        Job(
            job_id="strategies",
            world_size=1,
            payload=msgspec.msgpack.encode(question),
            deadline_s=DEADLINE_S,
            preload={"validation": VALIDATION},
            one_node=True,
        )
    )
    if outcome.status != "ok":
        return Validation(unavailable=outcome.message)
    return msgspec.msgpack.decode(outcome.ranks[0].payload or b"", type=Validation)
