"""Weight and bias gradients of layer_norm in bfloat16 on a CPU, against the same in float64, by number of rows."""

import torch
from torch.nn import functional as F

torch.set_num_threads(1)  # fewer rows for each partial sum with more threads


def gradients(dtype, *tensors):
    x, weight, bias, grad = (tensor.to(dtype, copy=True) for tensor in tensors)
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    F.layer_norm(x.requires_grad_(), weight.shape, *parameters).backward(grad)
    return [x.grad.double(), *(parameter.grad.double() for parameter in parameters)]


def distances(found, exact):
    return [round(((a - b).norm() / b.norm()).item(), 4) for a, b in zip(found, exact, strict=True)]


wrong = False
for rows in (64, 1024, 16384):
    torch.manual_seed(0)
    tensors = [
        t.bfloat16() for t in (torch.randn(rows, 128), torch.ones(128), torch.zeros(128), torch.randn(rows, 128))
    ]
    exact = gradients(torch.float64, *tensors)
    expected = distances([value.bfloat16().double() for value in exact], exact)
    actual = distances(gradients(torch.bfloat16, *tensors), exact)
    print(f"{rows} rows of 128: relative error of [x.grad, weight.grad, bias.grad]")
    print("expected:", expected, "(rounded to bfloat16 once)")
    print("actual:  ", actual)
    wrong |= max(actual) > 3 * max(expected)
raise SystemExit(wrong)
