"""The shared fabric beside torch's gloo: what every call leaves of values, versions, history and gradients, and errors.

The fabric stands for NCCL. Where gloo does something else, the difference is named, with the source of torch that says
so, and what the fabric does instead is said too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from harness.engine.zygote_engine import ZygoteEngine
from tests.jobs import make_share, run_alone

Report = Mapping[str, Mapping[str, Any]]  # what was seen after every call, by its name

Reports = Callable[..., list[Report]]


@pytest.fixture(scope="module")
def engine() -> Iterator[ZygoteEngine]:
    with ZygoteEngine("tests.worker.groupprogram") as zygote:
        yield zygote


@pytest.fixture(scope="module")
def reports(engine: ZygoteEngine, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """The report of every rank. The keywords are the options of `groupprogram`."""

    def run(fabric: str, *, world_size: int = 2, **options: object) -> list[Report]:
        payload = json.dumps({"fabric": fabric, **options}).encode()
        outcome = run_alone(engine, make_share(tmp_path_factory.mktemp(fabric), world_size, payload, deadline_s=240))
        assert outcome.status == "ok", f"{outcome.message}\n{outcome.ranks[0].traceback}"
        return [json.loads(rank.payload or b"") for rank in outcome.ranks]

    return run


@pytest.fixture(scope="module")
def stock(reports: Reports) -> list[Report]:
    """Torch's gloo, without anything of ours."""
    return reports("stock")


def leaves(seen: Any, aspect: str = "") -> Iterator[tuple[str, Any]]:
    """Every thing that was seen, with the innermost word for it."""
    parts = seen.items() if isinstance(seen, dict) else ((aspect, part) for part in seen)
    for word, part in parts:
        if isinstance(part, dict) or (isinstance(part, list) and any(isinstance(one, dict) for one in part)):
            yield from leaves(part, word)
        else:
            yield word, part


def same(one: Any, other: Any) -> bool:
    """But for rounding: numbers are whole where nothing but their sum is looked at."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-6)
    return type(one) is type(other) and one == other


NO_ERROR = "none"


def differing(stock: Mapping[str, Any], fabric: Mapping[str, Any]) -> set[str]:
    """What differs: "raises" where only one of the two does, "error" where its type does, or what was seen."""
    errors = [seen.get("error", NO_ERROR) for seen in (stock, fabric)]
    if errors != [NO_ERROR, NO_ERROR]:
        return set() if errors[0] == errors[1] else {"raises"} if NO_ERROR in errors else {"error"}
    both = list(leaves(stock)), list(leaves(fabric))
    if [word for word, _ in both[0]] != [word for word, _ in both[1]]:
        return {"what_is_seen"}
    return {word for (word, one), (_, other) in zip(*both, strict=True) if not same(one, other)} - {"kept"}


def kept(seen: Mapping[str, Any]) -> bool:
    """Nothing but memory was written: no tensor has another version or history than before."""
    return "error" not in seen and all(value for word, value in leaves(seen) if word == "kept")


def raises(*types: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda seen: seen.get("error") in types


class Difference(NamedTuple):
    calls: str  # a pattern of their names
    aspects: str  # what differs
    fabric: Callable[[Mapping[str, Any]], bool]  # what holds on the fabric
    why: str


# Files of torch/csrc/distributed/c10d.
NAMED = (
    Difference(
        r"(gather|scatter|all_to_all): .*(strided|expanded).*",
        "raises error",
        raises("ValueError"),
        "NCCL refuses to send what is not dense (ProcessGroupNCCL.cpp: check_gpu_single_tensor), and gloo passes on "
        "the memory where it begins",
    ),
    Difference(
        r"(gather|scatter|all_to_all|differentiable (gather|scatter)): .*transposed.*",
        "values values_of_the_leaf version autograd grad warnings raises",
        kept,
        "NCCL sends a transposed tensor in the order of its memory (ProcessGroupNCCL.cpp: check_gpu_single_tensor with "
        "p2p), and gloo copies what it has gathered in the order of indices",
    ),
    Difference(
        r"reduce_scatter: .* <- (strided|transposed|expanded).*",
        "values values_of_the_leaf version autograd grad warnings raises what_is_seen",
        kept,
        "NCCL copies the inputs, so that they may have any strides (ProcessGroupNCCL.cpp: reduce_scatter)",
    ),
    Difference(
        r"(premul|coalesced|differentiable)?.*: .*(strided|transposed|expanded).*",
        "raises error",
        raises("ValueError"),
        "NCCL refuses what is not contiguous (ProcessGroupNCCL.cpp: check_gpu_single_tensor), and gloo takes the "
        "memory where it begins, other elements included",
    ),
    Difference(
        r"(all_reduce|reduce|all_reduce_coalesced|reduce_scatter|reduce_scatter_tensor): (\w+ of )?torch.float8.*",
        "error",
        raises("TypeError"),
        "gloo knows no float8 (ProcessGroupGloo.cpp: GENERATE_ALL_TYPES). NCCL adds it up on Hopper since 2.24, and "
        "rounds at every hop (ProcessGroupNCCL.cpp: isUnsupportedFloat8): the sum would be another for every layout",
    ),
    Difference(
        r".*: torch.float8.*",
        "raises",
        lambda seen: "error" not in seen,
        "NCCL sends float8 as bytes (NCCLUtils.cpp: ncclDataType), and gloo knows none",
    ),
    Difference(
        r".*: (\w+ of )?torch.(int16|complex64)",
        "error raises",
        raises("TypeError"),
        "NCCL has no such dtype and raises TypeError (NCCLUtils.cpp: getNcclDataType). gloo raises RuntimeError, and "
        "reduces complex numbers where it builds on all_reduce",
    ),
    Difference(
        r".*: B\w+ of .*",
        "error raises",
        raises("ValueError"),
        "NCCL has no bitwise reductions (ProcessGroupNCCL.cpp: getNcclReduceOp)",
    ),
    Difference(
        r".*: AVG of torch.bool",
        "error",
        raises("TypeError"),
        "NCCL raises TypeError for it (ProcessGroupNCCL.cpp: getNcclReduceOp), gloo RuntimeError",
    ),
    Difference(
        r".*: AVG of .*|functional all_reduce, avg: .*",
        "version raises",
        kept,
        "NCCL averages within the reduction, whole numbers too. gloo divides the tensor after it, which counts as a "
        "write of its own (ProcessGroupGloo.cpp)",
    ),
    Difference(
        r"(reduce|differentiable reduce|work): .*",
        "values values_of_the_leaf version",
        kept,
        "gloo uses the tensors of ranks that are not the root for sums of its own (ProcessGroupGloo.cpp: reduce)",
    ),
    Difference(
        r"premul .*|(loss|saved): premul",
        "raises",
        kept,
        "gloo has no PREMUL_SUM (ProcessGroupGloo.cpp: toFunction), which NCCL has (getNcclReduceOp)",
    ),
    Difference(
        r"(all_reduce_coalesced|all_gather_into_tensor|gather|reduce_scatter|reduce_scatter_tensor|all_to_all): .*"
        r"|coalesced .*|functional .*(gather|coalesced).*|differentiable (gather|reduce_scatter|_all_gather_base): .*"
        r"|(loss|saved): all_reduce_coalesced",
        "version autograd grad kind warnings raises what_is_seen",
        kept,
        "gloo gathers in memory of its own, or builds the call on another one, and copies the results as any code "
        "would, so that autograd sees it (ProcessGroupGloo.cpp). NCCL writes them to their memory",
    ),
    Difference(
        "work: all_gather_into_tensor",
        "what_is_seen",
        kept,
        "the future of gloo has the parts (ProcessGroupGloo.cpp), of NCCL the whole tensor",
    ),
    Difference(
        "work: reduce_scatter_tensor",
        "raises",
        kept,
        "gloo's work has no future here (ProcessGroupGloo.cpp), every one of NCCL has",
    ),
    Difference(
        "tags: two",
        "values",
        kept,
        "NCCL takes messages in the order in which they were sent (ProcessGroupNCCL.cpp: send)",
    ),
    Difference(
        "error: receive from anyone",
        "raises",
        raises("NotImplementedError"),
        "NCCL cannot (ProcessGroupNCCL.cpp: recvAnysource)",
    ),
    Difference(
        "error: all_gather into another shape",
        "raises",
        raises(NO_ERROR),
        "NCCL compares numbers of elements (ProcessGroupNCCL.cpp: allgather), gloo shapes",
    ),
    Difference(
        "error: all_to_all_single that does not divide",
        "raises",
        raises("RuntimeError"),
        "NCCL refuses it (Utils.hpp: checkSplitSizes), gloo leaves out the rest",
    ),
    Difference(
        "error: sparse all_reduce",
        "raises",
        raises("RuntimeError"),
        "NCCL has it in an experimental branch alone (ProcessGroupNCCL.cpp: allreduce_sparse)",
    ),
    Difference("error: monitored_barrier", "raises", raises("ValueError"), "gloo alone has it (distributed_c10d.py)"),
    Difference(
        r"error: .*",
        "error",
        raises("ValueError", "TypeError"),
        "NCCL raises ValueError or TypeError for arguments (ProcessGroupNCCL.cpp: C10_THROW_ERROR), gloo RuntimeError",
    ),
)


def named(call: str, aspects: set[str], seen: Mapping[str, Any]) -> Difference | None:
    """The first difference that covers what differs, and of which the fabric does what it says."""
    for difference in NAMED:
        covered = re.fullmatch(difference.calls, call) and aspects <= {*difference.aspects.split()}
        if covered and difference.fabric(seen):
            return difference
    return None


def compare(stock: list[Report], fabric: list[Report]) -> tuple[set[Difference], dict[str, set[str]]]:
    """The named differences that were met, and what differs else, by call. Calls that `fabric` lacks are left out."""
    met: set[Difference] = set()
    rest: dict[str, set[str]] = {}
    for one, other in zip(stock, fabric, strict=True):
        for call, seen in other.items():
            aspects = differing(one[call], seen)
            difference = named(call, aspects, seen) if aspects else None
            if difference is not None:
                met.add(difference)
            elif aspects:
                rest.setdefault(call, set()).update(aspects)
    return met, rest


def test_every_call_does_what_gloo_does_or_what_is_named(stock: list[Report], reports: Reports):
    fabric = reports("shared")
    assert fabric[0].keys() == stock[0].keys() and len(stock[0]) > 500
    met, rest = compare(stock, fabric)
    assert rest == {}
    assert met == set(NAMED), "a difference that is none any more"


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_so_does_every_form_of_every_tensor(reports: Reports, world_size: int):
    given: Any = {"world_size": world_size, "everything": True}
    _, rest = compare(reports("stock", **given), reports("shared", **given))
    assert rest == {}


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (
            "writes_under_autograd",
            {
                "all_reduce: plain": {"version"},
                "all_reduce: Parameter": {"raises"},
                "all_reduce: result": {"version", "autograd", "grad"},
                "broadcast: Parameter": {"raises"},
                "loss: all_reduce": {"version", "kind", "grads"},
                "saved: all_reduce of detached": {"raises"},
                "trainer: weights": {"raises"},
            },
        ),
        ("counts_versions", {"all_reduce: plain": {"version"}, "saved: all_reduce of detached": {"raises"}}),
        ("takes_any_strides", {"all_reduce: strided": {"values"}}),
        ("without_futures", {"trainer: DDP": {"raises"}, "work: all_reduce": {"what_is_seen"}}),
    ],
)
def test_a_fabric_that_does_otherwise_is_found(
    stock: list[Report], reports: Reports, fault: str, found: dict[str, set[str]]
):
    calls = "|".join(found)
    _, rest = compare(stock, reports("shared", fault=fault, calls=calls))
    assert {call: rest.get(call, set()) & aspects for call, aspects in found.items()} == found
