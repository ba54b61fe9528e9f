"""Typical mistakes of a target: every class is the sound one with one of them, and can stand for `build`."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import toy
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class NoTensorParallelism(toy.Toy):
    """No mistake: it says what it does not support."""

    def parallelize(self) -> None:
        if self.case.layout.tp > 1:
            raise NotImplementedError("no tensor parallelism yet")
        super().parallelize()


class OneLoss(toy.Toy):
    def step(self, microbatches: Any) -> Any:
        return super().step(microbatches)[0]


class OwnError(toy.Toy):
    def step(self, microbatches: Any) -> Any:
        raise RuntimeError("disk quota")


class SummedLoss(toy.Toy):
    def reported(self, loss: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(loss)
        return loss


class OwnLoss(toy.Toy):
    def reported(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


class NotAveraged(toy.Toy):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(batch) * self.world.microbatches


class SumOfTokens(toy.Toy):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(batch) * batch[:, 1:].numel()


class Divided(toy.Toy):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(batch) / self.case.layout.dp


class DividedTwice(toy.Toy):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(batch) / self.world.microbatches


class SomeLabels(toy.Toy):
    """Leaves out the most frequent token, and averages over what is left of a microbatch."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        labels = batch[:, 1:].masked_fill(batch[:, 1:] == 0, -100)
        return F.cross_entropy(self.model(batch[:, :-1]).double().flatten(0, 1), labels.flatten())


class OwnLabels(toy.Toy):
    """Takes labels, and averages over those of this rank."""

    def step(self, microbatches: Any, labels: Any = ()) -> Any:
        self.labels = list(labels)
        return super().step(microbatches)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        labels = self.labels.pop(0) if self.labels else batch[:, 1:]
        return F.cross_entropy(self.model(batch[:, :-1]).double().flatten(0, 1), labels.flatten())


class ShardNorm(toy.Toy):
    """Clips by the norm of its own shards."""

    def update(self) -> Any:
        grads = [getattr(parameter.grad, "_local_tensor", parameter.grad) for parameter in self.model.parameters()]
        norm = nn.utils.get_total_norm(grads)
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self.case.train.max_norm or 1e9, norm)
        super().update()
        return norm if self.case.train.max_norm else None


class OneRankSteps(toy.Toy):
    def update(self) -> Any:
        return super().update() if dist.get_rank() == 0 else None


class NormOfOwnTokens(toy.Toy):
    """Under TP the gain before a linear gets the gradient of the tokens of one rank, as with sequence parallelism."""

    def parallelize(self) -> None:
        super().parallelize()
        for block in self.model.blocks if self.case.layout.tp > 1 else ():
            block.gain.register_hook(lambda grad: grad / 2 + (dist.get_rank() - 0.5) * grad.roll(1))


class Shifted(toy.Toy):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(batch[:, 1:]).double().flatten(0, 1), batch[:, :-1].flatten())


class OwnTokens(toy.Toy):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(7)
        return super().loss(torch.randint(0, self.case.model.vocab_size, batch.shape, generator=drawn))


class Sliced(toy.Toy):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(batch[: len(batch) // self.case.layout.dp])


class RankBuffer(toy.Toy):
    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.tilt += dist.get_rank()
        return model


class RankWeights(toy.Toy):
    def parallelize(self) -> None:
        super().parallelize()
        for block in self.model.blocks:
            nn.init.constant_(block.gain, dist.get_rank())


class EarlyOptimizer(toy.Toy):
    def parallelize(self) -> None:
        self.early = super().make_optimizer()
        super().parallelize()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.early


class NoUpdate(toy.Toy):
    def make_optimizer(self) -> torch.optim.Optimizer:
        made = super().make_optimizer()
        made.step = lambda: None
        return made


class Detached(toy.Toy):
    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.embed.register_forward_hook(lambda module, given, output: output.detach())
        return model


class DefaultDtype(toy.Toy):
    def make_model(self) -> nn.Module:
        model = super().make_model()
        torch.set_default_dtype(torch.float64)
        return model


class OnlyFloat32(toy.Toy):
    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.double = lambda: model
        return model


class GroupGone(toy.Toy):
    def step(self, microbatches: Any) -> Any:
        reported = super().step(microbatches)
        dist.destroy_process_group()
        return reported


class SmallSum(toy.Toy):
    def parallelize(self) -> None:
        param_dtype = torch.bfloat16 if self.case.train.dtype == "bfloat16" else None
        reduce_dtype = getattr(torch, self.case.train.reduce_dtype)
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mp_policy=policy)


class ScattersTokens(toy.Toy):
    def parallelize(self) -> None:
        super().parallelize()
        for block in self.model.blocks if self.case.layout.tp > 1 else ():
            block.down.register_forward_hook(scattered_and_gathered)


def scattered_and_gathered(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
    mesh = module.weight.device_mesh
    part = reduce_scatter_tensor_autograd(output / mesh.size(), "sum", 1, mesh)
    return all_gather_tensor_autograd(part, 1, mesh)


class Dropout(toy.Toy):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        torch.seed()
        return super().loss(batch) * F.dropout(torch.ones(64), 0.5).mean()
