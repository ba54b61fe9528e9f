"""One rank under torchrun: `python -m harness.engine.torchrun_rank FOLDER`, with RANK in the environment.

Reads the `LaunchSpec` that `torchrun.py` wrote to the folder, and writes its `RankOutcome` there.
"""

import faulthandler
import os
import signal
import sys
from pathlib import Path

import msgspec

from harness.engine.folder import JobFolder
from harness.engine.messages import RankOutcome, Returned
from harness.engine.program import RankContext, preload_program, rank_context
from harness.engine.rank import flush_streams, run_program
from harness.engine.torchrun import LaunchSpec, rank_file, spec_file


def main(folder: JobFolder, rank: int) -> int:
    """Run this rank; returns the exit code: 0 when the program returned."""
    spec = msgspec.msgpack.decode(spec_file(folder).read_bytes(), type=LaunchSpec)
    _redirect(folder, rank)
    rank_file(folder, rank, "pid").write_text(str(os.getpid()))  # from now on, SIGUSR1 dumps the stacks
    phases: list[str] = []

    def report_phase(phase: str) -> None:
        phases.append(phase)
        rank_file(folder, rank, "phase").write_text(phase)

    def rank_main(context: RankContext) -> bytes:
        context.report_phase("preload")  # here: an import error is then a failure of this rank
        program = preload_program(spec.program, spec.options)
        context.report_phase("start")
        return program.rank_main(context)

    report = run_program(rank_main, rank_context(spec.share, rank, report_phase))
    flush_streams()
    message, traceback = ("", "") if isinstance(report, Returned) else (report.message, report.traceback)
    outcome = RankOutcome(
        rank=rank,
        status="returned" if isinstance(report, Returned) else "raised",
        payload=report.payload if isinstance(report, Returned) else None,
        message=message,
        traceback=traceback,
        phase=phases[-1],
        seconds=report.at_s - spec.started_s,
        log_tail=folder.log_tail(rank),
    )
    path = rank_file(folder, rank, "outcome")
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.msgpack.encode(outcome))
    draft.rename(path)
    return 0 if isinstance(report, Returned) else 1


def _redirect(folder: JobFolder, rank: int) -> None:
    faulthandler.enable(file=(dump := folder.dump(rank).open("wb")))
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
    faulthandler.register(signal.SIGTERM, file=dump, all_threads=True, chain=True)  # torchrun ends ranks with SIGTERM
    with folder.log(rank).open("ab") as log:  # appending, so that it can be cut
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


if __name__ == "__main__":
    sys.exit(main(JobFolder(Path(sys.argv[1])), int(os.environ["RANK"])))
