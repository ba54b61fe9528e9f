"""The ring `native`: the kernels and collectives of the device in bfloat16, as users run them.

Makes the goldens of this class of hardware that are missing, judges every case by every check, measures the noise over
seeds, and looks whether probes or a second run change a bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.evidence.golden import list_goldens, write_golden
from harness.evidence.ring import RingItem
from harness.evidence.tolerance import Evidence, write_evidence
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, family_id
from harness.matrix.rules import expected_refusal
from harness.plural import counted
from harness.result import CaseResult
from harness.running.case_judge import known_here
from harness.running.selection import Query
from harness.studies.noise import environment, measure, measured_cases, over_seeds
from harness.studies.references import SanityJudge, make_goldens, needed_references
from harness.studies.rings.work import Found, Interrupted, Work
from harness.workflow import run, run_cases

REASON = "first goldens of this class of hardware"
_REPEATED = 2  # cases that are run twice without probes


def native_ring(work: Work, cases: Sequence[Case]) -> Found:
    """What this ring finds. Stores goldens, before the cases are judged by them, and the noise of this class."""
    made = _missing_goldens(work, cases)
    judged = _judged(work, cases)
    measured = _noise(work, cases)
    items = (*made, *map(_case_item, judged), *measured.items, *_bits(work, cases, judged))
    return Found(items, measured.notes)


def _missing_goldens(work: Work, cases: Sequence[Case]) -> tuple[RingItem, ...]:
    """Stores a golden of every family that no class of this device has one of."""
    classes = work.plan.hardware
    stored = {key.family for key in list_goldens(work.project.root) if key.hardware in classes}
    wanted = [each for each in needed_references(cases) if family_id(each) not in stored]
    if not wanted:
        return ()
    made = make_goldens(work.project, wanted, work.plan, work.progress, reason=REASON, command=work.command)
    _unless(made.interrupted)
    for golden in made.goldens:
        write_golden(work.project.root, golden)
    good = [RingItem(name=f"golden {each.family}", verdict="made", good=True) for each in made.goldens]
    return (*good, *(_case_item(each, prefix="golden of ") for each in made.failed))


def _judged(work: Work, cases: Sequence[Case]) -> tuple[CaseResult, ...]:
    """Every case, judged by every check. The run is stored like any other."""
    query = Query(case_ids=tuple(map(case_id, cases)))
    result, _ = run(work.project, query, work.plan, work.progress)
    _unless(result.end.interrupted)
    return result.results


def _noise(work: Work, cases: Sequence[Case]) -> Found:
    """The distances to BF16 over seeds, of up to two layouts of every kind of case that has no recorded fault."""
    chosen = over_seeds(measured_cases(cases, layouts=2, known=known_here(work.project)), work.seeds)
    if not chosen:
        return Found((), ("noise: not measured, without seeds or without a case to measure",))
    done = measure(work.project, chosen, work.plan, work.progress, command=work.command, fresh=True)
    _unless(done.interrupted)
    names, items = set(map(case_id, chosen)), []
    for check, evidence in done.evidence.items():
        new = _only(evidence, names)
        write_evidence(work.project.root, new, check, work.plan.hardware[0])
        items += _noise_items(check, new)
    return Found((*items, *(_case_item(each, prefix="noise of ") for each in done.failed)))


def _only(evidence: Evidence, names: set[str]) -> Evidence:
    """The new samples: those of other machines stay where they are."""
    samples = (each for each in evidence.samples if each.case_id in names and each.environment == environment())
    return msgspec.structs.replace(evidence, samples=tuple(samples))


def _noise_items(check: str, evidence: Evidence) -> list[RingItem]:
    keys = sorted({sample.key for sample in evidence.samples})
    of = {key: [max(each.per_step) for each in evidence.samples if each.key == key] for key in keys}
    return [
        RingItem(
            name=f"noise of {check}, {key}",
            verdict="measured",
            good=True,
            numbers={"largest": max(found)},
            says=(counted(len(found), "sample"),),
        )
        for key, found in of.items()
    ]


def _bits(work: Work, cases: Sequence[Case], judged: Sequence[CaseResult]) -> list[RingItem]:
    """Whether a second run, and one without probes, has the same losses and norms to the bit, of the first cases."""
    few = [case for case in cases if case.float8.enabled and expected_refusal(case) is None][:_REPEATED]
    if not few:
        return []
    plain = msgspec.structs.replace(work.plan, probed=False)
    twice = run_cases(work.project, [*few, *few], plain, SanityJudge(), work.progress)
    _unless(twice.end.interrupted)
    probed = {result.case_id: _curve(result) for result in judged}
    firsts, seconds = twice.results[: len(few)], twice.results[len(few) :]
    items: list[RingItem] = []
    for first, second in zip(firsts, seconds, strict=True):
        name, one, other = first.case_id, _curve(first), _curve(second)
        items.append(_same(f"a second run of {name}", one, other, must=False))
        # Where the device itself does not repeat its bits, a difference says nothing of probes.
        items.append(_same(f"probes in {name}", probed[name], one, must=one == other))
    return items


def _curve(result: CaseResult) -> tuple[tuple[float, float], ...]:
    """Loss and gradient norm of every step of every rank; empty where a rank did not finish."""
    traces = result.run.traces if result.run is not None and result.run.complete else ()
    return tuple((step.loss, step.grad_norm) for trace in traces for step in trace.steps)


def _same(name: str, one: Sequence[object], other: Sequence[object], *, must: bool) -> RingItem:
    """Whether two runs have the same numbers; a run that did not finish has none, which is never good."""
    if not one or not other:
        return RingItem(name=name, verdict="did not finish", good=False)
    same = one == other
    says = () if same else (f"{sum(a != b for a, b in zip(one, other, strict=True))} of {len(one)} steps differ",)
    return RingItem(name=name, verdict="no bit differs" if same else "bits differ", good=same or not must, says=says)


def _case_item(result: CaseResult, prefix: str = "") -> RingItem:
    found = result.measured
    numbers = {
        "loss_distance": found.loss_distance if found else None,
        "parity": found.parity if found else None,
        "local_parity": found.local_parity if found else None,
    }
    unjudged = [f"not judged: {each.check}: {each.reason}" for each in result.not_judged]
    return RingItem(
        name=f"{prefix}{result.case_id}",
        verdict=result.verdict.value,
        good=result.verdict.good or result.excused,
        numbers={name: value for name, value in numbers.items() if value is not None and abs(value) < float("inf")},
        says=(*(finding.message for finding in result.findings), *unjudged),
    )


def _unless(interrupted: bool) -> None:
    if interrupted:
        raise Interrupted
