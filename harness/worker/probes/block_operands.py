"""The operand probe of runs whose scales are those of blocks: the seams of torchao 0.18's `mx_mm`, `fp8_blockwise_mm`.

Of their three matmuls every operand is cast anew. Scales are recorded as torchao keeps them, as [lines, blocks along
the contracted dim]: a value times its scale is the operand.
"""

from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch

from harness.matrix.recipes import OPERATORS, TENSOR
from harness.trace.operands import Role
from harness.worker.probes.cast_numbers import Cast
from harness.worker.probes.operands import OperandProbe
from harness.worker.tensors.places import local_part, local_tensor
from harness.worker.virtual.casts import BLOCKWISE


class _Seams(NamedTuple):
    """Names of torchao: an autograd function, the linears that apply it, and functions that cast.

    `casts`: the dim that is contracted, and whether the data and the scales that are returned are transposed.
    """

    function: str
    linears: tuple[str, ...]
    casts: Mapping[str, Sequence[int]]


_MX = "torchao.prototype.moe_training.mxfp8_linear"
_SEAMS = {
    "mx": _Seams(
        f"{_MX}.mx_mm",
        ("torch.nn.Linear", f"{_MX}.MXFP8Linear"),
        {
            "torchao.prototype.mx_formats.mx_tensor.MXTensor.to_mx": (-1, False, False),
            f"{_MX}._to_mxfp8_dim1_kernel_wrapper": (0, True, False),
        },
    ),
    "blockwise": _Seams(
        f"{BLOCKWISE}.fp8_blockwise_mm",
        (f"{BLOCKWISE}.Float8BlockwiseLinear",),
        {f"{BLOCKWISE}.{name}": how[1:4] for name, how in OPERATORS.items() if "blockwise" in name},
    ),
}


class BlockOperandProbe(OperandProbe):
    """Records the casts and matmuls of converted linears, and of those whose weight is wrapped."""

    def install(self) -> None:
        super().install()
        seams = _SEAMS[self._case.float8.traits.kernel]
        for linear in map(resolve_name, seams.linears):
            self.replace(linear, "forward", self.watch_linear(linear.forward))
        function: Any = resolve_name(seams.function)
        self.replace(function, "forward", staticmethod(self._watch_forward(function.forward)))
        watched = self.watch_backward(self._watch_backward(function.backward))
        self.replace(function, "backward", staticmethod(watched))
        for path, how in seams.casts.items():
            owner, name = resolve_name(path.rpartition(".")[0]), path.rpartition(".")[2]
            watched = self._watch_block_cast(getattr(owner, name), *how)
            self.replace(owner, name, staticmethod(watched) if isinstance(owner, type) else watched)

    def _watch_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
            self.remember(ctx)
            self.place.operands = _storages(source, weight)
            return original(ctx, source, weight, *args)

        return forward

    def _watch_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            unpacked = _Unpacked(ctx)
            self.place.operands = _storages(*unpacked.saved_tensors)
            return original(unpacked, *grads)

        return backward

    def _watch_block_cast(self, original: Callable[..., Any], dim: int, *turned: int) -> Callable[..., Any]:
        def cast(source: torch.Tensor, *args: Any, **options: Any) -> Any:
            result = original(source, *args, **options)
            given = result if isinstance(result, tuple) else (result.qdata, result.scale)
            bits, scale = (
                tensor.t() if turns else tensor for tensor, turns in zip(map(local_tensor, given), turned, strict=True)
            )
            role, traits = self._role(source), self._case.float8.traits
            block = traits.block_of("w" if role == "weight" else "i") or TENSOR
            seen = Cast(local_part(source), bits, scale, dim, block, traits.rounds_scales_down)
            self.record_cast(seen, logical=source, role=role)
            return result

        return cast

    def _role(self, source: torch.Tensor) -> Role:
        """By the memory of the source: a copy that a reshape has made is of an activation."""
        activation: Role = "grad_output" if self.place.phase == "backward" else "input"
        return self.place.operands.get(_storage(source), activation)


class _Unpacked:
    """The context of a backward, whose saved tensors are unpacked once: a checkpoint refuses to unpack them again."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _storages(source: torch.Tensor, weight: torch.Tensor) -> dict[int, Role]:
    return {_storage(source): "input", _storage(weight): "weight"}


def _storage(tensor: torch.Tensor) -> int:
    return int(local_part(tensor).untyped_storage().data_ptr())
