"""Applies `compile` and `async_tp` of a case: every transformer block is compiled separately, as in torchtitan.

The order is torchtitan's: checkpointing, then compile, then FSDP2.
"""

from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from harness.matrix.case import Case
from harness.worker.targets.reference.model import Llama
from harness.worker.virtual.graph_backend import graph_backend


def apply_compile(model: Llama, tp: DeviceMesh | None, case: Case) -> None:
    """Compile the blocks of `model` in place, with async TP over `tp` if the case asks for it."""
    _configure(case)
    if case.layout.async_tp:
        from harness.worker.virtual import symm_mem

        assert tp is not None, "async TP needs a TP mesh"
        symm_mem.enable_async_tp(tp.get_group(), fallback=case.layout.symm_mem == "fallback")
    if case.layout.wait_for_embedding:
        model.tok_embeddings.register_forward_hook(_finished)
    backend = graph_backend if case.compile == "graph" else "inductor"
    for name, block in list(model.layers.items()):
        compiled: Any = torch.compile(block, backend=backend, fullgraph=True)
        model.layers[name] = compiled


def _configure(case: Case) -> None:
    config = torch._inductor.config
    config.compile_threads = 1  # every rank is already a separate process
    # A cache hit skips the passes, which is where the probe records.
    config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    # As torchtitan 0.2.2 does for this recipe: https://github.com/pytorch/pytorch/issues/150859
    config.emulate_precision_casts = case.float8.recipe == "rowwise"


def _finished(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    """Wait for the embedding's output: torch 2.13.0 loses the gradient of a compiled block's async input."""
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output
