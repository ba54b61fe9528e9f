"""Applies the `layout` of a case: the device mesh, the TP plan, checkpointing, FSDP2 and HSDP.

The order that users need: convert to FP8, tensor parallel, checkpointing, FSDP2.

Ranks of `ep` hold the experts between them, and send tokens to those that hold theirs. They arrive by source rank, then
expert; an expert computes those of the first source first.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput

from harness.matrix.case import Case, Checkpointing, Layout
from harness.matrix.dims.ddp import BUCKET_BYTES, has_static_graph
from harness.matrix.layout import REST, SEQUENCE_AXES, device_mesh
from harness.worker.targets.reference.loss import summed_over
from harness.worker.targets.reference.model import Llama
from harness.worker.targets.target import World

Tensor = torch.Tensor


class ExpertParallel(ParallelStyle):
    """A style of `parallelize_module` for `GroupedExperts`, as torchtitan has one.

    The module is then called with the tokens of its own rank and their counts for all experts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []  # rows to every rank
        self.received: list[int] = []
        self.order = torch.zeros(0, dtype=torch.int64)  # of received rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, param in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(param.data, device_mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(sharded))
        module.register_forward_pre_hook(lambda _, args: self.dispatch(device_mesh, *args))
        module.register_forward_hook(lambda _, __, rows: self.combine(device_mesh, rows))
        return module

    def dispatch(self, mesh: DeviceMesh, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        ranks = mesh.size()
        with torch.no_grad():
            received: Any = funcol.all_to_all_single(counts, None, None, mesh.get_group())
            table = received.unflatten(0, (ranks, -1))  # [source, local expert]
            self.sent = counts.unflatten(0, (ranks, -1)).sum(1).tolist()
            self.received = table.sum(1).tolist()
            experts = torch.arange(table.numel(), device=table.device) % table.size(1)
            self.order = experts.repeat_interleave(table.flatten()).argsort(stable=True)
        arrived = _exchanged(rows, self.received, self.sent, mesh)
        return arrived[self.order], table.sum(0)

    def combine(self, mesh: DeviceMesh, rows: Tensor) -> Tensor:
        order, self.order = self.order, self.order.new_zeros(0)
        return _exchanged(rows[order.argsort()], self.sent, self.received, mesh)


def _exchanged(rows: Tensor, received: list[int], sent: list[int], mesh: DeviceMesh) -> Tensor:
    exchanged: Any = funcol.all_to_all_single_autograd(rows, received, sent, mesh.get_group())
    return exchanged


def tokens_of_step(counts: Tensor, *meshes: DeviceMesh | None) -> Tensor:
    """Return the counts of all ranks: those of these meshes count different tokens."""
    return summed_over(counts, *meshes).clone()  # which waits: torch keeps a result alive that nobody waits for


class Meshes(NamedTuple):
    """The submeshes in use: `dp` is 1-D (FSDP2) or 2-D (HSDP), and so is `of_experts`, that of FSDP2 for experts.

    None if that parallelism is not used.
    """

    tp: DeviceMesh | None = None
    pp: DeviceMesh | None = None
    dp: DeviceMesh | None = None
    cp: DeviceMesh | None = None
    ep: DeviceMesh | None = None
    of_experts: DeviceMesh | None = None


def build_meshes(layout: Layout, world: World) -> Meshes:
    """Submeshes of one mesh over all ranks: FSDP2 takes a DTensor of a mesh that has a common root with its own.

    With context parallelism FSDP2 shards over ranks with the same sequences as well: they have other tokens of them.
    Expert parallelism has all ranks of TP, and some of those that share the other parameters: `dp_in_ep`.
    """
    parts = dict[str, int]()  # of the axis `dp_shard`
    if layout.ep > 1:
        parts = {"efsdp": layout.degrees["efsdp"], "dp_in_ep": layout.dp_in_ep}
    elif layout.cp > 1:
        parts = {name: layout.degrees[name] for name in SEQUENCE_AXES}
    axes = device_mesh(layout, fsdp=world.fsdp)
    if not axes:
        return Meshes()
    if parts:
        axes = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, **parts, "tp": layout.tp}
    mesh = init_device_mesh(world.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if parts:
        mesh[tuple(parts)]._flatten(REST)
    meshes = Meshes(**{name: mesh[name] for name in ("tp", "pp", "cp") if axes.get(name, 1) > 1})
    if layout.ep > 1:
        meshes = meshes._replace(ep=mesh["dp_in_ep", "tp"]._flatten("ep"))
    if layout.dp == 1 and not world.fsdp:
        return meshes
    replicas = ["dp_replicate"] * (layout.dp_replicate > 1)
    if layout.has_whole_replicas:
        return meshes._replace(dp=mesh["dp_replicate"])
    return meshes._replace(dp=mesh[(*replicas, REST)], of_experts=mesh[(*replicas, "efsdp" if layout.ep > 1 else REST)])


def apply_ep(model: Llama, mesh: DeviceMesh) -> None:
    for moe in model.mixtures():
        parallelize_module(moe, mesh, {"experts": ExpertParallel()})


def apply_tp(model: Llama, mesh: DeviceMesh, case: Case) -> None:
    """Parallelize every module over the TP mesh, in place."""
    layout = case.layout
    between_blocks = Shard(1) if layout.sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between_blocks),
        "output": ColwiseParallel(
            input_layouts=between_blocks,
            output_layouts=Shard(-1) if layout.loss_parallel else Replicate(),
            use_local_output=not layout.loss_parallel,
        ),
        **({"norm": SequenceParallel()} if layout.sequence_parallel else {}),
    }
    parallelize_module(model, mesh, {name: style for name, style in plan.items() if getattr(model, name) is not None})
    for block in model.layers.values():
        parallelize_module(block, mesh, block_plan(case, between_blocks, experts=hasattr(block, "moe")))


def block_plan(case: Case, between: Shard | Replicate, *, experts: bool) -> dict[str, ParallelStyle]:
    """What ranks share of a block. Router and experts get the tokens of the part of the sequence that a rank has.

    So every token is sent once, and the gradient of the router is a sum over ranks, as in Megatron; torchtitan gathers
    the tokens first, and every rank chooses for all of them but sends a part.
    """
    colwise, rowwise, prepare_input = (
        (Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput)
        if case.float8.tp_styles == "float8"
        else (ColwiseParallel, RowwiseParallel, PrepareModuleInput)
    )
    dense = "moe.shared_experts" if experts else "feed_forward"
    plan: dict[str, ParallelStyle] = {
        "attention": prepare_input(
            input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.wq": colwise(),
        "attention.wk": colwise(),
        "attention.wv": colwise(),
        "attention.wo": rowwise(output_layouts=between),
        dense: prepare_input(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        f"{dense}.w1": colwise(),
        f"{dense}.w2": rowwise(output_layouts=between),
        f"{dense}.w3": colwise(),
    }
    if experts:
        plan |= {
            "moe": PrepareModuleInput(
                input_layouts=(between,), desired_input_layouts=(between,), use_local_output=True
            ),
            "moe.router.gate": SequenceParallel(use_local_output=True),
        }
    if case.layout.sequence_parallel:
        plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    return plan


def apply_fsdp(model: Llama, meshes: Meshes, case: Case) -> None:
    """Apply FSDP2 to every block, as torchtitan does. With a 2-D mesh (replicate, shard) this is HSDP.

    Or `replicate`, which is FSDP2 of whole parameters, and reduces gradients a unit at a time.

    Experts are a unit of their own, on the ranks that hold the same ones, and every expert is sharded over its rows:
    torchtitan does so where there are fewer experts than ranks. Ends that are tied are one unit, as in torchtitan.

    Gradients are summed, not averaged: the loss is already divided by the number of tokens in the global batch.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if case.train.dtype == "bfloat16" else None,
        reduce_dtype=getattr(torch, case.reduce_dtype),  # None means another dtype since torch 2.15
    )
    asked, mesh = case.layout.reshard_after_forward, meshes.dp

    def apply(unit: Any, *, freed: bool | None = None) -> None:
        if case.layout.replicas == "replicate":
            from torch.distributed._composable.replicate_with_fsdp import replicate  # private: other layouts do without

            replicate(unit, mesh=mesh, mp_policy=policy)
        else:
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=freed)

    for moe in model.mixtures():
        fully_shard(
            moe.experts,
            mesh=meshes.of_experts,
            mp_policy=policy,
            reshard_after_forward=asked != "never",
            shard_placement_fn=lambda _: Shard(1),
        )
    embedding, output = model.tok_embeddings, model.output
    are_one = embedding is not None and output is not None and share_weights(embedding, output)
    for unit in (None if are_one else embedding, *model.layers.values()):
        if unit is not None:
            apply(unit, freed=asked != "never")
    if output is not None:
        ends = [*([embedding] if are_one else []), model.norm, output]
        apply(ends, freed=asked == "always")
    apply(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def apply_ddp(model: Llama, mesh: DeviceMesh, case: Case) -> nn.parallel.DistributedDataParallel:
    """Return what is called in place of the model. Gradients are parts of buckets."""
    return nn.parallel.DistributedDataParallel(
        model,
        process_group=mesh.get_group(),
        bucket_cap_mb=BUCKET_BYTES >> 20,
        gradient_as_bucket_view=True,
        static_graph=has_static_graph(case),
    )


def share_weights(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = ({id(param) for param in module.parameters()} for module in (one, other))
    return bool(mine & theirs)


_aten = torch.ops.aten

# torchtitan 0.2.2, models/llama3/infra/parallelize.py, without operators that this model never calls (flex and varlen
# attention, inductor_compiled_code).
SAVED_OPS = frozenset(
    {
        _aten.mm.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_attention_math.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        _aten.max.default,
    }
)


def apply_checkpointing(layers: nn.ModuleDict, checkpointing: Checkpointing) -> None:
    """Wrap the blocks in place, before FSDP is applied, as in torchtitan."""

    def selective_contexts() -> Any:
        return create_selective_checkpoint_contexts(_policy(defaultdict(int)))

    for name, block in list(layers.items()):
        if checkpointing.mode == "selective_op":
            layers[name] = checkpoint_wrapper(block, context_fn=selective_contexts)
        elif checkpointing.mode == "full" or (
            checkpointing.mode == "selective_layer" and (int(name) + 1) % checkpointing.every == 0
        ):
            layers[name] = checkpoint_wrapper(block)


def _policy(mm_count: defaultdict[bool, int]) -> Callable[..., CheckpointPolicy]:
    def save_every_second_mm(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if func is _aten.mm.default:
            mm_count[context.is_recompute] += 1
            if mm_count[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if func in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE

    return save_every_second_mm
