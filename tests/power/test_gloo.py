"""Planted faults over gloo: what is found on the shared fabric is found here, and clean runs pass, in every dtype.

By night; `tests/acceptance/test_gloo.py` finds one in every run.
"""

from __future__ import annotations

import pytest

from harness.plugins.faults.faults import all_faults
from harness.plugins.faults.mutation import hosts_among, run_mutations
from harness.project import find_project
from harness.running.executor import Executor
from harness.running.plan import make_plan
from harness.running.progress import SilentProgress
from harness.running.selection import Query
from tests.power.kills import assert_all_found


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("host", "names"),
    [
        ("tp2-tensorwise-v2048-gb4-s2-f64", "sequence_shards_swapped amax_not_reduced_over_tp nothing_converted"),
        # float32 sums of more than two ranks have other bits here than in the reference of one rank
        ("fsdp3-tensorwise-v2048-gb6-s2-f32", "gathered_shards_swapped one_gradient_lost"),
        ("fsdp4-tensorwise-ag.fp8pre-v2048-gb4-s2-f32", "gathered_shards_swapped one_gradient_lost"),
        ("fsdp4-tensorwise-ag.fp8pre-v2048-gb4-s2-b16", "gathered_shards_swapped one_gradient_lost"),
        ("tp4-rowwise-ac.full-v2048-gb4-s2-b16", "partial_output_not_reduced output_kept_on_module"),
    ],
)
def test_faults_are_found_and_the_clean_run_passes(executor: Executor, host: str, names: str) -> None:
    project, faults = find_project(), tuple(all_faults()[name] for name in names.split())
    hosts = hosts_among(project, faults, Query(sources=(host,)), at_most=1)
    plan = make_plan(device="cpu", fabric="gloo")
    matrix = run_mutations(project, faults, hosts, plan, SilentProgress(), executor=executor)
    assert len(matrix.trials) == len(faults)
    assert_all_found(matrix)
