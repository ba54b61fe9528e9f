"""What alignment costs: the copies of `pad_inner_dim`, and vocabularies whose shards are no multiples of 16."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from harness.matrix.case import Case
from harness.matrix.linears import shard_sizes
from harness.performance.gemms import ALIGNMENT, FLOAT8, Gemm, gemms
from harness.performance.machine import Machine

_PARAMETER_BYTES = 4 + 4 + 8  # the float32 weight, its gradient, and AdamW's two moments


def padding_bytes(case: Case, gemm: Gemm) -> int:
    """What `pad_inner_dim` reads and writes for all executions of a matmul in one step: both float8 operands.

    A compiled block copies what it pads. In an eager one `torch.nn.functional.pad` copies what is aligned too.
    """
    pads = gemm.precision == FLOAT8 and case.float8.pad_inner_dim
    if not pads or (gemm.executed_k == gemm.k and case.compile != "none"):
        return 0
    return (gemm.m + gemm.n) * (gemm.k + gemm.executed_k) * gemm.executions


def padding_memory_bytes(case: Case) -> int:
    """The largest pair of copies of one matmul, which live while it runs; 0 where nothing is copied."""
    copied = (gemm for gemm in gemms(case) if padding_bytes(case, gemm))
    return max(((gemm.m + gemm.n) * gemm.executed_k for gemm in copied), default=0)


def padding_s(case: Case, machine: Machine) -> float:
    """Seconds of these copies in one step."""
    return sum(padding_bytes(case, gemm) for gemm in gemms(case)) / machine.memory_bytes_s


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """A way to train a vocabulary under tensor parallelism, and what it costs one rank.

    `shards`: the rows of the output layer that ranks hold, each size once. `refused`: of them those that float8
    matmuls refuse. `added_bytes`: what the rows that padding adds take for the embedding and the output layer, with
    gradients and AdamW, if nothing else shards them.
    """

    name: str
    case: Case
    shards: tuple[int, ...]
    refused: tuple[int, ...]
    added_rows: int
    added_bytes: int


def vocabularies(case: Case) -> tuple[Vocabulary, ...]:
    """The ways to train the vocabulary of a case: as it is and padded, with the output layer in float8 and not."""
    return tuple(_vocabularies(case))


def padded_size(vocab_size: int, tp: int) -> int:
    """The smallest vocabulary of at least this size whose shards on `tp` ranks are equal multiples of 16."""
    multiple = ALIGNMENT * tp
    return -(-vocab_size // multiple) * multiple


def added_bytes(vocab_size: int, padded: int, tp: int, dim: int) -> int:
    """What the rows that padding adds take on one of `tp` ranks: of the embedding and of the output layer."""
    return 2 * _added_rows(vocab_size, padded, tp) * dim * _PARAMETER_BYTES


def _added_rows(vocab_size: int, padded: int, tp: int) -> int:
    return -(-padded // tp) - -(-vocab_size // tp)


def _vocabularies(case: Case) -> Iterator[Vocabulary]:
    tp, own = case.layout.tp, case.model.vocab_size
    size = padded_size(own, tp)
    multiples = (1,) if size == own else (1, ALIGNMENT * tp)
    for multiple in multiples:
        for float8 in (True, False):
            model = replace(case.model, pad_vocab_to_multiple_of=multiple)
            found = replace(case, model=model, float8=replace(case.float8, output_layer=float8))
            rows = found.model.padded_vocab_size
            shards = tuple(dict.fromkeys(shard_sizes(rows, tp)))
            yield Vocabulary(
                name=f"{rows} rows, output layer in {'float8' if float8 else case.train.dtype}",
                case=found,
                shards=shards,
                refused=tuple(shard for shard in shards if float8 and shard % ALIGNMENT),
                added_rows=_added_rows(own, rows, tp),
                added_bytes=added_bytes(own, rows, tp, case.model.shape.dim),
            )
