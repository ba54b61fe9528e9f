"""What every dimension states: a way to share the work of a run among ranks. Each has one file beside this one.

The degree of a dimension is an axis (`layout.py`). Its file says what a rank then has of the model, what it sends for
that, which cases are impossible, and what the one rank of a reference must repeat to stand for all. The rest of the
harness adds up what dimensions state.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from harness.matrix.case import Case, ModelShape
from harness.matrix.recipes import ITEM_BYTES
from harness.matrix.upstream import NONE, Changes
from harness.trace.counts import Moment, collective_words

# The axes that the shape of the model follows from. A target that cuts the model itself is not bound by it.
MODEL_AXES = ("target", "model", *ModelShape.__struct_fields__, "experts")
VOCABULARY_AXES = ("vocab_size", "pad_vocab_to_multiple_of")
# By the name of the rule in `rules.toml`: the axes that it reads, and what is true, or not zero, where it applies.
Excluded = Mapping[str, tuple[tuple[str, ...], Callable[[Case], int]]]


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


def repeated(terms: Iterable[Transfer], times: int) -> Iterator[Transfer]:
    for term in terms:
        least = None if term.least is None else term.least * times
        yield msgspec.structs.replace(term, times=term.times * times, least=least)


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that one rank plays, and of what each of them has a piece.

    Of the batch: `ranks`, whose gradients are added up `shards` at a time, and then those of all replicas. Of the
    experts of a block: so many of these ranks that one computes all their tokens at once. Of the sequence: the
    positions of ranks that share it, which compute one piece after the other. Of what matmuls contract: `products`,
    where the modules of a run are replayed. Of the stages: whether tied ends are two copies.
    """

    ranks: int = 1
    shards: int = 1
    sharing_experts: int = 1
    positions: tuple[tuple[int, ...], ...] = ((),)
    products: int = 1
    copied_ends: bool = False


class Sender(msgspec.Struct, frozen=True):
    """One rank in one step (1-based) of a case, with these changes of upstream."""

    case: Case
    rank: int
    step: int = 2  # and every later one
    changes: Changes = NONE


Terms = Callable[[Sender], Iterable[Transfer]]


def _nothing(_: Sender) -> Iterable[Transfer]:
    return ()


class Dimension(msgspec.Struct, frozen=True, kw_only=True):
    """A way to share work.

    Of a step `of_microbatch` is sent for every microbatch, `of_reduction` wherever gradients are reduced, `of_step`
    once, the same in every step from the second on. What depends on more of the past is `of_age`. `saved_by_block`:
    elements by dtype that a block keeps for backward because ranks share the work in this way. `alive`: dtype, elements
    and purpose of what a rank keeps at a moment of a step, whose number is its target's age. `alone`: values of axes
    that the single rank of a reference keeps, because it repeats what ranks of this dimension do one after another;
    without, it computes at once what all of them do. `played`: what of `Played` follows from this dimension.
    """

    name: str
    of_microbatch: Terms = _nothing
    of_reduction: Terms = _nothing
    of_step: Terms = _nothing
    of_age: Terms = _nothing
    saved_by_block: Callable[[Case], Mapping[str, int]] = lambda _: {}
    alive: Callable[[Case, int, Moment], Iterable[tuple[str, int, str]]] = lambda *_: ()
    excluded: Excluded = {}
    alone: Callable[[Case], Mapping[str, object]] = lambda _: {}
    played: Callable[[Case], Mapping[str, object]] = lambda _: {}
