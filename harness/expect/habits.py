"""What targets that train the same Llama do differently around it: numbers that the formulas of this package use.

A habit is neither right nor wrong. What a target gets wrong is not here: the checks must keep finding it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from harness.matrix.case import Case
from harness.matrix.targets import REFERENCE, TORCHTITAN


class Habits(msgspec.Struct, frozen=True, kw_only=True):
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
_HABITS: Mapping[str, Habits] = {
    REFERENCE: Habits(),
    TORCHTITAN: Habits(
        logs=True,
        clips=True,
        recomputes_whole_blocks=True,
        casts_rope=False,
        keeps_logits=False,
        keeps_gradients=True,
        counts_tokens_in="float32",
    ),
}


def habits_of(case: Case) -> Habits:
    """The habits of the target of a case."""
    return _HABITS.get(case.target, Habits())
