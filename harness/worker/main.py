"""The rank program that trains a case, behind a check of the private parts of torch and torchao that it uses.

Nothing that uses them is imported before: a part that is gone is one line, not the traceback of an import.
"""

import os
import sys
from collections.abc import Mapping

import msgspec

from harness.engine.program import RankContext
from harness.request import CALL
from harness.worker.process import internals


def preload(options: Mapping[str, str]) -> None:
    """Do once what every rank needs: see `program.preload`. Without what every run needs, nothing is done."""
    if options.get("device", "cpu") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torchao takes other paths where it sees a GPU, and so may a target
        _install_casts()
    compiles = options.get("compile", "off") == "on"
    from harness.worker.process.process import PROCESS  # imports torch

    PROCESS.remarks = tuple(internals.lines(compiled=compiles))
    if not internals.gaps(internals.RUN):
        from harness.worker import program

        program.preload(options)


def _install_casts() -> None:
    """Let torchao define what it defines for a GPU: private parts of that are looked for, too."""
    from harness.worker.virtual import casts

    casts.install_if_possible()


def notes() -> tuple[str, ...]:
    """The remarks at the start of a run: every private part that is not as declared, and what is lost by that."""
    from harness.worker.process.process import PROCESS

    return PROCESS.remarks


def rank_main(context: RankContext) -> bytes:
    """Answer one request on this rank: the encoded `RankTrace`, or what the function of a `CallRequest` returned.

    Raises RuntimeError where no run can be.
    """
    internals.require(internals.RUN)
    if context.payload.startswith(CALL):
        from harness.worker import calls

        return calls.rank_main(context)
    from harness.worker import program

    return program.rank_main(context)


if __name__ == "__main__":
    _install_casts()
    sys.stdout.buffer.write(msgspec.json.encode(internals.state()))
