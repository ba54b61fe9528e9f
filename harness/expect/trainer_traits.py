"""Traits of trainers: what those of the same Llama log, read, keep and save differently.

A trait is neither right nor wrong. What a target gets wrong is not here: the checks must keep finding it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from harness.matrix.case import Case
from harness.matrix.targets import REFERENCE, TORCHTITAN


class TrainerTraits(msgspec.Struct, frozen=True, kw_only=True):
    """How a target goes about a step. The defaults are those of the reference target."""

    logs: bool = False  # sums the tokens and the loss over data-parallel ranks, and the norm over all
    clips: bool = False  # reads every gradient for its norm before the optimizer does
    recomputes_whole_blocks: bool = False  # otherwise recomputing stops at the last tensor that backward needs
    casts_rope: bool = True  # the RoPE cache is real, so that FSDP2 casts it; a complex one it does not
    keeps_logits: bool = True  # a name still holds the logits in backward
    keeps_gradients: bool = False  # until the next step begins
    counts_tokens_in: str = ""  # dtype of the number of tokens where it is saved to divide by; "": a Python number


# torchtitan 0.2.2: `train.py` (`train_step`, `forward_backward_step`), `config/job_config.py` (`early_stop`),
# `models/llama3/model/model.py` (`precompute_freqs_cis`).
_TRAITS: Mapping[str, TrainerTraits] = {
    REFERENCE: TrainerTraits(),
    TORCHTITAN: TrainerTraits(
        logs=True,
        clips=True,
        recomputes_whole_blocks=True,
        casts_rope=False,
        keeps_logits=False,
        keeps_gradients=True,
        counts_tokens_in="float32",
    ),
}


def traits_of(case: Case) -> TrainerTraits:
    """The traits of the target of a case."""
    return _TRAITS.get(case.target, TrainerTraits())
