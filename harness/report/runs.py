"""Stored runs: the list of them, the history of cases over them, and the same cases in several environments.

The history of a case is how it ended and what it measured, run after run, and what changed together with what. On a CPU
every number but the seconds repeats exactly, so a number that changes in one environment is a finding. Flaky is what
ended differently in one environment: retries say nothing about that, so they are not looked at.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from harness.checks.measuring import moved
from harness.hints import compare_runs
from harness.report.case import sparkline
from harness.report.run import damage_section, totals_words
from harness.report.sections import Block, Entry, Facts, Section, Table, Verbatim
from harness.result import CaseNumbers, Environment, Numbers, RunResult, verdict_totals
from harness.running.stored import Stored
from harness.store import RunStore
from harness.text import binary_bytes, counted, to_the_minute
from harness.verdict import Verdict


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A case in one run. `moved` names the exact numbers that changed since the last run of the same environment."""

    run: Stored
    case: CaseNumbers
    changes: tuple[str, ...]  # of the environment since the run before
    moved: tuple[str, ...] = ()
    repeats: bool = False  # False: there is no such run, so since the run before


class History(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of a case, the oldest first."""

    case_id: str
    moments: tuple[Moment, ...]

    @property
    def verdicts(self) -> Mapping[Verdict, int]:
        return Counter(moment.case.verdict for moment in self.moments)

    @property
    def is_flaky(self) -> bool:
        """True when two runs in one environment ended differently. A machine that fails says nothing of the case."""
        by_environment: dict[str, set[Verdict]] = defaultdict(set)
        for moment in self.moments:
            environment = moment.run.start.environment
            if environment is not None and moment.case.verdict is not Verdict.INFRA:
                by_environment[environment.fingerprint].add(moment.case.verdict)
        return any(len(verdicts) > 1 for verdicts in by_environment.values())

    @property
    def is_nondeterministic(self) -> bool:
        """True when an exact number changed between two runs in one environment."""
        return any(moment.moved and moment.repeats for moment in self.moments)

    @property
    def last_change(self) -> Moment | None:
        """The last run in which the verdict or an exact number was another than before; None where there is none."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        changed = [now for before, now in pairs if now.moved or now.case.verdict is not before.case.verdict]
        return changed[-1] if changed else None


def histories(runs: Sequence[Stored], wanted: Callable[[str], bool], *, most: int | None = None) -> tuple[History, ...]:
    """The history of every wanted case in these runs, which come oldest first; of each case `most` of the last runs."""
    by_case: dict[str, list[tuple[Stored, CaseNumbers]]] = defaultdict(list)
    for run in runs:
        for case_id, case in RunStore(run.path).numbers(wanted).items():
            by_case[case_id].append((run, case))
    last = slice(None if most is None else -most, None)
    return tuple(History(case_id=case_id, moments=tuple(_moments(pairs[last]))) for case_id, pairs in by_case.items())


def _moments(pairs: Iterable[tuple[Stored, CaseNumbers]]) -> Iterable[Moment]:
    last: dict[str, Numbers] = {}  # by fingerprint
    before: tuple[Environment, Numbers | None] | None = None
    for run, case in pairs:
        now = run.start.environment
        if now is None:
            yield Moment(run=run, case=case, changes=())
            continue
        same = last.get(now.fingerprint)
        earlier = same or (before[1] if before is not None else None)
        yield Moment(
            run=run,
            case=case,
            changes=before[0].differences(now) if before is not None else (),
            moved=moved(earlier, case.measured, counts_only=now.device != "cpu"),
            repeats=same is not None,
        )
        if case.measured is not None:
            last[now.fingerprint] = case.measured
        before = now, case.measured or (before[1] if before is not None else None)


_SHOWN = 60  # characters of one difference of environments: models of CPUs are long
_COLUMNS = (
    "started", "name", "commit", "verdict", "loss apart", "local", "parity", "flushed", "s", "wire", "saved",
    "what changed",
)  # fmt: skip
_VERDICT = _COLUMNS.index("verdict")


# The list of stored runs


def runs_sections(runs: Sequence[Stored]) -> list[Block]:
    """Return a row for every run: its number, as in `last~2`, when it started, how it ended, and where it comes from.

    An imported run has no number.
    """
    if not runs:
        return ["no runs are stored"]
    rows = [
        (
            "-" if number is None else str(number),
            to_the_minute(run.start.started),
            run.state,
            f"{counted(len(verdicts), 'case')}: {totals_words(verdicts)}",
            _origin(run),
        )
        for number, run, verdicts in _listed(runs)
    ]
    return [Table(rows=tuple(rows), right=(0,)), damage_section([line for run in runs for line in run.damaged])]


def run_documents(runs: Sequence[Stored]) -> list[dict[str, object]]:
    """Return the runs as JSON values."""
    return [
        {
            "number": number,
            "name": run.start.name,
            "path": str(run.path),
            "started": run.start.started,
            "state": run.state,
            "imported": run.is_imported,
            "damaged": run.damaged,
            "cases": len(verdicts),
            "totals": verdict_totals(verdicts),
            "argv": run.start.argv,
            "environment": run.start.environment,
        }
        for number, run, verdicts in _listed(runs)
    ]


def _listed(runs: Sequence[Stored]) -> Iterator[tuple[int | None, Stored, list[Verdict]]]:
    """Yield each run with its number, and how its cases ended; those without a result were not run."""
    numbers = itertools.count()
    for run in runs:
        verdicts = [case.verdict for case in RunStore(run.path).numbers(lambda _: True).values()]
        verdicts += [Verdict.NOT_RUN] * (len(run.start.cases) - len(verdicts))
        yield None if run.is_imported else next(numbers), run, verdicts


def _origin(run: Stored) -> str:
    """Its name and its environment: "v1; imported; torch 2.13.0, torchao 0.18.0, cpu, 1234abcde"."""
    words, environment = ["environment not recorded"], run.start.environment
    if environment is not None:
        packages = [
            f"{name} {environment.packages[name]}" for name in ("torch", "torchao") if name in environment.packages
        ]
        words = [*packages, environment.device, environment.short_commit]
    imported = "imported" if run.is_imported else ""
    return "; ".join(filter(None, [run.start.name, imported, ", ".join(filter(None, words))]))


# The history of cases


def history_sections(history: History) -> list[Block]:
    """Return every run of a case with what changed, its curves over the runs, and what is wrong with it."""
    moments = history.moments
    distances = [moment.case.measured.loss_distance if moment.case.measured else None for moment in moments]
    curves = Facts(
        (("loss apart", sparkline(distances)), ("seconds", sparkline([moment.case.seconds for moment in moments])))
    )
    warnings = (
        "FLAKY: it ended differently in one environment." if history.is_flaky else "",
        "NONDETERMINISTIC: exact numbers changed in one environment." if history.is_nondeterministic else "",
    )
    return [history_table(history), Section(blocks=(*((curves,) if len(moments) > 1 else ()), *filter(None, warnings)))]


def history_table(history: History) -> Table:
    numbers = tuple(range(_VERDICT + 1, len(_COLUMNS) - 1))
    return Table(columns=_COLUMNS, rows=tuple(map(_row, history.moments)), verdict=_VERDICT, right=numbers)


def histories_sections(histories: Sequence[History]) -> list[Block]:
    """Return a row for every case: how often it was run, how it ended, its last change."""
    return [Table(rows=tuple(map(_summary, histories)))]


def history_document(history: History) -> dict[str, object]:
    return {
        "case": history.case_id,
        "flaky": history.is_flaky,
        "nondeterministic": history.is_nondeterministic,
        "verdicts": {verdict.value: count for verdict, count in history.verdicts.items()},
        "runs": [
            {
                "started": moment.run.start.started,
                "name": moment.run.start.name,
                "path": str(moment.run.path),
                "environment": moment.run.start.environment,
                "changes": moment.changes,
                "moved": moment.moved,
                "repeats": moment.repeats,
                "verdict": moment.case.verdict,
                "seconds": moment.case.seconds,
                "numbers": moment.case.measured,
            }
            for moment in history.moments
        ],
    }


def _summary(history: History) -> tuple[str, ...]:
    verdicts = ", ".join(f"{count} {verdict.value}" for verdict, count in history.verdicts.items())
    flags = ["FLAKY"] * history.is_flaky + ["NONDETERMINISTIC"] * history.is_nondeterministic
    change = history.last_change
    last = "no change"
    if change is not None:
        description = "; ".join(filter(None, [change.case.verdict.value, ", ".join(change.moved), _changes(change)]))
        last = f"last change {change.run.start.started[:10] or '?'}: {description}"
    return (history.case_id, counted(len(history.moments), "run"), verdicts, " ".join(flags) or "-", last)


def _row(moment: Moment) -> tuple[str, ...]:
    numbers, environment = moment.case.measured, moment.run.start.environment
    names = ("loss_distance", "module_replay", "parity", "flushed")
    shares = [getattr(numbers, name) if numbers else None for name in names]
    sizes = (numbers.wire_bytes, numbers.saved_bytes) if numbers else (None, None)
    return (
        to_the_minute(moment.run.start.started),
        moment.run.start.name or "-",
        (environment.short_commit if environment is not None else "") or "-",
        moment.case.verdict.value,
        *("-" if share is None else f"{share:.3g}" for share in shares),
        f"{moment.case.seconds:.1f}",
        *("-" if size is None else binary_bytes(size) for size in sizes),
        "; ".join(_what_changed(moment)),
    )


def _what_changed(moment: Moment) -> Iterator[str]:
    """Yield what changed of the environment before the run, and which exact numbers changed then."""
    if changes := _changes(moment):
        yield f"now {changes}"
    if moment.moved:
        where = "NONDETERMINISTIC, in the same environment" if moment.repeats else "changed with it"
        yield f"{where}: {', '.join(moment.moved)}"


def _changes(moment: Moment) -> str:
    shown = [change for change in moment.changes if not change.startswith(("commit ", "changes "))]
    more = ["uncommitted changes"] if any(change.startswith("changes ") for change in moment.changes) else []
    return ", ".join([*(change if len(change) <= _SHOWN else f"{change[: _SHOWN - 3]}..." for change in shown), *more])


# The same cases in several environments


def environments_sections(runs: Mapping[str, RunResult], *, decide: bool = False) -> list[Block]:
    """A row for every environment, the cases whose verdicts differ, and the command that compares first and last."""
    rows = tuple(
        (
            name,
            str(sum(case.good for case in run.results)),
            str(sum(case.ran for case in run.results)),
            f"{run.cpu_s:.1f}",
            f"{run.end.wall_s:.1f}",
        )
        for name, run in runs.items()
    )
    table = Table(columns=("environment", "good", "cases", "CPU s", "wall s"), rows=rows, right=(1, 2, 3, 4))
    first, *_, last = runs
    command = (Verbatim(f"to decide: `{compare_runs(first, last)}`"),) if decide and last != first else ()
    return [table, _differences(runs), *command]


def _differences(runs: Mapping[str, RunResult]) -> Block:
    ids = dict.fromkeys(case.case_id for run in runs.values() for case in run.results)
    verdicts = {name: {case.case_id: case.verdict.value for case in run.results} for name, run in runs.items()}
    by_case = {case: {name: of_run.get(case, "not selected") for name, of_run in verdicts.items()} for case in ids}
    differ = {case: by_run for case, by_run in by_case.items() if len(set(by_run.values())) > 1}
    if not differ:
        return f"{counted(len(ids), 'case')}: the same verdicts everywhere"
    entries = (
        Entry(title=case, lines=tuple(f"{name}: {verdict}" for name, verdict in by_run.items()))
        for case, by_run in differ.items()
    )
    return Section(title=f"different verdicts in {counted(len(differ), 'case')} of {len(ids)}", blocks=tuple(entries))
