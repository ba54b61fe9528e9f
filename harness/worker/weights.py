"""Initial weights: written into a built model by the harness, so that every layout starts from the same values.

A rank writes the part of the logical parameter that it holds. Rows that pad the vocabulary are zero.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from harness.matrix.case import Case, Model
from harness.worker import data
from harness.worker.probes.places import local_shard, place_of
from harness.worker.probes.sketches import clean_fqn


@torch.no_grad()
def write_weights(model: nn.Module, case: Case) -> dict[str, data.Weights]:
    """Write every parameter of a built model. Returns the full weights by FQN, without the padding of vocabularies."""
    embeddings = _embeddings(model)
    written = {}
    for name, param in model.named_parameters():
        fqn, place = clean_fqn(name), place_of(param)
        rows = unpadded_rows(place.shape, case.model)
        full = data.make_weight(fqn, (*rows, *place.shape[1:]), seed=case.train.seed, embedding=name in embeddings)
        local = local_shard(param)
        local.zero_()
        mine = full[tuple(slice(at, at + size) for at, size in zip(place.offset, local.shape, strict=True))]
        local[tuple(slice(size) for size in mine.shape)].copy_(torch.from_numpy(mine))
        written[fqn] = full
    return written


def unpadded_rows(shape: tuple[int, ...], model: Model) -> tuple[int, ...]:
    """The number of rows of a parameter as a 1-tuple, without the padding rows of a vocabulary; () for a scalar."""
    if not shape:
        return ()
    padded = model.padded_vocab_size
    return (model.vocab_size,) if shape[0] == padded else (shape[0],)


def _embeddings(model: nn.Module) -> set[str]:
    """Names of the weights of embeddings that no other module shares."""
    owners = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    users = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    alone = {name for name, param in model.named_parameters() if users[id(param)] == 1}
    return alone & {f"{owner}.weight".removeprefix(".") for owner in owners}
