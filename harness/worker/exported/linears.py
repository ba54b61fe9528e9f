"""What every float8 linear of a run computes, and what one rank computes from the same operands."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.float8.float8_linear import Float8Linear

from harness.worker.exported.given import LINEAR_LIMIT

CALLS: list[dict[str, Any]] = []


def watch(model):
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear):  # what is between the hooks of its TP style
            module.register_forward_hook(lambda *call, name=name: keep(name, *call), prepend=True)


def keep(name, module, args, output):
    kept = {"name": name, "module": module, "weight": whole(module.weight), "x": args[0], "y": output}
    args[0].register_hook(lambda grad: kept.update(grad_x=grad))
    output.register_hook(lambda grad: kept.update(grad_y=grad))
    CALLS.append(kept)


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def linears():
    """By name what a call in the last step computed, what one rank computes, and how far it may be."""
    compared = {}
    for call in [each for each in CALLS if "grad_x" in each]:  # none that checkpointing repeats
        name, module = call["name"], call["module"]
        alone = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        alone.weight = nn.Parameter(call["weight"])
        x = whole(call["x"]).requires_grad_()
        y = Float8Linear.from_float(alone, config=module.config)(x)
        y.backward(whole(call["grad_y"]))
        grad = alone.weight.grad.float()
        dist.all_reduce(grad)  # TP ranks have the same, others another batch
        compared[f"the output of {name}"] = whole(call["y"]), y.detach(), LINEAR_LIMIT
        compared[f"the gradient of the input of {name}"] = whole(call["grad_x"]), x.grad, LINEAR_LIMIT
        mean = grad / dist.get_world_size()
        compared[f"the gradient of the weight of {name}"] = whole(module.weight.grad), mean, LINEAR_LIMIT
    return compared
