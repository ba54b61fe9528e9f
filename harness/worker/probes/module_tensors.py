"""Records what every module really computed with: its operands, results and gradients, and every parameter's update.

`worker/one_rank/replay.py` repeats the modules on them on one rank. Only references are taken while a step runs;
nothing is copied, gathered or waited for before its end, so that the run is the same with the probe and without.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from harness.matrix.case import Case
from harness.matrix.layout import SAME_BATCH_AXES
from harness.matrix.numerics import RECORDED_BYTES, Numerics, replayed_steps
from harness.registry import computes_on_plain_shards, is_llama
from harness.trace.model import FLOAT8, ModuleShard, ModuleTensorKind
from harness.worker.probes.probe import Probe
from harness.worker.process.process import PROCESS, in_backward
from harness.worker.tensors.digests import bytes_of, ordered_digest
from harness.worker.tensors.names import clean_fqn, dtype_name, is_compiled, mark_owned
from harness.worker.tensors.places import Places, local_shard, local_tensor
from harness.worker.tensors.reduction import of_all_ranks

NORMS = (nn.RMSNorm, nn.LayerNorm)
MODULES = (nn.Linear, *NORMS, nn.Embedding)  # everything between them is repeated from their results
_STACKED = 3  # dims of the weights of experts
_COMPILED = "_orig_mod."  # in the names of what is inside of a compiled module
_SEQUENCE_DIM = 1  # of [batch, sequence, features]


class _Seen(NamedTuple):
    fqn: str
    call: int  # of the module in this step
    kind: ModuleTensorKind
    tensor: torch.Tensor | None  # None: the module got it in float8


class ModuleTensorProbe(Probe):
    """Records a `ModuleShard` of every tensor of every module; nothing where the case is not replayed.

    How large a model is that is not known shows in the first step: if a replay cannot be given it, nothing is kept.
    """

    def __init__(self, case: Case, device: torch.device, numerics: Numerics) -> None:
        super().__init__(case, device)
        self._device = device
        self._steps = replayed_steps(case, numerics)
        self._seen: list[_Seen] = []
        self._hooks: list[_Hooks] = []
        self._shards: list[ModuleShard] = []
        self._of_sequence: dict[str, DeviceMesh] = {}  # the TP mesh of blocks that have a part of the sequence
        self._activations = Places(case.layout, SAME_BATCH_AXES)  # every data-parallel rank has its own
        self._parameters = Places(case.layout)

    def attach(self, model: nn.Module) -> None:
        """Hook every module inside of what tensor parallelism does with its operands and results.

        Inside of a compiled module hooks would change what is compiled: it is a module like others.
        """
        if not self._steps:
            return
        for name, module in model.named_modules():
            if is_compiled(module) or (is_recorded(module, self._case) and _COMPILED not in name):
                hooks = _Hooks(clean_fqn(name), self._seen, uses_input_once=uses_input_once(module))
                self._hooks.append(hooks)
                if (is_compiled(module) or is_mixture(module)) and self._case.layout.sequence_parallel:
                    self._of_sequence |= {clean_fqn(name): mesh for mesh in _tp_meshes(module)}
                # Of experts outside of what sends tokens to other ranks: then they compute what one rank does.
                outside = has_experts(module)
                if not is_mixture(module):
                    module.register_forward_pre_hook(hooks.before, prepend=outside)
                module.register_forward_hook(hooks.after, prepend=not outside)

    def _with_place(self, seen: _Seen) -> torch.Tensor | None:
        """Return the tensor with its place in the logical one: between blocks, sequence shards are plain."""
        mesh, tensor = self._of_sequence.get(seen.fqn), seen.tensor
        if mesh is None or tensor is None or isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, mesh, [Shard(_SEQUENCE_DIM)], run_check=False)

    @property
    def _recording(self) -> bool:
        return self._step in self._steps

    @torch.no_grad()
    def after_backward(self, model: nn.Module) -> None:
        if self._recording:
            for seen in self._seen:
                self._add(seen.fqn, seen.kind, self._with_place(seen), self._activations, seen.call)
            for name, param in model.named_parameters():
                if param.grad is not None:
                    self._add(clean_fqn(name), "grad", param.grad, self._parameters)
        self._seen.clear()
        for hooks in self._hooks:
            hooks.calls = 0

    @torch.no_grad()
    def after_update(self, model: nn.Module) -> None:
        """Record what the parameters are before every step that is replayed, and behind it.

        Behind a later step they are not recorded: its replay does not know the state of the optimizer.
        """
        is_later = self._recording and self._step - 1 not in (0, *self._steps)
        if (self._recording and not is_later) or self._step + 1 in self._steps:
            for name, param in model.named_parameters():
                self._add(clean_fqn(name), "param", param, self._parameters)
        if self._recording and not is_llama(self._case.target):
            self._stop_if_too_large()

    def _stop_if_too_large(self) -> None:
        """All ranks stop, or none: the first holds alone what ranks have the same of."""
        held_bytes = torch.tensor(float(sum(len(shard.data or b"") for shard in self._shards)), device=self._device)
        recorded = sum(step <= self._step for step in self._steps)
        if of_all_ranks(held_bytes).sum().item() / recorded * len(self._steps) > RECORDED_BYTES:
            self._steps = ()
            self._shards.clear()

    def _add(
        self, fqn: str, kind: ModuleTensorKind, tensor: torch.Tensor | None, places: Places, call: int = 0
    ) -> None:
        if tensor is None or not is_wide(tensor):
            self._shards.append(ModuleShard(step=self._step, fqn=fqn, call=call, kind=kind, dtype=FLOAT8))
            return
        place, local = places(tensor), local_shard(tensor).contiguous()
        summed = isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)
        self._shards.append(
            ModuleShard(
                step=self._step,
                fqn=fqn,
                call=call,
                kind=kind,
                dtype=dtype_name(local.dtype),
                shape=place.shape,
                offset=place.offset,
                local_shape=tuple(local.shape),
                summed=summed,
                digest=ordered_digest(local),
                data=bytes_of(local, transposed=False) if place.owner else None,
            )
        )

    def result(self) -> tuple[ModuleShard, ...] | None:
        """Return all shards in the order they were recorded; None if the case is not replayed."""
        return tuple(self._shards) if self._steps else None


def is_recorded(module: nn.Module, case: Case) -> bool:
    """Return True for what is replayed by itself: experts and their mixture too.

    The mixture alone where experts get other rows than those of one rank: under TP in the order of ranks, and where a
    trainer calls them behind the exchange of tokens, as one on plain shards does.
    """
    others = case.layout.tp > 1 or (case.layout.ep > 1 and computes_on_plain_shards(case.target))
    return isinstance(module, MODULES) or is_mixture(module) or (not others and has_experts(module))


def has_experts(module: nn.Module) -> bool:
    """Return True for a module whose own weights are stacked matrices."""
    return any(param.dim() == _STACKED for param in module.parameters(recurse=False))


def is_mixture(module: nn.Module) -> bool:
    """Return True for a module of experts and of what chooses among them. Its input is that of its parts."""
    return any(map(has_experts, module.children()))


def uses_input_once(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or has_experts(module)


def _tp_meshes(module: nn.Module) -> Iterator[DeviceMesh]:
    for param in module.parameters():
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
            yield mesh["tp"] if mesh.ndim > 1 else mesh


class _Hooks:
    """The hooks of one module. Recomputation and evaluation call them too, which is not recorded."""

    def __init__(self, fqn: str, seen: list[_Seen], *, uses_input_once: bool) -> None:
        self._fqn = fqn
        self._seen = seen
        self._uses_input_once = uses_input_once
        self.calls = 0  # in this step, those that are complete

    def before(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Give the input of a linear its own place in the graph: several linears may share one tensor.

        A norm uses its input twice. Both gradients would be summed before the residual stream's, which rounds
        differently, so its input gets no place and its gradient is not recorded.
        """
        given = args[0]
        if not given.is_floating_point():
            return None  # tokens
        if not (self._uses_input_once and is_wide(given)):
            self._keep("input", given)
            return None
        placed: torch.Tensor = _SeparateGraphInput.apply(given)
        self._keep("input", placed, "grad_input")
        return (placed, *args[1:])

    def after(self, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        self._keep("output", output, "grad_output")
        self.calls += not (in_backward() or PROCESS.evaluating)

    def _keep(self, kind: ModuleTensorKind, tensor: torch.Tensor, gradient: ModuleTensorKind | None = None) -> None:
        if in_backward() or PROCESS.evaluating:
            return
        call = self.calls
        self._seen.append(_Seen(self._fqn, call, kind, mark_owned(_detached(tensor)) if is_wide(tensor) else None))
        if gradient is not None and tensor.requires_grad:
            tensor.register_hook(lambda grad: self._seen.append(_Seen(self._fqn, call, gradient, grad)))


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return what `tensor.detach()` returns, but parts of a sum stay parts.

    DTensor's own takes much longer, and from torch 2.14 on adds up the masked parts of an embedding.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    return DTensor(tensor._local_tensor.detach(), tensor._spec, requires_grad=False)


class _SeparateGraphInput(torch.autograd.Function):
    """The identity as its own node, so that a shared tensor has a gradient per reader. A view would reduce it."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return _detached(given)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def is_wide(tensor: torch.Tensor) -> bool:
    """Return False for tokens, and for an operand that was cast to float8 already: its module casts nothing."""
    return tensor.is_floating_point() and not isinstance(local_tensor(tensor), Float8TrainingTensor)
