"""Makes the evidence of one ring: chooses what to try on these devices, tries it, and puts the report together."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import msgspec

from harness.engine.hardware import cuda_devices
from harness.evidence.ring import SCHEMA, Ring, RingReport
from harness.matrix.case import Case
from harness.matrix.rules import expected_refusal
from harness.plural import counted
from harness.project import Project
from harness.request import Arithmetic
from harness.running.identity import environment
from harness.running.plan import Plan
from harness.running.selection import NothingSelected, Query, select_cases
from harness.studies.rings.kernel import kernel_ring
from harness.studies.rings.native import native_ring
from harness.studies.rings.possible import MOST_DEVICES, doubts, memory_words
from harness.studies.rings.proof import proof_ring
from harness.studies.rings.work import Work
from harness.timestamp import timestamp

ARITHMETIC: Mapping[Ring, Arithmetic] = {"kernel": "kernel", "proof": "exact", "native": "kernel"}
DTYPE: Mapping[Ring, str] = {"proof": "float64", "native": "bfloat16"}
_TIERS = {"cpu": ("smoke",), "cuda": ("smoke", "pr")}
_READ_BY_DEVICES = ("NCCL_", "CUBLAS", "NVIDIA_TF32", "TORCH_NCCL", "CUDA_DEVICE")


def collect(ring: Ring, work: Work, query: Query) -> RingReport:
    """The evidence of this ring, not stored; goldens and noise of the ring `native` are.

    Raises `Interrupted` after Ctrl-C, RanksFailed, and HarnessError for bad input.
    """
    started_s = time.monotonic()
    work = work._replace(plan=msgspec.structs.replace(work.plan, arithmetic=ARITHMETIC[ring]))
    plan, facts = work.plan, work.facts
    cases, left_out = chosen_cases(ring, work.project, query, plan)
    uncertain = () if facts is None else doubts(facts, _held(work))
    for note in (*uncertain, *left_out):
        work.progress.note(f"{note}.")
    found = {
        "kernel": lambda: kernel_ring(work),
        "proof": lambda: proof_ring(work, cases),
        "native": lambda: native_ring(work, cases),
    }[ring]()
    return RingReport(
        schema=SCHEMA,
        ring=ring,
        hardware=plan.hardware[0],
        items=found.items,
        notes=(*uncertain, *left_out, *found.notes),
        environment=environment(plan, work.project.root, {case.target for case in cases}),
        devices=min(work.slots, MOST_DEVICES.get(ring, work.slots)),
        memory=() if facts is None else memory_words(facts),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(_READ_BY_DEVICES)},
        command=work.command,
        created=timestamp(),
        seconds=round(time.monotonic() - started_s, 1),
    )


def chosen_cases(ring: Ring, project: Project, query: Query, plan: Plan) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    """The cases of this ring among those that are asked for, by default those of small tiers, and what is left out.

    Raises `NothingSelected` where none is left.
    """
    if ring == "kernel":
        return (), ()
    if not query.sources and not query.case_ids:
        tiers = tuple(name for name in _TIERS[plan.device] if name in project.tiers)
        query = msgspec.structs.replace(query, sources=tiers)
    of_dtype = [case for case in select_cases(project, query) if case.train.dtype == DTYPE[ring]]
    fitting = [case for case in of_dtype if case.world_size <= plan.capacity.largest]
    # torch's kernel of a CPU refuses less than that of a GPU.
    unrefused = ring == "native" and plan.device == "cpu"
    cases = [case for case in fitting if not (unrefused and expected_refusal(case) is not None)]
    if not cases:
        what = f"no selected case is in {DTYPE[ring]} and has at most {counted(plan.capacity.largest, 'rank')}."
        raise NothingSelected(what, where=f"evidence {ring}", fix="select others, or leave the selection out.")
    left = (
        (len(of_dtype) - len(fitting), f"need more than {counted(plan.capacity.largest, 'device')}"),
        (len(fitting) - len(cases), "must be refused, which torch's kernel of a CPU does not do"),
    )
    return tuple(cases), tuple(f"{counted(count, 'case')} left out that {why}" for count, why in left if count)


def _held(work: Work) -> tuple[str, ...]:
    """Names of the devices that other jobs of the harness lease now."""
    devices = cuda_devices(work.slots)
    return tuple(devices[slot].uuid for slot in work.leases.held_slots())
