"""A smaller run with the same fault: sizes and degrees made smaller so that what faults depend on stays.

What stays of every size that is sharded: its remainder modulo 16, whether TP ranks and FSDP2 ranks divide it, and the
remainder modulo 16 of the part that a TP rank holds, which is what `torch._scaled_mm` sees; of a vocabulary, where TP
ranks stay, its remainder modulo 16 times these. Of degrees: which are above 1. Of tokens: their number per rank modulo
16, whether there are several sequences, and whether TP divides them. Of layers: as many as the checkpointing pattern
needs to wrap one and leave out one.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from msgspec.structs import replace

from harness.matrix.layout import MESH_AXES, Mesh

MAX_RANKS = 8  # that fit on two cores
_FLOORS = {"dim": 128, "ffn_dim": 256, "vocab_size": 2048}  # of sizes that are made smaller
_CHEAP = 4  # sizes up to this many times the floor are kept
_HEADS = 8  # of the smallest attention, if they fit
_SEQUENCE = 32  # tokens
_CHEAP_TOKENS = 512  # per rank

# Of the traits of a size: what a TP rank holds before what the whole is.
_WEIGHTS = (1, 4, 3, 2)

Traits = tuple[object, ...]
_Candidate = TypeVar("_Candidate")


class Sizes(Mesh, frozen=True, kw_only=True):
    """The sizes of a run. `every`: layers between two checkpointed ones, 1 where all or none are."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab_size: int
    local_batch: int
    seq_len: int
    every: int = 1

    @property
    def kv_dim(self) -> int:
        return self.dim // self.heads * self.kv_heads


def made_smaller(sizes: Sizes) -> tuple[Sizes, Mapping[str, str]]:
    """The smaller run, and for every axis that changed the arithmetic, with what could not be kept."""
    smaller = [_on_mesh(sizes, mesh) for mesh in _meshes(sizes)]
    best = min(smaller, key=lambda small: _rank_of(sizes, small))
    return best, dict(_arithmetic(sizes, best))


def traits(sizes: Sizes) -> dict[str, Traits]:
    """What faults depend on, by size: equal for a run and its smaller one, unless the arithmetic says so."""
    shards = {name: getattr(sizes, name) for name in ("dim", "kv_dim", "ffn_dim", "vocab_size")}
    return {
        **{name: _traits(size, sizes) for name, size in shards.items()},
        "tokens": _token_traits(sizes.local_batch, sizes.seq_len, sizes.tp),
        "heads": (sizes.heads % sizes.tp == 0, sizes.kv_heads % sizes.tp == 0, sizes.kv_heads < sizes.heads),
        "degrees": tuple(degree > 1 for degree in sizes.mesh.values()),
        "layers": (sizes.layers >= sizes.every, sizes.layers > 1, sizes.every),
    }


def lost(sizes: Sizes, small: Sizes) -> tuple[str, ...]:
    """The names of the traits that a smaller run does not have."""
    before, after = traits(sizes), traits(small)
    return tuple(name for name in before if before[name] != after[name])


def _traits(size: int, mesh: Mesh) -> Traits:
    divides = size % mesh.tp == 0
    return (size % 16, divides, size // mesh.tp % 16 if divides else None, size % mesh.dp_shard == 0)


def _token_traits(batch: int, seq_len: int, tp: int) -> Traits:
    return (batch * seq_len % 16, batch > 1, seq_len % tp == 0)


def _meshes(sizes: Sizes) -> list[dict[str, int]]:
    """Those that fit, with the fewest axes that go, then with the fewest degrees that do not divide what they were."""
    if sizes.world_size <= MAX_RANKS:
        return [sizes.mesh]
    full = tuple(sizes.mesh.values())
    all_degrees = itertools.product(*(range(1, min(degree, MAX_RANKS) + 1) for degree in full))
    fitting = [degrees for degrees in all_degrees if math.prod(degrees) <= MAX_RANKS]

    def unlike(degrees: tuple[int, ...]) -> tuple[int, int]:
        pairs = tuple(zip(degrees, full, strict=True))
        return sum(few == 1 < many for few, many in pairs), sum(many % few != 0 for few, many in pairs)

    least = min(map(unlike, fitting))
    return [dict(zip(MESH_AXES, degrees, strict=True)) for degrees in fitting if unlike(degrees) == least]


def _rank_of(sizes: Sizes, small: Sizes) -> tuple[int, int, int, int]:
    """What is better first: less lost, degrees kept, more ranks, powers of two."""
    pairs = [(sizes.mesh[name], small.mesh[name]) for name in MESH_AXES]
    odd = sum(after & (after - 1) != 0 for _, after in pairs)
    return len(lost(sizes, small)), sum(before != after for before, after in pairs), odd, -small.world_size


def _on_mesh(sizes: Sizes, mesh: Mapping[str, int]) -> Sizes:
    small = replace(sizes, **mesh, layers=min(sizes.layers, max(2, sizes.every)))
    small = _smaller_attention(sizes, small)
    small = replace(small, ffn_dim=_smaller(sizes, small, "ffn_dim"), vocab_size=_smaller(sizes, small, "vocab_size"))
    return _fewer_tokens(sizes, small)


def _smaller(sizes: Sizes, small: Sizes, name: str) -> int:
    size, floor = int(getattr(sizes, name)), _FLOORS[name]
    wanted = _traits(size, sizes)
    kept = (size,) if size <= _CHEAP * floor else ()
    candidates: tuple[int, ...] = (
        *kept,
        *range(min(floor, size), min(size, floor + 32 * small.tp * small.dp_shard) + 1),
    )
    if name == "vocab_size" and small.tp == sizes.tp:  # whatever rows the last rank has
        whole = 16 * sizes.tp
        candidates = tuple(candidate for candidate in candidates if (candidate - size) % whole == 0) or candidates
    return _closest(candidates, wanted, lambda candidate: _traits(candidate, small), _WEIGHTS)


def _smaller_attention(sizes: Sizes, small: Sizes) -> Sizes:
    """The smallest attention whose dim, keys and values have the same traits."""
    kept: tuple[Sizes, ...] = (small,) if sizes.dim <= _CHEAP * _FLOORS["dim"] else ()
    ratio = 1 if sizes.heads == sizes.kv_heads else 2
    widths = sorted(
        (kv_heads * ratio * width, abs(kv_heads * ratio - _HEADS), kv_heads)
        for kv_heads in range(1, min(_HEADS, sizes.kv_heads) + 1)
        for width in range(2, 66, 2)
        if min(_FLOORS["dim"], sizes.dim) <= kv_heads * ratio * width <= min(sizes.dim, 2048)
    )
    attention = (replace(small, dim=dim, heads=kv * ratio, kv_heads=kv) for dim, _, kv in widths)

    def of(candidate: Sizes) -> Traits:
        candidate_traits = traits(candidate)
        return (candidate_traits["dim"], candidate_traits["kv_dim"], candidate_traits["heads"])

    return _closest((*kept, *attention, small), of(sizes), of)


def _fewer_tokens(sizes: Sizes, small: Sizes) -> Sizes:
    wanted = _token_traits(sizes.local_batch, sizes.seq_len, sizes.tp)
    kept = ((sizes.local_batch, sizes.seq_len),) if sizes.local_batch * sizes.seq_len <= _CHEAP_TOKENS else ()
    batches = range(2, min(sizes.local_batch, 16) + 1) if sizes.local_batch > 1 else (1,)
    lengths = range(min(_SEQUENCE, sizes.seq_len), min(sizes.seq_len, _SEQUENCE + 16 * small.tp) + 1)
    fewer = sorted(itertools.product(batches, lengths), key=lambda shape: (shape[0] * shape[1], shape))
    batch, seq_len = _closest((*kept, *fewer), wanted, lambda shape: _token_traits(shape[0], shape[1], small.tp))
    return replace(small, local_batch=batch, seq_len=seq_len)


def _closest(
    candidates: Iterable[_Candidate],
    wanted: Traits,
    traits_of: Callable[[_Candidate], Traits],
    weights: tuple[int, ...] = (1, 1, 1),
) -> _Candidate:
    scored = []
    for candidate in candidates:
        pairs = zip(traits_of(candidate), wanted, weights, strict=True)
        same = sum(weight for left, right, weight in pairs if left == right)
        if same == sum(weights):
            return candidate
        scored.append((same, candidate))
    return max(scored, key=lambda pair: pair[0])[1]


def _arithmetic(sizes: Sizes, small: Sizes) -> Iterator[tuple[str, str]]:
    for name in Sizes.__struct_fields__:
        before, after = getattr(sizes, name), getattr(small, name)
        if before != after:
            yield name, f"{before} made smaller: {_reason(name, sizes, small)}"


def _reason(name: str, sizes: Sizes, small: Sizes) -> str:
    before, after = getattr(sizes, name), getattr(small, name)
    if name in MESH_AXES:
        divides = "which divides it" if before % after == 0 else f"as no divisor of {before} fits"
        return f"{after}, {divides}, so that at most {MAX_RANKS} ranks run"
    if name == "layers":
        return f"{after}, as many as the checkpointing pattern needs"
    if name in ("heads", "kv_heads"):
        return f"{after}, which {small.tp} TP ranks divide as {sizes.tp} did"
    if name in ("local_batch", "seq_len"):
        tokens = small.local_batch * small.seq_len
        return f"{after}; {tokens} tokens per rank, {tokens % 16} modulo 16{_unkept('tokens', sizes, small)}"
    same = " as well" if before % 16 == after % 16 else f", not {before % 16}"
    return f"{after}, {after % 16} modulo 16{same}{_unkept(name, sizes, small)}"


def _unkept(name: str, sizes: Sizes, small: Sizes) -> str:
    return ", but not every remainder could be kept" if name in lost(sizes, small) else ""
