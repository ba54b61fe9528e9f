"""Evidence about GPUs, level by level: what can be tried on these devices, trying it, and the report of one level.

- kernel: the float8 matmul of one device beside the exact one. Needs one device and no cases.
- proof: the exact matmul with everything else real. Clean cases pass, and every injected fault is found.
- native: the kernels and collectives of the device in bfloat16, as users run them. Makes the goldens of this class of
  hardware that are missing, checks every case by every check, measures the noise over seeds, and looks whether probes
  or a second run change a bit.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from harness.engine.cluster import Cluster, unleased_cluster
from harness.engine.hardware import cuda_devices, open_leases
from harness.engine.leases import Leases
from harness.engine.messages import Job
from harness.errors import HarnessError
from harness.evidence.golden import stored_families, write_golden
from harness.evidence.tolerance import Evidence, write_evidence
from harness.evidence.verified import FLOAT8_FROM, LEAST_DEVICES, Level
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, family_id
from harness.matrix.choice import PlantedFault, catalogue_of_faults
from harness.matrix.rules import expected_refusal
from harness.plugins.gpu import kernels
from harness.plugins.gpu.record import LevelItem, LevelReport, TorchFacts
from harness.project import Project
from harness.registry import answer
from harness.request import Arithmetic
from harness.result import CaseResult
from harness.running.case_judge import known_here
from harness.running.executor import local_node
from harness.running.identity import environment
from harness.running.plan import Plan
from harness.running.progress import Progress
from harness.running.selection import NothingSelected, Query, select_cases
from harness.studies import noise
from harness.studies.records import SanityJudge, make_goldens, needed_references
from harness.text import binary_bytes, counted, timestamp
from harness.workflow import run, run_cases

_FACTS_PROGRAM = "harness.plugins.gpu.worker.facts"
_FACTS_DEADLINE_S = 120.0
_IN_USE_BYTES = 1 << 30  # what a driver and an idle context hold is less
ARITHMETIC: Mapping[Level, Arithmetic] = {"kernel": "kernel", "proof": "exact", "native": "kernel"}
DTYPE: Mapping[Level, str] = {"proof": "float64", "native": "bfloat16"}
_TIERS = {"cpu": ("smoke",), "cuda": ("smoke", "pr")}
_READ_BY_DEVICES = ("NCCL_", "CUBLAS", "NVIDIA_TF32", "TORCH_NCCL", "CUDA_DEVICE")
NO_REFUSALS = "rejected calls are not compared: torch's CPU kernel rejects fewer than a GPU"
_PROOF = "evidence proof"
_ALL = 99  # host cases of a fault
_SMALL = 2  # ranks of the cases of a rehearsal
REASON = "first goldens of this class of hardware"
_REPEATED = 2  # cases that are run twice without probes


class Work(NamedTuple):
    """What a level works with. `facts`: None on a CPU. `faults`: none for the usual ones. `seeds`: of the noise."""

    project: Project
    plan: Plan
    progress: Progress
    facts: TorchFacts | None
    faults: tuple[PlantedFault, ...]
    seeds: int
    command: str  # as it was given

    @property
    def slots(self) -> int:
        """Return the number of ranks that run at the same time: devices of this machine, or slots of its CPU."""
        return self.plan.capacity.largest

    @property
    def leases(self) -> Leases:
        """Return the slots of this machine that cases of this plan run on."""
        return open_leases(self.project.lease_folder(), self.plan.device, self.slots)


class LevelOutcome(NamedTuple):
    items: tuple[LevelItem, ...]
    notes: tuple[str, ...] = ()


class Interrupted(Exception):
    """Ctrl-C ended a level early: what is known of it must not replace what is stored."""


def ask_torch() -> TorchFacts:
    """Ask torch about this machine. HarnessError if the process that asks it fails."""
    with unleased_cluster(_FACTS_PROGRAM, 1) as cluster:
        outcome = cluster.run(Job(job_id="facts", world_size=1, payload=b"", deadline_s=_FACTS_DEADLINE_S))
    if outcome.status != "ok":
        raise HarnessError(
            f"torch cannot be asked about devices: {outcome.message}", fix='see why `python -c "import torch"` fails.'
        )
    return msgspec.msgpack.decode(outcome.ranks[0].payload or b"", type=TorchFacts)


def obstacle(level: Level, facts: TorchFacts, visible: int) -> HarnessError | None:
    """Return why the CUDA devices here cannot prove this level; None if they can. `visible`: how many may be used."""
    return next(_obstacles(level, facts, visible), None)


def _obstacles(level: Level, facts: TorchFacts, visible: int) -> Iterator[HarnessError]:
    where = f"evidence {level}"
    if not facts.cuda:
        fix = "install a build for CUDA, from https://pytorch.org/get-started/locally/."
        yield HarnessError(f"torch {facts.torch} was built without CUDA.", where=where, fix=fix)
    if facts.error or not facts.devices:
        what = f"torch {facts.torch} for CUDA {facts.cuda} shows no device: {facts.error or 'it counts none'}."
        fix = "compare the version of CUDA with the driver's, which nvidia-smi shows, and CUDA_VISIBLE_DEVICES."
        yield HarnessError(what, where=where, fix=fix)
    least, there = LEAST_DEVICES[level], min(len(facts.devices), visible)
    if there < least:
        fix = "make more visible by CUDA_VISIBLE_DEVICES, or run the levels that need fewer."
        yield HarnessError(f"it needs {counted(least, 'GPU')}, and {there} can be used.", where=where, fix=fix)
    old = [gpu for gpu in facts.devices if gpu.capability < FLOAT8_FROM]
    if old and level != "proof":
        named = ", ".join("GPU {} ({}, {}.{})".format(gpu.index, gpu.name, *gpu.capability) for gpu in old)
        what = "float8 matmuls need compute capability {}.{}; too old: {}.".format(*FLOAT8_FROM, named)
        fix = "leave these out of CUDA_VISIBLE_DEVICES; `dev evidence proof` multiplies exactly, on older ones too."
        yield HarnessError(what, where=where, fix=fix)
    if level != "kernel" and not facts.nccl:
        yield HarnessError(f"torch {facts.torch} was built without NCCL.", where=where, fix="install a build with it.")


def memory_words(facts: TorchFacts) -> tuple[str, ...]:
    return tuple(f"GPU {gpu.index} {gpu.name}, {binary_bytes(gpu.total_bytes)}" for gpu in facts.devices)


def doubts(facts: TorchFacts, held: Sequence[str]) -> tuple[str, ...]:
    """Caveats about numbers of these devices: memory in use by others, leases of other jobs, mixed GPUs."""
    held_bytes = {gpu: gpu.total_bytes - gpu.free_bytes for gpu in facts.devices}
    used = [
        f"GPU {gpu.index}: {binary_bytes(held_bytes[gpu])} of {binary_bytes(gpu.total_bytes)} are in use by others; "
        "cases may find too little memory, and their seconds say little"
        for gpu in facts.devices
        if held_bytes[gpu] > _IN_USE_BYTES
    ]
    leased = [f"GPU {name} is leased by another job of the harness: cases wait for it" for name in held]
    names = sorted({gpu.name for gpu in facts.devices})
    mixed = [f"different GPUs side by side: {', '.join(names)}; the first gives the class"]
    return (*used, *leased, *(mixed if len(names) > 1 else ()))


def collect(level: Level, work: Work, query: Query) -> LevelReport:
    """Collect the evidence of this level, not stored; goldens and noise of the level `native` are.

    Raises `Interrupted` after Ctrl-C, RanksFailed, and HarnessError for bad input.
    """
    started_s = time.monotonic()
    work = work._replace(plan=msgspec.structs.replace(work.plan, arithmetic=ARITHMETIC[level]))
    plan, facts, project = work.plan, work.facts, work.project
    cases, left_out = chosen_cases(level, project, query, plan)
    devices, held = cuda_devices(work.slots), work.leases.held_slots()  # by other jobs of the harness
    uncertain = () if facts is None else doubts(facts, [devices[slot].uuid for slot in held])
    for sentence in (*project.replaced_tiers(query.sources), *(f"{note}." for note in (*uncertain, *left_out))):
        work.progress.note(sentence)
    collected = {
        "kernel": lambda: kernel_level(work),
        "proof": lambda: proof_level(work, cases),
        "native": lambda: native_level(work, cases),
    }[level]()
    return LevelReport(
        level=level,
        hardware=plan.hardware[0],
        items=collected.items,
        notes=(*uncertain, *left_out, *collected.notes),
        environment=environment(plan, project.root, {case.target for case in cases}),
        devices=1 if level == "kernel" else work.slots,
        memory=() if facts is None else memory_words(facts),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(_READ_BY_DEVICES)},
        command=work.command,
        created=timestamp(),
        seconds=round(time.monotonic() - started_s, 1),
    )


def chosen_cases(level: Level, project: Project, query: Query, plan: Plan) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    """Return the requested cases of this level (default: those of small tiers), and what is left out.

    Raises `NothingSelected` where none is left.
    """
    if level == "kernel":
        return (), ()
    if not query.sources:
        query = msgspec.structs.replace(query, sources=_TIERS[plan.device])
    of_dtype = [case for case in select_cases(project, query) if case.train.dtype == DTYPE[level]]
    small = [case for case in of_dtype if case.world_size <= plan.capacity.largest]
    fitting, blocked = without_obstacles(small, plan)
    # torch's kernel of a CPU refuses less than a GPU's.
    unrefused = level == "native" and plan.device == "cpu"
    cases = [case for case in fitting if not (unrefused and expected_refusal(case) is not None)]
    if not cases:
        what = f"no selected case is in {DTYPE[level]} and has at most {counted(plan.capacity.largest, 'rank')}."
        raise NothingSelected(what, where=f"evidence {level}", fix="select others, or leave the selection out.")
    left = (
        (len(of_dtype) - len(small), f"need more than {counted(plan.capacity.largest, 'device')}"),
        (len(fitting) - len(cases), "must be refused, which torch's kernel of a CPU does not do"),
    )
    notes = tuple(f"{counted(count, 'case')} left out that {why}" for count, why in left if count)
    return tuple(cases), (*notes, *(f"{counted(count, 'case')} left out: {why}" for why, count in blocked.items()))


def without_obstacles(cases: Sequence[Case], plan: Plan) -> tuple[list[Case], Mapping[str, int]]:
    """Return the cases that the devices of a plan can run, and by reason how many others."""
    against = [plan.obstacle(case).why for case in cases]
    return [case for case, why in zip(cases, against, strict=True) if not why], Counter(filter(None, against))


def kernel_level(work: Work) -> LevelOutcome:
    """Return what this level finds on a device free. Raises RanksFailed where the rank fails outside of any check."""
    facts, plan = work.facts, work.plan
    capability = kernels.BLOCKS_FROM if facts is None else facts.devices[0].capability  # a CPU rehearses all of it
    refusals = () if facts is None else kernels.refusal_checks(capability)
    checks = (*kernels.value_checks(capability), *refusals)
    accumulator: kernels.Accumulator = "float32" if plan.device == "cpu" else "tensor_core"
    plan = msgspec.structs.replace(plan, program=kernels.PROGRAM, launcher="fork")
    node = local_node(plan, work.project, work.progress.note)
    with Cluster([node], note=work.progress.note) as cluster:
        conclusions = kernels.run_checks(cluster, checks, device=plan.device, accumulator=accumulator)
    return LevelOutcome(tuple(map(_kernel_item, conclusions)), () if refusals else (NO_REFUSALS,))


def _kernel_item(conclusion: kernels.KernelConclusion) -> LevelItem:
    compared = {"error_of_sum": conclusion.error_of_sum, "allowed": conclusion.allowed} if conclusion.allowed else {}
    return LevelItem(
        name=conclusion.check.id,
        verdict="passed" if conclusion.good else "failed",
        good=conclusion.good,
        numbers=_finite(compared),
        says=tuple(map(str, conclusion.problems)),
    )


def proof_level(work: Work, cases: Sequence[Case]) -> LevelOutcome:
    """What this level finds: the clean cases, and each fault in a case of the catalogue that fits on these devices."""
    slots, faults = work.slots, work.faults or default_faults(work.plan.device)
    mutation = answer("mutation testing", where=_PROOF)
    of_catalogue = mutation.hosts_among(work.project, faults, Query(), at_most=_ALL)
    fitting = {
        name: [case for case in host_cases if case.world_size <= slots and not work.plan.obstacle(case).why]
        for name, host_cases in of_catalogue.items()
    }
    # The first that fits, one with several ranks before one with a single rank.
    hosts = {
        name: sorted(host_cases, key=lambda case: case.world_size == 1)[:1] for name, host_cases in fitting.items()
    }
    plantable = [fault for fault in faults if hosts[fault.name]]
    matrix = mutation.run_mutations(work.project, plantable, hosts, work.plan, work.progress, others=cases)
    if matrix.interrupted:
        raise Interrupted
    left = [fault.name for fault in faults if not hosts[fault.name]]
    more = f"{counted(len(left), 'fault')} left out, whose cases {counted(slots, 'such device')} cannot run"
    return LevelOutcome(items_of(matrix), (f"{more}: {', '.join(left)}",) if left else ())


def default_faults(device: str) -> tuple[PlantedFault, ...]:
    """Return all injected faults; in a rehearsal one of each class, in a small case."""
    faults = tuple(catalogue_of_faults(_PROOF).all_faults().values())
    if device != "cpu":
        return faults
    small = [fault for fault in faults if any(case.world_size <= _SMALL for case in fault.hosts(at_most=_ALL))]
    return tuple({fault.group: fault for fault in reversed(small)}.values())[::-1]


def items_of(matrix: Any) -> tuple[LevelItem, ...]:
    """Return the clean runs and the trials as items of a report."""
    return (*map(_clean, matrix.clean), *map(_planted, matrix.trials))


def _clean(trial: Any) -> LevelItem:
    return LevelItem(
        name=trial.case_id,
        verdict=trial.verdict.value,
        good=trial.verdict.good,
        numbers=_finite({"parity": trial.parity}),
        says=(trial.message,) if trial.message and not trial.verdict.good else (),
    )


def _finite(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


def _planted(trial: Any) -> LevelItem:
    """A fault without an effect must not be found, and one that breaks when injected proves nothing."""
    verdict = "detected" if trial.detected else "not reached" if trial.not_reached else "not detected"
    says = tuple(filter(None, [trial.not_reached, ", ".join(trial.checks)]))
    good = trial.detected != trial.equivalent and not trial.not_reached
    return LevelItem(name=f"{trial.fault} in {trial.case_id}", verdict=verdict, good=good, says=says)


def native_level(work: Work, cases: Sequence[Case]) -> LevelOutcome:
    """What this level finds. Stores goldens, before the cases are checked by them, and the noise of this class."""
    made = _missing_goldens(work, cases)
    judged, _ = run(work.project, Query(sources=tuple(map(case_id, cases))), work.plan, work.progress)
    _unless(judged.end.interrupted)
    measured = _noise(work, cases)
    items = (*made, *map(_case_item, judged.results), *measured.items, *_bits(work, cases, judged.results))
    return LevelOutcome(items, measured.notes)


def _missing_goldens(work: Work, cases: Sequence[Case]) -> tuple[LevelItem, ...]:
    stored = stored_families(work.project.root, work.plan.hardware)
    wanted = [reference for reference in needed_references(cases) if family_id(reference) not in stored]
    if not wanted:
        return ()
    made = make_goldens(work.project, wanted, work.plan, work.progress, reason=REASON, command=work.command)
    _unless(made.interrupted)
    for golden in made.goldens:
        write_golden(work.project.root, golden)
    good = [LevelItem(name=f"golden {golden.family}", verdict="made", good=True) for golden in made.goldens]
    return (*good, *(_case_item(result, prefix="golden of ") for result in made.failed))


def _noise(work: Work, cases: Sequence[Case]) -> LevelOutcome:
    """Return the distances to BF16 over seeds, for up to two layouts of every kind of case without a recorded fault."""
    chosen = noise.over_seeds(noise.measured_cases(cases, layouts=2, known=known_here(work.project)), work.seeds)
    if not chosen:
        return LevelOutcome((), ("noise: not measured, without seeds or without a case to measure",))
    done = noise.measure(work.project, chosen, work.plan, work.progress, command=work.command, fresh=True)
    _unless(done.interrupted)
    names, items = set(map(case_id, chosen)), []
    for check, evidence in done.evidence.items():
        here = noise.environment()  # samples of other machines stay where they are
        samples = [sample for sample in evidence.samples if sample.case_id in names and sample.environment == here]
        new = msgspec.structs.replace(evidence, samples=tuple(samples))
        write_evidence(work.project.root, new, check, work.plan.hardware[0])
        items += _noise_items(check, new)
    return LevelOutcome((*items, *(_case_item(result, prefix="noise of ") for result in done.failed)))


def _noise_items(check: str, evidence: Evidence) -> list[LevelItem]:
    keys = sorted({sample.key for sample in evidence.samples})
    of = {key: [max(sample.per_step) for sample in evidence.samples if sample.key == key] for key in keys}
    return [
        LevelItem(
            name=f"noise of {check}, {key}",
            verdict="measured",
            good=True,
            numbers={"largest": max(distances)},
            says=(counted(len(distances), "sample"),),
        )
        for key, distances in of.items()
    ]


def _bits(work: Work, cases: Sequence[Case], judged: Sequence[CaseResult]) -> list[LevelItem]:
    """Whether a second run, and one without probes, has the same losses and norms to the bit, of the first cases."""
    few = [case for case in cases if case.float8.enabled and expected_refusal(case) is None][:_REPEATED]
    if not few:
        return []
    plain = msgspec.structs.replace(work.plan, probed=False)
    twice = run_cases(work.project, [*few, *few], plain, SanityJudge(), work.progress)
    _unless(twice.end.interrupted)
    probed = {result.case_id: _curve(result) for result in judged}
    firsts, seconds = twice.results[: len(few)], twice.results[len(few) :]
    items: list[LevelItem] = []
    for first, second in zip(firsts, seconds, strict=True):
        name, one, other = first.case_id, _curve(first), _curve(second)
        items.append(_same(f"a second run of {name}", one, other, must=False))
        # Where the device itself does not repeat its bits, a difference says nothing of probes.
        items.append(_same(f"probes in {name}", probed[name], one, must=one == other))
    return items


def _curve(result: CaseResult) -> tuple[tuple[float, float], ...]:
    """Return the loss and gradient norm of every step of every rank; empty if a rank did not finish."""
    traces = result.run.traces if result.run is not None and result.run.complete else ()
    return tuple((step.loss, step.grad_norm) for trace in traces for step in trace.steps)


def _same(name: str, one: Sequence[object], other: Sequence[object], *, must: bool) -> LevelItem:
    """Return whether two runs have the same numbers; a run that did not finish has none, which is never good."""
    if not one or not other:
        return LevelItem(name=name, verdict="did not finish", good=False)
    same = one == other
    says = () if same else (f"{sum(a != b for a, b in zip(one, other, strict=True))} of {len(one)} steps differ",)
    return LevelItem(name=name, verdict="no bit differs" if same else "bits differ", good=same or not must, says=says)


def _case_item(result: CaseResult, prefix: str = "") -> LevelItem:
    numbers = {name: getattr(result.measured, name, None) for name in ("loss_distance", "parity", "module_replay")}
    unjudged = [f"not checked: {skipped.check}: {skipped.reason}" for skipped in result.not_judged]
    return LevelItem(
        name=f"{prefix}{result.case_id}",
        verdict=result.verdict.value,
        good=result.verdict.good or result.excused,
        numbers=_finite(numbers),
        says=(*(finding.message for finding in result.findings), *unjudged),
    )


def _unless(interrupted: bool) -> None:
    if interrupted:
        raise Interrupted
