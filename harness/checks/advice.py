"""Advice: what to do about errors that targets often run into, told by their text."""

from __future__ import annotations

import re
from typing import NamedTuple

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
        r"divisible by 16\b|multiple of 16\b",
        "float8 matmuls need sizes that are multiples of 16, those of a shard too: choose such sizes, leave the linear "
        "out (filter_fqns), or pad the inner one (pad_inner_dim).",
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


def advice(error: str) -> Advised:
    """What an error of a rank or of the engine says, and what to do about it."""
    misfit = _MISFIT.search(error)
    if misfit:
        return Advised(what=f"{error[: misfit.start()]}{misfit['what']}", fix=misfit["fix"])
    return Advised(what=error, fix=next((each.fix for each in _KNOWN if re.search(each.pattern, error)), None))
