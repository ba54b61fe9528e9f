"""The plan: how cases are run, decided once before any rank starts.

Owns the defaults of parallelism and time, and the command line that reproduces one case. It starts nothing.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from harness.checks.catalogue import probes_of
from harness.engine.hardware import Capacity, Device, capacity_here
from harness.engine.ray_cluster import cluster_capacity, cluster_device
from harness.engine.ray_connection import AUTO
from harness.errors import HarnessError
from harness.evidence.golden import hardware_classes
from harness.expect.expectations import Expectations
from harness.hints import run_cases
from harness.matrix.case import Case
from harness.matrix.linears import FLOPS_PER_PARAMETER_AND_TOKEN, parameter_count
from harness.matrix.numerics import Numerics
from harness.request import Arithmetic, Fabric, default_arithmetic, numerics_of
from harness.run_options import CommandOptions, EngineKind, PlanOptions, RunOptions, words_of
from harness.running.injection import Injection, parse_injection
from harness.running.machine import check_ranks, resolve_device

PROGRAM_VARIABLE = "FP8_HARNESS_PROGRAM"  # dotted module name of another rank program: `harness/engine/program.py`
DEFAULT_PROGRAM = "harness.worker.main"


# What collectives of a device can run on, the default first.
FABRICS: Mapping[Device, tuple[Fabric, ...]] = {"cpu": ("shared", "gloo"), "cuda": ("nccl",)}

# A tiny case of 8 ranks takes below 20 s on two busy cores; the rest is room for slower machines. Every rank-step adds
# its own second because long cases (many steps) must not be called hangs.
_BASE_TIMEOUT_S = 120.0
_TIMEOUT_PER_RANK_STEP_S = 1.0
_SLOWEST_FLOPS_PER_S = 1e9  # on a busy core
# Every rank compiles for itself: about 4 CPU seconds for graphs, 20 for code that inductor generates the first time.
_COMPILE_TIMEOUT_S = {"none": 0.0, "graph": 20.0, "inductor": 120.0}


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How cases are run. `capacity` is what the nodes have that run them."""

    device: Device = "cpu"
    fabric: Fabric = "shared"
    capacity: Capacity = Capacity()
    jobs: int = PlanOptions().jobs
    engine: EngineKind = "zygote"
    arithmetic: Arithmetic = "exact"
    address: str = ""  # of the Ray cluster of engine `ray`
    program: str = DEFAULT_PROGRAM
    injections: tuple[Injection, ...] = ()
    probed: bool = False  # ranks record what checks read besides losses
    compiles: bool = False  # some case compiles its blocks: the zygote imports what that takes
    timeout_s: float | None = None  # of every case; None scales it with the case
    timeout_factor: float = 1.0  # multiplies the default, which a study may set in `timeout_s`
    max_failures: int | None = None  # stop after so many cases that are not good
    digests_built: bool = False  # as `RunRequest`
    traces: Path | None = None  # save what ranks recorded here (`tables.py`)
    logs: Path | None = None  # keep rank logs and dumps here; None removes them
    name: str = ""  # that the user gave the run
    quarantined: Mapping[str, str] = {}  # by case id: until when, by whom and why
    given: RunOptions = RunOptions()  # what a rerun repeats
    root_option: str | None = None  # what the user gave as --root, for the command that reproduces a case

    def probes_for(self, case: Case) -> tuple[str, ...]:
        """What ranks of a case are asked to record besides losses: fields of `RankTrace`."""
        return probes_of(Expectations(case, numerics=self.numerics), self.device) if self.probed else ()

    def records_of(self, case: Case) -> tuple[str, ...]:
        """The records that ranks must leave. Of a rank program of the user's own, it is not known what it records."""
        return self.probes_for(case) if self.program == DEFAULT_PROGRAM else ()

    @property
    def numerics(self) -> Numerics:
        return numerics_of(self.device, self.fabric, self.arithmetic)

    def one_node(self, case: Case) -> bool:
        """True when the ranks of a case must be on one node: for shared memory, or one checkpoint."""
        return (self.fabric == "shared" and self.program == DEFAULT_PROGRAM) or case.train.resume != "none"

    def most_ranks(self, case: Case) -> int:
        """How many ranks the nodes can give to this case."""
        return self.capacity.largest if self.one_node(case) else self.capacity.total

    @property
    def hardware(self) -> tuple[str, ...]:
        """All hardware classes of the nodes, the most specific first: goldens of each serve."""
        first = self.capacity.nodes[0]
        return hardware_classes(first.device_name, first.architecture)

    def serving(self, cases: Iterable[Case]) -> Plan:
        """The plan of a run of these cases: what only some cases need is prepared where one needs it."""
        return msgspec.structs.replace(self, compiles=any(case.compile != "none" for case in cases))

    def deadline_s(self, case: Case) -> float:
        """Seconds that one attempt at this case may take."""
        if self.timeout_s is not None:
            return self.timeout_factor * self.timeout_s
        flops = FLOPS_PER_PARAMETER_AND_TOKEN * parameter_count(case) * case.train.tokens
        step_s = _TIMEOUT_PER_RANK_STEP_S * case.world_size + flops / _SLOWEST_FLOPS_PER_S
        compile_s = _COMPILE_TIMEOUT_S[case.compile] * case.world_size
        return self.timeout_factor * (_BASE_TIMEOUT_S + compile_s + step_s * case.train.steps)

    def command(self, case_id: str) -> str:
        """The one-line command that runs this case alone, the same way, for a POSIX shell."""
        words = words_of({"root": self.root_option, **self._unusual.as_given})
        program = "" if self.program == DEFAULT_PROGRAM else f"{PROGRAM_VARIABLE}={shlex.quote(self.program)} "
        return program + run_cases(case_id, *words)

    @property
    def _unusual(self) -> RunOptions:
        usual = Plan(
            fabric=FABRICS[self.device][0],
            arithmetic=default_arithmetic(self.device),
            address=AUTO if self.engine == "ray" else "",
        )
        both = [name for name in RunOptions.__struct_fields__ if hasattr(usual, name)]
        values = {name: getattr(self, name) for name in both if getattr(self, name) != getattr(usual, name)}
        return RunOptions(**values, inject=tuple(injection.text for injection in self.injections))


def make_plan(**given: Any) -> Plan:
    """The plan that options describe, on this machine or on the nodes of a Ray cluster, which is asked what it has.

    `given`: fields of `PlanOptions`, by name. Raises HarnessError for a device, a cluster, an injection or a package
    that is not there, and for a fabric of another device.
    """
    asked = PlanOptions(**given)
    for where, what, fix in asked.contradictions:
        raise HarnessError(what, where=where, fix=fix)
    program = os.environ.get(PROGRAM_VARIABLE) or DEFAULT_PROGRAM
    check_ranks(packages=program == DEFAULT_PROGRAM)
    cluster = (asked.address or AUTO) if asked.engine == "ray" else ""
    if cluster:
        resolved = cluster_device(cluster, asked.device or "auto")
        capacity = cluster_capacity(cluster, resolved, asked.slots)
    else:
        resolved = resolve_device(asked.device or "auto")
        capacity = Capacity(nodes=(capacity_here(resolved, asked.slots),))
    as_asked = Plan(**{name: value for name, value in asked.as_given.items() if name in Plan.__struct_fields__})
    return msgspec.structs.replace(
        as_asked,
        device=resolved,
        fabric=_resolve_fabric(asked.fabric or "auto", resolved),
        capacity=capacity,
        jobs=asked.jobs * len(capacity.nodes),
        address=cluster,
        arithmetic=asked.arithmetic or default_arithmetic(resolved),
        program=program,
        injections=tuple(parse_injection(text) for text in asked.inject),
        probed=True,
    )


def with_command(plan: Plan, given: RunOptions, asked: CommandOptions) -> Plan:
    """The plan with what the command line says besides. `given`: what of it a rerun repeats."""
    if asked.keep_logs is not None:
        try:
            asked.keep_logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what, where = f"cannot make this folder: {error.strerror}.", f"--keep-logs {asked.keep_logs}"
            raise HarnessError(what, where=where, fix="name another one.") from error
    return msgspec.structs.replace(
        plan,
        given=msgspec.structs.replace(
            given, inject=tuple(injection.text_with_absolute_path for injection in plan.injections)
        ),
        root_option=asked.root,
        logs=asked.keep_logs and asked.keep_logs.resolve(),
        max_failures=1 if asked.first_failure else asked.maxfail,
        traces=asked.save_trace,
        name=asked.name,
    )


def _resolve_fabric(asked: str, device: Device) -> Fabric:
    """The fabric that `auto`, `shared`, `gloo` or `nccl` means here; HarnessError for one of another device."""
    offered = FABRICS[device]
    for fabric in offered:
        if asked in ("auto", fabric):
            return fabric
    raise HarnessError(
        f"ranks on {device} cannot use it: {_WHY_NOT[asked]}.",
        where=f"--fabric {asked}",
        fix=f"use --fabric {' or '.join(offered)}{'' if device == 'cuda' else ', or --device cuda'}.",
    )


_WHY_NOT = {
    "shared": "it passes tensors of a CPU through shared memory",
    "gloo": "it has no float8 collectives on a GPU",
    "nccl": "it needs a GPU for every rank",
}
