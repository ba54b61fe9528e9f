"""Async TP: inductor's pass that fuses collectives with matmuls, and the symmetric memory that it needs."""

import torch._inductor.config
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.device_mesh import DeviceMesh

from harness.matrix.case import Case
from harness.worker.virtual import symm_mem as virtual_symm_mem


def enable_async_tp(tp: DeviceMesh, case: Case) -> None:
    """Enable the fusion pass, and symmetric memory for the TP group, without which the pass silently fuses nothing."""
    torch._inductor.config._micro_pipeline_tp = True
    group_name = tp.get_group().group_name
    if case.layout.symm_mem == "fallback":
        virtual_symm_mem.use_reference(group_name)
    else:
        symm_mem.enable_symm_mem_for_group(group_name)
