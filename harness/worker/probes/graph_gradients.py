"""Holds the gradients that the optimizer gets against those that generated code has returned.

What lies between is one rank's sum over microbatches, bit for bit, and sums over ranks, which are repeated in float64:
FSDP2's, and that of parameters that TP ranks hold alike and use for other tokens each. Clipping scales all gradients
by one number, which most of them show; whether it is the right one is for check `clipping`.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

from harness.matrix.case import Case
from harness.trace.graphs import GradientDistance
from harness.worker.process.process import PROCESS, in_backward
from harness.worker.tensors.names import clean_fqn, is_compiled
from harness.worker.tensors.places import local_tensor
from harness.worker.tensors.sums import relative_distance

_TP = "tp"


class _Gradient(NamedTuple):
    """What the optimizer gets on this rank, and the sum of what ranks returned for it: None if nothing that fits."""

    fqn: str
    axes: tuple[str, ...]  # over which ranks are added up
    found: torch.Tensor
    returned: torch.Tensor | None = None


class GradientWatcher:
    """`distances` grows by one for every parameter of a compiled module in every step.

    A backward graph returns a gradient for every input of its forward graph. Calls come back in reverse order.
    """

    def __init__(self, case: Case) -> None:
        self.distances: list[GradientDistance] = []
        self._dp, self._tp = case.layout.dp, case.layout.tp
        self._clips = case.train.max_norm is not None
        self._forward: list[list[str | None]] = []  # of calls whose backward is to come: the names of their inputs
        self._returned: dict[str, torch.Tensor] = {}
        self._model: nn.Module | None = None

    def attach(self, model: nn.Module) -> None:
        self._model = model

    def before_call(self, inputs: Sequence[Any]) -> None:
        if self._model is None or in_backward() or PROCESS.evaluating:
            return
        parameters = {_place(param): clean_fqn(name) for name, param in self._model.named_parameters()}
        self._forward.append([parameters.get(_place(tensor)) for tensor in inputs])

    def after_call(self, outputs: Sequence[Any]) -> None:
        if not (self._forward and in_backward()):
            return
        names = self._forward.pop()
        for name, gradient in zip(names, outputs, strict=False) if len(names) == len(outputs) else ():
            if name is not None and isinstance(gradient, torch.Tensor):
                kept = gradient.double() if self._dp > 1 else gradient.clone()
                self._returned[name] = self._returned[name] + kept if name in self._returned else kept

    def after_backward(self, model: nn.Module, step: int) -> None:
        compiled = tuple(f"{clean_fqn(name)}." for name, part in model.named_modules() if is_compiled(part))
        grads = {clean_fqn(name): param.grad for name, param in model.named_parameters() if param.grad is not None}
        gradients: Iterable[_Gradient] = (
            self._gradient(fqn, grad) for fqn, grad in grads.items() if fqn.startswith(compiled)
        )
        scale = 1.0
        if self._clips:
            gradients = list(gradients)
            scale = _common_scale(gradients)
        self.distances += [self._distance(gradient, scale, step) for gradient in gradients]
        self._returned.clear()
        self._forward.clear()

    def _gradient(self, fqn: str, grad: torch.Tensor) -> _Gradient:
        found, axes, returned = local_tensor(grad).double(), _summed_axes(grad), self._returned.get(fqn)
        if returned is None:
            return _Gradient(fqn, axes, found)
        expected = returned.double()
        if isinstance(grad, DTensor) and axes:
            expected = _reduced(grad, expected, axes)
        return _Gradient(fqn, axes, found, expected if found.shape == expected.shape else None)

    def _distance(self, gradient: _Gradient, scale: float, step: int) -> GradientDistance:
        fqn, axes, found, returned = gradient
        if returned is None:
            return GradientDistance(step=step, fqn=fqn, distance=math.nan)
        expected = returned * scale
        # A sum or a mean over data-parallel ranks; TP ranks may each have returned the whole.
        factors = {times * parts for times in {1, self._dp} for parts in {1, self._tp if _TP in axes else 1}}
        distances = [relative_distance(found, expected / factor) for factor in factors]
        nearest = min(distances, key=lambda distance: math.inf if math.isnan(distance) else distance)
        return GradientDistance(step=step, fqn=fqn, distance=nearest, summed_over_tp=_TP in axes)


def _common_scale(gradients: Iterable[_Gradient]) -> float:
    """The factor that most gradients show; 1 where none shows one."""
    shares = [
        float((gradient.found * gradient.returned).sum() / gradient.returned.square().sum())
        for gradient in gradients
        if gradient.returned is not None
    ]
    return statistics.median([share for share in shares if math.isfinite(share)] or [1.0])


def _summed_axes(grad: torch.Tensor) -> tuple[str, ...]:
    """The mesh axes over which what ranks returned is added up: all of FSDP2, TP where its ranks hold the sum alike."""
    if not isinstance(grad, DTensor):
        return ()
    names = grad.device_mesh.mesh_dim_names or ()
    pairs = zip(names, grad.placements, strict=True)
    return tuple(name for name, place in pairs if name != _TP or place.is_replicate())


def _reduced(grad: DTensor, returned: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    """This rank's shard of the sum of what ranks returned along these axes."""
    mesh = grad.device_mesh
    over = mesh[axes] if len(axes) < mesh.ndim else mesh
    placed: dict[str, Any] = dict(zip(mesh.mesh_dim_names or (), grad.placements, strict=True))
    # Among the shards of tensor parallelism FSDP2 divides those of a rank, as if they were the tensor.
    placements = [Shard(placed[axis].dim) if hasattr(placed[axis], "dim") else placed[axis] for axis in axes]
    summed = DTensor.from_local(returned, over, [Partial()] * len(axes), run_check=False)
    return summed.redistribute(placements=placements).to_local()


def _place(tensor: Any) -> tuple[int, torch.Size] | None:
    """What tells a parameter among the inputs of a graph, which have its storage; None of what is no plain tensor."""
    local = local_tensor(tensor) if isinstance(tensor, torch.Tensor) else None
    if local is None or type(local) not in {torch.Tensor, nn.Parameter} or not local.numel():
        return None
    return local.data_ptr(), local.shape
