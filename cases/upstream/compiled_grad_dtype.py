"""Tensor.grad_dtype = float32 of a bfloat16 parameter, in eager and in compiled code."""

import torch

torch.manual_seed(0)
x = torch.randn(8, 16)
weight = torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
weight.grad_dtype = torch.float32


def gradient(function):
    weight.grad = None
    function(weight).sum().backward()
    return weight.grad


def scaled(weight):
    return x * weight


exact = x.sum(0)  # the gradient, in float32
eager, compiled = gradient(scaled), gradient(torch.compile(scaled, backend="aot_eager"))
print("expected:", eager.dtype, "and", (eager - exact).abs().max().item(), "from the exact gradient (eager)")
print("actual:  ", compiled.dtype, "and", (compiled - exact).abs().max().item(), "from it (torch.compile)")
raise SystemExit(not torch.equal(eager, compiled))
