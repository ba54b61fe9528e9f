"""A rank program that returns what torch reports about this machine. The process that loads CUDA ends with it."""

from collections.abc import Mapping

import msgspec
import torch
from torch.cuda import nccl

from harness.engine.program import RankContext
from harness.plugins.gpu.record import DeviceFacts, TorchFacts


def preload(options: Mapping[str, str]) -> None:
    torch.set_num_threads(1)


def rank_main(context: RankContext) -> bytes:
    facts = TorchFacts(torch=str(torch.__version__), cuda=torch.version.cuda or "", nccl=_nccl())
    try:
        if facts.cuda:
            torch.cuda.init()
            facts = msgspec.structs.replace(facts, devices=tuple(map(_device, range(torch.cuda.device_count()))))
    except RuntimeError as error:
        facts = msgspec.structs.replace(facts, error=" ".join(str(error).split()))
    return msgspec.msgpack.encode(facts)


def _nccl() -> str:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return ""
    return ".".join(map(str, nccl.version()))


def _device(index: int) -> DeviceFacts:
    free, total = torch.cuda.mem_get_info(index)
    return DeviceFacts(
        index=index,
        name=torch.cuda.get_device_name(index),
        capability=torch.cuda.get_device_capability(index),
        total_bytes=total,
        free_bytes=free,
    )
