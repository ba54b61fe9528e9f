"""References: the runs that a case is compared with, as data. Nothing is run here.

`needs` says which references a case wants: before its run, as the schedule and the budget plan them, and after it, with
what the run decides. References with one name are one run, whichever cases want it. `running/references.py` runs them.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec

from harness.expect.expectations import Expectations
from harness.matrix.case import Case, Float8
from harness.matrix.caseid import case_id, reference_case, solo_case
from harness.request import RunRequest, noise_of
from harness.trace import Run
from harness.trace.record import Patch

DRAWS = 4  # of random errors, for a tolerance that was not measured

SOLO, OPERANDS, BF16, NOISE, PARTNER, REPLAY = "solo", "operands", "bf16", "noise", "partner", "replay"

RunsByRole = Mapping[str, Run | None]  # by role; None if it was stopped, without traces where it did not finish


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A run to compare with. `role`: what it is to the case. `name`: equal names are one run.

    `request` is None if the run of the case decides it: what its modules had, which linears it converted.
    """

    role: str
    name: str
    case: Case
    request: RunRequest | None
    kept: bool = True  # on disk, for other runs
    replayed: bool = False  # its own modules are replayed too: it stands for those of a compiled case

    @property
    def world_size(self) -> int:
        return 1 if self.request is None else self.request.world_size


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored for a case, so that no reference has to be run for it."""

    golden: bool = True
    tolerance: bool = True
    parity_tolerance: bool = True


ALL_STORED = Stored()


def needs(
    expect: Expectations,
    stored: Stored,
    *,
    recorded: Collection[str],
    run: Run | None = None,
    with_partner: bool = True,
    fixes: Mapping[str, Patch] = MappingProxyType({}),
) -> tuple[Reference, ...]:
    """Return the references that a case wants whether it fails or not, those first that most cases share.

    With its `run` those alone that can start. `recorded`: fields of `RankTrace` that its ranks fill. `fixes`: what its
    counterpart runs with, by content.
    """
    if expect.refusal is not None:
        return ()
    case, sketched = expect.case, "sketches" in recorded
    derives = not stored.tolerance or (sketched and not stored.parity_tolerance)
    wanted = []
    if sketched or (expect.model is None and "model" in recorded):
        wanted.append(solo_reference(case))
    if not stored.golden:
        wanted.append(bf16_reference(case))
    if derives:
        wanted.append(noisy_reference(case, None if expect.model is None else expect.converted_fqns))
    if sketched and with_partner and expect.relation is not None:
        wanted.append(partner_reference(expect, fixes))
    if sketched and "module_tensors" in recorded:
        wanted.append(replay_reference(case, run))
    return tuple(reference for reference in wanted if run is None or reference.request is not None)


def solo_reference(case: Case) -> Reference:
    """Return the single-rank reference with the same recipe, with sketches and operands."""
    reference = solo_case(case)
    more = {"operands": reference.float8.enabled, "experts": reference.model.experts}
    probes = ("sketches", "logprobs", *(probe for probe, wanted in more.items() if wanted))
    request = RunRequest(case=reference, probes=probes, solo=True)
    return Reference(role=SOLO, name=f"solo {case_id(reference)}", case=reference, request=request)


def operands_reference(case: Case) -> Reference:
    """Return the same run with its operands, which are too large to be kept in memory for all cases."""
    return msgspec.structs.replace(solo_reference(case), role=OPERANDS)


def bf16_reference(case: Case) -> Reference:
    """Return the BF16 reference on one rank, instead of a golden."""
    reference = reference_case(case)
    request = RunRequest(case=reference, probes=("sketches",))
    return Reference(role=BF16, name=f"reference {case_id(reference)}", case=reference, request=request)


def noisy_reference(case: Case, converted: tuple[str, ...] | None) -> Reference:
    """Return the BF16 reference without random errors, and with all draws of them where the case casts.

    `converted`: its linears in float8.
    """
    reference, float8 = reference_case(case), case.float8
    rounded = Float8(recipe=float8.recipe, output_layer=float8.output_layer, filter_fqns=float8.filter_fqns)
    name = f"noise {case_id(msgspec.structs.replace(reference, float8=rounded))}"
    request = None
    if converted is not None:
        noise = noise_of(case, tuple(range(1, DRAWS + 1)), converted)
        request = RunRequest(case=reference, probes=("sketches",), noise=noise)
    return Reference(role=NOISE, name=name, case=reference, request=request)


def partner_reference(expect: Expectations, fixes: Mapping[str, Patch] = MappingProxyType({})) -> Reference:
    """Return the run of the counterpart of a case that has one (`relations.py`), with `fixes` against recorded faults.

    One that stands for the modules of a compiled case has their distances from a replay as well.
    """
    assert expect.relation is not None, f"{case_id(expect.case)} has no counterpart"
    other, replayed = expect.relation.partner, expect.stands_for_modules
    name = " with ".join([f"{'replayed ' * replayed}counterpart {case_id(other)}", *fixes])
    probes = ("sketches", "module_tensors") if replayed else ("sketches",)
    request = RunRequest(case=other, probes=probes, injections=tuple(fixes.values()))
    return Reference(role=PARTNER, name=name, case=other, request=request, replayed=replayed)


def replay_reference(case: Case, run: Run | None = None) -> Reference:
    """Return the modules of this very `run`, repeated one by one on one rank."""
    request = None
    if run is not None:
        request = RunRequest(case=case, replayed=tuple(trace.module_tensors or () for trace in run.traces))
    return Reference(role=REPLAY, name=f"replay {case_id(case)}", case=case, request=request, kept=False)
