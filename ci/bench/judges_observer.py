"""What torch's own checks see of a run: an injection that `judges.py` hands to every rank.

The two lines with FOLDER and JUDGE are filled in: where a rank leaves what it saw, and who watches.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._debug_mode import DebugMode

from harness.worker.training import train

FOLDER = ""
JUDGE = ""  # "comm", "hashes", both or none
# What they return may not be written yet: two clean runs then differ in what was in memory before
UNWRITTEN = ("c10d", "_c10d_functional", "fsdp")
COPIES = ("aten.copy_.default", "aten._foreach_copy_.default")


def observe() -> None:
    """Enter the modes in every step of this rank, and write what they saw so far at its end."""
    stock = train.train_step
    comms: list[str] = []
    hashes: list[str] = []
    spent_s = 0.0

    def train_step(*args: Any) -> Any:
        nonlocal spent_s
        comm: Any = CommDebugMode()  # type: ignore[no-untyped-call]
        debug = DebugMode()
        with ExitStack() as stack:
            if "comm" in JUDGE:
                stack.enter_context(comm)
            if "hashes" in JUDGE:
                stack.enter_context(debug)
                stack.enter_context(DebugMode.log_tensor_hashes("hash_tensor"))
            started_s = time.process_time()
            result = stock(*args)
            spent_s += time.process_time() - started_s
        comms.extend(f"{fqn} {sorted(map(str, phases.items()))}" for fqn, phases in comm.comm_module_counts.items())
        hashes.extend(f"{_named(call)} {_hash(call)}" for call in debug.logs)
        seen = {"comm": _digest(comms), "hashes": _digest(hashes), "cpu_s": spent_s}
        (Path(FOLDER) / f"rank{dist.get_rank()}.json").write_text(json.dumps(seen))
        return result

    setattr(train, "train_step", train_step)  # noqa: B010  mypy rejects assigning to a function


def _named(call: Any) -> str:
    return f"{call.call_depth} {type(call).__name__} {getattr(call, 'op', '')}"


def _hash(call: Any) -> str:
    """Of what an operator computes; torch hashes views and copies too."""
    op = getattr(call, "op", None)
    if not isinstance(op, OpOverload) or op.is_view or op.namespace in UNWRITTEN or str(op) in COPIES:
        return ""
    return str((call.log or {}).get("hash", ""))


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
