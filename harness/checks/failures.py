"""How ranks failed: a finding for ranks that failed alike, or that are stuck at the same place, and where that is.

Where a rank was when its stacks were dumped, the collective that it waited in and what called it, is read of what
faulthandler writes, most recent call first.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

from harness.checks.check import Rule, Rules, Stage
from harness.text import format_ranks
from harness.trace import RankFailure, Run
from harness.verdict import Finding

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
    """A call. `code`: its line, empty if it is not known."""

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def module(self) -> str:
        """Return the file as a dotted name, the same wherever the package is installed."""
        return _FOLDER.sub("", _INSTALLED.sub("", self.file)).removesuffix(".py").replace("/", ".")

    def __str__(self) -> str:
        return f"{self.function} ({_FOLDER.sub('', _INSTALLED.sub('', self.file))}:{self.line})"

    @property
    def in_full(self) -> str:
        """Return the full file name, line, function and code."""
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
    """Return the frames of the main thread, innermost first; empty when the dump has none.

    faulthandler goes from the newest thread to the oldest: the main thread is the last one.
    """
    threads: list[list[Frame]] = [[]]
    for line in takewhile(lambda line: line != LAST_OUTPUT, dump.splitlines()):
        if line.endswith("(most recent call first):"):
            threads.append([])
        elif match := _FRAME.fullmatch(line):
            threads[-1].append(Frame(match[1], int(match[2]), match[3]))
    return tuple(next((frames for frames in reversed(threads) if frames), ()))


def own_frame(traceback: str) -> Frame | None:
    """Return the innermost call of a Python traceback that is neither of the harness nor of an installed package."""
    own = (call for call in reversed(_calls(traceback)) if not _FOREIGN.search(call.file))
    return next(own, None)


def raised_frames(traceback: str) -> tuple[Frame, ...]:
    """Return the calls of torch and torchao in a Python traceback, innermost last, without wrappers and dispatch."""
    return tuple(call for call in _calls(traceback) if _FIELD.search(call.file) and not _PLUMBING.search(call.file))


def innermost_calls(traceback: str, number: int) -> tuple[Frame, ...]:
    """Return the last calls of a Python traceback, of whatever file, innermost first."""
    return tuple(_calls(traceback)[::-1][:number])


def _calls(traceback: str) -> list[Frame]:
    lines = traceback.partition(LAST_OUTPUT)[0].splitlines()
    return [
        Frame(match[1], int(match[2]), match[3], after.strip() if after.startswith("    ") else "")
        for line, after in pairwise((*lines, ""))
        if (match := _RAISED_AT.fullmatch(line))
    ]


def place_of(stack: Sequence[Frame]) -> StackLocation | None:
    """Return where the rank with this stack is; None when the stack shows nothing of what it ran.

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
    raised = last and own is not None and re.match(r"(if .*: )?(raise|assert) ", own.code) is not None
    return raised and failure.phase == "build" and (any_error or failure.message.startswith("NotImplementedError"))


ENGINE = "engine"  # instead of a check, in findings about ranks that did not finish

RULES = Rules("engine", Stage.RUN, only={"a rank that hangs": "stuck", "a damaged trace": "unknown report"})
UNKNOWN = RULES("unknown", "the launcher reports {status}, but no rank reports a cause")
RAISED = RULES("raised", "{ranks} {end}", key=("error",))
STUCK = RULES("stuck", "{ranks} {end}")
LOST = RULES("lost", "{ranks} {end}")
REPORT = RULES("report", "{report}")

_CALLED = ",\n    called from "


class _Kind(NamedTuple):
    """What ranks that failed alike have in common. `place`: of a rank that is stuck; `own`: of one that raised."""

    kind: str
    phase: str
    message: str
    place: StackLocation | None
    own: Frame | None

    def __str__(self) -> str:
        backward = ", backward" if self.place is not None and self.place.backward else ""
        at = f", at {self.own.in_full}" if self.own is not None else ""
        description = self.place or f"{advice(self.message).what}{at}"
        limit = f", {self.message}" if self.place is not None and "within" in self.message else ""
        return f"{self.kind}{f' in {self.phase}' if self.phase else ''}{backward}: {description}{limit}"

    @property
    def found(self) -> str:
        return self.kind if self.place is None else f"{self.kind} in {_CALLED.join(map(str, self.place.calls))}"

    @property
    def waits(self) -> bool:
        return self.place is not None and bool(self.place.collective)


def failures(run: Run, status: str) -> tuple[Finding, ...]:
    """Return how the ranks failed. Consequences only where no cause is known.

    Of stuck ranks those come first that wait for no other, then those of which there are fewest. The first finding then
    says what the other ranks do.
    """
    groups = _groups(run.causes or run.failures)
    if not groups:
        return (UNKNOWN.finding(status=status),)
    return tuple(
        {"raised": RAISED, "stuck": STUCK}.get(kind.kind, LOST).finding(
            end=f"{kind}{_others(run, groups) if kind.place and not index else ''}",
            error=kind.message,
            ranks=ranks,
            expected="every rank returns",
            found=kind.found,
            fix=advice(kind.message).fix,
        )
        for index, (kind, ranks) in enumerate(groups)
    )


def _groups(causes: Iterable[RankFailure]) -> list[tuple[_Kind, list[int]]]:
    groups: dict[_Kind, list[int]] = {}
    for failure in sorted(causes, key=lambda failure: failure.rank):
        place = place_of(main_stack(failure.traceback)) if failure.kind == "stuck" else None
        own = own_frame(failure.traceback) if failure.kind == "raised" else None
        groups.setdefault(_Kind(failure.kind, failure.phase, failure.message, place, own), []).append(failure.rank)
    stuck = any(kind.place for kind in groups)
    return sorted(groups.items(), key=lambda group: (group[0].waits, len(group[1]))) if stuck else list(groups.items())


def _others(run: Run, groups: list[tuple[_Kind, list[int]]]) -> str:
    does = [
        f"{format_ranks(ranks)} {'wait' if len(ranks) > 1 else 'waits'} in {kind.place.collective}"
        for kind, ranks in groups[1:]
        if kind.place is not None and kind.place.collective
    ]
    returned = [trace.rank for trace in run.traces]
    return "".join(f"; {clause}" for clause in (*does, *([f"{format_ranks(returned)} returned"] if returned else [])))


# What to do about errors that targets often run into, recognized by a pattern anywhere in their text

_MISFIT = re.compile(r"TargetMisfit: (?P<what>.*?) Fix: (?P<fix>.*)", re.DOTALL)
_KNOWN = {
    r"did not finish within": "if it is only slow, raise the limit with `--timeout-s N` or `--timeout-factor N`.",
    r"fails on this machine, not in the case": "see `nvidia-smi` and the Xid errors in `dmesg`; end other processes "
    "on the GPU, or leave it out with CUDA_VISIBLE_DEVICES.",
    r"killed by SIGBUS[^:]*, not by the harness": "see `df -h /dev/shm`: a container gets more of it by `docker run "
    "--shm-size=8g`.",
    r"killed by SIG[A-Z]+[^:]*, not by the harness|no memory or no disk space left": "see `dmesg` for the OOM killer, "
    "`free -h`, `df -h` and the limits of the job or container; smaller values of --slots and -j run fewer ranks at "
    "the same time.",
    r"initialize the default process group twice": "the harness has initialized the process group before build(): "
    "remove dist.init_process_group(), or guard it with `if not dist.is_initialized()`.",
    r"'(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'": "ranks are not started by torchrun: "
    "use dist.get_rank(), dist.get_world_size() and world.device instead of its environment variables.",
    r"not compiled with CUDA|[Nn]o NVIDIA driver|No CUDA GPUs|CUDA driver": "build on world.device and "
    "hard-code no device: here it is the virtual FP8 device, a CPU.",
    r"divisible by (?:16\b|inner block size\b)|multiple of (?:16|32)\b": "float8 matmuls need multiples of "
    "16 (MXFP8: 32), in shards too: change the sizes, exclude the linear (filter_fqns), or pad the inner dimension "
    "(pad_inner_dim, not in MXFP8).",
    r"mixed torch\.Tensor and DTensor": "a plain tensor meets a DTensor. In the optimizer: make one parameter group "
    "per device mesh. In forward: distribute the tensor too, or call .to_local() on the other.",
    r"element 0 of tensors does not require grad": "the loss has no graph: look for torch.no_grad(), .detach(), "
    ".item() or frozen parameters before backward().",
    r"backward through the graph a second time": "call backward() once per microbatch, on the loss of that microbatch.",
    r"Missing key in checkpoint state_dict: \S*param_groups": "parameter groups differ between layouts: save "
    "optimizer options per parameter, with StateDictOptions(flatten_optimizer_state_dict=True) in get_state_dict and "
    "set_state_dict.",
    r"No module named": "install it next to fp8-harness, or run from its folder: the project and current folder are "
    "searched.",
    r"must be single-threaded to fork": "start no thread at import or in preload(): ranks are forked from that "
    "process. Start it in build(), or switch it off before the import: `tqdm.tqdm.monitor_interval = 0`, "
    "`JE_ARROW_MALLOC_CONF=background_thread:false` for pyarrow. Create loggers and data loaders with threads in "
    "build(). `--launcher torchrun` runs it unchanged.",
    r"must use no device before it forks": "use no GPU at import or in preload(): ranks are forked from that process, "
    'which breaks CUDA. `torch.cuda.is_available()` and `torch.cuda.device_count()` are safe there; tensors on "cuda" '
    "and `torch.cuda.get_device_capability()` belong in build(). `--launcher torchrun` runs it unchanged.",
    r"unexpected keyword argument|missing \d+ required positional argument|positional arguments? but \d+ w": "the "
    "harness calls build(case, world) and step(microbatches); compare the signatures.",
}


class Advised(NamedTuple):
    """An error without its advice, and the advice, or None."""

    what: str
    fix: str | None


def is_misfit(error: str) -> bool:
    """True for an error that the harness raised about a target: its text is whole, and its traceback all ours."""
    return _MISFIT.search(error) is not None


def advice(error: str) -> Advised:
    """Return what an error of a rank or the engine means, and what to do about it."""
    misfit = _MISFIT.search(error)
    if misfit:
        return Advised(what=f"{error[: misfit.start()]}{misfit['what']}", fix=misfit["fix"])
    return Advised(what=error, fix=next((fix for pattern, fix in _KNOWN.items() if re.search(pattern, error)), None))


# A reference that did not finish

_CALLS = 3  # of the traceback of a reference that raised


def why_unfinished(run: Run | None) -> str:
    """Why a run did not finish, as the end of a sentence: ": TypeError: ..."; empty if nothing is known of it."""
    causes = () if run is None else run.causes or run.failures
    return f": {causes[0].message.partition(chr(10))[0]}" if causes else ""


def unfinished(rule: Rule, who: str, run: Run | None, case_run: Run) -> Finding:
    """Return the finding of a check that cannot compare `case_run` with a run of `who`, with its last calls."""
    return rule.finding(who=who, why=why_unfinished(run), expected=f"a run of {who}", found=_ending(run, case_run))


def _ending(run: Run | None, case_run: Run) -> str | None:
    causes = () if run is None else run.causes or run.failures
    if not causes:
        return None
    first = causes[0]
    phase = f" in {first.phase}" if first.phase else ""
    calls = innermost_calls(first.traceback, _CALLS)
    lines = [f"  {'called from' if place else 'in'} {call}" for place, call in enumerate(calls)]
    software = case_run.traces[0].software if case_run.traces else {}
    versions = ", ".join(f"{name} {software[name]}" for name in ("torch", "torchao") if name in software)
    ended = f"{format_ranks([first.rank])} {first.kind}{phase}" + (f", with {versions}" if versions else "")
    return "\n".join([ended, *lines])
