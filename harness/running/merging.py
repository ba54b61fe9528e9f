"""The merge: results of the shards of one run, made on several machines, as those of one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from harness.document import CaseDocument, RunDocument, document_of
from harness.environment import Environment
from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.plural import counted


class Shard(NamedTuple):
    """The results of one shard, and what the user calls them."""

    name: str
    run: RunDocument


def merged(shards: Sequence[Shard], *, latest: bool = False, mixed: bool = False) -> RunDocument:
    """The results of all shards as one run, which began with the first of them and took the seconds of all.

    A case counts where it was run. Raises HarnessError where two shards have different results of a case, unless the
    `latest` counts, where their environments differ, unless they may be `mixed`, and where one of N shards is missing.
    """
    _check_complete(shards)
    environment = _environment(shards, mixed=mixed)
    cases = _cases(shards, latest=latest)
    runs = [shard.run for shard in shards]
    names, started = dict.fromkeys(run.name for run in runs), [run.started for run in runs if run.started]
    left_out = dict.fromkeys(case_id for run in runs for case_id in run.left_out)
    return document_of(
        list(cases.values()),
        interrupted=any(run.interrupted for run in runs) and not all(case.ran for case in cases.values()),
        seconds=sum(run.seconds for run in runs),
        provenance=_together([run.provenance for run in runs]),
        witnesses=tuple(made for run in runs for made in run.witnesses),
        left_out=tuple(name for name in left_out if name not in cases),
        environment=environment,
        name=next(iter(names)) if len(names) == 1 else "",
        started=min(started, default=""),
    )


def environment_differences(shards: Sequence[Shard]) -> Iterable[str]:
    """How the environment of every shard differs from that of the first, a line each; none where all are the same."""
    first = shards[0].run.environment or Environment()
    targets = dict(first.targets)  # a shard names those of its own cases: what others name too can differ
    for shard in shards[1:]:
        mine = shard.run.environment or Environment()
        shared = {name: mine.targets.get(name, digest) for name, digest in targets.items()}
        if found := replace(first, targets=targets).differences(replace(mine, targets=shared)):
            yield f"{shards[0].name} and {shard.name}: {', '.join(found)}"
        targets = {**mine.targets, **targets}


def _check_complete(shards: Sequence[Shard]) -> None:
    """Raise `HarnessError` where a shard of `run --shard` is not among them: its cases would go unnoticed."""
    given = {shard.run.shard for shard in shards if shard.run.shard}
    counts = {int(text.partition("/")[2]) for text in given}
    missing = [f"{index}/{n}" for n in sorted(counts) for index in range(1, n + 1) if f"{index}/{n}" not in given]
    if missing:
        what = f"{counted(len(missing), 'shard')} of the run {'is' if len(missing) == 1 else 'are'} missing: "
        raise HarnessError(what + ", ".join(missing) + ".", where=_names(shards), fix="give their results too.")


def _environment(shards: Sequence[Shard], *, mixed: bool) -> Environment | None:
    """The one of all shards, with the targets of all; None where they differ: it is that of no case."""
    found = list(environment_differences(shards))
    if found and not mixed:
        fix = "give `results merge` --mixed where that does not matter, or run them in one environment."
        raise HarnessError(f"the environments differ: {'; '.join(found)}.", where=_names(shards), fix=fix)
    first = shards[0].run.environment
    if found or first is None:
        return None
    targets = {
        name: digest for shard in shards if (each := shard.run.environment) for name, digest in each.targets.items()
    }
    return replace(first, targets=targets)


def _cases(shards: Sequence[Shard], *, latest: bool) -> dict[str, CaseDocument]:
    """Every case once, in the order in which the shards name them."""
    found: dict[str, CaseDocument] = {}
    source: dict[str, Shard] = {}
    for shard in sorted(shards, key=lambda shard: shard.run.started) if latest else shards:
        for case in shard.run.cases:
            other = found.get(case.id)
            if other is not None and (not case.ran or (not latest and _same(case, other))):
                continue
            if other is not None and not latest and other.ran:
                raise HarnessError(
                    f"{source[case.id].name} and {shard.name} have different results of it: {other.verdict.value} and "
                    f"{case.verdict.value}.",
                    where=case.id,
                    fix="give `results merge` --latest to keep that of the run that started last.",
                )
            found[case.id], source[case.id] = case, shard
    return found


def _names(shards: Sequence[Shard]) -> str:
    return ", ".join(shard.name for shard in shards)


def _same(one: CaseDocument, other: CaseDocument) -> bool:
    """True where nothing but times and the command differs."""
    return to_json(_timeless(one)) == to_json(_timeless(other))


def _timeless(case: CaseDocument) -> CaseDocument:
    return replace(case, seconds=0.0, cpu_s=0.0, attempts=(), command="")


def _together(facts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Every fact with its value; with all of them where they differ."""
    names = sorted({name for each in facts for name in each})
    values = {name: dict.fromkeys(each[name] for each in facts if name in each) for name in names}
    return {name: ", ".join(found) for name, found in values.items()}
