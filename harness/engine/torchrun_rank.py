"""One rank under torchrun: `python -m harness.engine.torchrun_rank FOLDER`, with RANK in the environment.

Reads the orders that `torchrun.py` left in the folder and writes there how it ended.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

import msgspec

from harness.engine.ending import Ending
from harness.engine.folder import JobFolder
from harness.engine.program import RankContext, load_program
from harness.engine.rank import flush_streams, run_program
from harness.engine.torchrun import RankFile, ending_path, job_path, phase_path, pid_path
from harness.engine.wire import Returned


class _Program:
    """The rank program, preloaded as the first part of its work: an import error is then a failure of this rank."""

    def __init__(self, orders: RankFile) -> None:
        self._orders = orders

    def preload(self, options: object) -> None:
        """Nothing before the rank runs."""

    def rank_main(self, context: RankContext) -> bytes:
        """Preload and run."""
        context.report_phase("preload")
        program = load_program(self._orders.program)
        program.preload(self._orders.options)
        context.report_phase("start")
        return program.rank_main(context)


def main(folder: JobFolder, rank: int) -> int:
    """Run this rank; returns the exit code: 0 when the program returned."""
    _redirect(folder, rank)
    pid_path(folder, rank).write_text(str(os.getpid()))  # from now on we can be asked for our stacks
    orders = msgspec.msgpack.decode(job_path(folder).read_bytes(), type=RankFile)
    phases: list[str] = []

    def report_phase(phase: str) -> None:
        phases.append(phase)
        phase_path(folder, rank).write_text(phase)

    context = RankContext(
        rank=rank,
        world_size=orders.job.world_size,
        payload=orders.job.payload,
        folder=folder.path,
        device=orders.job.devices[rank] if orders.job.devices else None,
        report_phase=report_phase,
    )
    report = run_program(_Program(orders), context)
    flush_streams()
    returned = isinstance(report, Returned)
    ending = Ending(
        rank=rank,
        status="returned" if returned else "raised",
        at_s=report.at_s - orders.started_s,
        payload=report.payload if isinstance(report, Returned) else None,
        message="" if isinstance(report, Returned) else report.message,
        traceback="" if isinstance(report, Returned) else report.traceback,
        phase=phases[-1],
        log_tail=folder.log_tail(rank),
    )
    path = ending_path(folder, rank)
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.msgpack.encode(ending))
    draft.rename(path)
    return 0 if returned else 1


def _redirect(folder: JobFolder, rank: int) -> None:
    faulthandler.enable(file=(dump := folder.dump(rank).open("wb")))
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
    faulthandler.register(signal.SIGTERM, file=dump, all_threads=True, chain=True)  # torchrun's way to end a rank
    with folder.log(rank).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


if __name__ == "__main__":
    sys.exit(main(JobFolder(Path(sys.argv[1])), int(os.environ["RANK"])))
