"""CPU seconds of a run against the same steps on bare ranks, without probes, references or controller.

    python ci/bench/bare.py pr                       every reference is run anew, as in CI
    python ci/bench/bare.py pr --kept-witnesses      with the references that earlier runs have kept
    python ci/bench/bare.py pr -j 1 --select 'compile=none'

Runs `fp8-harness run` itself, with the options that are left. After every run of a case, its steps run once more on
ranks that are forked from the same fork server and record nothing: so both are measured under the same load, and their
ratio means something on a shared machine too. A case with a recorded fault trains twice, the second time with the
candidate fix; both count as its steps, and the ratio to the first alone is printed too.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kinds import kind_of

from harness.cli.main import main as command_line
from harness.engine.fork_server_engine import ForkServerClient
from harness.engine.messages import JobOutcome
from harness.evidence.references import Reference
from harness.matrix.case import Case
from harness.project import STATE_VARIABLE
from harness.request import RunRequest
from harness.running.case_runner import CaseRunner
from harness.running.executor import Executor
from harness.running.plan import Injection
from harness.running.references import ReferenceRunner
from harness.store import RunStore

BARE, AGAIN, WATCHED = "bare", "with fix", "probes"  # the steps of cases: alone, alone with a fix, and watched
# What ranks run for, as columns: a case, and references by the first words of their names.
RUNS = (BARE, AGAIN, WATCHED, "solo", "partner", "replay", "reference", "noise")
JUDGING, STORING = "decoding and checking", "storing"
_ROW = "{:24} {:>5}" + " {:>9}" * len(RUNS) + " {:>7} {:>6}"


class Spent:
    """CPU seconds of ranks by what they ran for, and of the controller by what it did. Thread-safe."""

    def __init__(self) -> None:
        self.ranks: Counter[tuple[str, str]] = Counter()  # by kind of case and run
        self.cases: Counter[str] = Counter()  # by kind
        self.processes: Counter[bool] = Counter()  # whether bare
        self.controller: Counter[str] = Counter()
        self.imported_s = 0.0
        self._lock = threading.Lock()
        self._now = threading.local()  # the case and the run that a thread works on

    @property
    def kind(self) -> str | None:
        """The kind of case that this thread works on."""
        kind: str | None = getattr(self._now, "kind", None)
        return kind

    @contextmanager
    def within(self, run: str) -> Iterator[None]:
        """Ranks that this thread starts run for this."""
        before = getattr(self._now, "run", "")
        self._now.run = run
        try:
            yield
        finally:
            self._now.run = before

    def begin(self, case: Case) -> None:
        """This thread works on a case from here on."""
        self._now.kind = kind_of(case)
        with self._lock:
            self.cases[self._now.kind] += 1

    def add(self, request: RunRequest, outcome: JobOutcome | None) -> None:
        """Count what the ranks of a request took."""
        if outcome is None:
            return
        run = getattr(self._now, "run", "")
        with self._lock:  # a draw of noise has its own thread, which works on no case
            self.ranks[self.kind or kind_of(request.case), run] += outcome.cpu_s  # type: ignore[assignment]
            self.processes[run in (BARE, AGAIN)] += len(outcome.ranks)

    @contextmanager
    def controlling(self, part: str) -> Iterator[None]:
        """What this thread itself takes in here belongs to this part of the controller."""
        begun_s = time.thread_time()
        try:
            yield
        finally:
            with self._lock:
                self.controller[part] += time.thread_time() - begun_s  # type: ignore[assignment]

    def imported(self, pid: int) -> None:
        """A fork server is ready: all it took so far is import and warm-up."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = sum(int(field) for field in fields[11:15])  # user and system, own and of children
        with self._lock:
            self.imported_s += ticks / os.sysconf("SC_CLK_TCK")


def install(spent: Spent) -> None:
    """Measure every run from here on, and run the steps of every case on bare ranks as well."""
    execute = Executor.execute

    def twice(executor: Executor, case: Case, fixes: Sequence[Injection] = ()) -> JobOutcome | None:
        with spent.within(WATCHED):
            outcome = execute(executor, case, fixes)
        with spent.within(AGAIN if fixes else BARE), spent.controlling(BARE):
            executor.serve(RunRequest(case=case, injections=tuple(fix.patch for fix in fixes)))
        return outcome

    def serve(original: Callable[..., JobOutcome | None], executor: Executor, request: RunRequest) -> JobOutcome | None:
        outcome = original(executor, request)
        spent.add(request, outcome)
        return outcome

    def made(original: Callable[..., Any], runner: ReferenceRunner, reference: Reference) -> Any:
        run = next(run for run in RUNS if reference.name.removeprefix("replayed ").startswith(run))
        with spent.within(run):
            return original(runner, reference)

    def case_run(original: Callable[..., Any], runner: CaseRunner, case: Case) -> Any:
        spent.begin(case)
        return original(runner, case)

    def ready(original: Callable[..., Any], client: ForkServerClient, *rest: Any) -> Any:
        notes = original(client, *rest)
        spent.imported(client.pid)
        return notes

    Executor.execute = twice  # type: ignore[method-assign, assignment]
    _wrap(Executor, "serve", serve)
    _wrap(ReferenceRunner, "_finished", made)
    _wrap(CaseRunner, "run", case_run)
    _wrap(ForkServerClient, "wait_until_ready", ready)
    _wrap(CaseRunner, "_judged", _timed(spent, JUDGING))
    for owner, name in ((RunStore, "append"), (RunStore, "begin"), (RunStore, "finish")):
        _wrap(owner, name, _timed(spent, STORING))


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: around(original, *args, **options))


def _timed(spent: Spent, part: str) -> Callable[..., Any]:
    def timed(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with spent.controlling(part):
            return original(*args, **options)

    return timed


def tables(spent: Spent, own_s: float, children_s: float) -> str:
    """What was spent, by kind of case and in all, as text."""
    lines = [_ROW.format("CPU seconds of ranks", "cases", *RUNS, "sum", "ratio")]
    lines += [_row(spent, kind, (kind,)) for kind in sorted(spent.cases)]
    lines.append(_row(spent, "all kinds", sorted(spent.cases)))
    parts, columns = _parts(spent, own_s, children_s), _columns(spent, spent.cases)
    whole_s, bare_s = sum(parts.values()), columns[BARE] + columns[AGAIN]
    lines += ["", f"{'part':46} {'CPU s':>8} {'of bare':>8}"]
    lines += [f"{name:46} {cpu_s:8.1f} {cpu_s / bare_s:8.3f}" for name, cpu_s in {**parts, "whole": whole_s}.items()]
    lines.append(f"against one run of every case: {whole_s / columns[BARE]:.3f}")
    lines.append(f"with import and warm-up on both sides: {whole_s / (bare_s + spent.imported_s):.3f}")
    return "\n".join(lines)


def _columns(spent: Spent, kinds: Iterable[str]) -> dict[str, float]:
    """CPU seconds of ranks of these kinds: of the probes what they add to bare ranks, of all others everything."""
    columns = {run: float(sum(spent.ranks[kind, run] for kind in kinds)) for run in RUNS}
    columns[WATCHED] -= columns[BARE] + columns[AGAIN]
    return columns


def _row(spent: Spent, title: str, kinds: Sequence[str]) -> str:
    columns, cases = _columns(spent, kinds), sum(spent.cases[kind] for kind in kinds)
    whole_s, bare_s = sum(columns.values()), columns[BARE] + columns[AGAIN]
    seconds = [f"{cpu_s:.1f}" for cpu_s in columns.values()]
    return _ROW.format(title, cases, *seconds, f"{whole_s:.1f}", f"{whole_s / bare_s:.2f}")


def _parts(spent: Spent, own_s: float, children_s: float) -> dict[str, float]:
    """CPU seconds of every part of the run, without what forking and awaiting the bare ranks took."""
    columns = _columns(spent, spent.cases)
    ranks_s = sum(spent.ranks.values())
    forking_s = (children_s - ranks_s - spent.imported_s) * spent.processes[False] / spent.processes.total()
    return {
        "ranks, bare": columns[BARE],
        "ranks, bare: second runs with a candidate fix": columns[AGAIN],
        "probes": columns[WATCHED],
        **{f"witnesses: {run}": columns[run] for run in RUNS[3:]},
        "fork server: import and warm-up": spent.imported_s,
        "fork server: forks and supervision": forking_s,
        **{f"controller: {part}": spent.controller[part] for part in (JUDGING, STORING)},
        "controller: start, waiting, report": own_s - spent.controller.total(),
    }


def cpu_s(who: int) -> float:
    """User and system seconds of this process, or of its children that have ended."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Run the cases and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept-witnesses", action="store_true", help="use references that earlier runs have kept")
    options, words = parser.parse_known_args()
    spent = Spent()
    install(spent)
    with tempfile.TemporaryDirectory(prefix="fp8-bare-") as state:
        if not options.kept_witnesses:
            os.environ[STATE_VARIABLE] = state
        command_line(["run", *words])
    print(tables(spent, cpu_s(resource.RUSAGE_SELF), cpu_s(resource.RUSAGE_CHILDREN)))


if __name__ == "__main__":
    main()
