"""Where a rank was when its stacks were dumped: the collective that it waited in, and what called it.

Reads what faulthandler writes, most recent call first.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from harness.trace import RankFailure

LAST_OUTPUT = "last output:"  # ends the stacks in the traceback of a failure; what the rank printed follows

_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_RAISED_AT = re.compile(r'  File "(.+)", line (\d+), in (.+)')  # as a traceback writes it, not faulthandler
_FOREIGN = re.compile(
    r"^<|(^|/)(harness/(engine|worker|matrix|trace|request)|site-packages|dist-packages|python3\.\d+)/"
)
_ENGINE = re.compile(r"(^|/)harness/engine/")
_COLLECTIVES = re.compile(r"(^|/)torch/distributed/(_functional_collectives|distributed_c10d)\.py$")
_KERNELS = re.compile(r"(^|/)harness/worker/virtual/(collectives|symm_mem)\.py$")
# Wrappers and dispatch, which do not show where a rank is.
_PLUMBING = re.compile(
    r"(^|/)(harness/worker/(virtual|probes|dispatch_hooks)/"
    r"|torch/(_ops|_library/.*|nn/modules/module|autograd/.*|utils/_contextlib|distributed/c10d_logger|_dynamo/eval_frame)\.py$)"
)
_FIELD = re.compile(r"(^|/)(torch|torchao)/")
_TORCH = re.compile(r"(^|/)torch/")
_INSTALLED = re.compile(r"^.*/(site|dist)-packages/")
_FOLDER = re.compile(r"^.*/(?=harness/worker/)")


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    @property
    def module(self) -> str:
        """The file as a dotted name, the same wherever the package is installed."""
        return _FOLDER.sub("", _INSTALLED.sub("", self.file)).removesuffix(".py").replace("/", ".")

    def __str__(self) -> str:
        return f"{self.function} ({_FOLDER.sub('', _INSTALLED.sub('', self.file))}:{self.line})"


class OwnFrame(NamedTuple):
    """The innermost call of a traceback that is in files of the user. `code`: its line, empty where it is not known."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.code}" if self.code else "")


class StackLocation(NamedTuple):
    """Where a rank is. `collective` is empty if it is in none; `calls` are the most telling ones, innermost first."""

    collective: str
    backward: bool
    calls: tuple[Frame, ...]

    def __str__(self) -> str:
        innermost, *callers = map(str, self.calls)
        if not self.collective:
            return f"in {innermost}, in no collective"
        return f"waiting in {self.collective}{f', called from {callers[0]}' if callers else ''}"


def main_stack(dump: str) -> tuple[Frame, ...]:
    """The frames of the main thread, innermost first; empty when the dump has none.

    faulthandler goes from the newest thread to the oldest: the main thread is the last one.
    """
    threads: list[list[Frame]] = [[]]
    for line in takewhile(lambda line: line != LAST_OUTPUT, dump.splitlines()):
        if line.endswith("(most recent call first):"):
            threads.append([])
        elif match := _FRAME.fullmatch(line):
            threads[-1].append(Frame(match[1], int(match[2]), match[3]))
    return tuple(next((frames for frames in reversed(threads) if frames), ()))


def own_frame(traceback: str) -> OwnFrame | None:
    """The innermost call of a Python traceback that is neither of the harness nor of an installed package."""
    lines = traceback.partition(LAST_OUTPUT)[0].splitlines()
    calls = [(index, match) for index, line in enumerate(lines) if (match := _RAISED_AT.fullmatch(line))]
    own = [(index, match) for index, match in calls if not _FOREIGN.search(match[1])]
    if not own:
        return None
    index, match = own[-1]
    code = lines[index + 1].strip() if lines[index + 1 : index + 2] and lines[index + 1].startswith("    ") else ""
    return OwnFrame(file=match[1], line=int(match[2]), function=match[3], code=code)


def raised_frames(traceback: str) -> tuple[Frame, ...]:
    """The calls of torch and torchao in a Python traceback, innermost last, without wrappers and dispatch."""
    return tuple(call for call in _calls(traceback) if _FIELD.search(call.file) and not _PLUMBING.search(call.file))


def innermost_calls(traceback: str, number: int) -> tuple[Frame, ...]:
    """The last calls of a Python traceback, of whatever file, innermost first."""
    return tuple(_calls(traceback)[::-1][:number])


def _calls(traceback: str) -> list[Frame]:
    lines = traceback.partition(LAST_OUTPUT)[0].splitlines()
    return [Frame(match[1], int(match[2]), match[3]) for line in lines if (match := _RAISED_AT.fullmatch(line))]


def place_of(stack: Sequence[Frame]) -> StackLocation | None:
    """Where the rank with this stack is; None when the stack shows nothing of what it ran.

    The calls are the collective or else the innermost one, the first outside of torch, and the first of another file
    that is not of an installed package.
    """
    program = list(takewhile(lambda frame: not _ENGINE.search(frame.file), stack))
    collectives = [frame for frame in program if _COLLECTIVES.search(frame.file)]
    kernels = [frame for frame in program if _KERNELS.search(frame.file)]
    entered = collectives[:1] or kernels[-1:]
    telling = [frame for frame in program if not _PLUMBING.search(frame.file) and frame not in collectives]
    outside_torch = [frame for frame in telling if not _TORCH.search(frame.file)]
    inner = dict.fromkeys((*(entered or telling[:1]), *outside_torch[:1]))
    shown = {frame.file for frame in inner}
    own = [frame for frame in outside_torch if not _INSTALLED.search(frame.file) and frame.file not in shown]
    calls = (*inner, *own[:1])
    backward = any(frame.function == "_engine_run_backward" for frame in program)
    return StackLocation(entered[0].function.strip("_") if entered else "", backward, calls) if calls else None


def refusal_words(failures: Iterable[RankFailure], *, any_error: bool) -> str | None:
    """What a target says that refuses a layout: every rank that failed first ran into a `raise` of its own in build."""
    causes = [failure for failure in failures if not failure.consequence]
    refused = bool(causes) and all(_is_refusal(failure, any_error=any_error) for failure in causes)
    return causes[0].message.partition(": ")[2] if refused else None


def _is_refusal(failure: RankFailure, *, any_error: bool) -> bool:
    own = own_frame(failure.traceback)
    calls = [line for line in failure.traceback.splitlines() if line.startswith('  File "')]
    last = bool(calls) and own is not None and f'"{own.file}", line {own.line},' in calls[-1]
    raised = last and own is not None and own.code.startswith(("raise ", "assert "))
    return raised and failure.phase == "build" and (any_error or failure.message.startswith("NotImplementedError"))
