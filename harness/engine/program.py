"""The rank program: what the engine asks of the module that does the work in a rank.

The engine knows a program by its dotted module name alone, so it never imports one in the controller.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, cast

import msgspec

from harness.errors import HarnessError


class RankContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is told: who it is, what to do, where its files go.

    `folder` is shared by the ranks of the job (rendezvous, TMPDIR); `device` is a CUDA index, None on CPU.
    `report_phase` names what the rank does from now on; the last phase is part of every failure report.
    """

    rank: int
    world_size: int
    payload: bytes
    folder: Path
    device: int | None
    report_phase: Callable[[str], None]


class RankProgram(Protocol):
    """A module with these two functions is a rank program."""

    def preload(self, options: Mapping[str, str]) -> None:
        """Import and warm everything that all jobs share. No CUDA; the process is single-threaded after it."""

    def rank_main(self, context: RankContext) -> bytes:
        """Do the work of one rank, in a fresh process; what it returns goes to the caller of the engine as it is."""


def load_program(name: str) -> RankProgram:
    """Returns the module `name` as a rank program. Import errors pass through; a missing function is a HarnessError."""
    module = importlib.import_module(name)
    missing = [function for function in ("preload", "rank_main") if not callable(getattr(module, function, None))]
    if missing:
        raise HarnessError(
            f"not a rank program: it has no function {' and no function '.join(missing)}",
            where=f"module {name}",
            fix="define preload(options) and rank_main(context)",
        )
    return cast("RankProgram", module)
