"""What ranks leave behind: processes they started that outlive them. Finds them by kinship and ends them.

The warm process adopts orphans (`linux.adopt_orphans`), so every child of it that is not a rank was left by one.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from harness.engine import linux


def end_orphans(live_pids: frozenset[int]) -> tuple[tuple[int, ...], float]:
    """SIGKILL and reap orphans once, without waiting; call again until none is left, for their children follow.

    Returns the orphans that were found and the CPU seconds of those that were reaped. An orphan in the session of a
    live rank is spared: it may be a helper that this rank still needs.
    """
    orphans = tuple(pid for pid in linux.children() if pid not in live_pids and linux.session(pid) not in live_pids)
    cpu_s = 0.0
    for pid in orphans:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            _, _, usage = os.wait4(pid, os.WNOHANG)
            cpu_s += usage.ru_utime + usage.ru_stime
    return orphans, cpu_s
