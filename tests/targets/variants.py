"""Sound targets that build the model of `toy.py` in other ways."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
import toy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel
from torchao.float8.float8_training_tensor import GemmInputRole


class GatedBlock(nn.Module):
    """Two linears have the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(toy.WIDTH, 2 * toy.WIDTH, bias=False)
        self.gate = nn.Linear(toy.WIDTH, 2 * toy.WIDTH, bias=False)
        self.down = nn.Linear(2 * toy.WIDTH, toy.WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.layer_norm(x, (toy.WIDTH,))
        return x + self.down(F.gelu(self.up(normed)) * self.gate(normed))


class Accumulating(toy.Toy):
    """Two microbatches for every update. FSDP2 reduces the gradients of both at once."""

    synchronizes_once = True

    def parts(self, microbatches: Any) -> list[torch.Tensor]:
        return [part for batch in microbatches for part in batch.chunk(2)]

    def before(self, left: int) -> None:
        if self.synchronizes_once and isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(left == 0)


class Synchronizing(Accumulating):
    """FSDP2 reduces the gradients of every microbatch."""

    synchronizes_once = False


class Styled(toy.Toy):
    """Float8 TP styles without PrepareFloat8ModuleInput: every linear casts its own input."""

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.blocks = nn.ModuleList(GatedBlock() for _ in range(2))
        return model

    def parallelize(self) -> None:
        tp = self.case.layout.tp
        if tp > 1:
            mesh = init_device_mesh(self.world.device.type, (tp,))
            plan = {"up": Float8ColwiseParallel(), "gate": Float8ColwiseParallel(), "down": Float8RowwiseParallel()}
            for block in self.model.blocks:
                parallelize_module(block, mesh, plan)


class Tied(toy.Toy):
    """The output layer is converted too, and then gets the weight of the embedding."""

    def convert(self) -> None:
        float8 = self.case.float8
        config = Float8LinearConfig.from_recipe_name(float8.recipe)
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=float8.fp8_all_gather)
        convert_to_float8_training(self.model, config=config)

    def parallelize(self) -> None:
        self.model.lm_head.weight = self.model.embed.weight
        super().parallelize()


class CachingLinear(Float8Linear):
    """Casts its weight for the first microbatch, and keeps that until it is told to forget it."""

    kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = hp_tensor_to_float8_dynamic(
                self.weight.t(),
                self.config.cast_config_weight.target_dtype,
                self.linear_mm_config,
                gemm_input_role=GemmInputRole.WEIGHT,
            )
        output = matmul_with_hp_or_float8_args.apply(x, self.kept, self.linear_mm_config, self.config)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class Caching(Accumulating):
    """Every weight is cast once in a step."""

    forgets = True

    def convert(self) -> None:
        super().convert()
        for module in self.model.modules():
            if isinstance(module, Float8Linear):
                module.__class__ = CachingLinear

    def step(self, microbatches: Any) -> Any:
        result = super().step(microbatches)
        for module in self.model.modules():
            if isinstance(module, CachingLinear) and self.forgets:
                module.kept = None
        return result


class Forgetful(Caching):
    """Casts of the first step are used in all."""

    forgets = False


# Variants with a model of their own, by the seed of their cases: what asks for them is not in the case of one rank.
OWN_MODELS = {1: Styled, 2: Tied, 4: Caching, 5: Forgetful}


def build(case: Any, world: Any) -> toy.Toy:
    """The variant that a case is about."""
    if case.train.seed in OWN_MODELS:
        return OWN_MODELS[case.train.seed](case, world)
    if case.train.reduce_dtype == "bfloat16":
        return Synchronizing(case, world)
    return (Accumulating if case.train.dtype == "float32" else toy.Toy)(case, world)
