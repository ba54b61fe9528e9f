"""Results by what the user calls them: the last run, a run by its name, a file of results, or a folder of them.

Runs of this machine and imported ones are files of one format (`store.py`) in two folders: estimates, budgets and
`--lf` are about this machine, and do not look at imported ones. Results of the shards of one run, made on several
machines, are merged to those of one run.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile, islice
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from harness.checks.assembly import same_numbers
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.hints import LIST_RUNS, run_cases
from harness.jsonform import to_json
from harness.project import Project, number_of_run
from harness.result import CaseResult, Environment, RunEnd, RunResult, RunStart
from harness.store import RunStore, run_lines
from harness.text import counted

Named = tuple[str, RunResult]  # the results of one shard, after what the user calls them


def merged(shards: Sequence[Named], *, latest: bool = False, mixed: bool = False) -> RunResult:
    """Return the results of all shards as one run, which began with the first of them and took the seconds of all.

    A case counts where it was run. Raises HarnessError if two shards have different results of a case, unless the
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
            harness_cpu_s=sum(end.harness_cpu_s for end in ends),
            interrupted=any(end.interrupted for end in ends) and not all(case.ran for case in cases.values()),
            provenance=_together([end.provenance for end in ends]),
            references=tuple(each for end in ends for each in end.references),
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
    """Return the common environment of all shards, with all their targets; None if they differ."""
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


KEPT_RUNS = 100  # a new run removes older ones of the same project, except those with a name

_ID = re.compile(r"(?!.*\.toml)[a-zA-Z0-9][\w.+-]*")
_LAST = re.compile(r"last(?:~(\d+))?")


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the store, whose results are not read yet."""

    path: Path
    start: RunStart
    state: Literal["finished", "interrupted", "killed", "running"]
    is_imported: bool = False
    damaged: tuple[str, ...] = ()  # its lines that are not as they were written

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.start.name, self.path.stem)))


def results_of(project: Project, text: str) -> RunResult:
    """Return the results that `text` means, as one run; those of a folder of files are merged.

    Raises HarnessError if there are none, or they cannot be read or merged.
    """
    shards = shards_of(project, text)
    (name, run), *_ = shards
    return run if name == text else merged(shards)


def shards_of(project: Project, text: str) -> list[Named]:
    """Return the results that `text` means, each with what it is called.

    It means "last", "last~2", the name of a run, a file of results, or a folder of such files, each of which has some.
    Raises HarnessError if there are none.
    """
    path = Path(text)
    if text and (files := sorted(file for file in path.glob("*.json*") if file.suffix in (".json", ".jsonl"))):
        return [(str(file), _of_others(read_results(file))) for file in files]
    if path.is_file():
        return [(text, _of_others(read_results(path)))]
    stored = stored_run(project, text)
    run = read_stored(stored.path)
    return [(text, _of_others(run) if stored.is_imported else run)]


def _of_others(run: RunResult) -> RunResult:
    """Return the run with our own commands: a file from somebody else must not decide what a user types."""
    words = run.start.options.words
    return replace(
        run,
        results=tuple(
            replace(case, command=run_cases(case.case_id, *words) if _ID.fullmatch(case.case_id) else "")
            for case in run.results
        ),
    )


def stored_run(project: Project, text: str) -> Stored:
    """Return the run of the store that "last", "last~2" or a name means. Raises HarnessError if there is none.

    "last" is the run of this machine that was stored last. An imported one is found by its name alone.
    """
    last = _LAST.fullmatch(text)
    back = int(last[1] or 0) if last else 0
    runs = (run for run in runs_of(project, imported=not last) if last or text in run.names)
    for number, run in enumerate(runs):
        if number == back:
            return run
    raise HarnessError("there are no such results.", where=text, fix=f"`{LIST_RUNS}` shows the stored runs.")


def runs_of(project: Project, *, imported: bool = True) -> Iterator[Stored]:
    """The stored runs, the one that was stored last first; without those that were imported where that is asked."""
    paths = (*project.stored_runs(), *(project.imported_runs() if imported else ()))
    for path in sorted(paths, key=number_of_run, reverse=True):
        stored = _stored(path, is_imported=path.parent == project.imported)
        if stored is not None:
            yield stored


def runs_before(project: Project, run: RunResult, *, most: int) -> list[Stored]:
    """The last `most` stored runs of any of its cases up to this run, the oldest first; none where it is not stored."""
    ids = {result.case_id for result in run.results}
    alike = (stored for stored in runs_of(project) if not ids.isdisjoint(stored.start.cases))
    here = dropwhile(lambda stored: (stored.start.started, set(stored.start.cases)) != (run.start.started, ids), alike)
    return list(islice(here, most))[::-1]


def _stored(path: Path, *, is_imported: bool) -> Stored | None:
    """Return None for a run that never began, or that another process removed meanwhile."""
    store = RunStore(path)
    if not path.exists() or not path.stat().st_size:
        return None
    end = store.read_end()
    state: Literal["finished", "interrupted", "killed", "running"] = "killed"
    if store.is_running:
        state = "running"
    elif end is not None:
        state = "interrupted" if end.interrupted else "finished"
    start = store.read_start() or RunStart()
    return Stored(path=path, start=start, state=state, is_imported=is_imported, damaged=store.read_damage())


def import_results(project: Project, run: RunResult) -> bool:
    """Add results that were made elsewhere to the store; False where they are there. Raises `WriteFailed`."""
    digest, started = _digest(run), run.start.started
    here = (stored.path for stored in runs_of(project, imported=False) if stored.start.started == started)
    if any(_digest(read_stored(path)) == digest for path in here):
        return False
    with project.alone():
        path = project.new_import(digest)
        if path is not None:
            write_whole(path, run_lines(run))
    return path is not None


def _digest(run: RunResult) -> str:
    """Equal for the same results, under whatever name they were stored."""
    results = tuple(replace(case, command="") for case in run.results)
    return hashlib.sha256(run_lines(replace(run, results=results, start=replace(run.start, name="")))).hexdigest()[:16]


def remove_run(run: Stored) -> None:
    """Remove a run from the store. Raises HarnessError while it runs."""
    if run.state == "running":
        raise HarnessError("this run has not ended yet.", where=str(run.path), fix="wait for its end, or interrupt it.")
    run.path.unlink(missing_ok=True)


def remove_old_runs(project: Project, *, kept: int = KEPT_RUNS) -> None:
    """Remove all but the last `kept` runs of this machine; those with a name, and those that still run, stay."""
    for path in project.stored_runs()[:-kept]:
        store = RunStore(path)
        start = store.read_start()
        if not (start and start.name) and not store.is_running:
            path.unlink(missing_ok=True)


def read_stored(path: Path) -> RunResult:
    """Return the results of a stored run. Raises HarnessError if damage cost it results, or hides which ones.

    What a killed run wrote last may be cut short: it has cases without a result anyway, and `damaged` names the line.
    """
    run, fix = RunStore(path).read(), "run its cases again, or import it again."
    complete = run.end.interrupted or all(case.ran for case in run.results)
    if run.damaged and not (run.start.cases and complete):
        raise HarnessError(f"{next(iter(run.damaged))}.", fix=fix)
    return _consistent(run, path, fix)


def read_results(path: Path) -> RunResult:
    """Return the results in a file of `run --json`. Raises HarnessError for any other file, and for a damaged one."""
    run, fix = RunStore(path).read(), "write the file again: `run --json FILE`."
    if run.damaged:
        raise HarnessError(f"{next(iter(run.damaged))}.", fix=fix)
    if run.start == RunStart() and not run.results:
        raise HarnessError("holds no results.", where=str(path), fix=fix)
    return _consistent(run, path, fix)


def _consistent(run: RunResult, path: Path, fix: str) -> RunResult:
    """The run. HarnessError if the losses of a case are not those of its curve: it was put together by hand."""
    for case in run.results:
        curve = None if case.measured is None else case.measured.curves.get("case")
        if curve is not None and case.losses and not same_numbers(case.losses, curve.losses):
            raise HarnessError("its losses differ from its own curve.", where=f"{path}: {case.case_id}", fix=fix)
    return run
