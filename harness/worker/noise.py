"""Rounding noise: a BF16 model with random errors as large as those of float8 where a case casts to float8.

It says how far a sound FP8 run may be from BF16 without running any FP8 code: a random error, uniform within half a
unit in the last place, stands for the rounding of each cast. Whatever is not cast gets the errors of bfloat16, which a
run in another dtype or another order of sums has against BF16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from harness.matrix.recipes import BLOCK, E4M3, MANTISSA_BITS
from harness.request import Noise
from harness.worker.probes.sketches import clean_fqn

BFLOAT16_BITS = 7

# A unit in the last place of m * 2^e is 2^(e - bits): relative to the value, 1/m of 2^-bits with 1 <= m < 2. This is
# the root mean square of 1/m over values of all magnitudes.
_MEAN_UNIT = 0.7355


# The largest value of e4m3 in a block whose scale is rounded down, in units of the power of two below its amax.
_LARGEST = 1.75


class _Bits(NamedTuple):
    """Bits of the mantissa to which a linear rounds its operands and the gradient of its output.

    `saturates`: what is above the largest value of its block is cut to that, which is no random error.
    """

    operand: int
    gradient: int
    saturates: bool = False


def add_noise(model: nn.Module, noise: Noise) -> None:
    """Every linear, norm and embedding of `model` computes with the errors of this draw from now on."""
    generator = torch.Generator().manual_seed(noise.draw)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            converted = clean_fqn(name) in noise.float8_fqns
            bits = _Bits(MANTISSA_BITS[E4M3], MANTISSA_BITS[noise.grad_output_dtype], noise.saturates)
            _make_noisy(module, bits if converted else _Bits(BFLOAT16_BITS, BFLOAT16_BITS), generator)
        elif isinstance(module, (nn.RMSNorm, nn.Embedding)):
            module.register_forward_hook(
                lambda _, __, output: _with_errors(output, generator, forward=BFLOAT16_BITS, backward=BFLOAT16_BITS)
            )


def _make_noisy(linear: nn.Linear, bits: _Bits, generator: torch.Generator) -> None:
    def forward(given: torch.Tensor) -> torch.Tensor:
        cut = _Cut.apply if bits.saturates else torch.nn.Identity()
        operands = (cut(each) for each in (given, linear.weight))
        operand, weight = (_with_errors(each, generator, forward=bits.operand) for each in operands)
        output = _with_errors(F.linear(operand, weight), generator, forward=BFLOAT16_BITS, backward=bits.gradient)
        output = _CutGradient.apply(output) if bits.saturates else output
        return output if linear.bias is None else output + linear.bias  # its gradient sums what no cast has rounded

    linear.forward = forward  # type: ignore[method-assign, assignment]


class _Cut(torch.autograd.Function):
    """What a cast with a scale that is rounded down leaves of a tensor; casts pass gradients on."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return _cut(given)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class _CutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _cut(grads[0])


def _cut(given: torch.Tensor) -> torch.Tensor:
    blocks = given.unflatten(-1, (-1, BLOCK))
    largest = _LARGEST * torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))))
    return blocks.clamp(-largest, largest).flatten(-2)


def _with_errors(
    given: torch.Tensor, generator: torch.Generator, *, forward: int, backward: int | None = None
) -> torch.Tensor:
    noisy: torch.Tensor = _Errors.apply(given, generator, forward, backward)
    return noisy


class _Errors(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, generator: torch.Generator, bits: int, backward: int | None
    ) -> torch.Tensor:
        ctx.backward_with = generator, backward
        return _rounded_at_random(given, bits, generator)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        generator, bits = ctx.backward_with
        return grads[0] if bits is None else _rounded_at_random(grads[0], bits, generator), None, None, None


def _rounded_at_random(given: torch.Tensor, bits: int, generator: torch.Generator) -> torch.Tensor:
    """The tensor with random errors as large as those of rounding to `bits` mantissa bits, in its dtype."""
    wide = given.float()
    errors = torch.rand(given.shape, generator=generator).sub_(0.5).to(given.device)
    return torch.addcmul(wide, wide, errors, value=_MEAN_UNIT * 2.0**-bits).to(given.dtype)
