"""Discovers what a target has built: linears, conversions, checkpointed and compiled regions, parameters."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor import DTensor
from torchao.float8.float8_linear import Float8Linear

from harness.matrix.case import Case
from harness.trace.model import Buffer, Linear, ModelRecord, Parameter
from harness.worker.process.process import PROCESS, in_backward
from harness.worker.tensors.digests import ordered_digest
from harness.worker.tensors.names import clean_fqn, dtype_name
from harness.worker.tensors.places import is_wrapped, local_shard, mesh_axes, place_of, unwrapped


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {clean_fqn(fqn): module for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}


def converted_linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {fqn: module for fqn, module in linears(model).items() if is_converted(module)}


def is_converted(linear: nn.Module) -> bool:
    """True for a linear of torchao's, and for one of torch's whose weight torchao has wrapped."""
    if isinstance(linear, Float8Linear):
        return True
    if not isinstance(linear, nn.Linear):
        return False
    # imported where something is converted to MXFP8
    mxfp8 = sys.modules.get("torchao.prototype.moe_training.mxfp8_linear")
    if mxfp8 is not None and isinstance(linear, mxfp8.MXFP8Linear):
        return True
    weight = linear.weight
    return is_wrapped(weight.data) or (isinstance(weight, DTensor) and is_wrapped(weight._local_tensor))


def forward_owner(linear: Float8Linear) -> type:
    """The class whose `forward` runs: `Float8Linear`, or a kind of it that a target defines."""
    return next(kind for kind in type(linear).__mro__ if "forward" in vars(kind))


Digests = dict[str, str]  # by FQN


def parameter_digests(model: nn.Module) -> Digests:
    return {clean_fqn(fqn): ordered_digest(local_shard(parameter)) for fqn, parameter in model.named_parameters()}


class Discovery:
    """What a built model consists of; counts the calls of its linears, in eager runs, from then on.

    `built`: what its parameters were before the harness wrote its weights. `resumed`: what was discovered before the
    run was resumed, whose saved buffers are those that training began with.
    """

    def __init__(self, model: nn.Module, case: Case, built: Digests, resumed: Discovery | None = None) -> None:
        self._model = model
        self._built = built
        self._initial = parameter_digests(model)
        before = {} if resumed is None else {buffer.fqn: buffer for buffer in resumed.buffers}
        saved = {fqn for fqn, _ in saved_buffers(model)} & before.keys()
        buffers = (_buffer(fqn, buffer) for fqn, buffer in model.named_buffers())
        self.buffers: tuple[Buffer, ...] = tuple(
            before[buffer.fqn] if buffer.fqn in saved else buffer for buffer in buffers
        )
        self._layout = case.layout
        # By FQN, of forward and of recomputation: in the current step, and the maximum over finished steps.
        self._calls: list[Counter[str]] = [Counter(), Counter()]
        self._most: list[Counter[str]] = [Counter(), Counter()]
        for fqn, linear in linears(model).items() if case.compile == "none" else ():
            linear.register_forward_pre_hook(self._counting(fqn))

    def _counting(self, fqn: str) -> Any:
        def count(*_: Any) -> None:
            if not PROCESS.evaluating:
                self._calls[in_backward()][fqn] += 1

        return count

    def end_step(self) -> None:
        self._most = [most | calls for most, calls in zip(self._most, self._calls, strict=True)]
        self._calls = [Counter(), Counter()]

    def record(self) -> ModelRecord:
        modules = (module for module in self._model.modules() if not isinstance(module, nn.Linear))
        others = {parameter for module in modules for parameter in module.parameters(recurse=False)}
        return ModelRecord(
            linears=tuple(
                Linear(
                    fqn=fqn,
                    in_features=linear.in_features,
                    out_features=linear.out_features,
                    converted=is_converted(linear),
                    tied=linear.weight in others,
                    own_forward=isinstance(linear, Float8Linear) and forward_owner(linear) is not Float8Linear,
                )
                for fqn, linear in linears(self._model).items()
            ),
            parameters=tuple(self._parameter(fqn, param) for fqn, param in self._model.named_parameters()),
            checkpointed=_names(self._model, CheckpointWrapper),
            compiled=_names(self._model, OptimizedModule),
            calls=dict(sorted(self._most[0].items())),
            recomputed=dict(sorted(self._most[1].items())),
            buffers=self.buffers,
            constants=_constants(self._model),
        )

    def _parameter(self, fqn: str, param: nn.Parameter) -> Parameter:
        local, name, held = local_shard(param), clean_fqn(fqn), unwrapped(param)
        return Parameter(
            fqn=name,
            shape=tuple(param.shape),
            dtype=dtype_name(local.dtype),
            local_elements=local.numel(),
            axes=mesh_axes(held.device_mesh, self._layout) if isinstance(held, DTensor) else (),
            trained=param.requires_grad,
            offset=place_of(param).offset,
            built=self._built.get(name, ""),
            updated=ordered_digest(local) != self._initial.get(name),
        )


def _constants(model: nn.Module) -> dict[str, str]:
    """Sizes are left out: those that a module keeps may be of its shard."""
    constants = {
        clean_fqn(f"{fqn}.{name}"): getattr(module, name)
        for fqn, module in model.named_modules()
        for name in getattr(module, "__constants__", ())
    }
    return {fqn: repr(value) for fqn, value in constants.items() if isinstance(value, float | str | None)}


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that are a part of the state of a model, by FQN."""
    for fqn, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield clean_fqn(f"{fqn}.{name}".lstrip(".")), buffer


def _buffer(fqn: str, buffer: torch.Tensor) -> Buffer:
    local = local_shard(buffer)
    return Buffer(
        fqn=clean_fqn(fqn), shape=tuple(local.shape), dtype=dtype_name(local.dtype), digest=ordered_digest(local)
    )


def _names(model: nn.Module, kind: type[nn.Module]) -> tuple[str, ...]:
    return tuple(clean_fqn(f"{fqn}.").rstrip(".") for fqn, module in model.named_modules() if isinstance(module, kind))
