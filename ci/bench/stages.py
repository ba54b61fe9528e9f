"""Where the time of a run goes: CPU seconds per stage and kind of case, page faults, and time outside of the ranks.

    python ci/bench/stages.py pr
    python ci/bench/stages.py pr --select 'compile=none'
    python ci/bench/stages.py smoke --kept-witnesses

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
    _print(records)
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    ranks_s = sum(record["user_s"] + record["system_s"] for record in records)
    all_s = sum((usage.ru_utime + usage.ru_stime) for usage in (own, children))
    print(f"\n{len(result.results)} cases in {result.end.wall_s:.0f} s of wall clock, {all_s:.0f} CPU s in all")
    print(f"  ranks                     {ranks_s:8.1f} CPU s ({len(records)} processes)")
    print(f"  fork server: import, warm-up   {children.ru_utime + children.ru_stime - ranks_s:8.1f} CPU s")
    print(
        f"  controller                {own.ru_utime + own.ru_stime:8.1f} CPU s, checking {controller.judging_cpu_s:.1f}"
    )
    print(f"  waiting for slots         {controller.waiting_s:8.1f} s, over all threads")


def _print(records: list[dict[str, Any]]) -> None:
    by_kind: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_kind["witnesses" if record["witness"] else kind_of(parse_case_id(record["case"]))].append(record)
    for kind, own in sorted(by_kind.items(), key=lambda item: -_cpu_s(item[1])):
        stages: Counter[str] = Counter()
        for record in own:
            stages.update(record["stages"])
        faults = sum(record["page_faults"] for record in own)
        system_s = sum(record["system_s"] for record in own)
        print(
            f"\n{kind}: {len(own)} ranks, {_cpu_s(own):.1f} CPU s, of these {system_s:.1f} in the kernel; "
            f"{faults / len(own):.0f} page faults a rank"
        )
        total_s = sum(stages.values())
        for stage, cpu_s in stages.most_common(TOP):
            print(f"  {stage:<28} {cpu_s:8.1f} s {cpu_s / total_s:6.1%}")


def _cpu_s(records: list[dict[str, Any]]) -> float:
    return sum(float(record["user_s"] + record["system_s"]) for record in records)


if __name__ == "__main__":
    main()
