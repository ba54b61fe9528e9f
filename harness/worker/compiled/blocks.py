"""How a case's `compile` and `async_tp` become torch calls: every transformer block by itself, as torchtitan does it.

The order is torchtitan's: checkpointing inside, then compile, then FSDP2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.distributed._symmetric_memory as symm_mem
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from harness.spec.case import Case
from harness.worker.compiled.backend import graph_backend
from harness.worker.model import Llama
from harness.worker.virtual import rng
from harness.worker.virtual import symm_mem as virtual_symm_mem


def apply_compile(model: Llama, tp: DeviceMesh | None, case: Case) -> None:
    """Compile the blocks of `model` in place, with async TP over `tp` where the case asks for it."""
    _configure(case)
    if case.layout.async_tp:
        assert tp is not None, "async TP needs a TP mesh"
        enable_async_tp(tp, case)
    if case.layout.wait_for_embedding:
        model.tok_embeddings.register_forward_hook(_finished)
    backend = graph_backend if case.compile == "graph" else "inductor"
    for name, block in list(model.layers.items()):
        compiled: Any = torch.compile(block, backend=backend, fullgraph=True)
        model.layers[name] = compiled


def enable_async_tp(tp: DeviceMesh, case: Case) -> None:
    """Switch the fusion pass on, and symmetric memory for the TP group: without it the pass fuses nothing, silently."""
    torch._inductor.config._micro_pipeline_tp = True
    group_name = tp.get_group().group_name
    if case.layout.symm_mem == "fallback":
        virtual_symm_mem.use_reference(group_name)
    else:
        symm_mem.enable_symm_mem_for_group(group_name)


def forget() -> None:
    """Undo for this process what `apply_compile` switched on, and drop everything that was compiled."""
    torch._dynamo.reset()
    torch._inductor.config._micro_pipeline_tp = False
    virtual_symm_mem.forget()
    rng.skipped.clear()


def _configure(case: Case) -> None:
    config = torch._inductor.config
    config.compile_threads = 1  # a rank is a process of its own already
    # A cache hit skips the passes, and with them what the probe records.
    config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    # torchtitan 0.2.2 does so for this recipe: https://github.com/pytorch/pytorch/issues/150859
    config.emulate_precision_casts = case.float8.recipe == "rowwise"


def _finished(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    """The embedding's output as a plain tensor: torch 2.13.0 loses the gradient of a compiled block's async input."""
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output
