"""The shared-memory backend beside torch's gloo: what every call leaves of values, versions, history and gradients, and
errors.

And the virtual collectives on more ranks: float8 moves, every reduction is right, a mismatch is named.

The backend stands for NCCL. Where gloo does something else, the difference is named, with the source of torch that says
so, and what the backend does instead is said too.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.engine.fork_server_engine import ForkServerEngine
from tests.jobs import make_share, run_alone

Report = Mapping[str, Mapping[str, Any]]  # what was seen after every call, by its name

Reports = Callable[..., list[Report]]


@pytest.fixture(scope="module")
def engine() -> Iterator[ForkServerEngine]:
    with ForkServerEngine("tests.worker.groupprogram") as fork_server:
        yield fork_server


@pytest.fixture(scope="module")
def reports(engine: ForkServerEngine, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """The report of every rank. The keywords are the options of `groupprogram`."""

    def run(backend: str, *, world_size: int = 2, **options: object) -> list[Report]:
        payload = json.dumps({"backend": backend, **options}).encode()
        outcome = run_alone(engine, make_share(tmp_path_factory.mktemp(backend), world_size, payload, deadline_s=240))
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


def differing(stock: Mapping[str, Any], backend: Mapping[str, Any]) -> set[str]:
    """What differs: "raises" where only one of the two does, "error" where its type does, or what was seen."""
    errors = [seen.get("error", NO_ERROR) for seen in (stock, backend)]
    if errors != [NO_ERROR, NO_ERROR]:
        return set() if errors[0] == errors[1] else {"raises"} if NO_ERROR in errors else {"error"}
    both = list(leaves(stock)), list(leaves(backend))
    if [word for word, _ in both[0]] != [word for word, _ in both[1]]:
        return {"what_is_seen"}
    return {word for (word, one), (_, other) in zip(*both, strict=True) if not same(one, other)} - {"kept"}


def kept(seen: Mapping[str, Any]) -> bool:
    """Nothing but memory was written: no tensor has another version or history than before."""
    return "error" not in seen and all(value for word, value in leaves(seen) if word == "kept")


class Difference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    calls: str  # a pattern of their names
    aspects: str  # what differs
    why: str
    raises: tuple[str, ...] = ()
    kept: bool = False

    def holds(self, seen: Mapping[str, Any]) -> bool:
        """Whether the backend did what it says."""
        return seen.get("error") in self.raises if self.raises else kept(seen) if self.kept else "error" not in seen


class Named(msgspec.Struct, frozen=True):
    difference: tuple[Difference, ...]


NAMED = msgspec.toml.decode(Path(__file__).with_name("differences.toml").read_bytes(), type=Named).difference


def named(call: str, aspects: set[str], seen: Mapping[str, Any]) -> Difference | None:
    """The first difference that covers what differs, and of which the backend does what it says."""
    for difference in NAMED:
        covered = re.fullmatch(difference.calls, call) and aspects <= {*difference.aspects.split()}
        if covered and difference.holds(seen):
            return difference
    return None


def compare(stock: list[Report], backend: list[Report]) -> tuple[set[Difference], dict[str, set[str]]]:
    """The named differences that were met, and what differs else, by call. Calls that `backend` lacks are left out."""
    met: set[Difference] = set()
    rest: dict[str, set[str]] = {}
    for one, other in zip(stock, backend, strict=True):
        for call, seen in other.items():
            aspects = differing(one[call], seen)
            difference = named(call, aspects, seen) if aspects else None
            if difference is not None:
                met.add(difference)
            elif aspects:
                rest.setdefault(call, set()).update(aspects)
    return met, rest


def test_every_call_does_what_gloo_does_or_what_is_named(stock: list[Report], reports: Reports):
    backend = reports("shared")
    assert backend[0].keys() == stock[0].keys() and len(stock[0]) > 500
    met, rest = compare(stock, backend)
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


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkServerEngine]:
    with ForkServerEngine("tests.worker.collectiveprogram") as fork_server:
        yield fork_server


def test_ranks_that_disagree_are_told_so_at_once(ranks: ForkServerEngine, tmp_path: Path):
    outcome = run_alone(ranks, make_share(tmp_path, 4, b"mismatch"))
    assert outcome.status == "crash"
    assert "all_gather of 16 bytes" in outcome.message
    assert "all_gather of 12 bytes" in outcome.message
    assert not list(tmp_path.glob("fabric-*"))


def test_a_message_that_does_not_fit_is_told_by_who_receives_it(ranks: ForkServerEngine, tmp_path: Path):
    outcome = run_alone(ranks, make_share(tmp_path, 2, b"misfit"))
    assert outcome.status == "crash"
    message = "rank 0 sends 4 elements of bfloat16, and rank 1 receives 4 of float32"
    assert message in f"{[rank.message for rank in outcome.ranks]}"


# gloo rounds at every hop, and uses the tensors of other ranks for what only one rank gets.
GLOO = {"bfloat16 sums are rounded once", "reduce"}


@pytest.mark.parametrize(("backend", "not_so"), [("shared", set()), ("gloo", GLOO)])
def test_every_collective_is_right_for_every_dtype(
    ranks: ForkServerEngine, tmp_path: Path, backend: str, not_so: set[str]
):
    outcome = run_alone(ranks, make_share(tmp_path, 4, backend.encode()))
    assert outcome.status == "ok", f"{outcome.message}\n{outcome.ranks[0].traceback}"
    reports = [json.loads(rank.payload or b"") for rank in outcome.ranks]
    assert len(reports) == 4
    assert len(reports[0]) == 4 * 7 + 13 + 2 * (backend == "shared")
    assert {name for report in reports for name, right in report.items() if not right} == not_so
