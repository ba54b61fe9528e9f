"""How ranks failed: a finding for ranks that failed alike, or that are stuck at the same place."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from harness.checks.rule import Rules, Stage
from harness.checks.stacks import OwnFrame, StackLocation, main_stack, own_frame, place_of
from harness.text import format_ranks
from harness.trace import RankFailure, Run
from harness.verdict import Finding

ENGINE = "engine"  # in place of a check, in findings about ranks that did not finish

RULES = Rules("engine", Stage.RUN)
UNKNOWN = RULES("unknown", "the engine reports {status}, but no rank reports a cause")
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
    own: OwnFrame | None

    def __str__(self) -> str:
        backward = ", backward" if self.place is not None and self.place.backward else ""
        at = f", at {self.own}" if self.own is not None else ""
        description = self.place or f"{advice(self.message).what}{at}"
        return f"{self.kind}{f' in {self.phase}' if self.phase else ''}{backward}: {description}"

    @property
    def found(self) -> str:
        return self.kind if self.place is None else f"{self.kind} in {_CALLED.join(map(str, self.place.calls))}"

    @property
    def waits(self) -> bool:
        return self.place is not None and bool(self.place.collective)


def failures(run: Run, status: str) -> tuple[Finding, ...]:
    """How the ranks failed. Consequences only where no cause is known.

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


# What to do about errors that targets often run into, recognized by their text

_MISFIT = re.compile(r"TargetMisfit: (?P<what>.*?) Fix: (?P<fix>.*)", re.DOTALL)


class _Advice(NamedTuple):
    """What to do about errors whose text matches `pattern`, which is matched anywhere in it."""

    pattern: str
    fix: str


_KNOWN = (
    _Advice(
        r"fails on this machine, not in the case",
        "see `nvidia-smi` and the Xid errors in `dmesg`; end other processes on the GPU, or leave it out with "
        "CUDA_VISIBLE_DEVICES.",
    ),
    _Advice(
        r"killed by SIGBUS[^:]*, not by the harness",
        "see `df -h /dev/shm`: a container gets more of it by `docker run --shm-size=8g`.",
    ),
    _Advice(
        r"killed by SIG[A-Z]+[^:]*, not by the harness|no memory or no disk space left",
        "see `dmesg` for the OOM killer, `free -h`, `df -h` and the limits of the job or container; smaller values of "
        "--slots and -j run fewer ranks at the same time.",
    ),
    _Advice(
        r"initialize the default process group twice",
        "the harness has initialized the process group before build(): leave out dist.init_process_group(), or guard "
        "it by `if not dist.is_initialized()`.",
    ),
    _Advice(
        r"'(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'",
        "ranks are not started by torchrun: use dist.get_rank(), dist.get_world_size() and world.device in place of "
        "its environment variables.",
    ),
    _Advice(
        r"not compiled with CUDA|[Nn]o NVIDIA driver|No CUDA GPUs|CUDA driver",
        "build on world.device, and name no device of your own: on this machine it is the virtual FP8 device, a cpu.",
    ),
    _Advice(
        r"divisible by (?:16\b|inner block size\b)|multiple of (?:16|32)\b",
        "float8 matmuls need sizes that are multiples of 16, of 32 in MXFP8, those of a shard too: choose such sizes, "
        "leave the linear out (filter_fqns), or pad the inner one (pad_inner_dim; not in MXFP8).",
    ),
    _Advice(
        r"mixed torch\.Tensor and DTensor",
        "a plain tensor meets a distributed one. In the optimizer: give parameters of every device mesh a parameter "
        "group of their own. In forward: distribute the tensor too, or take .to_local() of the other.",
    ),
    _Advice(
        r"element 0 of tensors does not require grad",
        "the loss has no graph: look for torch.no_grad(), .detach(), .item() or frozen parameters before backward().",
    ),
    _Advice(
        r"backward through the graph a second time",
        "call backward() once for every microbatch, on a loss of its own.",
    ),
    _Advice(
        r"Missing key in checkpoint state_dict: \S*param_groups",
        "another layout has other parameter groups: save options of an optimizer by parameter, with "
        "StateDictOptions(flatten_optimizer_state_dict=True) in get_state_dict and set_state_dict.",
    ),
    _Advice(
        r"No module named",
        "install it into the environment of fp8-harness, or run where its file is: the folder of the project and the "
        "current one are searched.",
    ),
    _Advice(
        r"must be single-threaded to fork",
        "start no thread at import or in preload(): ranks are forked from that process. Start it in build(), or switch "
        "it off before the import: `tqdm.tqdm.monitor_interval = 0`, `JE_ARROW_MALLOC_CONF=background_thread:false` "
        "for pyarrow; loggers and data loaders with threads belong into build(). `--engine torchrun` runs it as it is.",
    ),
    _Advice(
        r"must use no device before it forks",
        "use no GPU at import or in preload(): ranks are forked from that process, which breaks CUDA. "
        '`torch.cuda.is_available()` and `torch.cuda.device_count()` are safe there; tensors on "cuda" and '
        "`torch.cuda.get_device_capability()` belong into build(). `--engine torchrun` runs it as it is.",
    ),
    _Advice(
        r"unexpected keyword argument|missing \d+ required positional argument|positional arguments? but \d+ w",
        "the harness calls build(case, world) and step(microbatches); compare the signatures.",
    ),
)


class Advised(NamedTuple):
    """An error without its advice, and the advice; None where there is none."""

    what: str
    fix: str | None


def is_misfit(error: str) -> bool:
    """True for an error that the harness raised about a target: its text is whole, and its traceback all ours."""
    return _MISFIT.search(error) is not None


def advice(error: str) -> Advised:
    """What an error of a rank or of the engine says, and what to do about it."""
    misfit = _MISFIT.search(error)
    if misfit:
        return Advised(what=f"{error[: misfit.start()]}{misfit['what']}", fix=misfit["fix"])
    return Advised(what=error, fix=next((known.fix for known in _KNOWN if re.search(known.pattern, error)), None))
