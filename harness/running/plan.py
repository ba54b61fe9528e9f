"""The plan: how cases are run, decided once before any rank starts.

Owns the defaults of parallelism and time, and the command line that reproduces one case. It starts nothing.
An injection is a user's function that every rank calls before the target is built, to try a patch on the whole matrix:
`FILE.py:FUNCTION`, or the prefix of a plug-in, as in `fault:NAME` of an injected fault. It is checked without running
anything: a file is parsed, never imported here.
"""

import ast
import contextlib
import hashlib
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.checks.catalogue import MEASURED, probes_of
from harness.engine.hardware import Capacity, Device
from harness.errors import HarnessError
from harness.evidence.golden import hardware_classes
from harness.expect.expectations import Expectations
from harness.hints import run_cases
from harness.matrix.case import Case
from harness.matrix.linears import FLOPS_PER_PARAMETER_AND_TOKEN, parameter_count
from harness.matrix.numerics import Numerics
from harness.registry import injections, is_offered, launcher, load, needed
from harness.request import Arithmetic, Backend, default_arithmetic, numerics_of
from harness.result import Place
from harness.run_options import AUTO, CommandOptions, LauncherKind, PlanOptions, RunOptions, words_of
from harness.running.machine import BACKENDS, Choice, Obstacle, Side, Sides, check_ranks, locate, obstacle
from harness.trace.record import Patch

_FORM_FIX = "write --inject FILE.py:FUNCTION or fault:NAME."


class Injection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to call in every rank. `text` is what the user wrote; in `target` paths are absolute.

    `source` is the content of the file when the command started, which is what ranks run.
    """

    text: str
    target: str
    source: bytes = b""

    @property
    def patch(self) -> Patch:
        return Patch(text=self.target, source=self.source)

    @property
    def text_with_absolute_path(self) -> str:
        """`text` with an absolute path."""
        return self.target

    @property
    def content(self) -> str:
        """Return its name and the digest of its file: injections with equal content do the same."""
        if not self.source:  # of a plug-in
            return self.text
        return f"{self.text} {hashlib.sha256(self.source).hexdigest()[:16]}"


def parse_injection(text: str, *, folder: Path | None = None) -> Injection:
    """Return the injection that `text` names; HarnessError if the form, the file, the function or the fault is wrong.

    A relative file is looked for in `folder`, by default the current one.
    """
    where = f"--inject {text}"
    prefix, separator, name = text.partition(":")
    prefix += separator
    if prefix in injections():
        load(injections()[prefix].check)(name)
        return Injection(text=text, target=text)
    if is_offered(prefix):
        raise needed(prefix, where=where)
    file_name, colon, function = text.rpartition(":")
    if not colon or not file_name.endswith(".py") or not function.isidentifier():
        raise HarnessError("this is not FILE.py:FUNCTION.", where=where, fix=_form_fix(text))
    file = (folder or Path()).joinpath(file_name).resolve()
    source = _read(file, where=where)
    names = _top_level_names(file, source, where=where)
    if function not in names:
        offered = ", ".join(sorted(names)) or "nothing"
        raise HarnessError(f"{file_name} defines no {function}.", where=where, fix=f"it defines {offered}.")
    return Injection(text=text, target=f"{file}:{function}", source=source)


def _form_fix(text: str) -> str:
    """Return the prefix that is missing in front of a name that a plug-in knows, or the forms that there are."""
    for prefix, kind in injections().items():
        with contextlib.suppress(HarnessError):
            load(kind.check)(text)
            return f"write --inject {prefix}{text}."
    return _FORM_FIX


def _read(file: Path, *, where: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise HarnessError(f"cannot read {file}: {error.strerror}.", where=where, fix=_FORM_FIX) from error


def _top_level_names(file: Path, source: bytes, *, where: str) -> frozenset[str]:
    """Return the names that the module binds at its top level and that may be functions: defs and assignments."""
    try:
        module = ast.parse(source, filename=str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise HarnessError(f"{file}:{line}: {error}.", where=where, fix="correct the file.") from error
    return frozenset(name for statement in module.body for name in _bound_names(statement))


def _bound_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    return []


PROGRAM_VARIABLE = "FP8_HARNESS_PROGRAM"  # dotted module name of another rank program: `harness/engine/program.py`
DEFAULT_PROGRAM = "harness.worker.main"

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
    backend: Backend = "shared"
    capacity: Capacity = Capacity()
    jobs: int = PlanOptions().jobs
    launcher: LauncherKind = "fork"
    arithmetic: Arithmetic = "exact"
    address: str = ""  # of the Ray cluster of launcher `ray`
    program: str = DEFAULT_PROGRAM
    sides: Sides | None = None  # as in `Location`, like the next three
    usual: Choice | None = None
    unused: str = ""
    idle: str = ""
    chosen: bool = False  # the device is the one that was chosen from the sides
    injections: tuple[Injection, ...] = ()
    probed: bool = False  # ranks record what checks read besides losses
    measures: bool = True  # and what no check reads, but is kept with the results
    compiles: bool = False  # some case compiles its blocks: the fork server imports what that takes
    one_fork_server: bool = False  # for all targets: each rank imports its own after the fork
    timeout_s: float | None = None  # of every case; None scales it with the case
    timeout_factor: float = 1.0  # multiplies the default, which a study may set in `timeout_s`
    max_failures: int | None = None  # stop after so many cases that are not good
    digests_built: bool = False  # as `RunRequest`
    logs: Path | None = None  # keep rank logs and dumps here; None removes them
    name: str = ""  # that the user gave the run
    quarantined: Mapping[str, str] = {}  # by case id: until when, by whom and why
    given: RunOptions = RunOptions()  # what a rerun repeats
    root_option: str | None = None  # what the user gave as --root, for the command that reproduces a case

    def probes_for(self, case: Case) -> tuple[str, ...]:
        """Return what ranks of a case are asked to record besides losses: fields of `RankTrace`."""
        asked = probes_of(Expectations(case, numerics=self.numerics), self.device) if self.probed else ()
        return tuple(record for record in asked if self.measures or record not in MEASURED)

    def records_of(self, case: Case) -> tuple[str, ...]:
        """The records that ranks must leave. Of a rank program of the user's own, it is not known what it records."""
        return self.probes_for(case) if self.program == DEFAULT_PROGRAM else ()

    @property
    def numerics(self) -> Numerics:
        return numerics_of(self.device, self.backend, self.arithmetic)

    def one_node(self, case: Case) -> bool:
        """Return True if the ranks of a case must be on one node: for shared memory, or one checkpoint."""
        return (self.backend == "shared" and self.program == DEFAULT_PROGRAM) or case.train.resume != "none"

    def most_ranks(self, case: Case) -> int:
        """Return how many ranks the nodes can give to this case."""
        return self.capacity.largest if self.one_node(case) else self.capacity.total

    @property
    def hardware(self) -> tuple[str, ...]:
        """Return all hardware classes of the nodes, the most specific first: goldens of each serve."""
        first = self.capacity.nodes[0]
        return hardware_classes(first.device_name, first.architecture)

    @property
    def decides(self) -> bool:
        """Return True for a plan of --device auto that still chooses a device for every case."""
        return self.sides is not None and not self.chosen

    def choice(self, case: Case) -> Choice:
        """Return where this case trains."""
        if self.sides is None or self.chosen:
            return Choice(self.device, self.arithmetic)
        return self.sides.choice(case)

    def of(self, case: Case) -> "Plan":
        """Return the plan of this case, on the device that is chosen for it."""
        return self.parts([case])[0][0]

    def parts(self, cases: Sequence[Case]) -> "list[tuple[Plan, tuple[int, ...]]]":
        """Return a plan per device and arithmetic that is chosen, with the positions of its cases; at least one."""
        positions: dict[tuple[Device, Arithmetic], list[int]] = {}
        for position, case in enumerate(cases):
            choice = self.choice(case)
            positions.setdefault((choice.device, choice.arithmetic), []).append(position)
        return [(self._on(*place, own=True), tuple(own)) for place, own in positions.items()] or [(self.on_gpus, ())]

    def by_device(self, cases: Iterable[Case]) -> "list[tuple[Plan, list[Case]]]":
        """Return a plan for every device that is chosen, with its cases."""
        chosen: dict[Device, list[Case]] = {}
        for case in cases:
            chosen.setdefault(self.choice(case).device, []).append(case)
        return [(self.on_cpu if device == "cpu" else self.on_gpus, own) for device, own in chosen.items()]

    def common(self, cases: Sequence[Case]) -> "Plan":
        """Return the plan of a study that stays on one device: the GPUs where these can run all of its cases."""
        parts = self.parts(cases)
        if len(parts) == 1:
            return parts[0][0]
        return self.on_cpu if any(plan.device == "cpu" for plan, _ in parts) else self._on("cuda", "exact")

    @property
    def on_cpu(self) -> "Plan":
        """Return the plan with the CPU in the place of what --device auto would choose."""
        return self if self.sides is None else self._on("cpu", self.sides.cpu.arithmetic)

    @property
    def on_gpus(self) -> "Plan":
        """Return the plan with the GPUs, where --device auto would choose between them and the CPU."""
        return self if self.sides is None else self._on("cuda", self.sides.gpus.arithmetic)

    def _on(self, device: Device, arithmetic: Arithmetic, *, own: bool = False) -> "Plan":
        """Return the plan for one device. `own`: --device auto chose it for these cases, and the arithmetic too."""
        if self.sides is None or self.chosen:
            return self
        default = default_arithmetic(device)
        if own:
            usual = Choice(device, arithmetic if self.sides.may_be_exact else default)
        else:
            usual = Choice("cpu" if device == "cuda" else "cuda", default)
        side = msgspec.structs.replace(self.sides.of(device), arithmetic=arithmetic)
        return msgspec.structs.replace(self, **msgspec.structs.asdict(side), chosen=True, usual=usual)

    def place(self, case: Case) -> Place | None:
        """Return where the case runs, for the end of the run; None on a machine without GPUs."""
        if self.sides is None:
            return Place(device="cpu", why=self.unused, idle=self.idle) if self.unused else None
        if self.device == "cuda":
            return Place(
                device=self.capacity.nodes[0].device_name,
                gpus=self.capacity.total,
                exact=self.arithmetic != self.sides.gpus.arithmetic,
            )
        why = self.sides.choice(case).why or "all of these run on one device"
        return Place(device="cpu", why=why, idle=self.idle)

    def obstacle(self, case: Case) -> Obstacle:
        """Return what prevents a case from running on the device of this plan."""
        side = Side(**{name: getattr(self, name) for name in Side.__struct_fields__})
        return obstacle(case, side, one_node=self.one_node(case))

    def serving(self, cases: Iterable[Case]) -> "Plan":
        """Return the plan of a run of these cases: what only some cases need is prepared where one needs it."""
        return msgspec.structs.replace(self, compiles=any(case.compile != "none" for case in cases))

    def deadline_s(self, case: Case) -> float:
        """Return the seconds that one attempt at this case may take."""
        if self.timeout_s is not None:
            return self.timeout_factor * self.timeout_s
        flops = FLOPS_PER_PARAMETER_AND_TOKEN * parameter_count(case) * case.train.tokens
        step_s = _TIMEOUT_PER_RANK_STEP_S * case.world_size + flops / _SLOWEST_FLOPS_PER_S
        compile_s = _COMPILE_TIMEOUT_S[case.compile] * case.world_size
        return self.timeout_factor * (_BASE_TIMEOUT_S + compile_s + step_s * case.train.steps)

    def command(self, case_id: str) -> str:
        """Return the one-line command that runs this case alone, the same way, for a POSIX shell."""
        words = words_of(self._unusual.as_given)
        program = "" if self.program == DEFAULT_PROGRAM else f"{PROGRAM_VARIABLE}={shlex.quote(self.program)} "
        return program + run_cases(case_id, *words, root=self.root_option)

    @property
    def _unusual(self) -> RunOptions:
        device, arithmetic, _ = self.usual or Choice("cpu", default_arithmetic(self.device))
        usual = Plan(
            device=device,
            backend=BACKENDS[self.device][0],
            arithmetic=arithmetic,
            address=AUTO if self.launcher == "ray" else "",
        )
        both = [name for name in RunOptions.__struct_fields__ if hasattr(usual, name)]
        values = {name: getattr(self, name) for name in both if getattr(self, name) != getattr(usual, name)}
        return RunOptions(**values, inject=tuple(injection.text for injection in self.injections))


def make_plan(**given: Any) -> Plan:
    """Return the plan that options describe, on this machine or on the nodes of a Ray cluster, which is queried.

    `given`: fields of `PlanOptions`, by name. Raises HarnessError for a device, a cluster, an injection or a package
    that is not there, and for a backend of another device.
    """
    asked = PlanOptions(**given)
    for where, what, fix in asked.contradictions:
        raise HarnessError(what, where=where, fix=fix)
    program = os.environ.get(PROGRAM_VARIABLE) or DEFAULT_PROGRAM
    check_ranks(packages=program == DEFAULT_PROGRAM)
    return plan_without_ranks(asked, program)


def plan_without_ranks(asked: PlanOptions, program: str = DEFAULT_PROGRAM) -> Plan:
    """Return the plan of these options, where no package that ranks import need be installed."""
    if asked.launcher not in (None, "fork"):
        launcher(asked.launcher)
    cluster = (asked.address or AUTO) if asked.launcher == "ray" else ""
    location = msgspec.structs.asdict(locate(asked, cluster))
    side = msgspec.structs.asdict(location.pop("side"))
    as_asked = Plan(**{name: value for name, value in asked.as_given.items() if name in Plan.__struct_fields__})
    return msgspec.structs.replace(
        as_asked,
        **side,
        **location,
        address=cluster,
        program=program,
        injections=tuple(parse_injection(text) for text in asked.inject),
        probed=True,
    )


def with_command(plan: Plan, given: RunOptions, asked: CommandOptions) -> Plan:
    """Return the plan with what the command line says besides. `given`: what of it a rerun repeats."""
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
        logs=asked.keep_logs and asked.keep_logs.resolve(),
        max_failures=1 if asked.first_failure else asked.maxfail,
        name=asked.name,
    )
