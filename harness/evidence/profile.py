"""Profiles: what a run of one case sent, multiplied, kept and fused, where no formula says what it must be.

Owns their file format (sealed JSON under `golden/profiles/<case id>.json`, one line a kind, so that a change shows in
a review) and the conditions for storing one. `checks/metamorphic.py` compares runs with profiles.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from harness.errors import HarnessError
from harness.evidence.golden import Provenance, missing_reason, provenance_of
from harness.evidence.sealed import Damaged, Sealed, holder, read_sealed, write_sealed
from harness.hints import update_profile
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.matrix.rules import expected_refusal
from harness.registry import is_llama
from harness.sources import PACKAGES, evidence_key
from harness.trace import RankTrace, Run
from harness.trace.counts import MOMENTS
from harness.trace.graphs import GraphCast
from harness.trace.operands import CastRecord

SETTLED = 2  # the step that all later ones repeat: the first one also builds optimizer state and what is kept

Seen = Mapping[str, str]  # by what is counted, such as "all_reduce (max) in float32 along tp", in the order of the file


class RanksSeen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ranks: str  # "0 1 2 3"
    seen: dict[str, str]


class Profile(Sealed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one run was seen to do: in its first step and, the same in each of them, in later ones."""

    case_id: str
    first_step: tuple[RanksSeen, ...]
    later_steps: tuple[RanksSeen, ...]  # empty if there is one step
    provenance: Provenance

    def seen(self, *, step: int, rank: int) -> Seen:
        """Return what `rank` did in `step` (1-based); nothing where it was not there."""
        groups = self.first_step if step < SETTLED else self.later_steps
        return next((group.seen for group in groups if str(rank) in group.ranks.split()), {})

    def version_gap(self, software: Mapping[str, str]) -> str | None:
        """Return why it does not apply to these package versions; None when it was recorded with them."""
        made_with = self.provenance.software
        others = [
            f"{name} {software[name]} is installed, recorded with {made_with[name]}"
            for name in PACKAGES
            if name in made_with and name in software and evidence_key(software[name]) != evidence_key(made_with[name])
        ]
        return f"the profile was recorded with other versions: {'; '.join(others)}" if others else None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What some ranks did otherwise in an old and a new profile; None: not at all."""

    step: str  # "step 1", "later steps"
    ranks: tuple[int, ...]
    what: str
    old: str | None
    new: str | None


def needs_profile(case: Case) -> bool:
    """Return True if no formula predicts a run of the case."""
    return not is_llama(case.target) and expected_refusal(case) is None


def seen_in(trace: RankTrace, step: int) -> Seen:
    """Return what one rank did in one step (1-based), one entry for every kind."""
    kinds = (_matmuls, _casts, _collectives, _memory, _graphs)
    return {name: value for kind in kinds for name, value in sorted(kind(trace, step))}


def make_profile(run: Run, *, case_id: str, command: str, reason: str, commit: str) -> Profile:
    """The profile of a run. Raises `HarnessError` for a missing record, and for a step that differs from the second.

    Only the first step may: otherwise a profile would say nothing of the next step.
    """

    def refused(what: str, fix: str) -> HarnessError:
        return HarnessError(f"no profile of this run: {what}.", where=case_id, fix=fix)

    if not run.complete or any(trace.traffic is None or trace.saved_memory is None for trace in run.traces):
        raise refused("not every rank finished and recorded traffic and saved memory", "run it on the virtual device.")
    lost = next((reason for trace in run.traces for reason in trace.not_recorded.values()), None)
    if lost is not None:
        raise refused(lost, "run it with versions that every record can be had with.")
    traces = sorted(run.traces, key=lambda trace: trace.rank)
    unsettled = next((difference for trace in traces for difference in _unlike_settled(trace)), None)
    if unsettled is not None:
        raise refused(unsettled, "give the case fewer steps, or do the same in every step after the first.")
    return Profile(
        case_id=case_id,
        first_step=_grouped(traces, 1),
        later_steps=_grouped(traces, SETTLED) if len(traces[0].steps) >= SETTLED else (),
        provenance=provenance_of(traces[0], command=command, reason=reason, commit=commit),
    )


def profile_path(root: Path, case_id: str) -> Path:
    return root / "golden" / "profiles" / f"{case_id}.json"


def load_profile(root: Path, case_id: str) -> Profile:
    """Return the recorded profile. Raises `Missing` or `Damaged` with the file and the fix."""
    path = profile_path(root, case_id)
    remake = f"run `{update_profile(case_id, root=root)}`." if _can_record(case_id) else "remove it."
    profile = read_sealed(path, Profile, remake=remake, missing="no profile is recorded of this case.")
    if profile.case_id != case_id:
        what = f"holds the profile of {profile.case_id}: it was copied or renamed by hand."
        raise Damaged(what, where=str(path), fix=f"restore it or {remake}")
    return profile


def find_profile(root: Path, case_id: str) -> Profile:
    """Return the recorded profile of the project, else the package's. Raises as `load_profile`."""
    return load_profile(holder(root, lambda place: profile_path(place, case_id)), case_id)


def write_profile(root: Path, profile: Profile) -> Path:
    """Store a profile and return its path. Raises `HarnessError` for one without a reason."""
    problem = missing_reason(profile.provenance)
    if problem:
        raise HarnessError(f"this profile is refused: {problem}.", where=profile.case_id)
    return write_sealed(profile_path(root, profile.case_id), profile)


def list_profiles(root: Path) -> tuple[str, ...]:
    """Return the ids of the cases whose profiles are stored under the project root, sorted."""
    return tuple(sorted(path.stem for path in (root / "golden" / "profiles").glob("*.json")))


def compare_profiles(old: Profile, new: Profile) -> tuple[Change, ...]:
    ranks: defaultdict[tuple[str, str, str | None, str | None], list[int]] = defaultdict(list)
    for title, step, rank in _places(old, new):
        before, now = old.seen(step=step, rank=rank), new.seen(step=step, rank=rank)
        for kind in dict.fromkeys((*before, *now)):
            if before.get(kind) != now.get(kind):
                ranks[title, kind, before.get(kind), now.get(kind)].append(rank)
    return tuple(
        Change(step=title, ranks=tuple(differing_ranks), what=kind, old=before, new=now)
        for (title, kind, before, now), differing_ranks in ranks.items()
    )


def _places(*profiles: Profile) -> Iterator[tuple[str, int, int]]:
    """("later steps", step, rank) for everything that one of the profiles has seen."""
    for title, step in (("step 1", 1), ("later steps", SETTLED)):
        groups = (group for profile in profiles for group in (profile.first_step if step == 1 else profile.later_steps))
        for rank in sorted({int(rank) for group in groups for rank in group.ranks.split()}):
            yield title, step, rank


def _can_record(case_id: str) -> bool:
    try:
        return needs_profile(parse_case_id(case_id))
    except HarnessError:
        return False


def _unlike_settled(trace: RankTrace) -> Iterator[str]:
    """In words, what a step does otherwise than the second."""
    expected = seen_in(trace, SETTLED)
    for step in trace.steps[SETTLED:]:
        found = seen_in(trace, step.step)
        for kind in dict.fromkeys((*expected, *found)):
            if expected.get(kind) != found.get(kind):
                values = f"{found.get(kind, 'none')} instead of {expected.get(kind, 'none')}"
                yield f"step {step.step} of rank {trace.rank} is not like step {SETTLED}: {kind}: {values}"


def _grouped(traces: Iterable[RankTrace], step: int) -> tuple[RanksSeen, ...]:
    groups: defaultdict[tuple[tuple[str, str], ...], list[int]] = defaultdict(list)
    for trace in traces:
        groups[tuple(seen_in(trace, step).items())].append(trace.rank)
    return tuple(RanksSeen(ranks=" ".join(map(str, ranks)), seen=dict(seen)) for seen, ranks in groups.items())


def _matmuls(trace: RankTrace, step: int) -> Iterator[tuple[str, str]]:
    yield from (("scaled matmuls", str(record.scaled_mm_calls)) for record in trace.steps if record.step == step)


def _casts(trace: RankTrace, step: int) -> Iterator[tuple[str, str]]:
    """Of eager runs the casts of operands, of compiled ones those in graphs; generated code shows none."""
    eager = trace.operands.casts if trace.operands is not None else ()
    compiled = (trace.graphs.casts or ()) if trace.graphs is not None else ()
    yield from _counted(f"casts of {_form(cast, cast.role)}" for cast in eager if cast.step == step)
    yield from _counted(
        f"casts of {_form(cast, 'weight' if cast.is_weight else 'input or grad_output')}"
        for cast in compiled
        if cast.step == step
    )


def _form(cast: CastRecord | GraphCast, role: str) -> str:
    return f"{role} to {cast.target_dtype} in {cast.phase}"


def _collectives(trace: RankTrace, step: int) -> Iterator[tuple[str, str]]:
    payload: Counter[str] = Counter()
    sizes: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for record in trace.traffic or ():
        if record.step == step:
            payload[record.words] += record.payload_bytes
            sizes[record.words].update(record.sizes)
    for kind, counts in sizes.items():
        elements = ", ".join(f"{times} of {size}" for size, times in sorted(counts.items()))
        yield kind, f"{counts.total()} with {payload[kind]} bytes ({elements} elements)"


def is_memory(kind: str) -> bool:
    return kind.endswith(_SAVED) or _ALIVE in kind


_SAVED, _ALIVE = " bytes saved for backward", " alive "


def _memory(trace: RankTrace, step: int) -> Iterator[tuple[str, str]]:
    for record in trace.saved_memory or ():
        if record.step == step:
            yield from ((f"{dtype}{_SAVED}", str(count)) for dtype, count in record.by_dtype.items())
            for live in record.live:
                when = f"alive {MOMENTS[live.moment]}"
                yield f"scalars {when}", str(live.scalars)
                yield from _counted(
                    f"{tensor.dtype} tensors of {tensor.nbytes} bytes {when}" for tensor in live.tensors
                )


def _graphs(trace: RankTrace, step: int) -> Iterator[tuple[str, str]]:
    """Yield the fused operators that a step executed, and what the graphs of all steps leave unfused."""
    if trace.graphs is None:
        return
    graphs = trace.graphs.graphs
    yield from _counted(f"graphs of {graph.phase}" for graph in graphs)
    yield from _counted(
        f"{unfused.collective} along {unfused.axis} not fused in {graph.phase}"
        for graph in graphs
        for unfused in graph.unfused
    )
    calls = [
        (f"{call.operator} executed in {call.phase}", call.times) for call in trace.graphs.calls if call.step == step
    ]
    yield from _counted(kind for kind, times in calls for _ in range(times))


def _counted(kinds: Iterable[str]) -> Iterator[tuple[str, str]]:
    yield from ((kind, str(count)) for kind, count in Counter(kinds).items())
