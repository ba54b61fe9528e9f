"""What makes the zygote unsafe to fork, and the step of the preload that introduced it.

A thread does not exist in a forked process, and a lock that it held stays locked there. A CUDA context does not work
there either: https://docs.pytorch.org/docs/main/notes/multiprocessing.html#poison-fork-in-multiprocessing.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.engine import linux


class ForkBlockers:
    """The threads and the open devices of this process, each with the step in which it was first seen."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}

    def record_new(self, step: str) -> None:
        """Attribute every new thread and open device to this step, such as "the import of mine"."""
        for name in (*linux.other_threads(), *linux.open_devices()):
            self._seen.setdefault(name, step)

    def reason(self) -> str:
        """Why this process must not be forked now; empty when it may be."""
        told = (
            ("be single-threaded to fork, but it also has", linux.other_threads()),
            ("use no device before it forks, but it has open", linux.open_devices()),
        )
        return "; ".join(f"the zygote must {what}: {_listed(names, self._seen)}" for what, names in told if names)


def _listed(names: tuple[str, ...], seen: Mapping[str, str]) -> str:
    return ", ".join(f"{name} (since {seen[name]})" if name in seen else name for name in names)


FORK_BLOCKERS = ForkBlockers()  # of this process
