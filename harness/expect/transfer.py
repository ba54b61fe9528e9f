"""One kind of collective of a rank and step, and how often forwards and microbatches repeat it."""

from collections.abc import Iterable, Iterator

import msgspec

from harness.matrix.case import Case
from harness.matrix.recipes import ITEM_BYTES
from harness.trace.counts import collective_words


class Transfer(msgspec.Struct, frozen=True):
    """`times` collectives with an input of `elements` each on one rank; `purpose` says what is sent and why."""

    axis: str
    kind: str
    dtype: str
    elements: int
    purpose: str
    op: str = ""
    times: int = 1
    least: int | None = None  # a compiled run may send from this many up to twice `times`

    @property
    def words(self) -> str:
        return collective_words(axis=self.axis, kind=self.kind, op=self.op, dtype=self.dtype)

    @property
    def payload_bytes(self) -> int:
        return self.times * self.elements * ITEM_BYTES[self.dtype]


def forward_passes(case: Case) -> int:
    """Forward passes of one step: its evaluation, and the one that is trained."""
    return 1 + case.train.evaluate


def repeated(terms: Iterable[Transfer], times: int) -> Iterator[Transfer]:
    for term in terms:
        least = None if term.least is None else term.least * times
        yield msgspec.structs.replace(term, times=term.times * times, least=least)


def residual_tokens(case: Case) -> int:
    """Tokens that a rank holds between blocks."""
    shares = case.layout.tp if case.layout.sequence_parallel else 1
    return case.microbatch * -(-case.local_seq_len // shares)
