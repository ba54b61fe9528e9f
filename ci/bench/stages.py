"""Where the time of a run goes: CPU seconds by what ran and by stage of a rank, and how busy the cores were.

    python ci/bench/stages.py pr
    python ci/bench/stages.py pr --select 'compile=none'
    python ci/bench/stages.py smoke --kept-witnesses
    python ci/bench/stages.py pr --markdown ci/bench/stages.md

Ranks are sampled (`stage_program.py`), which costs about 2 % of what it measures. Without --kept-witnesses every
reference is run anew, as in CI.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from kinds import FOLDER_VARIABLE, kind_of

from harness.engine.cluster import SlotTable
from harness.matrix.caseid import parse_case_id
from harness.project import STATE_VARIABLE, find_project
from harness.result import RunResult
from harness.running.case_judge import CaseJudge
from harness.running.plan import make_plan
from harness.running.progress import open_progress
from harness.running.selection import Query
from harness.workflow import run

TOP = 14  # stages of a kind that are printed by name


class Controller:
    """CPU seconds and waits of the controller's own threads."""

    def __init__(self) -> None:
        self.judging_cpu_s = 0.0
        self.waiting_s = 0.0
        self._lock = threading.Lock()
        self._taken = SlotTable.taken

    def install(self) -> None:
        """Measure from here on."""
        controller = self

        def timed(judges: Callable[..., Any]) -> Callable[..., Any]:
            def judge(*args: Any) -> Any:
                begun = time.thread_time()
                try:
                    return judges(*args)
                finally:
                    with controller._lock:
                        controller.judging_cpu_s += time.thread_time() - begun

            return judge

        def taken(self: SlotTable, *args: Any, **options: Any) -> Any:
            return _Timed(controller._taken(self, *args, **options), controller)

        CaseJudge.judge = timed(CaseJudge.judge)  # type: ignore[method-assign]
        CaseJudge.concluded = timed(CaseJudge.concluded)  # type: ignore[method-assign]
        SlotTable.taken = taken  # type: ignore[method-assign]

    def waited(self, seconds: float) -> None:
        """Add a wait for free slots."""
        with self._lock:
            self.waiting_s += seconds


class _Timed:
    """A context manager whose entry is timed."""

    def __init__(self, inner: Any, controller: Controller) -> None:
        self._inner, self._controller = inner, controller

    def __enter__(self) -> Any:
        begun = time.monotonic()
        entered = self._inner.__enter__()
        self._controller.waited(time.monotonic() - begun)
        return entered

    def __exit__(self, *error: object) -> Any:
        return self._inner.__exit__(*error)


def main() -> None:
    """Run the cases and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", default=["smoke"], metavar="TIER|FILE")
    parser.add_argument("--select", action="append", default=[], metavar="EXPR")
    parser.add_argument("--kept-witnesses", action="store_true", help="use references that earlier runs have kept")
    parser.add_argument("-j", "--jobs", type=int, default=None)
    parser.add_argument("--markdown", type=Path, help="write the tables to this file as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fp8-stages-") as folder, tempfile.TemporaryDirectory() as state:
        os.environ[FOLDER_VARIABLE] = folder
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if not options.kept_witnesses:
            os.environ[STATE_VARIABLE] = state
        plan = msgspec.structs.replace(make_plan(), program="stage_program")
        if options.jobs is not None:
            plan = msgspec.structs.replace(plan, jobs=options.jobs)
        controller = Controller()
        controller.install()
        query = Query(sources=tuple(options.sources), expressions=tuple(options.select))
        with open_progress() as progress:
            result, _ = run(find_project(), query, plan, progress)
        records = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own_s, children_s = (usage.ru_utime + usage.ru_stime for usage in (own, children))
    parts, stages = _parts(result, records, children_s, own_s), _stages(records)
    cpu_s, wall_s, cores = own_s + children_s, result.end.wall_s, os.cpu_count() or 1
    totals = (
        f"{len(result.results)} cases in {wall_s:.0f} s of wall clock, {cpu_s:.0f} CPU s in all: {cores} cores were "
        f"busy {cpu_s / wall_s / cores:.0%}.\nJudging took {controller.judging_cpu_s:.1f} of the controller's seconds. "
        f"Threads waited {controller.waiting_s:.1f} s for slots."
    )
    text = "\n".join([*_table("what ran", parts), "", *_table("stage of a rank", stages), "", totals])
    print(text)
    if options.markdown is not None:
        command = " ".join(("python ci/bench/stages.py", *options.sources, "--markdown", str(options.markdown)))
        options.markdown.write_text(f"# Where the CPU seconds of a run go\n\nMade by `{command}`.\n\n{text}\n")


Row = tuple[str, float, int]  # a name, CPU seconds, processes


def _parts(result: RunResult, records: list[dict[str, Any]], children_s: float, own_s: float) -> list[Row]:
    """Return what ran: cases by kind, references by kind, fork servers and the controller."""
    by_kind: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        if not record["witness"]:
            by_kind[kind_of(parse_case_id(record["case"]))].append(record)
    cases = [(f"{kind}, ranks", _cpu_s(own), len(own)) for kind, own in by_kind.items()]
    ran: defaultdict[str, list[float]] = defaultdict(list)
    for reference in result.end.references:
        if reference.ran:
            ran[f"references: {reference.kind.split()[0]}"].append(reference.cpu_s)
    references = [(kind, sum(seconds), len(seconds)) for kind, seconds in ran.items()]
    rows = sorted([*cases, *references], key=lambda row: -row[1])
    servers_s = children_s - _cpu_s(records)
    return [*rows, ("fork servers: import, warm-up", servers_s, 1), ("controller", own_s, 1)]


def _stages(records: list[dict[str, Any]]) -> list[Row]:
    stages: Counter[str] = Counter()
    for record in records:
        stages.update(record["stages"])
    return [(stage, cpu_s, len(records)) for stage, cpu_s in stages.most_common(TOP)]


def _table(title: str, rows: list[Row]) -> list[str]:
    total_s = sum(cpu_s for _, cpu_s, _ in rows)
    shares = (f"| {name} | {cpu_s:.1f} | {cpu_s / total_s:.1%} | {count} |" for name, cpu_s, count in rows)
    return [f"| {title} | CPU s | share | processes |", "|---|---|---|---|", *shares]


def _cpu_s(records: list[dict[str, Any]]) -> float:
    return sum(float(record["user_s"] + record["system_s"]) for record in records)


if __name__ == "__main__":
    main()
