"""Watches operands that a trainer owns: made of a weight that FSDP2 has gathered, and refilled in later unshards.

What they must be is known to the trainer: it makes them anew, of the current weight of all ranks, and both must have
the same bytes. The weight comes from the shards by a gather of the probe's own, not by the hooks that are
watched. See `harness/trace/unshards.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.matrix.case import Case
from harness.trace.unshards import HeldAfterStep, HeldOperand, OperandUse, Unshard, UnshardTrace
from harness.worker.dispatch_hooks import matmuls
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.probes.fsdp_params import ManagedParam, fsdp_params, is_gathered
from harness.worker.probes.probe import Probe
from harness.worker.tensors.digests import digest
from harness.worker.tensors.names import clean_fqn, dtype_name

Tensor = torch.Tensor
_RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


class _Made:
    """What the last unshard of a weight left."""

    def __init__(self, fqn: str) -> None:
        self.fqn = fqn
        self.step = 0
        self.is_there = False
        self.tensors: list[Tensor] = []  # FSDP2 holds them too
        self.digests: list[str] = []
        self.before: dict[tuple[int, str], int] = {}  # the step of an operand with this digest


class UnshardProbe(Probe):
    """Watches `FSDPParam` before and after it makes operands, frees them, and what matmuls read."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self._made: dict[int, _Made] = {}
        self._places: dict[int, tuple[_Made, int]] = {}  # by the address of an operand
        self._read: set[str] = set()
        self._unshards: list[Unshard] = []
        self._uses: list[OperandUse] = []
        self._held: list[HeldAfterStep] = []
        self._updated = 0  # the last step with an update

    def install(self) -> None:
        make, free = vars(FSDPParam)["init_unsharded_param"], vars(FSDPParam)["free_unsharded_param"]

        def init_unsharded_param(param: ManagedParam) -> None:
            if _makes_operands(param):
                self._watch(param, make)
            else:
                make(param)

        def free_unsharded_param(param: ManagedParam) -> None:
            free(param)
            self._forget(param)

        self.replace(FSDPParam, "init_unsharded_param", init_unsharded_param)
        self.replace(FSDPParam, "free_unsharded_param", free_unsharded_param)
        self.observe(matmuls.scaled_observers, self._use)

    @torch.no_grad()
    def _watch(self, param: ManagedParam, make: Any) -> None:
        made = self._made.setdefault(id(param), _Made(clean_fqn(param._param_fqn)))
        metadata, again = param._extensions_data.all_gather_metadata, made.is_there
        with unobserved():
            weight = _whole_weight(param)
            gathered = param._unflatten_all_gather_outputs()[0]
            arrived = _equal([gathered[: len(weight)].to(weight.dtype)], [weight])  # NaN equals NaN
            rows = len(gathered) - len(weight)
        with _casts(weight.numel()) as casts:
            make(param)
        tensors = list(param._unsharded_inner_tensors)
        with unobserved():
            fresh, fresh_casts = _fresh(param, _padded(weight, rows, 0.0), metadata)
            padded = rows > 0 and not _equal(fresh, _fresh(param, _padded(weight, rows, 1.0), metadata)[0])
            made.digests = [digest(tensor) for tensor in tensors]
            operands = tuple(
                self._operand(made, at, *pair) for at, pair in enumerate(zip(tensors, fresh, strict=False))
            )
        made.step, made.is_there, made.tensors = self._step, True, tensors
        self._places |= {address(tensor): (made, at) for at, tensor in enumerate(tensors)}
        self._unshards.append(
            Unshard(
                step=self._step,
                index=len(self._unshards),
                fqn=made.fqn,
                sent=dtype_name(gathered.dtype),
                asked=dtype_name(weight.dtype),
                arrived=arrived,
                casts=len(casts),
                fresh_casts=fresh_casts,
                operands=operands,
                again=again,
                padded=padded,
                holds_gathered=_releases(param)
                and any(output.untyped_storage().nbytes() for output in param.all_gather_outputs),
            )
        )

    def _operand(self, made: _Made, at: int, held: Tensor, fresh: Tensor) -> HeldOperand:
        right, key = _equal([held], [fresh]), (at, made.digests[at])
        since = 0 if right else made.before.get(key, 0)
        made.before.setdefault(key, self._step)
        return HeldOperand(dtype=dtype_name(held.dtype), shape=tuple(held.shape), right=right, since=since)

    def _forget(self, param: ManagedParam) -> None:
        made = self._made.get(id(param))
        if made is not None and made.is_there:
            made.is_there = False
            for place in [place for place, (owner, _) in self._places.items() if owner is made]:
                del self._places[place]

    def _use(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            made, at = self._places.get(address(tensor), (None, 0))
            if made is None:
                continue
            self._read.add(made.fqn)
            updated = made.step <= self._updated
            changed = digest(made.tensors[at]) != made.digests[at]
            if updated or changed:
                use = OperandUse(
                    step=self._step,
                    index=len(self._unshards),
                    fqn=made.fqn,
                    operand=at,
                    made=made.step,
                    updated=updated,
                    changed=changed,
                )
                self._uses.append(use)

    def after_update(self, model: nn.Module) -> None:
        self._updated = self._step
        for param in fsdp_params(model):
            made = self._made.get(id(param))
            if made is None or is_gathered(param):
                continue
            held = [(f"operand {at}", tensor) for at, tensor in enumerate(made.tensors)]
            held += [("what was gathered", output) for output in param.all_gather_outputs]
            for what, tensor in held:
                if tensor.untyped_storage().nbytes():
                    self._held.append(HeldAfterStep(step=self._step, fqn=made.fqn, what=what))

    def result(self) -> UnshardTrace | None:
        """Return None where no weight has operands of its own."""
        if not self._made:
            return None
        return UnshardTrace(
            weights=tuple(sorted(made.fqn for made in self._made.values())),
            read=tuple(sorted(self._read)),
            unshards=tuple(self._unshards),
            uses=tuple(self._uses),
            held=tuple(self._held),
        )


def _releases(param: ManagedParam) -> bool:
    """Return True if FSDP2 frees what was gathered as soon as operands are made of it, as torch 2.15 does on demand."""
    asks: Any = getattr(param._sharded_local_tensor, _RELEASES, bool)
    return bool(asks()) and hasattr(FSDPParam, "free_all_gather_outputs")


def address(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins, whichever view it is."""
    return tensor.untyped_storage().data_ptr()


def _has_memory(value: object) -> bool:
    """Return True for a tensor that is no wrapper around others."""
    return type(value) in (Tensor, nn.Parameter)


def _makes_operands(param: ManagedParam) -> bool:
    """Return True if the hooks of a weight get it whole, in high precision and cut along its rows.

    torchao's all-gather in float8 casts shards before they are sent: `scales` reads these casts.
    """
    inner = param._sharded_local_tensor
    wide = all(output.dtype.itemsize > 1 for output in param.all_gather_outputs)
    return hasattr(inner, "fsdp_post_all_gather") and wide and len(param.all_gather_outputs) == 1 and _cuts_rows(param)


def _cuts_rows(param: ManagedParam) -> bool:
    return param.fsdp_placement.dim == 0


def _whole_weight(param: ManagedParam) -> Tensor:
    """Return the current weight of all shards in the dtype of compute, without padding. [rows, columns]"""
    shard = torch.mul(param._sharded_local_tensor, 1).to(param.param_dtype or param.orig_dtype)
    group, ranks = param.mesh_info.shard_process_group, param.mesh_info.shard_mesh_size
    rows = -(-param._orig_size[0] // ranks)
    whole = shard.new_empty(ranks * rows, *shard.shape[1:])
    dist.all_gather_into_tensor(whole, _padded(shard, rows - len(shard), 0.0).contiguous(), group=group)
    return whole[: param._orig_size[0]]


def _padded(weight: Tensor, rows: int, value: float) -> Tensor:
    """Append rows that are `value` times larger than anything in the weight."""
    if not rows:
        return weight
    filled = weight.new_full((rows, *weight.shape[1:]), 1.0) * (16 * value * weight.abs().max())
    return torch.cat([weight, filled])


def _fresh(param: ManagedParam, gathered: Tensor, metadata: Any) -> tuple[Sequence[Tensor], int]:
    """Return the operands that the trainer makes of a weight as it does in its first unshard, and its casts."""
    inner, dtype = param._sharded_local_tensor, param.param_dtype or param.orig_dtype
    with _casts(param._orig_size.numel()) as casts:
        _, tensors = inner.fsdp_post_all_gather((gathered.contiguous(),), metadata, dtype)
    return tensors, len(casts)


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return True for the same bytes in the same shapes and dtypes."""
    return len(some) == len(others) and all(
        (a.shape, a.dtype) == (b.shape, b.dtype) and digest(a) == digest(b) for a, b in zip(some, others, strict=True)
    )


@contextmanager
def _casts(elements: int) -> Iterator[list[torch.dtype]]:
    """Yield the dtypes of the casts of so many elements to one byte or less that happen inside."""
    found: list[torch.dtype] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            given = {address(leaf) for leaf in tree_leaves((args, kwargs)) if _has_memory(leaf)}
            found.extend(
                leaf.dtype
                for leaf in tree_leaves(result)
                if _has_memory(leaf)
                and leaf.dtype.is_floating_point
                and leaf.dtype.itemsize == 1
                and leaf.numel() == elements
                and address(leaf) not in given
            )
            return result

    with Mode():
        yield found
