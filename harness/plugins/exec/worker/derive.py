"""Derives the case of a model that a script has built: layout, recipe and dtypes by parameters, modules and FSDP2."""

import gc
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Muon
from torch.optim.optimizer import Optimizer
from torchao.float8.config import Float8LinearConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_linear import Float8Linear

from harness.matrix.case import Case, Checkpointing, Float8, Layout, Train
from harness.matrix.layout import peers
from harness.matrix.recipes import E5M2, OPERAND_FIELDS, TRAITS, Recipe, mx_recipe
from harness.plugins.exec.request import TARGET
from harness.worker.probes.discovery import is_converted
from harness.worker.probes.fsdp_params import fsdp_params
from harness.worker.tensors.names import dtype_name
from harness.worker.tensors.places import is_wrapped, local_part, local_tensor, unwrapped

# Names of mesh axes that no parameter tells.
_STAGES = ("pp", "pipe", "pipeline", "stage")
_EXPERTS = ("ep", "expert", "experts", "expert_parallel")


class Unlike(Exception):
    """What a script has built has no case; the message says why."""


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def derive(model: nn.Module, optimizers: Sequence[Optimizer], steps: int) -> Case:
    """Return the case that is trained. Raises Unlike where ranks are numbered otherwise than in any case."""
    layout, training = _layout(model), _train(model, optimizers, steps)
    modules = list(model.modules())
    whole = any(isinstance(each, OptimizedModule) or each._compiled_call_impl is not None for each in modules)
    checkpointed = any(isinstance(each, CheckpointWrapper) for each in modules)
    return Case(
        target=TARGET,
        layout=layout,
        float8=_float8(modules, styled=layout.tp > 1 and _casts_in_hooks(modules)),
        checkpointing=Checkpointing(mode="full" if checkpointed else "none"),
        compile="graph" if whole else "none",
        train=replace(training, global_batch=layout.dp),
    )


# The layout


def _layout(model: nn.Module) -> Layout:
    """Return the degrees of every axis, which are those of FSDP2's groups and of the meshes of all other parameters."""
    axes: dict[str, tuple[int, ...]] = {"dp_replicate": (rank(),), "dp_shard": (rank(),), "tp": (rank(),)}
    for name, ranks in groups(model):
        axes[name] = max(axes[name], ranks, key=len)
    degrees = {name: len(ranks) for name, ranks in axes.items()}
    rest, odd = divmod(world_size(), math.prod(degrees.values()))
    if odd:
        raise Unlike(f"meshes of {degrees} do not divide {world_size()} ranks")
    axes["pp"] = max(_stages(), key=len, default=(rank(),))
    degrees["pp"] = len(axes["pp"]) if rest % len(axes["pp"]) == 0 else 1
    degrees["dp_replicate"] *= rest // degrees["pp"]
    layout = replace(Layout(), **degrees)
    for name, ranks in axes.items():
        if len(ranks) > 1 and ranks != peers(layout, rank(), (name,)):
            raise Unlike(f"{name} is over ranks {', '.join(map(str, ranks))}, which no mesh of {degrees} has in order")
    return layout


def groups(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the ranks of every axis that shares or repeats a parameter."""
    of_fsdp = set[tuple[int, ...]]()
    for param in fsdp_params(model):
        info = param.mesh_info
        for name, group in (("dp_shard", "shard_process_group"), ("dp_replicate", "replicate_process_group")):
            if getattr(info, group, None) is not None:
                ranks = tuple(dist.get_process_group_ranks(getattr(info, group)))
                of_fsdp.add(ranks)
                yield name, ranks
    for held in map(unwrapped, model.parameters()):
        for ranks, sharded in _mesh_dims(held) if isinstance(held, DTensor) else ():
            if ranks not in of_fsdp and (sharded or not of_fsdp):
                yield ("tp" if sharded else "dp_replicate"), ranks


def _mesh_dims(held: DTensor) -> Iterator[tuple[tuple[int, ...], bool]]:
    names = held.device_mesh.mesh_dim_names or ("",) * held.device_mesh.ndim
    for dim, placement in enumerate(held.placements):
        ranks = tuple(dist.get_process_group_ranks(held.device_mesh.get_group(dim)))
        if len(ranks) > 1 and names[dim] not in _EXPERTS:  # which are other modules on every rank
            yield ranks, not placement.is_replicate()


def _stages() -> Iterator[tuple[int, ...]]:
    """Yield the ranks of pipelines: of stages that torch made, and of mesh axes of that name."""
    pipelining: Any = sys.modules.get("torch.distributed.pipelining")
    for found in gc.get_objects():
        if issubclass(type(found), DeviceMesh):
            for dim, name in enumerate(found.mesh_dim_names or ()):
                if name in _STAGES:
                    yield tuple(dist.get_process_group_ranks(found.get_group(dim)))
        elif pipelining is not None and issubclass(type(found), pipelining.PipelineStage):
            yield tuple(dist.get_process_group_ranks(found.group or dist.group.WORLD))


# The recipe


def _float8(modules: Collection[nn.Module], *, styled: bool) -> Float8:
    converted = [module for module in modules if is_converted(module)]
    if not converted:
        return Float8()
    first = converted[0]
    if isinstance(first, Float8Linear):
        return _of_config(first.config, styled=styled)
    settings: Any = first
    if type(first) is nn.Linear:
        settings = _wrapper(first.weight).config
    recipe = mx_recipe(
        rounds_scales_down=settings.scale_calculation_mode.name == "FLOOR", wgrad=not settings.wgrad_with_hp
    )
    if recipe is None:
        raise Unlike("no recipe of MXFP8 rounds scales down and has weight gradients in high precision")
    return Float8(recipe=recipe, output_layer=True, conversion="wrapper" if type(first) is nn.Linear else "module")


def _wrapper(weight: torch.Tensor) -> Any:
    return weight.data if is_wrapped(weight.data) else local_tensor(weight)


def _of_config(config: Float8LinearConfig, *, styled: bool) -> Float8:
    """Return the recipe that is nearest to this config, and the casts that differ from it."""
    recipes: tuple[Recipe, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    settings = {operand: _setting(getattr(config, field)) for operand, field in OPERAND_FIELDS.items()}
    wide = config.cast_config_grad_output.target_dtype
    gradients = "e5m2" if wide is not None and dtype_name(wide) == E5M2 else "e4m3"
    casts = (*(f"{operand}:{setting}" for operand, setting in settings.items()), f"go:{gradients}")
    fitting = [name for name in recipes if TRAITS[name].power_of_two_scales == config.round_scales_to_power_of_2]
    if config.emulate or not fitting:
        raise Unlike("its matmuls are emulated" if config.emulate else "no recipe rounds scales so")
    found = (Float8(recipe=name, casts=casts) for name in fitting)
    return replace(
        min(found, key=lambda float8: len(float8.casts)),
        fp8_all_gather=config.enable_fsdp_float8_all_gather,
        pad_inner_dim=config.pad_inner_dim,
        output_layer=True,
        tp_styles="float8" if styled else "plain",
    )


def _setting(cast: Any) -> str:
    if cast.scaling_type is ScalingType.DISABLED:
        return "dis"
    return "axs" if cast.scaling_granularity is ScalingGranularity.AXISWISE else "ten"


def _casts_in_hooks(modules: Collection[nn.Module]) -> bool:
    """Return True where a module has a hook of torchao's tensor-parallel styles, which cast before they gather."""
    styles = sys.modules.get("torchao.float8.float8_tensor_parallel")
    hooks = (
        hook for module in modules for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    )
    held = (cell.cell_contents for hook in hooks for cell in getattr(hook, "__closure__", None) or ())
    functions = (getattr(value, "func", value) for value in held)
    return styles is not None and any(getattr(each, "__module__", "") == styles.__name__ for each in functions)


# Dtypes, and what updates parameters


_UPDATES: dict[type[Optimizer], Literal["sgd", "muon"]] = {SGD: "sgd", Muon: "muon"}  # AdamW updates what Muon leaves


def _train(model: nn.Module, optimizers: Sequence[Optimizer], steps: int) -> Train:
    kept = {dtype_name(local_part(param).dtype) for param in model.parameters() if param.requires_grad}
    units = (module for module in model.modules() if isinstance(module, FSDPModule))
    policies: list[Any] = [unit._get_fsdp_state()._mp_policy for unit in units]
    narrow = {dtype_name(policy.param_dtype) for policy in policies if policy.param_dtype is not None}
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        device = "cpu" if torch.is_autocast_enabled("cpu") else "cuda"
        narrow = {dtype_name(torch.get_autocast_dtype(device))}
    reduced = {dtype_name(policy.reduce_dtype) for policy in policies if policy.reduce_dtype is not None}
    reduced = reduced or narrow or kept
    computed = next(iter(sorted(narrow)), "bfloat16" if kept == {"bfloat16"} else "")
    dtype = computed or ("float64" if "float64" in kept else "float32")
    if dtype not in ("float64", "float32", "bfloat16"):
        raise Unlike(f"it computes in {dtype}")
    return Train(
        steps=steps,
        seq_len=1,
        dtype=dtype,  # type: ignore[arg-type]  # one of the three
        parameter_dtype="bfloat16" if kept == {"bfloat16"} else "float32",
        reduce_dtype="bfloat16" if reduced == {"bfloat16"} else "float32",
        optimizer=next((name for kind, name in _UPDATES.items() for of in optimizers if isinstance(of, kind)), "adamw"),
    )
