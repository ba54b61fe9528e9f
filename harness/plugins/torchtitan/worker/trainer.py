"""The Trainer of torchtitan 0.3.0 as a target: built from a case, and driven one `train_step` at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import Configurable
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.trainer import Trainer

from harness.matrix.linears import OUTPUT_FQN
from harness.plugins.torchtitan.worker.config import trainer_config
from harness.plugins.torchtitan.worker.shims import float64_kept
from harness.plugins.torchtitan.worker.step import Metrics, TrainedByTorchtitan, infer_shapes, trained_by

if TYPE_CHECKING:
    from harness.matrix.case import Case
    from harness.worker.targets.target import World


def trained(case: Case, world: World) -> TrainedByTorchtitan:
    """The case as torchtitan trains it. Raises ValueError where torchtitan cannot do what it asks."""
    loss = _Loss.Config(global_vocab_size=case.model.padded_vocab_size, vocab_size=case.model.vocab_size)
    parts = {"tokenizer": _Nothing.Config(), "dataloader": _Nothing.Config(), "metrics": _KeptMetrics.Config()}
    target = trained_by(lambda: _trainer(case, world, trainer_config(case, world, loss, **parts)), case, world)
    add_names(target.model)
    return target


def _trainer(case: Case, world: World, config: Trainer.Config) -> Trainer:
    trainer = Trainer(config)
    if case.layout.pp > 1:
        tokens = torch.zeros(world.local_batch, case.train.seq_len, dtype=torch.int64)
        infer_shapes(trainer, tokens, global_valid_tokens=torch.tensor(tokens.numel(), device=trainer.device))
    return trainer


class _Nothing(Configurable):  # type: ignore[misc]  # torchtitan is not installed where mypy runs
    """In place of a tokenizer and a data loader: the harness brings the tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):  # type: ignore[misc]
        """Nothing to configure."""

    def __init__(self, config: Config, **_: object) -> None:
        self.config = config


class _KeptMetrics(Metrics, Configurable):  # type: ignore[misc]
    """The metrics processor of the harness, as a part that torchtitan builds."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):  # type: ignore[misc]
        """Nothing to configure."""

    def __init__(self, config: Config, **_: object) -> None:
        super().__init__()
        self.config = config


class _Loss(CrossEntropyLoss):  # type: ignore[misc]
    """torchtitan's loss, with what it cannot say: float64 is kept, and rows that pad the vocabulary are masked."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):  # type: ignore[misc]
        """`vocab_size`: without padding."""

        vocab_size: int

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        self._vocab_size = config.vocab_size

    def __call__(self, pred: torch.Tensor, *args: Any, **options: Any) -> Any:
        """The loss of this rank over the tokens of the global batch, and no metrics."""
        with float64_kept():
            return super().__call__(self._masked(pred), *args, **options)

    def _masked(self, pred: torch.Tensor) -> torch.Tensor:
        """Logits [batch, seq, rows of this TP rank] with those of the padding set to -inf."""
        first = max(0, self._vocab_size - self._first_row())
        if first >= pred.size(-1):
            return pred
        return pred.index_fill(-1, torch.arange(first, pred.size(-1), device=pred.device), -torch.inf)

    def _first_row(self) -> int:
        tp = spmd_mesh_size("tp")
        mesh = current_spmd_mesh()
        return 0 if tp == 1 or mesh is None else -(-self.global_vocab_size // tp) * mesh.get_local_rank("tp")


def add_names(model: Any) -> None:
    """Let modules be found by the names of `linears.py` first. Nothing else changes: torchtitan's own names still hold.

    In 0.3.0 the projections of attention lie in a module `qkv_linear`, and the output layer is `lm_head`.
    """
    if getattr(model, "lm_head", None) is not None:  # a stage of a pipeline may have none
        _put_first(model, {OUTPUT_FQN: model.lm_head})
    for block in model.layers.values():
        projections = block.attention.qkv_linear
        _put_first(block.attention, {name: getattr(projections, name) for name in ("wq", "wk", "wv")})


def _put_first(module: nn.Module, children: dict[str, nn.Module]) -> None:
    others = dict(module._modules)
    module._modules.clear()
    module._modules.update(children | others)
