"""Calls a function of a test on every rank, on the virtual device and with the process group of the job.

Arguments and results are what `torch.load` reads without running code: tensors, numbers, strings, and tuples, lists and
dicts of them.
"""

import importlib
import io
from typing import Any

import msgspec
import torch

from harness.engine.program import RankContext
from harness.request import CALL, CallRequest
from harness.worker.process.process import PROCESS
from harness.worker.process_group import join
from harness.worker.virtual import device as virtual_device


def rank_main(context: RankContext) -> bytes:
    """Call the function of the payload. Returns what it returned, encoded."""
    request = msgspec.msgpack.decode(context.payload.removeprefix(CALL), type=CallRequest)
    torch.set_num_threads(1)
    PROCESS.phase.report = context.report_phase
    PROCESS.phase.begin("start")
    virtual_device.install(request.backend, arithmetic=request.arithmetic)
    join(context, request.backend)
    function = importlib.import_module(request.module).build
    PROCESS.phase.begin(f"{function.__name__}()")
    returned = function(*decoded(request.arguments))
    return encoded(returned, f"{function.__name__}() returned")


def encoded(value: Any, what: str) -> bytes:
    """Return the bytes of a value. Raises TypeError, with `what` it is, where `decoded` would not read it."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        decoded(file.getvalue())
    except Exception:
        said = f"{what} a {type(value).__name__}, which cannot go between processes"
        raise TypeError(f"{said}: use tensors, numbers, strings, and tuples, lists and dicts of them.") from None
    return file.getvalue()


def decoded(content: bytes) -> Any:
    """Return the value of these bytes; they run no code."""
    return torch.load(io.BytesIO(content), weights_only=True)
