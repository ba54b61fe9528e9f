"""A function on several CPU ranks: with the virtual FP8 device and a process group, and its results by rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

if TYPE_CHECKING:
    from harness.engine.messages import RankOutcome

_SKIPPED = ("Skipped: ", "SkipTest: ")
_SHOWN = 40  # lines of a traceback


class RanksFailed(AssertionError):
    """Ranks raised, died or hung. `ranks`: those that failed by themselves, not because another one did."""

    def __init__(self, failed: list[RankOutcome]) -> None:
        self.ranks = tuple(end.rank for end in failed)
        super().__init__("\n".join(map(_words, failed)))


def run_on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Call a function of a module on so many ranks of one process group, and return what each returned, by rank.

    Arguments and results are tensors, numbers, strings, and tuples, lists and dicts of them. Raises RanksFailed with
    the rank and its traceback, and unittest.SkipTest where a rank skips or the machine has too few.
    """
    __tracebackhide__ = True
    from fp8_harness.builds import write_module
    from fp8_harness.session import session
    from harness.request import CallRequest
    from harness.worker.calls import decoded, encoded  # imports torch, as whoever calls this has

    if ranks < 1:
        raise ValueError(f"{ranks} ranks: give 1 or more.")
    request = CallRequest(module=write_module(function), arguments=encoded(arguments, "an argument is"))
    outcome = session().call(request, ranks)
    failed = [end for end in outcome.ranks if end.payload is None and not end.consequence]
    for end in failed:
        if end.message.startswith(_SKIPPED):
            raise SkipTest(end.message.partition(": ")[2])
    if failed or outcome.status != "ok":
        raise RanksFailed(failed or [end for end in outcome.ranks if end.payload is None])
    return [decoded(end.payload or b"") for end in sorted(outcome.ranks, key=lambda end: end.rank)]


def _words(end: RankOutcome) -> str:
    """Return the rank and why it ended, then its traceback without the frames of the harness, or its last output."""
    lines = end.traceback.rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    own = next((at for at in frames if "/harness/" not in lines[at]), None)
    shown = lines[own or 0 :] if end.status == "raised" else lines
    more = [f"  {line}" for line in (end.log_tail.splitlines() if not lines else shown[-_SHOWN:])]
    return "\n".join((f"rank {end.rank}: {end.message}", *more))
