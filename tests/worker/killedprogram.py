"""A rank program without torch, of which one rank is killed: in which run, at which moment, how, and how often.

The option `plans` is a folder with a `Plan` for every seed of a case that is not trained in peace.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from harness.engine.messages import Returned, encode_frame
from harness.engine.program import RankContext
from harness.matrix.caseid import case_id
from harness.request import RunRequest
from tests.builders import make_trace
from tests.worker.toyprogram import open_files

Kind = Literal["case", "solo", "partner", "golden", "noise", "replay", "with fix", "unprobed"]
Moment = Literal["before training", "in a collective", "while returning", "after returning"]

_options: dict[str, str] = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to the last rank of a run of this kind. `how`: a signal that it gets, or what it does.

    "waits" is for a neighbor of what is killed: it is not killed itself, and waits so often for its end.
    """

    kind: Kind
    moment: Moment
    how: str
    times: int  # before a run of this kind ends well
    ids: Mapping[str, Kind]  # the kinds of references that only their case tells apart


def preload(options: Mapping[str, str]) -> None:
    _options.update(options)


def rank_main(context: RankContext) -> bytes:
    request = msgspec.msgpack.decode(context.payload, type=RunRequest)
    trace = make_trace(request.case, context.rank)
    draws = None if request.noise is None else (trace,) * len(request.noise.draws)
    result = msgspec.msgpack.encode(msgspec.structs.replace(trace, draws=draws))
    file = Path(_options["plans"]) / f"{request.case.train.seed}.json"
    if file.exists():
        plan = msgspec.json.decode(file.read_bytes(), type=Plan)
        if kind_of(request, plan) == plan.kind:
            _meet_fate(context, plan, result, file)
    return result


def kind_of(request: RunRequest, plan: Plan) -> Kind:
    if request.noise is not None or request.replayed:
        return "replay" if request.replayed else "noise"
    if request.injections:
        return "with fix"
    if request.solo:
        return "solo"
    return plan.ids.get(case_id(request.case), "case" if request.probes else "unprobed")


def _meet_fate(context: RankContext, plan: Plan, result: bytes, file: Path) -> None:
    done = file.with_suffix(".done")
    if _count(done) >= plan.times:
        return
    if plan.how == "waits":
        _add_one(done)
        time.sleep(60)
    arrived, pid = context.folder / "arrived", context.folder / "pid"
    if context.rank < context.world_size - 1:
        _add_one(arrived)
        while plan.moment != "after returning" or not pid.exists() or _is_alive(pid.read_text()):
            time.sleep(0.01)
        return
    while plan.moment != "before training" and _count(arrived) < context.world_size - 1:
        time.sleep(0.001)
    _add_one(done)
    pid.write_text(str(os.getpid()))
    if plan.moment == "while returning":
        _send_half(result)
    if plan.moment == "after returning":
        threading.Timer(0.1, _end, [plan.how]).start()
    else:
        _end(plan.how)


def _add_one(path: Path) -> None:
    with path.open("a") as file:
        file.write(".")


def _count(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_alive(pid: str) -> bool:
    return not pid or Path(f"/proc/{pid}/exe").exists()


def _send_half(result: bytes) -> None:
    frame = encode_frame(Returned(at_s=time.monotonic(), payload=result))
    for fd, target in open_files().items():
        if target.startswith("socket"):
            os.write(fd, frame[: len(frame) // 2])


def _end(how: str) -> None:
    if how == "fork server killed":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    elif how == "out of memory":
        raise MemoryError
    elif how == "exception":
        raise ValueError("planted")
    elif how == "exit":
        os._exit(7)
    else:
        os.kill(os.getpid(), signal.Signals[how])
