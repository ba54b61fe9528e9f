"""Tokens and initial weights: determined by the seed alone, bitwise equal on every machine and for every layout.

Only raw Philox words and integer or exactly rounded arithmetic are used: numpy guarantees the raw stream of a bit
generator, not its distributions, and libm differs in the last bit between CPUs.

Weights are written into a built model by the harness. A rank writes the part of the logical parameter that it holds.
Rows that pad the vocabulary are zero.
"""

import functools
import hashlib
import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from harness.matrix.case import Case, Model
from harness.matrix.linears import EMBEDDING, copies_of_weights
from harness.worker.tensors.names import clean_fqn
from harness.worker.tensors.places import local_shard, part_at, place_of
from harness.worker.tensors.reduction import with_other_ranks

Tokens = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]
_EMBEDDED = f"{EMBEDDING}.weight"

# One outlier for each of 8 shards, larger for every shard: no two shards of any layout have the same amax, so a scale
# from the wrong shard is a wrong number. With even shards every one of up to 8 ranks has at least one outlier.
OUTLIER_SHARDS = 8
_FOLLOW_PERCENT = 80  # how often a token is the fixed successor of the previous one, which the model can learn


def _stream(seed: int, purpose: str) -> np.random.Philox:
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64))


def make_tokens(*, steps: int, sequences: int, seq_len: int, vocab_size: int, seed: int) -> Tokens:
    """Zipf-distributed text with a bigram rule: [steps, sequences, seq_len + 1], values in [0, vocab_size).

    A token is followed by its fixed successor with a probability of 80 % and by an independent draw otherwise, so that
    a model that learns reduces its loss within a few steps.
    """
    words = _stream(seed, "tokens").random_raw(2 * steps * sequences * (seq_len + 1)).reshape(2, -1)
    fresh = _zipf(words[0], vocab_size).reshape(steps, sequences, seq_len + 1)
    follow = (words[1] % np.uint64(100) < _FOLLOW_PERCENT).reshape(fresh.shape)
    successor = np.argsort(_stream(seed, "successors").random_raw(vocab_size), kind="stable").astype(np.int64)
    tokens = fresh.copy()
    for position in range(1, seq_len + 1):
        tokens[..., position] = np.where(
            follow[..., position], successor[tokens[..., position - 1]], fresh[..., position]
        )
    return tokens


def _zipf(words: npt.NDArray[np.uint64], vocab_size: int) -> Tokens:
    ranks = np.arange(1, vocab_size + 1, dtype=np.uint64)
    cumulative = np.cumsum(np.uint64(2**40) // ranks)  # integers: exact on every machine
    return np.searchsorted(cumulative, words % cumulative[-1], side="right").astype(np.int64)


def make_weight(fqn: str, shape: tuple[int, ...], *, seed: int, bound: float | None = None) -> Weights:
    """Return the full initial weight of one parameter, float32.

    Vectors (norms) are ones, biases small. Matrices are uniform with a `bound`, by default 1/sqrt(in_features), skewed
    to the negative side, so that a missing abs is found, and with one negative outlier per shard on the diagonal, so
    that a local amax is found. Leading dims of other tensors count as rows.
    """
    return (_made if math.prod(shape) > _KEPT_SIZE else _kept)(fqn, shape, seed, bound)


def _made(fqn: str, shape: tuple[int, ...], seed: int, bound: float | None) -> Weights:
    if len(shape) < 2 and not fqn.endswith("bias"):
        return np.ones(shape, dtype=np.float32)
    count = math.prod(shape)
    words = _stream(seed, f"weight/{fqn}").random_raw((count + 1) // 2).view(np.uint32)[:count]
    unit = (words >> np.uint32(8)).astype(np.float32) * np.float32(2**-23) - np.float32(1)  # [-1, 1), exact
    if len(shape) < 2:
        return unit.reshape(shape) * np.float32(_BIAS)
    columns = shape[-1]
    rows = count // columns if columns else 0
    unit = np.where(unit < 0, unit * np.float32(1.5), unit).reshape(rows, columns)
    shards = min(OUTLIER_SHARDS, rows, columns)
    for shard in range(shards):
        unit[(2 * shard + 1) * rows // (2 * shards), (2 * shard + 1) * columns // (2 * shards)] = -2 - shard / 2
    return (unit * np.float32(_bound(columns) if bound is None else bound)).astype(np.float32).reshape(shape)


_KEPT_SIZE = 1 << 18
_kept = functools.lru_cache(maxsize=128)(_made)  # ranks inherit what the warm-up has made, and nobody writes into it
_BIAS = 2.0**-4  # not zero, so that a shard of a bias in the wrong place is a wrong number from the first step on


def _bound(features_in: int) -> float:
    # A power of two near 1/sqrt(features_in): scaling by it is exact, so weights are bitwise equal everywhere.
    return float(2.0 ** -round(np.log2(features_in) / 2))


# Embeddings are of order one, as in Llama: small ones make the first norm amplify rounding errors in five steps. Those
# that are weights of the output layer too are smaller, or logits are large: with 1/sqrt(in_features) the first
# gradients of a rowwise run of four blocks were up to 15 times those of BF16.
_EMBEDDING_BOUND, _TIED_BOUND = 1.0, 0.25


def global_tokens(case: Case) -> Tokens:
    """Return the tokens of the whole run: [steps, global_batch, seq_len + 1]."""
    train = case.train
    return make_tokens(
        steps=train.steps,
        sequences=train.global_batch,
        seq_len=train.seq_len,
        vocab_size=case.model.vocab_size,
        seed=train.seed,
    )


def positions(case: Case) -> Tokens:
    """Return the position of every token in its document: [steps, global_batch, seq_len]."""
    train = case.train
    rows = [train.documents(row, step) for step in range(1, train.steps + 1) for row in range(train.global_batch)]
    of_rows = [np.concatenate([np.arange(length) for length in lengths]) for lengths in rows]
    return np.stack(of_rows).reshape(train.steps, train.global_batch, train.seq_len)


def ignored_labels(case: Case) -> npt.NDArray[np.bool_]:
    """Return which labels the loss leaves out: [steps, global_batch, seq_len]; one step stands for all alike."""
    train = case.train
    if train.packing != "none":
        begins = positions(case) == 0
        last = np.arange(train.seq_len) == train.seq_len - 1
        number = begins.cumsum(-1)
        is_padding = (number == number[..., -1:]) & (train.packing == "padded")
        return is_padding | (np.roll(begins, -1, -1) & ~last)
    kept = [train.seq_len - train.ignored_labels(sequence) for sequence in range(train.global_batch)]
    ignored: npt.NDArray[np.bool_] = np.arange(train.seq_len) >= np.array(kept)[:, None]
    return ignored[None]


def batch_slice(case: Case, number: int) -> slice:
    """Return the sequences of a slice of the global batch: those that ranks of TP and of context parallelism share."""
    return slice(number * case.local_batch, (number + 1) * case.local_batch)


def digest(arrays: dict[str, npt.NDArray[np.generic]]) -> str:
    """sha256 over names, shapes, dtypes and bytes, sorted by name."""
    state = hashlib.sha256()
    for name in sorted(arrays):
        state.update(f"{name}{arrays[name].shape}{arrays[name].dtype}".encode())
        state.update(np.ascontiguousarray(arrays[name]).tobytes())
    return state.hexdigest()


@torch.no_grad()
def write_weights(model: nn.Module, case: Case) -> dict[str, Weights]:
    """Write every parameter of a built model. Returns the full weights by FQN, without the padding of vocabularies.

    A copy of weights is written as they are, and not returned.
    """
    owners = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    users = Counter(id(param) for module in model.modules() for param in module.parameters(recurse=False))
    alone = {name for name, param in model.named_parameters() if users[id(param)] == 1}
    embeddings = alone & {f"{owner}.weight".removeprefix(".") for owner in owners}
    written = {}
    for name, param in model.named_parameters():
        fqn, place = clean_fqn(name), place_of(param)
        fqn = _EMBEDDED if fqn in copies_of_weights(case) else fqn
        rows = unpadded_rows(place.shape, case.model)
        full = make_weight(
            fqn, (*rows, *place.shape[1:]), seed=case.train.seed, bound=_bound_of(fqn, case, name in embeddings)
        )
        local = local_shard(param)
        local.zero_()
        mine = full[part_at(place.offset, local.shape)]
        local[tuple(slice(size) for size in mine.shape)].copy_(torch.from_numpy(mine))
        written[fqn] = full
    return written


def with_other_stages(weights: dict[str, Weights], case: Case) -> dict[str, Weights]:
    """Return the full weights of the whole model, of which this rank has those of its stages of a pipeline."""
    if case.layout.pp == 1:
        return weights
    shapes = with_other_ranks({fqn: weight.shape for fqn, weight in weights.items()})
    return weights | {
        fqn: make_weight(fqn, shape, seed=case.train.seed, bound=_bound_of(fqn, case, fqn == _EMBEDDED))
        for fqn, shape in shapes.items()
        if fqn not in weights
    }


def _bound_of(fqn: str, case: Case, is_embedding: bool) -> float | None:
    if case.model.tied and fqn == _EMBEDDED:
        return _TIED_BOUND
    return _EMBEDDING_BOUND if is_embedding else None


def unpadded_rows(shape: tuple[int, ...], model: Model) -> tuple[int, ...]:
    """Return the number of rows of a parameter as a 1-tuple, without padding of a vocabulary; () for a scalar."""
    if not shape:
        return ()
    padded = model.padded_vocab_size
    return (model.vocab_size,) if shape[0] == padded else (shape[0],)
