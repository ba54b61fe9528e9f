"""The ring `proof`: the exact matmul with everything else real. Clean cases pass, and every planted fault is found."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.evidence.ring import RingItem
from harness.matrix.case import Case
from harness.matrix.faults import Fault, all_faults, carriers_of
from harness.plural import counted
from harness.running.selection import Query
from harness.studies.kill_matrix import Power, Trial
from harness.studies.power import carriers_among, run_power
from harness.studies.rings.work import Found, Interrupted, Work

_ALL = 99  # carriers of a fault
_SMALL = 2  # ranks of the cases of a rehearsal


def proof_ring(work: Work, cases: Sequence[Case]) -> Found:
    """What this ring finds: the clean cases, and each fault in a case of the catalogue that fits on these devices."""
    slots, faults = work.slots, work.faults or default_faults(work.plan.device)
    of_catalogue = carriers_among(work.project, faults, Query(), at_most=_ALL)
    carriers = {name: _carrier(found, slots) for name, found in of_catalogue.items()}
    plantable = [fault for fault in faults if carriers[fault.name]]
    power = run_power(work.project, plantable, carriers, work.plan, work.progress, others=cases)
    if power.interrupted:
        raise Interrupted
    left = [fault.name for fault in faults if not carriers[fault.name]]
    more = f"{counted(len(left), 'fault')} left out, whose cases need more than {counted(slots, 'device')}"
    return Found(items_of(power), (f"{more}: {', '.join(left)}",) if left else ())


def _carrier(of_catalogue: Sequence[Case], slots: int) -> list[Case]:
    """The first case that fits, one with several ranks before one with a single rank; empty if none fits."""
    fitting = [case for case in of_catalogue if case.world_size <= slots]
    return sorted(fitting, key=lambda case: case.world_size == 1)[:1]


def default_faults(device: str) -> tuple[Fault, ...]:
    """All planted faults; in a rehearsal one of each class, in a small case."""
    faults = tuple(all_faults().values())
    if device != "cpu":
        return faults
    small = [fault for fault in faults if any(case.world_size <= _SMALL for case in carriers_of(fault, at_most=_ALL))]
    return tuple({fault.group: fault for fault in reversed(small)}.values())[::-1]


def items_of(power: Power) -> tuple[RingItem, ...]:
    """The clean runs and the trials as items of a report."""
    return (*map(_clean, power.clean), *map(_planted, power.trials))


def _clean(trial: Trial) -> RingItem:
    says = (trial.message,) if trial.message and not trial.verdict.good else ()
    measured = trial.parity is not None and math.isfinite(trial.parity)
    return RingItem(
        name=trial.case_id,
        verdict=trial.verdict.value,
        good=trial.verdict.good,
        numbers={"parity": trial.parity or 0.0} if measured else {},
        says=says,
    )


def _planted(trial: Trial) -> RingItem:
    """A fault without an effect must not be found, and one that breaks when planted proves nothing."""
    found = "detected" if trial.detected else "not reached" if trial.not_reached else "not detected"
    says = tuple(filter(None, [trial.not_reached, ", ".join(trial.checks)]))
    good = trial.detected != trial.equivalent and not trial.not_reached
    return RingItem(name=f"{trial.fault} in {trial.case_id}", verdict=found, good=good, says=says)
