"""The smallest case with the same failure: axes are made smaller while the signature stays the same.

First whole groups of axes, then one axis at a time, then pairs, until nothing smaller fails alike. Several cases run at
the same time; the first one in order that fails alike is taken, so the result does not depend on `--jobs`. Every trial
is kept in a journal: a shrink that was killed goes on where it was.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from harness.errors import HarnessError
from harness.matrix.axes import AXES, DECLARED, axis_values, case_from_axes, shown_value
from harness.matrix.axis import Changes
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.layout import MESH_AXES
from harness.matrix.rules import exclusions, expected_refusal
from harness.plugins.bugs.trials import Journal, TrialResult, trial_result
from harness.project import Project
from harness.result import CaseResult
from harness.running.plan import Injection
from harness.verdict import FailureSignature

# Every axis, in the order in which it is tried: what costs most first. Of sizes, the least that there can be.
_LEAST = {"dim": 32, "ffn_dim": 32, "vocab_size": 64, "seq_len": 16}
_COUNTS = (*MESH_AXES, "ep", "cp", "layers", "heads", "kv_heads", "top_k", "global_batch", "steps")
_SMALLEST: Mapping[str, int] = {name: _LEAST.get(name, 1) for name in AXES if name in (*_LEAST, *_COUNTS)}
_SIMPLEST = {"recipe": "tensorwise", "dtype": "float32"}  # of options, where that is not the default
_SAME_CODE = ("model", "lr", "seed", "loss_tolerance")  # another value runs no other code
OPTIONS = tuple(name for name in AXES if name not in (*_SMALLEST, *_SAME_CODE))
RunCases = Callable[[Sequence[Case]], Sequence[CaseResult]]  # the result of every case, in order
GROUPS: tuple[tuple[str, ...], ...] = (
    tuple(name for name in _SMALLEST if DECLARED[name].changes is Changes.TRAINING),
    tuple(name for name in _SMALLEST if DECLARED[name].changes is Changes.LAYOUT),
    OPTIONS,
)
_SMALL = 8  # numbers up to this one, as degrees, are tried with their neighbors: only those show a bound
_GRID = 64  # a size that keeps its remainder by this keeps what alignment makes of it


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A smaller case that was tried on the way, and whether it fails alike."""

    changes: Mapping[str, object]
    result: TrialResult
    same: bool


class Shrunk(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest case that was found. `complete`: nothing smaller fails alike; else the budget ended it.

    `needed` are the attempts from the smallest case itself: with what the failure is not the same, and of each such
    number the larger neighbors, with which it may be.
    """

    first: Case
    case: Case
    signature: FailureSignature
    message: str  # the first finding of the smallest case, with its numbers
    attempts: tuple[Attempt, ...]
    needed: tuple[Attempt, ...]
    complete: bool
    ran: int  # cases that were run here; the others were in the journal
    cpu_s: float
    wall_s: float


def open_journal(project: Project, case: Case, injections: Sequence[Injection], content: str) -> Journal:
    """The journal of shrinking this case with these injections. `content` stands for what runs it (`witness_key`)."""
    parts = [case_id(case), *(injection.content for injection in injections), content]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return Journal(project.state / "shrinks" / f"{key}.jsonl")


def shrink(
    case: Case,
    run: RunCases,
    journal: Journal,
    *,
    jobs: int = 1,
    budget_s: float | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Shrunk:
    """Return the smallest case that fails like this one. HarnessError when it does not fail, or cannot be run."""
    return _Shrinking(case, run, journal, jobs, budget_s, note).smallest()


class _OutOfTime(Exception):
    """The budget is spent."""


@dataclasses.dataclass
class _Shrinking:
    """One search: the smallest case so far, and all that was tried."""

    case: Case
    run: RunCases
    journal: Journal
    jobs: int
    budget_s: float | None
    note: Callable[[str], None]
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    ran: int = 0
    cpu_s: float = 0.0
    started_s: float = dataclasses.field(default_factory=time.monotonic)

    def smallest(self) -> Shrunk:
        given = self.case
        (first,) = self._tried([self.case])
        if not first.decided:
            raise HarnessError(f"it could not be run: {first.message}.", where=first.case_id)
        if first.signature is None:
            fix = "give the case, and by --inject the fault, with which it fails."
            raise HarnessError("it does not fail, so there is nothing to shrink.", where=first.case_id, fix=fix)
        self._signature = first.signature
        self.note(f"failure: {first.text}")
        complete, larger = True, tuple[Attempt, ...]()
        try:
            while self._pass(self._groups) or self._pass(self._single) or self._pass(self._pairs):
                pass
            larger = self._larger()
        except _OutOfTime:
            complete = False
        return Shrunk(
            first=given,
            case=self.case,
            signature=self._signature,
            message=self._tried([self.case])[0].message,
            attempts=tuple(self.attempts),
            needed=(*self._needed(), *larger),
            complete=complete,
            ran=self.ran,
            cpu_s=self.cpu_s,
            wall_s=time.monotonic() - self.started_s,
        )

    def _groups(self) -> "Iterator[Smaller]":
        return smaller_groups(self.case, steps=self._signature.first_step or 1)

    def _single(self) -> "Iterator[Smaller]":
        return smaller_cases(self.case, steps=self._signature.first_step or 1)

    def _pairs(self) -> "Iterator[Smaller]":
        """Two axes together, each at the simplest value that was not possible alone."""
        simplest: dict[str, Smaller] = {}
        for candidate in self._single():
            simplest.setdefault(next(iter(candidate.changes)), candidate)
        for one, other in itertools.combinations(simplest.values(), 2):
            combined = with_changes(self.case, {**one.changes, **other.changes})
            if combined is not None:
                yield combined

    def _pass(self, smaller: "Callable[[], Iterable[Smaller]]") -> bool:
        """Take the first case that fails alike, again and again until none does. True when one was taken."""
        taken = False
        while (first_alike := self._first_alike(smaller())) is not None:
            self.note(f"smaller: {first_alike.text} -> {case_id(first_alike.case)}")
            self.case, taken = first_alike.case, True
        return taken

    def _first_alike(self, smaller: "Iterable[Smaller]") -> "Smaller | None":
        candidates = list({case_id(smaller_case.case): smaller_case for smaller_case in smaller}.values())
        for start in range(0, len(candidates), self.jobs):
            batch = candidates[start : start + self.jobs]
            for candidate, attempt in zip(batch, self._attempted(batch), strict=True):
                self.attempts.append(attempt)
                if attempt.same:
                    return candidate
        return None

    def _attempted(self, batch: "Sequence[Smaller]") -> list[Attempt]:
        if self.budget_s is not None and time.monotonic() - self.started_s > self.budget_s:
            raise _OutOfTime
        tried = zip(batch, self._tried([candidate.case for candidate in batch]), strict=True)
        return [
            Attempt(changes=candidate.changes, result=result, same=result.signature == self._signature)
            for candidate, result in tried
        ]

    def _larger(self) -> tuple[Attempt, ...]:
        """Of each number that the failure needs: the case with the next one, and with the next power of two."""
        values, attempts = axis_values(self.case), list[Attempt]()
        for name in dict.fromkeys(next(iter(attempt.changes)) for attempt in self._needed()):
            for value in _above(values[name]):
                larger = with_changes(self.case, {name: value})
                with contextlib.suppress(HarnessError):  # more ranks than slots
                    attempts += self._attempted([larger]) if larger is not None else []
        return tuple(attempts)

    def _tried(self, cases: Sequence[Case]) -> list[TrialResult]:
        unknown = [case for case in cases if self.journal.get(case_id(case)) is None]
        new_results = {result.case_id: result for result in map(trial_result, self.run(unknown))} if unknown else {}
        for new_result in new_results.values():
            if new_result.decided:
                self.journal.keep(new_result)
            self.ran, self.cpu_s = self.ran + 1, self.cpu_s + new_result.cpu_s
        return [self.journal.get(case_id(case)) or new_results[case_id(case)] for case in cases]

    def _needed(self) -> tuple[Attempt, ...]:
        """Return the attempts that change one axis of the smallest case and do not fail alike."""
        tried_from = {case_id(candidate.case): candidate for candidate in self._single()}
        last = {attempt.result.case_id: attempt for attempt in self.attempts if attempt.result.case_id in tried_from}
        return tuple(
            msgspec.structs.replace(attempt, changes=tried_from[name].changes)
            for name, attempt in last.items()
            if not attempt.same
        )


class Smaller(NamedTuple):
    """A smaller case, and the axes that were changed for it with their new values."""

    case: Case
    changes: Mapping[str, object]

    @property
    def text(self) -> str:
        """What was changed: `tp 1, async_tp false`."""
        return ", ".join(f"{name} {shown_value(value)}" for name, value in self.changes.items())


def smaller_cases(case: Case, *, steps: int = 1) -> Iterator[Smaller]:
    """Yield every smaller case by one axis, the smallest value first. `steps`: the least that is needed."""
    for name in (*_SMALLEST, *OPTIONS):
        for value in _values(case, name, steps):
            smaller = with_changes(case, {name: value})
            if smaller is not None:
                yield smaller


def smaller_groups(case: Case, *, steps: int = 1) -> Iterator[Smaller]:
    """Yield cases with all axes of a group at their smallest values: where one shows the same, much is saved."""
    for group in ((*_SMALLEST, *OPTIONS), *GROUPS):
        changes = {name: values[0] for name in group if (values := _values(case, name, steps))}
        smaller = with_changes(case, changes) if len(changes) > 1 else None
        if smaller is not None:
            yield smaller


def with_changes(case: Case, changes: Mapping[str, object]) -> Smaller | None:
    """Return the case with these values, and whatever else a rule then asks for. None where there is no such case.

    A case that torch must refuse is none either, unless the first must be refused too.
    """
    values = axis_values(case) | dict(changes)
    changed = _allowed(_with_heads(values), frozenset(changes))
    if changed is None or changed == case or (expected_refusal(changed) is None) != (expected_refusal(case) is None):
        return None
    now, before = axis_values(changed), axis_values(case)
    return Smaller(changed, {name: now[name] for name in (*changes, *AXES) if now[name] != before[name]})


def _values(case: Case, name: str, steps: int) -> Sequence[object]:
    value = axis_values(case)[name]
    if name in _SMALLEST:
        return _sizes(value, steps if name == "steps" else _smallest(case, name))
    simplest = _SIMPLEST.get(name) or axis_values(Case())[name]
    if (name, value) in (("recipe", "bf16"), ("dtype", "float64")):  # simpler already; the sharpest comparison
        return ()
    return () if value == simplest else (simplest,)


def _smallest(case: Case, name: str) -> int:
    """Return the least size with which the ranks of a case have what they need: 16 rows each, a head, a sequence."""
    tp = case.layout.tp
    least = {"global_batch": case.layout.batches, "heads": tp, "kv_heads": tp}
    rows = 16 * tp if name in ("dim", "ffn_dim", "vocab_size", "seq_len") else 1
    return max(_SMALLEST[name], least.get(name, 1), rows)


def _sizes(value: object, smallest: int) -> Sequence[int]:
    """Sizes below a value: the smallest, then towards it; where that is possible with the same remainder."""
    assert isinstance(value, int)
    before = {value - 1} if value <= _SMALL else set()
    parts = sorted({max(smallest, value // part) for part in (16, 8, 4, 2)} | {smallest} | before)
    aligned = [part - part % _GRID + value % _GRID for part in parts if part >= _GRID]
    return [size for size in dict.fromkeys(sorted({*parts, *aligned})) if smallest <= size < value]


def _above(value: object) -> Sequence[int]:
    """Return the next number and the next power of two, of a small number."""
    if not isinstance(value, int) or isinstance(value, bool) or value > _SMALL:
        return ()
    return sorted({value + 1, 1 << value.bit_length()})


def _with_heads(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values with a number of heads that fits, where another dim, tp or number of heads needs one."""
    adjusted = dict(values)
    dim, heads, tp = (int(str(adjusted[name])) for name in ("dim", "heads", "tp"))
    if dim % heads or (dim // heads) % 2 or heads % tp:
        adjusted["heads"] = heads = tp if dim % tp == 0 and (dim // tp) % 2 == 0 else heads
    kv_heads = int(str(adjusted["kv_heads"]))
    if heads % kv_heads or kv_heads % tp:
        adjusted["kv_heads"] = heads
    return adjusted


def _allowed(values: Mapping[str, object], fixed: frozenset[str]) -> Case | None:
    """Return the case of these values; options that rules name are set to their defaults until none excludes it."""
    default = axis_values(Case())
    adjusted = dict(values)
    for _ in range(len(AXES)):
        try:
            case = case_from_axes(adjusted)
        except HarnessError:
            return None
        rules = exclusions(case)
        if not rules:
            return case
        now = axis_values(case)
        names = [name for name in rules[0].axes if name in OPTIONS and name not in fixed and now[name] != default[name]]
        batch = case.layout.batches
        if rules[0].name == "batch_divides_dp" and "global_batch" not in fixed:
            adjusted["global_batch"] = max(batch, int(str(now["global_batch"])) // batch * batch)
        elif rules[0].name == "replicate_needs_shard" and "dp_replicate" not in fixed:
            adjusted["dp_replicate"] = 1
        elif names:
            adjusted[names[0]] = default[names[0]]
        else:
            return None
    return None
