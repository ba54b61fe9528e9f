"""The ring `kernel`: the float8 matmul of one device beside the exact one. Needs one device and no cases."""

from __future__ import annotations

import math

import msgspec

from harness.engine.cluster import Cluster
from harness.evidence.ring import RingItem
from harness.running.executor import local_node
from harness.studies.kernels.bound import Accumulator
from harness.studies.kernels.fixed import refusal_checks, value_checks
from harness.studies.kernels.judge import KernelConclusion
from harness.studies.kernels.runner import PROGRAM, run_kernel_checks
from harness.studies.rings.work import Found, Work

NO_REFUSALS = "refusals: torch's kernel of a CPU refuses less than that of a GPU, so none is compared"


def kernel_ring(work: Work) -> Found:
    """What this ring finds on a device that is free. Raises RanksFailed where the rank fails outside of any check."""
    facts, plan = work.facts, work.plan
    refusals = () if facts is None else refusal_checks(facts.devices[0].capability)
    checks = (*value_checks(), *refusals)
    accumulator: Accumulator = "float32" if plan.device == "cpu" else "tensor_core"
    plan = msgspec.structs.replace(plan, program=PROGRAM, engine="zygote")
    node = local_node(plan, work.project, work.progress.note)
    with Cluster([node]) as cluster:
        found = run_kernel_checks(cluster, checks, device=plan.device, accumulator=accumulator)
    return Found(tuple(map(_item, found)), () if refusals else (NO_REFUSALS,))


def _item(found: KernelConclusion) -> RingItem:
    compared = {"error_of_sum": found.error_of_sum, "allowed": found.allowed} if found.allowed else {}
    return RingItem(
        name=found.check.id,
        verdict="passed" if found.good else "failed",
        good=found.good,
        numbers={name: value for name, value in compared.items() if math.isfinite(value)},
        says=tuple(map(str, found.problems)),
    )
