"""Torch's own validation of sharding strategies, for the operators that layouts call on DTensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from harness.engine.cluster import Cluster
from harness.engine.messages import Job, JobOutcome
from harness.matrix.case import Case
from harness.plural import counted
from harness.project import Project
from harness.request import RunRequest
from harness.running.executor import local_node, open_executor
from harness.running.plan import Plan
from harness.trace.operator_checks import StrategyQuestion, Validated, Validation
from harness.trace.record import Patch

PROGRAM = "harness.worker.strategies"
VALIDATION = "torch.distributed.tensor._ops.strategy_validation"  # needs the package expecttest
DEADLINE_S = 600.0

ValidationWord = Literal["agrees", "objects", "nothing to validate", "not available"]


class ValidatedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What torch reports about one layout. `operators`: those with rules that it calls wrong, and how many."""

    word: ValidationWord
    why: str = ""
    validated: int = 0  # operators
    operators: Mapping[str, int] = {}

    @property
    def text(self) -> str:
        wrong = ", ".join(f"{name}: {counted(count, 'rule')} wrong" for name, count in self.operators.items())
        return f"{self.word}: {self.why or wrong or counted(self.validated, 'operator')}"


def validate_layouts(project: Project, cases: Sequence[Case], plan: Plan) -> Iterator[ValidatedLayout]:
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
        if isinstance(payload, str):
            yield ValidatedLayout(word="not available", why=payload)
        else:
            yield validated_layout(payload, validation)


def validated_layout(used: Sequence[str], validation: Validation) -> ValidatedLayout:
    """The verdict on a layout that calls these operators on DTensors."""
    if not used:
        return ValidatedLayout(word="nothing to validate", why="no operator takes a DTensor")
    if validation.unavailable:
        return ValidatedLayout(word="not available", why=validation.unavailable)
    validated: dict[str, Validated] = {
        name: validation.operators[name] for name in used if name in validation.operators
    }
    wrong = {name: operator.wrong for name, operator in validated.items() if operator.wrong}
    if not validated:
        return ValidatedLayout(word="nothing to validate", why=f"torch has no samples of {', '.join(used)}")
    return ValidatedLayout(word="objects" if wrong else "agrees", validated=len(validated), operators=wrong)


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
    """What torch reports about its rules for these operators, with what is injected."""
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
