"""What `assert_handoff` and the command ask: states in whatever form, one hand-off, and what a second one must show."""

import re
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace

from harness.checks.catalogue import by_cause
from harness.errors import HarnessError
from harness.plugins.handoff import rules
from harness.plugins.handoff.agreement import agreement, read_list
from harness.plugins.handoff.formats import format_named
from harness.plugins.handoff.judge import Asked, Judged, judge_states, wrong_at
from harness.plugins.handoff.pairing import Unit, units_of
from harness.plugins.handoff.reading import gathered, read_state
from harness.plugins.handoff.tensors import State, View, pieces
from harness.text import counted
from harness.verdict import Finding

Given: TypeAlias = str | PathLike[str] | Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Also(msgspec.Struct, frozen=True, kw_only=True):
    """What else is to hold, each where it is given.

    `after`: the source and the export of a second hand-off. `again`: what was exported after the first was loaded.
    `kept`: the first export as it is after the update. `one_rank`: an export of one rank. `agrees_with`: a second list
    of what is converted, `matched_by`: how its names are taken.
    """

    after: tuple[Given, Given] | None = None
    again: Given | None = None
    idempotent: bool = True
    kept: Given | None = None
    one_rank: Given | None = None
    agrees_with: str | PathLike[str] | Mapping[str, Any] | None = None
    matched_by: str = ""


def judge(
    source: Given,
    exported: Given,
    *,
    format: str | None = None,
    through: str = "",
    renames: Sequence[tuple[str, str]] = (),
    also: Also | Mapping[str, Any] | None = None,
) -> Judged:
    """Judge a hand-off. HarnessError for what cannot be read, for an unknown format, and where no names match."""
    also = also if isinstance(also, Also) else Also(**(also or {}))
    _check_patterns(renames)
    ours = state_of(source, "source")
    shapes = {name: held.shape for name, held in ours.tensors.items()}
    theirs = state_of(exported, "exported", shapes)
    config = theirs.quantization or (ours.quantization and {"quant_method": "none"})
    own = format_named(None, ours.quantization, where=ours.origin) if ours.quantization else None
    form = format_named(format, config, where=theirs.origin)
    asked = Asked(format=form, source_format=own, through=through, renames=tuple(renames))
    judged = judge_states(ours, theirs, asked)
    found, notes = [*judged.findings, *shared_memory(ours, theirs, renames)], list[str]()
    if also.after is not None:
        second = state_of(also.after[0], "source after the update"), state_of(also.after[1], "second export", shapes)
        seen = {(one.rule, one.module) for one in found}
        found += [one for one in judge_update((ours, theirs), second, asked) if (one.rule, one.module) not in seen]
    if also.one_rank is not None:
        found += same_bits(state_of(also.one_rank, "export of one rank"), theirs, rules.GATHER, renames)
    if also.again is not None:
        changed = [*same_bits(theirs, state_of(also.again, "second export", shapes), rules.IDEMPOTENT, renames)]
        found += changed if also.idempotent else ()
        notes += [f"other bits after loading and exporting: {counted(len(changed), 'weight')}"] if changed else ()
    if also.kept is not None:
        how = "changed when the source was updated: it is no copy"
        for one in same_bits(theirs, state_of(also.kept, "export", shapes), rules.MOVED, renames):
            found.append(rules.ALIASED.finding(module=one.module, how=how, expected=one.expected, found=one.found))
    if also.agrees_with is not None:
        agreed = agreement(theirs, read_list(also.agrees_with, also.matched_by))
        found, notes = [*found, *agreed.findings], [*notes, *agreed.notes]
    return replace(judged, findings=by_cause(found), notes=tuple(notes))


def _check_patterns(renames: Sequence[tuple[str, str]]) -> None:
    for pattern, to in renames:
        try:
            re.sub(pattern, to, "")
        except (re.error, IndexError) as error:
            what, where = f"it is no regular expression: {error}.", f"--rename {pattern}={to}"
            raise HarnessError(what, where=where, fix="escape what is meant as it is.") from error


def state_of(given: Given, what: str, whole: Mapping[str, tuple[int, ...]] = {}) -> State:
    """Return what was given as a state: a path, tensors by name, or those of each rank in a list."""
    if isinstance(given, str | PathLike):
        return read_state(Path(fspath(given)))
    from harness.plugins.handoff.worker.states import state_of as of_torch

    if isinstance(given, Mapping):
        return of_torch(given, what)
    if not any(given):
        of_torch({}, what)  # which says so
    of_ranks = [
        of_torch(tensors, f"{what} of rank {rank}") if tensors else State("", {}) for rank, tensors in enumerate(given)
    ]
    tensors = gathered([state.tensors for state in of_ranks], whole)
    return State(what, {held.name: held for held in tensors})


def judge_update(first: tuple[State, State], second: tuple[State, State], asked: Asked) -> list[Finding]:
    """Judge a hand-off that follows an update: it is right by itself, and differs from the first where it must."""
    states = zip(first, second, strict=True)
    sources, exports = ([units_of(state, asked.renames).by_name for state in both] for both in states)
    same = {name for name, unit in sources[1].items() if name in sources[0] and not differing(sources[0][name], unit)}
    kept = {name for name, unit in exports[1].items() if name in exports[0] and not differing(exports[0][name], unit)}
    unchanged = {exports[1][name].given for name in kept}
    found: list[Finding] = []
    for finding in judge_states(*second, asked).findings:
        if finding.module in unchanged and finding.rule in _OF_VALUES:
            stale = rules.STALE.finding(module=finding.module, expected=finding.expected, found=finding.found)
            found.append(stale)
        else:
            found.append(finding)
    for name in (exports[0].keys() & exports[1].keys() & same) - kept:
        found.append(wrong_at(rules.MOVED, exports[1][name], "the bits of the first hand-off", "others"))
    return found


_OF_VALUES = {rule.name for rule in (rules.VALUES, rules.ROUNDED, rules.ORDER, rules.SCALE, rules.WIDE)}


def differing(first: Unit, second: Unit) -> int:
    """Return how many bytes of a weight and of its scale differ; all of them where the shapes do."""
    views = [(first.view, second.view)]
    if first.scale is not None and second.scale is not None:
        views.append((first.scale, second.scale))
    return sum(_bytes(*both) for both in views)


def _bytes(first: View, second: View) -> int:
    if first.shape != second.shape or first.held.dtype != second.held.dtype:
        return max(first.shape[0] * first.shape[1], 1)
    count = 0
    for start, stop in pieces(first.shape):
        bits = [np.ascontiguousarray(view.rows(start, stop)).view("u1") for view in (first, second)]
        count += int(np.count_nonzero(bits[0] != bits[1]))
    return count


def same_bits(first: State, second: State, rule: Any, renames: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """Yield a finding of a rule for each weight of the first state whose bits are others in the second."""
    ours, theirs = (units_of(state, renames).by_name for state in (first, second))
    for name, unit in ours.items():
        if name not in theirs:
            yield rules.MISSING.finding(module=unit.given, expected=f"it in {second.origin}")
            continue
        count = differing(unit, theirs[name])
        if count:
            size = f"{unit.view.shape[0]}x{unit.view.shape[1]}"
            yield wrong_at(rule, unit, "the same bits", f"{count} bytes of {size}", count=count)
    for name in theirs.keys() - ours.keys():
        yield rules.EXTRA.finding(module=theirs[name].given, found=f"it in {second.origin}")


def shared_memory(source: State, exported: State, renames: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """Yield exported tensors that are in the same memory although the source has them in two places."""
    ours, theirs = (units_of(state, renames) for state in (source, exported))
    taken: dict[int, Unit] = {}
    for name, unit in theirs.by_name.items():
        memory = unit.view.held.parts[0].memory
        before = taken.setdefault(memory, unit) if memory and not unit.view.at else unit
        one, other = ours.by_name.get(before.name), ours.by_name.get(name)
        if before is unit or one is None or other is None:
            continue
        if one.view.held.parts[0].memory != other.view.held.parts[0].memory:
            how = f"is in the memory of {before.given}, which is another weight"
            yield wrong_at(rules.ALIASED, unit, "its own memory", "memory of another", how=how)
