"""torchtitan's Trainer as a target: built from a case, and driven one `train_step` at a time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.train import Trainer

from harness.plugins.torchtitan.worker.v0_2.config import FLAVOR, job_config, model_args
from harness.plugins.torchtitan.worker.v0_2.step import Metrics, TrainedByTorchtitan, infer_shapes, trained_by
from harness.worker.targets.reference.loss import mask_padded_vocab, summed_loss

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

    from harness.matrix.case import Case
    from harness.worker.targets.target import World

_Batch = tuple[dict[str, torch.Tensor], torch.Tensor]  # inputs, and labels
_spec_numbers = itertools.count(1)


def trained(case: Case, world: World) -> TrainedByTorchtitan:
    """The case as torchtitan trains it. Raises ValueError where torchtitan cannot do what it asks."""

    def make_trainer() -> _StepTrainer:
        config = job_config(case, world)
        config.model.name = _registered_spec(case)
        trainer = _StepTrainer(config, one_rank_fsdp=world.fsdp and case.world_size == 1)
        if case.layout.pp > 1:
            infer_shapes(trainer, torch.zeros(world.local_batch, case.train.seq_len, dtype=torch.int64))
        return trainer

    return trained_by(make_trainer, case, world)


class _StepTrainer(Trainer):  # type: ignore[misc]  # torchtitan is not installed where mypy runs
    """torchtitan's Trainer, with FSDP2 on a mesh of one rank where the harness asks for it."""

    def __init__(self, config: JobConfig, *, one_rank_fsdp: bool) -> None:
        self._one_rank_fsdp = one_rank_fsdp
        super().__init__(config)

    def batch_generator(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """What a data loader gives: with a pipeline the microbatches of a step in one batch."""
        return super().batch_generator([_joined(batches)] if self.parallel_dims.pp_enabled else batches)

    def init_distributed(self) -> ParallelDims:
        dims = super().init_distributed()
        if not self._one_rank_fsdp:
            return dims
        fields = (field.name for field in dataclasses.fields(dims))
        return _OneRankFsdp(**{name: getattr(dims, name) for name in fields if not name.startswith("_")})


def _joined(batches: Iterable[_Batch]) -> _Batch:
    inputs, labels = zip(*((batch["input"], its_labels) for batch, its_labels in batches), strict=True)
    return {"input": torch.cat(inputs)}, torch.cat(labels)


class _OneRankFsdp(ParallelDims):  # type: ignore[misc]
    """Meshes of a single rank on which FSDP2 is applied, for its mixed precision and its float8 all-gather.

    0.2.2 applies FSDP2 from two shards on, and autocast on one rank, which casts at other places. The single-rank
    reference of a layout must cast where the layout does. Can go when torchtitan applies FSDP2 on one rank.
    """

    @property
    def dp_shard_enabled(self) -> bool:
        """FSDP2 shards, over one rank."""
        return True

    def _mesh_exist(self, name: str, degree: int) -> bool:
        return name == "fsdp" or bool(super()._mesh_exist(name, degree))


def _registered_spec(case: Case) -> str:
    """Name of a train spec for this case: torchtitan's llama3 without tokenizer and data, with metrics kept here."""
    name = f"fp8_harness_{next(_spec_numbers)}"
    spec = dataclasses.replace(
        get_train_spec("llama3"),
        model_args={FLAVOR: model_args(case)},
        build_tokenizer_fn=None,
        build_dataloader_fn=None,
        build_loss_fn=_loss_builder(case),
        build_metrics_processor_fn=lambda *_: Metrics(),
        build_validator_fn=None,
        state_dict_adapter=None,
    )
    register_train_spec(name, spec)
    return name


def _loss_builder(case: Case) -> Callable[..., Any]:
    """torchtitan's loss, except where it cannot say what a case asks: it rounds to float32 and masks no padding."""
    if case.train.dtype != "float64" and case.model.padded_vocab_size == case.model.vocab_size:
        builder: Callable[..., Any] = build_cross_entropy_loss
        return builder

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return summed_loss(mask_padded_vocab(logits, case), labels)

    return lambda *_, **__: loss
