"""The merge: results of the shards of one run, made on several machines, as those of one run."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.result import CaseResult, Environment, RunEnd, RunResult, RunStart
from harness.text import counted

Named = tuple[str, RunResult]  # the results of one shard, after what the user calls them


def merged(shards: Sequence[Named], *, latest: bool = False, mixed: bool = False) -> RunResult:
    """The results of all shards as one run, which began with the first of them and took the seconds of all.

    A case counts where it was run. Raises HarnessError where two shards have different results of a case, unless the
    `latest` counts, where their environments differ, unless they may be `mixed`, and where one of N shards is missing.
    """
    _check_complete(shards)
    environment = _environment(shards, mixed=mixed)
    cases = _cases(shards, latest=latest)
    starts, ends = [run.start for _, run in shards], [run.end for _, run in shards]
    names, started = {start.name for start in starts}, [start.started for start in starts if start.started]
    left_out = dict.fromkeys(case_id for start in starts for case_id in start.left_out)
    return RunResult(
        results=tuple(cases.values()),
        start=RunStart(
            environment=environment,
            name=starts[0].name if len(names) == 1 else "",
            started=min(started, default=""),
            left_out=tuple(name for name in left_out if name not in cases),
        ),
        end=RunEnd(
            wall_s=sum(end.wall_s for end in ends),
            interrupted=any(end.interrupted for end in ends) and not all(case.ran for case in cases.values()),
            provenance=_together([end.provenance for end in ends]),
            witnesses=tuple(made for end in ends for made in end.witnesses),
        ),
        damaged={text: name for _, run in shards for text, name in run.damaged.items()},
    )


def environment_differences(shards: Sequence[Named]) -> Iterable[str]:
    """How the environment of each shard differs from the first one's, a line each; none where all are the same."""
    (name, run), *others = shards
    first = run.start.environment or Environment()
    targets = dict(first.targets)  # a shard names those of its own cases: what others name too can differ
    for other, run in others:
        mine = run.start.environment or Environment()
        shared = {name: mine.targets.get(name, digest) for name, digest in targets.items()}
        if differences := replace(first, targets=targets).differences(replace(mine, targets=shared)):
            yield f"{name} and {other}: {', '.join(differences)}"
        targets = {**mine.targets, **targets}


def _check_complete(shards: Sequence[Named]) -> None:
    """Raise `HarnessError` where a shard of `run --shard` is not among them: its cases would go unnoticed."""
    given = {run.start.shard for _, run in shards if run.start.shard}
    counts = {int(text.partition("/")[2]) for text in given}
    missing = [f"{index}/{n}" for n in sorted(counts) for index in range(1, n + 1) if f"{index}/{n}" not in given]
    if missing:
        what = f"{counted(len(missing), 'shard')} of the run {'is' if len(missing) == 1 else 'are'} missing: "
        raise HarnessError(what + ", ".join(missing) + ".", where=_names(shards), fix="give their results too.")


def _environment(shards: Sequence[Named], *, mixed: bool) -> Environment | None:
    """The common environment of all shards, with all their targets; None where they differ."""
    differences = list(environment_differences(shards))
    if differences and not mixed:
        fix = "give `runs merge` --mixed where that does not matter, or run them in one environment."
        raise HarnessError(f"the environments differ: {'; '.join(differences)}.", where=_names(shards), fix=fix)
    environments = [run.start.environment for _, run in shards]
    if differences or environments[0] is None:
        return None
    targets = {
        name: digest for environment in environments if environment for name, digest in environment.targets.items()
    }
    return replace(environments[0], targets=targets)


def _cases(shards: Sequence[Named], *, latest: bool) -> dict[str, CaseResult]:
    cases: dict[str, CaseResult] = {}
    source: dict[str, str] = {}
    for name, run in sorted(shards, key=lambda shard: shard[1].start.started) if latest else shards:
        for case in run.results:
            other = cases.get(case.case_id)
            if other is not None and (not case.ran or (not latest and _but_for_times(case) == _but_for_times(other))):
                continue
            if other is not None and not latest and other.ran:
                raise HarnessError(
                    f"{source[case.case_id]} and {name} have different results of it: {other.verdict.value} and "
                    f"{case.verdict.value}.",
                    where=case.case_id,
                    fix="give `runs merge` --latest to keep the result of the run that started last.",
                )
            cases[case.case_id], source[case.case_id] = case, name
    return cases


def _names(shards: Sequence[Named]) -> str:
    return ", ".join(name for name, _ in shards)


def _but_for_times(case: CaseResult) -> bytes:
    return to_json(replace(case, attempts=(), command=""))


def _together(facts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    names = sorted({name for shard_facts in facts for name in shard_facts})
    values = {name: dict.fromkeys(shard_facts[name] for shard_facts in facts if name in shard_facts) for name in names}
    return {name: ", ".join(distinct) for name, distinct in values.items()}
