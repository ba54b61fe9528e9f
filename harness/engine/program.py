"""The rank program: the interface of the module that does the work in a rank.

The engine refers to a program by its dotted module name, so the controller never imports it. What a program does before
the fork must leave the fork server fit for it. A thread does not exist in a forked process, and a lock that it held
stays locked there. A CUDA context does not work there either:
https://docs.pytorch.org/docs/main/notes/multiprocessing.html#poison-fork-in-multiprocessing.
"""

import gc
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, cast

import msgspec

from harness.engine import linux
from harness.engine.messages import Share
from harness.errors import HarnessError


class RankContext(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a rank: its identity, its work and its folder.

    `folder` is shared by the ranks of the job on this node (TMPDIR, generated code); `device` is a CUDA index, None on
    CPU. `rendezvous` is where all ranks of the job meet, as in `Share`.
    `report_phase` sets the current phase of the rank; failure reports include the last one.
    """

    rank: int
    local_rank: int  # among the ranks of the job on this node
    world_size: int
    payload: bytes
    deadline_s: float
    folder: Path
    rendezvous: str
    device: int | None
    report_phase: Callable[[str], None]


def rank_context(share: Share, rank: int, report_phase: Callable[[str], None]) -> RankContext:
    local_rank = rank - share.first_rank
    return RankContext(
        rank=rank,
        local_rank=local_rank,
        world_size=share.job.world_size,
        payload=share.job.payload,
        deadline_s=share.job.deadline_s,
        folder=Path(share.folder),
        rendezvous=share.rendezvous,
        device=share.devices[local_rank] if share.devices else None,
        report_phase=report_phase,
    )


RankMain = Callable[[RankContext], bytes]


class RankProgram(Protocol):
    """What the module defines; `notes()`, if it has it, returns remarks about the environment, a line each."""

    def preload(self, options: Mapping[str, str]) -> None:
        """Import and warm up everything that all jobs share. Must not use CUDA or leave threads running."""

    def rank_main(self, context: RankContext) -> bytes:
        """Do the work of one rank in a fresh process; the engine passes the returned bytes to its caller unchanged."""


def preloaded(name: str, options: Mapping[str, str]) -> tuple[RankMain, tuple[str, ...]]:
    """`rank_main` of the program `name`, ready to run, and its notes. Where it raises, every rank raises the same.

    Raises OSError and MemoryError, for which no program is to blame.
    """
    try:
        program = preload_program(name, options)
        notes: Callable[[], tuple[str, ...]] = getattr(program, "notes", tuple)
        return program.rank_main, notes()
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raised = error

    def rank_main(context: RankContext) -> bytes:
        context.report_phase("preload")
        raise raised

    return rank_main, ()


def preload_program(name: str, options: Mapping[str, str]) -> RankProgram:
    """Return the program `name`, ready for its ranks. Raises what it raises.

    Collects no garbage meanwhile: the imports make millions of objects that stay, and searching them again and again
    takes a quarter of the time.
    """
    gc.disable()
    try:
        program = load_program(name)
        FORK_BLOCKERS.record_new(f"the import of {name}")
        program.preload(options)
        FORK_BLOCKERS.record_new(f"preload() of {name}")
    finally:
        gc.enable()
    return program


def load_program(name: str) -> RankProgram:
    """Return the module `name` as a rank program. Raises ImportError, and HarnessError if a function is missing."""
    module = importlib.import_module(name)
    missing = [function for function in ("preload", "rank_main") if not callable(getattr(module, function, None))]
    if missing:
        raise HarnessError(
            f"not a rank program: it does not define {' or '.join(missing)}.",
            where=f"module {name}",
            fix="define preload(options) and rank_main(context).",
        )
    return cast("RankProgram", module)


class ForkBlockers:
    """The threads and the open devices of this process, each with the step in which it was first seen."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}

    def record_new(self, step: str) -> None:
        """Attribute every new thread and open device to this step, such as "the import of mine"."""
        for name in (*linux.other_threads(), *linux.open_devices()):
            self._seen.setdefault(name, step)

    def reason(self) -> str:
        """Return why this process must not be forked now; empty when it may be."""
        demands = (
            ("be single-threaded to fork, but it also has", linux.other_threads()),
            ("use no device before it forks, but it has open", linux.open_devices()),
        )
        return "; ".join(
            f"the fork server must {demand}: {_listed(names, self._seen)}" for demand, names in demands if names
        )


def _listed(names: tuple[str, ...], seen: Mapping[str, str]) -> str:
    return ", ".join(f"{name} (since {seen[name]})" if name in seen else name for name in names)


FORK_BLOCKERS = ForkBlockers()  # of this process
