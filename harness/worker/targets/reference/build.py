"""Builds the reference target: FP8, TP, checkpointing, compile and FSDP2 applied in the correct order.

The single-rank reference (single-rank reference) is built like any other case. The batches of all data-parallel ranks
are repeated one after another on the full weights, because tensorwise scales of activations belong to one data-parallel
rank. Their gradients are accumulated in rank order and in the reduce dtype. Weights are cast where FSDP2 casts them,
because FSDP2 itself runs, on a mesh of one rank. Tensor parallelism needs no repetition: with DTensor every scale is
that of the logical tensor.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from harness.matrix.case import Case
from harness.matrix.linears import OUTPUT_FQN, linear_fqns
from harness.worker.targets.reference.context_parallel import Cut, apply_cp, stand_for_all
from harness.worker.targets.reference.float8 import after_optimizer_step, convert, convert_experts
from harness.worker.targets.reference.loss import (
    Batch,
    global_loss,
    global_token_count,
    lengths_of,
    loss_of_logits,
    sharded_logits,
    share_of_loss,
    whole,
)
from harness.worker.targets.reference.model import Llama
from harness.worker.targets.reference.parallel import (
    Meshes,
    apply_checkpointing,
    apply_ddp,
    apply_ep,
    apply_fsdp,
    apply_tp,
    build_meshes,
    tokens_of_step,
)
from harness.worker.targets.reference.pipeline import CopiedEnds, Pipeline, cut, in_copies, part_of_rank
from harness.worker.targets.target import StepResult, World
from harness.worker.tensors.names import clean_fqn


@torch.no_grad()
def clip_gradients(
    model: nn.Module, max_norm: float, pp: DeviceMesh | None, copy: nn.Parameter | None = None
) -> torch.Tensor:
    """Scale all gradients of a model down to the norm `max_norm`. Returns their norm before: a scalar.

    The norm of the parameters on a device mesh is summed over the axes of that mesh, those of several meshes add up,
    and so do those of the stages of a pipeline. A `copy` of a parameter is clipped, but not counted.
    """
    groups = _by_mesh(model.parameters())
    counted = ([param.grad for param in group if param is not copy and param.grad is not None] for group in groups)
    norms = [get_total_norm(grads) for grads in counted]
    summed = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(summed))
    if pp is not None:  # a norm of no gradients is in float32
        total = total.to(groups[0][0].dtype)
        total = funcol.all_reduce(total.square(), "sum", pp.get_group()).sqrt()
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total)
    return total


# By parameter: an optimizer has a group for every mesh, so another layout may have another number of groups.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


# Llama 2 (arXiv:2307.09288, section 2.2). An eps of 1e-5 instead of torch's 1e-8 also keeps the noise small: a gradient
# that is only rounding error does not cause a full step.
LLAMA_ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
# ResNet (arXiv:1512.03385, section 3.4), with a learning rate of 0.1. torch's SGD adds the decay to the gradient.
RESNET_SGD: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-4}
# Moonlight (arXiv:2502.16982, section 2.2): updates are as large as AdamW's, so both have one learning rate and decay.
MOONLIGHT_MUON: dict[str, Any] = {"momentum": 0.95, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


def muon(params: list[dict[str, Any]], lr: float) -> torch.optim.Muon:
    """Return torch's Muon, of which a rank keeps its part of the momentum, and orthogonalizes whole matrices.

    On shards DTensor adds up Gram matrices in bfloat16: elements of an update then differ by a tenth between layouts.
    """
    shards: dict[nn.Parameter, DTensor] = {}

    @torch.no_grad()
    def gather(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for param in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if isinstance(grad := param.grad, DTensor):
                state, whole = optimizer.state[param], [Replicate()] * grad.device_mesh.ndim
                momentum = state.get("momentum_buffer", torch.zeros_like(grad))
                shards[param], param.grad = grad, grad.redistribute(placements=whole)
                state["momentum_buffer"] = momentum.redistribute(placements=whole)

    @torch.no_grad()
    def shard(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for param, grad in shards.items():
            state = optimizer.state[param]
            param.grad, momentum = grad, state["momentum_buffer"]
            state["momentum_buffer"] = momentum.redistribute(placements=grad.placements)
        shards.clear()

    optimizer = torch.optim.Muon(params, lr=lr, **MOONLIGHT_MUON)
    optimizer.register_step_pre_hook(gather)
    optimizer.register_step_post_hook(shard)
    return optimizer


class Distributed(NamedTuple):
    """A model that is ready for its weights, its stages in a pipeline, what cuts its sequences, and its copied ends."""

    model: Llama
    parts: Sequence[Llama] = ()
    context: Cut | None = None
    ends: CopiedEnds | None = None
    replicas: nn.parallel.DistributedDataParallel | None = None  # what is called in place of the model


class ReferenceTarget:
    def __init__(
        self, case: Case, built: Distributed, optimizers: Sequence[torch.optim.Optimizer], meshes: Meshes
    ) -> None:
        self.model, parts, self.context, self._ends, self._replicas = built
        self._called = self._replicas or self.model
        self.optimizers = optimizers
        self._case = case
        self._meshes = meshes
        self._pipeline = (
            None if meshes.pp is None else Pipeline(parts, case, meshes.pp, self.loss_of_stage, dist.get_rank())
        )
        self.tokens = 0  # over which the loss of this step is a mean

    @torch.no_grad()
    def evaluate(
        self,
        microbatches: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor] | None = None,
        positions: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the loss of one step, in evaluation mode and without gradients."""
        batches, tokens = self._counted(microbatches, labels, positions)
        self.model.eval()
        if self._pipeline is None:
            losses = [share_of_loss(self._called, self.cut(batch), self._case, tokens) for batch in batches]
        else:
            losses = self._in_stages(self._pipeline.evaluate, batches, tokens)
        self.model.train()
        return self._global_loss(losses)

    def step(
        self,
        microbatches: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor] | None = None,
        positions: Sequence[torch.Tensor] | None = None,
    ) -> StepResult:
        """Forward, backward, clipping where the case asks for it, and update."""
        batches, tokens = self._counted(microbatches, labels, positions)
        loss = self._global_loss(self._backward(batches, tokens))
        max_norm = self._case.train.max_norm
        copy = None
        if self._ends is not None:
            self._ends.add_gradients()
            copy = self._ends.copy
        norm = None if max_norm is None else clip_gradients(self.model, max_norm, self._meshes.pp, copy)
        for moe in self.model.mixtures():
            of_experts = tokens_of_step(moe.tokens_per_expert, self._meshes.dp, self._meshes.tp)
            if self._case.model.balance:
                moe.move_bias(of_experts)
            moe.tokens_per_expert.zero_()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=self._replicas is None)  # they stay parts of buckets
        after_optimizer_step(self.model, self._case.float8)
        return loss, norm

    def _backward(self, batches: Sequence[Batch], tokens: int) -> Sequence[torch.Tensor]:
        """Return the shares of the loss of all microbatches, whose gradients are added up.

        DDP averages gradients behind the last microbatch, so a rank divides its loss by its share of the tokens.
        """
        if self._pipeline is not None:
            return self._in_stages(self._pipeline.train, batches, tokens)
        losses, averaged = [], 1 if self._replicas is None else self._case.layout.dp
        for number, batch in enumerate(batches, start=1):
            is_last = number == len(batches)
            syncing: Any = torch.enable_grad()  # which it is
            if isinstance(self.model, FSDPModule) and self._case.train.reduce_grads == "last_microbatch":
                self.model.set_requires_gradient_sync(is_last)
            elif self._replicas is not None and not is_last:
                syncing = self._replicas.no_sync()
            with syncing:
                loss = share_of_loss(self._called, self.cut(batch), self._case, tokens / averaged, backward=True)
            losses.append(loss / averaged)
        return losses

    def _in_stages(
        self, run: Callable[[Sequence[Batch]], list[torch.Tensor]], batches: Sequence[Batch], tokens: int
    ) -> list[torch.Tensor]:
        self.tokens = tokens
        with sharded_logits(self._case):
            return [whole(loss) for loss in run(batches)]

    def loss_of_stage(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of_logits(logits, labels, self._case, self.tokens)

    def _counted(
        self,
        microbatches: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor] | None,
        positions: Sequence[torch.Tensor] | None,
    ) -> tuple[Sequence[Batch], int]:
        """Return the batches of one step, and over how many tokens of all ranks their loss is a mean."""
        labels = labels or [tokens[:, 1:] for tokens in microbatches]
        documents = [None] * len(microbatches) if positions is None else map(lengths_of, positions)
        batches = [
            Batch(tokens[:, :-1], own, lengths)
            for tokens, own, lengths in zip(microbatches, labels, documents, strict=True)
        ]
        return batches, global_token_count(map(self.cut, batches), self._meshes.dp, self._case)

    def cut(self, batch: Batch) -> Batch:
        """Return what this rank has of whole sequences."""
        return batch if self.context is None else Batch(self.context.cut(batch.inputs), self.context.cut(batch.labels))

    def save(self, folder: Path) -> None:
        save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Read it, whatever layout it was written in.

        Weights have changed as by an update, so precomputed scales are those of other weights.
        """
        state = self._state()
        load(state, checkpoint_id=folder)
        weights, of_optimizer = state["model"], state["optimizer"]
        set_state_dict(
            self.model, self.optimizers, model_state_dict=weights, optim_state_dict=of_optimizer, options=_OPTIONS
        )
        after_optimizer_step(self.model, self._case.float8)

    def _state(self) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(self.model, self.optimizers, options=_OPTIONS)
        return {"model": of_model, "optimizer": of_optimizer}

    def _global_loss(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        tp = self._meshes.tp
        zero = torch.zeros((), device=next(self.model.parameters()).device)  # of a rank without the last stage
        return global_loss(torch.stack(tuple(losses) or (zero,)).sum(), tp=1 if tp is None else tp.size())


def build(case: Case, world: World) -> ReferenceTarget:
    meshes = build_meshes(case.layout, world)
    built = distributed_model(case, meshes, world)
    return ReferenceTarget(case, built, build_optimizers(built.model, case), meshes)


def distributed_model(case: Case, meshes: Meshes, world: World, device: torch.device | None = None) -> Distributed:
    """Built on the device of the world, or on another.

    The order matters: stages, FP8, TP, ties, context parallelism, checkpointing, compile, FSDP2. TP makes a parameter
    of every module, and so does FP8 that FSDP2 gathers: what was tied before would not be behind them.
    """
    model = _plain_model(case, device or world.device)
    if not case.float8.convert_after_tp:
        convert(model, case.float8)
    if meshes.tp is not None:
        apply_tp(model, meshes.tp, case)
    convert_experts(model, case.float8)
    if meshes.ep is not None:
        apply_ep(model, meshes.ep)
    if case.float8.convert_after_tp:
        convert(model, case.float8)
    ends = CopiedEnds(model, meshes.pp) if in_copies(case, world) else None
    if case.model.tied and ends is None:
        model.output.weight = model.tok_embeddings.weight
    context = cut_sequences(model, case, meshes, world)
    apply_checkpointing(model.layers, case.checkpointing)
    if case.compile != "none":
        from harness.worker.targets.reference.compiled import apply_compile

        apply_compile(model, meshes.tp, case)
    if case.layout.is_ddp and meshes.dp is not None:
        return Distributed(model, replicas=apply_ddp(model, meshes.dp, case))
    parts = [] if meshes.pp is None else cut(model, case, dist.get_rank())
    for part in parts or [model]:
        if meshes.dp is not None:
            apply_fsdp(part, meshes, case)
    return Distributed(model, parts, context, ends)


def cut_sequences(model: Llama, case: Case, meshes: Meshes, world: World) -> Cut | None:
    """Return what the model is given of every sequence, where ranks of context parallelism share them."""
    if meshes.cp is not None:
        return apply_cp(model, case, meshes.cp, world.device)
    return stand_for_all(model, world) if len(world.plays.positions) > 1 else None


def _plain_model(case: Case, device: torch.device) -> Llama:
    """Return what a rank holds of the model, in the dtype of its parameters."""
    with torch.device(device):
        model = Llama(case.model, seq_len=case.train.seq_len)
    if case.layout.pp > 1:
        model = part_of_rank(model, case, dist.get_rank())
    if case.train.dtype == "float64":
        model.double()
    for param in model.parameters():
        param.data = param.data.to(getattr(torch, case.parameter_dtype))
    return model


def build_optimizers(model: nn.Module, case: Case) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers of a case: Muon takes the linears of blocks, AdamW the rest."""
    lr, params = case.train.lr, dict(model.named_parameters())
    if case.train.optimizer == "sgd":
        return [torch.optim.SGD(_groups(params.values()), lr=lr, **RESNET_SGD)]
    optimizers = list[torch.optim.Optimizer]()
    if case.train.optimizer == "muon":
        names = {f"{fqn}.weight" for fqn in linear_fqns(case) if fqn != OUTPUT_FQN}
        matrices = [params.pop(name) for name in [*params] if clean_fqn(name) in names]
        optimizers.append(muon(_groups(matrices), lr))
    return [*optimizers, torch.optim.AdamW(_groups(params.values()), lr=lr, **LLAMA_ADAMW)]


def _groups(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return one parameter group for each device mesh: foreach kernels cannot mix meshes."""
    return [{"params": on_mesh} for on_mesh in _by_mesh(params)]


def _by_mesh(params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[object, list[nn.Parameter]] = {}
    for param in params:
        groups.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
    return list(groups.values())
