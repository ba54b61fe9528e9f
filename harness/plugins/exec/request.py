"""What `exec` asks of the process that runs a command, and what every process of it records.

Both are files of one folder: `request.msgpack`, and a `record-PID.msgpack` of each process that built an optimizer,
joined a process group or met something that the device lacks.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from harness.matrix.case import Case
from harness.trace import RankTrace
from harness.trace.model import TensorSketch
from harness.trace.record import Patch, Record

REQUEST = "request.msgpack"
RECORDS = "record-*.msgpack"
REFUSED = "refused.txt"  # why the command cannot be run at all
TARGET = "script"  # of a case that no target trains
# What ranks record of a script: what the checks read that need no reference (`judge.py`), and of compiled blocks less.
RECORDED = ("sketches", "operands", "unshards", "traffic", "saved_memory")
UNCOMPILED = ("operands", "saved_memory")


def program_of(name: str) -> str | None:
    """Return the path of a program: of this environment, activated or not, before those on PATH."""
    return shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))


class Gpu(Record, frozen=True, kw_only=True):
    """The GPU that a script is shown."""

    name: str  # of `torch.cuda.get_device_name`
    capability: tuple[int, int]
    memory_gib: int


GPUS = {
    "4090": Gpu(name="NVIDIA GeForce RTX 4090", capability=(8, 9), memory_gib=24),
    "h100": Gpu(name="NVIDIA H100 80GB HBM3", capability=(9, 0), memory_gib=80),
    "b200": Gpu(name="NVIDIA B200", capability=(10, 0), memory_gib=180),
}


class ExecRequest(Record, frozen=True, kw_only=True):
    """A command as it was typed. `ranks`: 0 for what the command itself says, else that many GPUs and ranks."""

    command: tuple[str, ...]
    ranks: int = 0
    nodes: int = 1
    gpu: Gpu = GPUS["h100"]
    injections: tuple[Patch, ...] = ()
    watch: bool = True
    steps: int = 3  # how many steps of each optimizer are recorded whole
    keep_inputs: str = ""  # a folder for weights, batches and results, compared with those of one rank
    inputs: str = ""  # such a folder of all ranks, whose weights and batches this run on one rank gets


class Absent(Record, frozen=True, kw_only=True):
    """Something of a GPU that a CPU lacks, and where the script used it."""

    name: str  # "torch.cuda.synchronize"
    effect: str  # "does nothing", "returns 0", "raised"
    line: str  # the first line of the script that used it: "train.py:41"
    calls: int = 1


class ProcessRecord(Record, frozen=True, kw_only=True):
    """What one process did. `trace` and `case`: of what it trained, None where it built no optimizer."""

    pid: int
    rank: int
    world_size: int
    ended: str = ""  # the exception that ended it, with the line of the script; empty where it ended well
    exit_code: int = 0
    steps: int = 0  # of optimizers
    case: Case | None = None  # layout, recipe and dtype, as they were found
    trace: RankTrace | None = None
    not_finite: tuple[int, float] | None = None  # behind the recorded steps, the first whose loss is no number
    not_watched: str = ""  # why there is no trace although it trained
    backwards: int = 0  # passes that began
    stepped: tuple[tuple[int, ...], ...] = ()  # of every optimizer, how many of them before each of its steps
    inputs: tuple[str, ...] = ()  # digests of what the model was called with in the recorded steps
    converted: tuple[str, ...] = ()  # linears that compute in float8
    exchanged: str = ""  # the first that its forward sent by itself: "all_to_all over ranks 0-1 (moe.py:40)"
    # The first step and line of the script ("train.py:41") of what no script means, by kind: "twice", where backward
    # began again from one loss; "kept" and "cleared", where gradients of the step before were there, or those of the
    # microbatch before were not.
    mistakes: Mapping[str, tuple[int, str]] = {}
    absent: tuple[Absent, ...] = ()


class OneRankRecord(Record, frozen=True, kw_only=True):
    """What one rank trained, of a script that is compared with itself on one rank: `lineup-RANK.msgpack`.

    `not_lined_up`: what one rank was not given as the ranks were, and why.
    """

    rank: int
    world_size: int = 1
    losses: tuple[float, ...]  # by step: what backward passes began from, added up over microbatches
    loss_dtype: str = ""
    dtype: str = ""  # that linears compute in
    tokens: int = 1  # of the first tensor that the model was called with, a step
    shares_linears: bool = False  # ranks add up partial sums of linears
    labels: tuple[int, ...] = ()  # that losses of each step are means over
    batches: int = 1  # data-parallel ranks whose batches this rank trained on
    sketches: tuple[TensorSketch, ...] = ()
    not_lined_up: Mapping[str, str] = {}
