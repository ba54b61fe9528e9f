"""Every planted fault changes what its entry in the list says, and from the step it says. Equivalent ones: no bit."""

import functools
import importlib
from collections.abc import Sequence

import msgspec
import pytest

from harness.matrix.case import Case
from harness.plugins.faults.faults import Fault, all_faults, fault_named
from harness.plugins.faults.worker import FAULT_MODULES, function_of
from harness.trace import RankTrace
from harness.trace.record import Patch
from tests.jobs import traces_of
from tests.worker.runs import UNDER_TP, numbers

EVIDENCE = {
    "operands": ("operands",),
    "traffic": ("traffic",),
    "memory": ("saved_memory",),
    "graphs": ("graphs",),
    "experts": ("experts",),
    "nothing": ("operands",),
}


def small(case: Case, steps: int) -> Case:
    """The same machinery in less time; as many tokens where padding, blocks or microbatches need them."""
    needed = case.float8.pad_inner_dim or case.float8.traits.block
    batch = case.train.global_batch if needed or 4 % (case.layout.batches * case.train.accumulation) else 4
    return msgspec.structs.replace(case, train=msgspec.structs.replace(case.train, steps=steps, global_batch=batch))


def first_difference(planted: Sequence[RankTrace], clean: Sequence[RankTrace]) -> int | None:
    """The first step at which any number of any rank differs; NaN does not differ from NaN."""
    sides = ([map(repr, steps) for steps in numbers(side)] for side in (planted, clean))
    by_step = zip(*(zip(*side, strict=True) for side in sides), strict=True)
    return next((step for step, (one, other) in enumerate(by_step, start=1) if one != other), None)


def changes(planted: Sequence[RankTrace], clean: Sequence[RankTrace]) -> set[str]:
    def differ(*names: str) -> bool:
        return any(
            getattr(one, name) != getattr(other, name)
            for one, other in zip(planted, clean, strict=True)
            for name in names
        )

    calls = [[[step.scaled_mm_calls for step in rank.steps] for rank in side] for side in (planted, clean)]
    seen = {
        "numbers": first_difference(planted, clean) is not None,
        "matmuls": differ("converted_fqns") or calls[0] != calls[1],
        "data": differ("data_digest"),
        "operands": differ("operands"),
        "traffic": differ("traffic"),
        "memory": differ("saved_memory"),
        "graphs": differ("graphs"),
        "state": differ("state"),
        "resumed": differ("resumed"),
        "experts": differ("experts"),
    }
    return {name for name, is_seen in seen.items() if is_seen}


@pytest.fixture(scope="module")
def outcomes(submit):
    """Outcomes by case and probes: many faults share a clean run."""
    return functools.cache(lambda case, probes, fixes: submit(case, probes=probes, injections=fixes))


@pytest.mark.sweep  # that every fault has an effect which is found, `tests/power` shows in every run
@pytest.mark.parametrize("name", all_faults())
def test_a_fault_changes_what_it_says(submit, outcomes, name):
    fault: Fault = fault_named(name)
    (host,) = fault.hosts(at_most=1)
    case, probes = small(host, max(2, fault.since_step)), EVIDENCE.get(fault.shows, ())
    fixes = (UNDER_TP,) if case.float8.traits.block and case.layout.tp > 1 else ()
    clean = outcomes(case, probes, fixes)
    planted = submit(case, injections=(*fixes, fault.injection), probes=probes)
    if fault.shows == "trains":
        assert (clean.status, planted.status) == ("crash", "ok"), planted.message
        return
    if fault.shows == "crash":
        assert (clean.status, planted.status) == ("ok", "crash"), clean.message
        assert "injection" not in planted.ranks[0].phase, planted.message
        return
    found, expected = traces_of(planted), traces_of(clean)
    seen = changes(found, expected)
    if fault.shows == "nothing":
        assert not seen
        return
    assert fault.shows in seen
    if fault.shows == "numbers":
        assert first_difference(found, expected) == fault.since_step


def test_every_fault_is_the_function_of_its_name_in_the_file_of_its_class():
    for fault in all_faults().values():
        assert callable(function_of(fault))
    listed = set(all_faults())
    for name in sorted({name for names in FAULT_MODULES.values() for name in names}):
        module = importlib.import_module(f"harness.plugins.faults.worker.{name}")
        own = {
            name
            for name, made in vars(module).items()
            if isinstance(made, functools.partial) or getattr(made, "__module__", "") == module.__name__
        }
        public = {name for name in own if not name.startswith("_") and callable(getattr(module, name))}
        assert public <= listed, f"{public - listed} of {module.__name__} are not in the list"


def test_an_unknown_fault_is_named(submit):
    outcome = submit(Case(), injections=(Patch(text="fault:amax_without_ab"),))
    assert outcome.status == "crash"
    assert "amax_without_abs" in outcome.message
