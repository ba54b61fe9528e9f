"""Rounding noise: a BF16 model with random errors as large as those of float8 where a case casts to float8.

It says how far a sound FP8 run may be from BF16 without running any FP8 code: a random error, uniform within half a
unit in the last place, stands for the rounding of each cast. Whatever is not cast gets the errors of bfloat16, which a
run in another dtype or another order of sums has against BF16.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from harness.matrix.recipes import E4M3, MANTISSA_BITS
from harness.request import Noise
from harness.worker.tensors.names import clean_fqn

BFLOAT16_BITS = 7

# A unit in the last place of m * 2^e is 2^(e - bits): relative to the value, 1/m of 2^-bits with 1 <= m < 2. This is
# the root mean square of 1/m over values of all magnitudes.
_MEAN_UNIT = 0.7355

# The largest value of e4m3 in a block whose scale is rounded down, in units of the power of two below its amax.
_LARGEST = 1.75


class _Rounding(NamedTuple):
    """Bits of the mantissa that are left of a tensor.

    `saturates`: in blocks of so many values, what is above the largest is cut to that, which is no random error.
    """

    bits: int
    saturates: int = 0


_BFLOAT16 = _Rounding(BFLOAT16_BITS)


def add_noise(model: nn.Module, noise: Noise, draw: int) -> None:
    """Every linear, norm and embedding of `model` computes with the errors of this draw from now on."""
    generator = torch.Generator().manual_seed(draw)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            converted = clean_fqn(name) in noise.float8_fqns
            float8 = (_Rounding(MANTISSA_BITS[dtype], noise.saturates) for dtype in (E4M3, noise.grad_output_dtype))
            operand, gradient = float8 if converted else (_BFLOAT16, _BFLOAT16)
            _make_noisy(module, operand, gradient, generator)
        elif isinstance(module, (nn.RMSNorm, nn.Embedding)):
            module.register_forward_hook(
                lambda _, __, output: _with_errors(output, generator, forward=_BFLOAT16, backward=_BFLOAT16)
            )


def _make_noisy(linear: nn.Linear, operand: _Rounding, gradient: _Rounding, generator: torch.Generator) -> None:
    def forward(given: torch.Tensor) -> torch.Tensor:
        operands = (_with_errors(tensor, generator, forward=operand) for tensor in (given, linear.weight))
        output = _with_errors(F.linear(*operands), generator, forward=_BFLOAT16, backward=gradient)
        return output if linear.bias is None else output + linear.bias  # its gradient sums what no cast has rounded

    linear.forward = forward  # type: ignore[method-assign, assignment]


def _with_errors(
    given: torch.Tensor, generator: torch.Generator, *, forward: _Rounding, backward: _Rounding | None = None
) -> torch.Tensor:
    noisy: torch.Tensor = _Errors.apply(given, generator, forward, backward)
    return noisy


class _Errors(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, generator: torch.Generator, rounding: _Rounding, backward: _Rounding | None
    ) -> torch.Tensor:
        ctx.backward_with = generator, backward
        return _rounded_at_random(given, rounding, generator)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        generator, rounding = ctx.backward_with
        return grads[0] if rounding is None else _rounded_at_random(grads[0], rounding, generator), None, None, None


def _rounded_at_random(given: torch.Tensor, rounding: _Rounding, generator: torch.Generator) -> torch.Tensor:
    """Return the tensor with random errors as large as those of a rounding, in its dtype."""
    wide = (_cut(given, rounding.saturates) if rounding.saturates else given).float()
    errors = torch.rand(given.shape, generator=generator).sub_(0.5).to(given.device)
    return torch.addcmul(wide, wide, errors, value=_MEAN_UNIT * 2.0**-rounding.bits).to(given.dtype)


def _cut(given: torch.Tensor, length: int) -> torch.Tensor:
    blocks = given.unflatten(-1, (-1, length))
    largest = _LARGEST * torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))))
    return blocks.clamp(-largest, largest).flatten(-2)
