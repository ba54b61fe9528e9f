"""Simulated ranks of large layouts do what the formulas say, and a formula that is wrong shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from harness.engine.cluster import Cluster, unleased_cluster
from harness.engine.messages import Job, JobOutcome
from harness.matrix import models
from harness.matrix.case import Case
from harness.matrix.records import read_known
from harness.plugins.predict.layouts import PROGRAM, Verification, verify
from harness.plugins.predict.simulated import SimulationRequest
from tests.worker.runs import sweep

KNOWN = read_known(Path(__file__).parents[4] / "cases" / "known.toml")


@pytest.fixture(scope="module")
def engine() -> Iterator[Cluster]:
    with unleased_cluster(PROGRAM, 2) as opened:
        yield opened


def case_of(name: str, **axes: object) -> Case:
    return models.training(models.MODELS[name], **{"layers": 2, **axes})


def held(engine: Cluster, case: Case) -> Verification:
    return verify(engine, case, (0, case.world_size - 1), KNOWN)


@pytest.mark.parametrize(
    "case",
    [
        case_of("llama3-8b", tp=8, dp_shard=8, recipe="tensorwise", layers=1),
        sweep(
            case_of(
                "debugmodel", dp_shard=8, dp_replicate=8, recipe="tensorwise", fp8_all_gather=True, output_layer=True
            )
        ),
        sweep(case_of("debugmodel", tp=2, dp_shard=32, recipe="rowwise", output_layer=True, tied=True)),
        sweep(
            case_of("debugmodel", tp=4, dp_shard=16, recipe="rowwise", checkpointing="selective_op", vocab_size=2250)
        ),
        sweep(case_of("debugmodel", tp=2, dp_shard=32, recipe="rowwise", optimizer="sgd")),
        sweep(case_of("debugmodel", tp=2, dp_shard=32, recipe="rowwise", optimizer="muon")),
    ],
    ids=["8b", "hsdp", "tied", "rowwise", "sgd", "muon"],
)
def test_64_ranks(engine: Cluster, case: Case) -> None:
    verification = held(engine, case)
    assert verification.compared and not verification.differing, verification.differing
    assert not any(row.known for row in verification.compared)
    assert all(0.99 < peak < 1.3 for peak in verification.peaks)


def test_a_misaligned_matmul_is_refused_as_on_a_gpu(engine: Cluster) -> None:
    verification = held(engine, case_of("debugmodel", tp=2, dp_shard=4, recipe="tensorwise", seq_len=2056))
    assert [(row.what, row.formula, row.found) for row in verification.compared] == [("refusals", 1, 1)] * 2


def test_a_recorded_fault_explains_its_difference(engine: Cluster) -> None:
    options = {"tp": 2, "dp_shard": 4, "recipe": "tensorwise", "fp8_all_gather": True}
    verification = verify(engine, case_of("debugmodel", **options), (0,), KNOWN)
    assert not verification.differing
    assert {row.known for row in verification.compared if row.known} == {"fp8-all-gather-scale-per-tp-rank-of-llama"}
    assert verify(engine, case_of("debugmodel", **options), (0,)).differing


class _Filtering:
    """An engine whose ranks convert no wo, whatever is asked of them."""

    def __init__(self, engine: Cluster) -> None:
        self._engine = engine

    def run(self, job: Job) -> JobOutcome:
        request = msgspec.msgpack.decode(job.payload, type=SimulationRequest)
        float8 = replace(request.case.float8, filter_fqns=("attention.wo",))
        other = replace(request, case=replace(request.case, float8=float8))
        return self._engine.run(replace(job, payload=msgspec.msgpack.encode(other)))


def test_what_is_not_as_the_formulas_say_differs(engine: Cluster) -> None:
    case = case_of("debugmodel", tp=2, dp_shard=4, recipe="tensorwise")
    differing = {row.what for row in verify(_Filtering(engine), case, (0,)).differing}
    assert "calls of all_reduce (max) in float64 along tp" in differing
    assert "FLOPs of matmuls in float8" in differing
    assert "matmuls [2048, 128] x [128, 256] in bfloat16" in differing


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["llama3-70b", "llama3-405b"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_4096_ranks(engine: Cluster, name: str, recipe: str) -> None:
    verification = held(engine, case_of(name, tp=8, dp_shard=512, recipe=recipe, checkpointing="full", layers=4))
    assert verification.compared and not verification.differing, verification.differing
