"""Made-up text: every token is followed by the same one most of the time, so that there is something to learn."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tiny_gpt.config import Config


def batches(config: Config, dp_rank: int, device: torch.device, sequences: int = 4) -> Iterator[list[torch.Tensor]]:
    """The microbatches of one step after another, int64 [sequences, seq_len + 1], for one data-parallel rank."""
    language = torch.Generator().manual_seed(0)
    successor = torch.randperm(config.vocab_size, generator=language)
    draws = torch.Generator().manual_seed(1 + dp_rank)
    shape = (config.accumulate, sequences, config.seq_len + 1)
    while True:
        tokens = torch.randint(64, shape, generator=draws)  # few of the vocabulary, so that they come again
        follows = torch.rand(shape, generator=draws) < 0.9
        for position in range(1, config.seq_len + 1):
            previous = successor[tokens[..., position - 1]] % 64
            tokens[..., position] = torch.where(follows[..., position], previous, tokens[..., position])
        yield list(tokens.to(device).unbind())
