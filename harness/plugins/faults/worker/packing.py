"""Class E: attention and positions of packed documents. Class G: their labels, and how many the loss is a mean over."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.plugins.faults.worker import hooks
from harness.plugins.faults.worker.hooks import RUN, planted, wrap, wrap_everywhere
from harness.worker.targets import data
from harness.worker.targets.reference import loss, model
from harness.worker.targets.target import IGNORED


def _lengths(change: Callable[[Sequence[int]], Sequence[int]]) -> None:
    """Attention and positions of documents of other lengths."""
    wrap(model, "attend_apart", lambda stock, documents, *rest: stock([*change(documents)], *rest))


@planted(_lengths)
def document_border_off_by_one(lengths: Sequence[int]) -> Sequence[int]:
    first, *others = lengths
    return [first + 1, others[0] - 1, *others[1:]] if others else lengths


@planted(_lengths)
def borders_of_first_sequence(lengths: Sequence[int]) -> Sequence[int]:
    """Every sequence of a microbatch has the documents of its first one."""
    ends, whole = [*itertools.accumulate(lengths)], RUN.case.train.seq_len
    return [*lengths[: ends.index(whole) + 1]] * (ends[-1] // whole)


@planted(wrap, model, "attend_apart")
def document_mask_lost(
    _: Any, documents: Sequence[int], q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    positions = torch.cat([torch.arange(length) for length in documents])
    tables = cos[positions], sin[positions]
    q, k = (model.apply_rope(each.flatten(0, 1)[None], *tables).view(each.shape) for each in (q, k))
    return model.attend(q, k, v)


@planted(wrap, model, "attend_apart")
def positions_not_restarted(stock: Any, documents: Sequence[int], *given: Tensor) -> Tensor:
    *heads, cos, sin = given
    begins = (end % heads[0].size(1) for end in itertools.accumulate(documents, initial=0))
    pieces = zip(*(each.flatten(0, 1)[None].split(documents, 1) for each in heads), strict=True)
    attended = [
        stock([piece[0].size(1)], *piece, cos[begin:], sin[begin:])
        for begin, piece in zip(begins, pieces, strict=False)
    ]
    return torch.cat(attended, 1).view(heads[0].shape)


@planted(wrap, data, "ignored_labels")
def labels_of_padding_counted(stock: Any, case: Any) -> Any:
    ends = np.roll(data.positions(case) == 0, -1, -1)
    ends[..., -1] = False
    return stock(case) & ends


@planted(hooks.around_loss)
def mean_of_means_of_microbatches(stock: Any, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    train, own = RUN.case.train, (labels != IGNORED).sum()
    every = sum(train.labels_of(sequence, RUN.step) for sequence in range(train.global_batch))
    means = RUN.case.layout.batches * train.accumulation
    return stock(logits, labels, **options) * every / (own * means)


def token_count_not_restarted() -> None:
    counted: list[int] = []

    def global_token_count(stock: Any, *args: Any) -> int:
        counted.append(stock(*args))
        return sum(counted)

    wrap_everywhere(loss, "global_token_count", global_token_count)
