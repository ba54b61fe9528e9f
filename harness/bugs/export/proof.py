"""Does an exported script show its fault? It is run by torchrun, as a reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

Outcome = Literal["FAULT", "fixed", "cannot tell"]

_TIMEOUT_S = 300.0
_OUTCOME = re.compile(
    r"^rank \d+: (FAULT|fixed|cannot tell)(?:.*\n)(?:  (?:expected|found) .*\n?)*", flags=re.MULTILINE
)


class Proof(NamedTuple):
    """The verdict of a script: that of the first rank that printed one, else the end of the output."""

    told: Outcome
    text: str


def proof_of(script: Path, ranks: int, patches: Sequence[str] = ()) -> Proof:
    """Run a script on this machine's Python, with these patches (`FILE.py:FUNCTION`)."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    try:
        done = subprocess.run(
            [*torchrun, str(script), *patches],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Proof("cannot tell", f"it did not end within {_TIMEOUT_S:.0f} s")
    return script_outcome(done.stdout)


def script_outcome(output: str) -> Proof:
    """The verdict in the output of a script: a fault on any rank, else "cannot tell", else "fixed"."""
    found = {each[1]: each[0].rstrip() for each in _OUTCOME.finditer(output)}
    for told in ("FAULT", "cannot tell", "fixed"):
        if told in found:
            return Proof(told, found[told])
    return Proof("cannot tell", output.strip()[-500:])
