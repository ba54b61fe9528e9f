"""Candidate fix for torchtitan 0.2.2: in a pipeline the loss is divided by the tokens before backward, as without one.

    fp8-harness run target.torchtitan-pp2-bf16-v2048-s2-accum4-f64 \\
        --inject cases/fixes/torchtitan_pipeline_loss.py:apply

`forward_backward_step` divides the loss by the tokens of the global batch and then computes backward. In a pipeline the
schedule runs backward itself, on the sum, and only the loss that is logged is divided. With this fix the loss of
the schedule is divided for as long as it runs, and what is logged is not divided again. torchtitan 0.3.0 hands the
number of tokens to the loss of the schedule.
"""

from __future__ import annotations

from typing import Any


def apply() -> None:
    """Divide the loss of every microbatch, in this process."""
    from torchtitan.train import Trainer

    stock: Any = Trainer.forward_backward_step

    def divided(trainer: Any, *, global_valid_tokens: Any, **batch: Any) -> Any:
        if not trainer.parallel_dims.pp_enabled:
            return stock(trainer, global_valid_tokens=global_valid_tokens, **batch)
        schedule = trainer.pp_schedule
        summed = schedule._loss_fn
        schedule._loss_fn = lambda *given: summed(*given) / global_valid_tokens
        try:
            return stock(trainer, global_valid_tokens=1.0, **batch)
        finally:
            schedule._loss_fn = summed

    Trainer.forward_backward_step = divided
