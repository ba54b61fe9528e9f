"""The batch of a drafted case, and its smaller run with the same fault: what made the case is kept, or asked.

Sizes and degrees are made smaller so that what faults depend on stays.
What stays of every size that is sharded: its remainder modulo 16, whether TP ranks and FSDP2 ranks divide it, and the
remainder modulo 16 of the part that a TP rank holds, which is what `torch._scaled_mm` sees; of a vocabulary, where TP
ranks stay, its remainder modulo 16 times these. Of degrees: which are above 1. Of tokens: their number per rank modulo
16, whether there are several sequences, and whether TP divides them. Of layers: as many as the checkpointing pattern
needs to wrap one and leave out one.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.matrix.axes import AXES, axis_values, case_from_axes
from harness.matrix.case import MODEL_PRESETS
from harness.matrix.dims.pp import stage_count
from harness.matrix.layout import DP_AXES, MESH_AXES, REST, Layout, Mesh, ranks_of
from harness.plugins.bugs.draft import SIZES, Draft

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
    """Return the smaller run, and for every axis that changed the arithmetic, with what could not be kept."""
    smaller = [_on_mesh(sizes, mesh) for mesh in _meshes(sizes)]
    best = min(smaller, key=lambda small: _rank_of(sizes, small))
    changed = [name for name in Sizes.__struct_fields__ if getattr(sizes, name) != getattr(best, name)]
    return best, {name: f"{getattr(sizes, name)} made smaller: {_reason(name, sizes, best)}" for name in changed}


def traits(sizes: Sizes) -> dict[str, Traits]:
    """Return what faults depend on, by size: equal for a run and its smaller one, unless the arithmetic says so."""
    shards = {name: getattr(sizes, name) for name in ("dim", "kv_dim", "ffn_dim", "vocab_size")}
    return {
        **{name: _traits(size, sizes) for name, size in shards.items()},
        "tokens": _token_traits(sizes.local_batch, sizes.seq_len, sizes.tp),
        "heads": (sizes.heads % sizes.tp == 0, sizes.kv_heads % sizes.tp == 0, sizes.kv_heads < sizes.heads),
        "degrees": tuple(degree > 1 for degree in sizes.mesh.values()),
        "layers": (sizes.layers >= sizes.every, sizes.layers > 1, sizes.every),
    }


def lost(sizes: Sizes, small: Sizes) -> tuple[str, ...]:
    """Return the names of the traits that a smaller run does not have."""
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
    """Return a sort key, better first: less lost, degrees kept, more ranks, powers of two."""
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
    smaller = range(min(floor, size), min(size, floor + 32 * small.tp * small.dp_shard) + 1)
    candidates: tuple[int, ...] = (*kept, *smaller)
    if name == "vocab_size" and small.tp == sizes.tp:  # whatever rows the last rank has
        whole = 16 * sizes.tp
        candidates = tuple(candidate for candidate in candidates if (candidate - size) % whole == 0) or candidates
    return _closest(candidates, wanted, lambda candidate: _traits(candidate, small), _WEIGHTS)


def _smaller_attention(sizes: Sizes, small: Sizes) -> Sizes:
    """Return the smallest attention whose dim, keys and values have the same traits."""
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


_LARGEST = 100_000  # sequences of a batch, or microbatches
_FEW_EXPERTS = 8  # more of them show no other faults
_FEW_RANKS = 4  # that share sequences: the least with which the order of more than two shows
_PIECE = 16  # positions of a rank of these: what every recipe can multiply
_LONGEST = 20  # steps that are run to reach the first bad one
_MOST_MICROBATCHES = 8
# By what a smaller run may lose, the axis to ask about.
_AXIS_OF = {"tokens": "seq_len", "kv_dim": "kv_heads", "degrees": REST}


def fit(draft: Draft, *, first_bad_step: int | None, full_size: bool) -> None:
    """Complete a draft: batch and steps, then sizes and degrees that are made smaller, unless `full_size`."""
    _batch(draft, full_size=full_size)
    _length(draft, first_bad_step, full_size=full_size)
    if not full_size:
        _make_smaller(draft)
    _microbatches_of_compiled(draft)
    _pipeline(draft)
    _experts(draft, full_size=full_size)
    _context(draft)


def _number(draft: Draft, fact: str) -> int | None:
    statement = draft.fact(fact)
    value = statement.value if statement is not None else draft.file.get(fact)
    return int(str(value)) if value is not None and str(value).isdigit() and int(str(value)) else None


def _batch(draft: Draft, *, full_size: bool) -> None:
    """Sequences of a step, and the microbatches that a data-parallel rank splits its own into."""
    draft.take("seq_len")
    dp, whole = ranks_of(draft.axes, DP_AXES), _number(draft, "global_batch")
    local, words = _local_batch(draft)
    draft.take("accumulation")
    count = draft.count("accumulation") if "accumulation" in draft.axes else None
    if count is None and local and whole and whole != local * dp:
        count = _counted(draft, whole, local, dp)
    count = count or 1
    if local is None and whole is not None and dp * count <= whole <= _LARGEST:
        draft.take("global_batch")
    else:
        sequences, where = (local, draft.derived) if local else (2 if count == 1 else 1, draft.assumed)
        text = words if local else f"{sequences} sequences a data-parallel rank: it states no batch"
        times = f" x {count} microbatches" if count > 1 else ""
        arithmetic = f"{text}: {sequences} x {dp} data-parallel ranks{times}"
        draft.put("global_batch", sequences * dp * count, where, arithmetic)
    if count > _MOST_MICROBATCHES and not full_size:
        _fewer_microbatches(draft, count)


def _local_batch(draft: Draft) -> tuple[int | None, str]:
    """(sequences of a microbatch of a data-parallel rank, words), by their number or by their tokens."""
    local, tokens, length = _number(draft, "local_batch"), _number(draft, "local_tokens"), draft.count("seq_len")
    if draft.says("local_batch") or tokens is None:
        return local, draft.words_of("local_batch") or draft.of_file
    return max(1, tokens // length), f"{draft.words_of('local_tokens')} / sequences of {length}"


def _counted(draft: Draft, whole: int, local: int, dp: int) -> int:
    """Return the microbatches of a global batch."""
    words = f"{draft.words_of('global_batch')}: {whole} / ({local} sequences x {dp} data-parallel ranks)"
    if REST in draft.missing or "ranks" in draft.missing:
        draft.missing.setdefault("accumulation", f"{words} is how many microbatches? It follows from {REST}")
    if whole % (local * dp):
        draft.missing.setdefault("accumulation", f"{words} is no whole number: how many microbatches were run?")
        return 1
    count = whole // (local * dp)
    if 1 < count <= _LARGEST:
        draft.put("accumulation", count, draft.derived, f"{words} = {count} microbatches")
    return count


def _fewer_microbatches(draft: Draft, count: int) -> None:
    """Few microbatches, an even number where it was even: the first and the last of several stay."""
    few = 4 if count % 2 == 0 else 3
    sequences = draft.count("global_batch") // count
    draft.full_size |= {"accumulation": count, "global_batch": draft.count("global_batch")}
    draft.put("accumulation", few, draft.derived, f"{count} made smaller: {few}, of which several are not the last")
    draft.put("global_batch", sequences * few, draft.derived, f"{sequences} sequences x {few} microbatches")


def _length(draft: Draft, step: int | None, *, full_size: bool) -> None:
    """Steps up to the first bad one. A learning rate is only stated: a case has the one of its golden."""
    rate, trained = draft.fact("learning_rate"), draft.fact("train_steps")
    if rate is not None:
        draft.ignored.append(f"{rate.words}: goldens have the learning rate of their cases: set lr where it matters")
    if step is not None and (step <= _LONGEST or full_size):
        draft.put("steps", max(5, step), draft.derived, f"the first bad step is {step}")
    elif step is not None:
        draft.assumed["steps"] = f"5; the first bad step is {step}: set steps to reach it"
    elif trained is not None and 1 <= int(str(trained.value)) <= _LONGEST:
        draft.put("steps", trained.value, draft.stated, trained.words)
    elif trained is not None:
        draft.ignored.append(f"{trained.words}: most faults show in 5 steps: set steps where this one does not")


def _make_smaller(draft: Draft) -> None:
    try:
        values = axis_values(case_from_axes({**draft.axes, "filter_fqns": ()}))
    except HarnessError:
        return
    wraps = values["checkpointing"] == "selective_layer"
    microbatches = int(str(values["accumulation"]))
    sizes = Sizes(
        **{name: int(str(values[name])) for name in (*SIZES, "seq_len", *MESH_AXES)},
        local_batch=max(1, int(str(values["global_batch"])) // ranks_of(values, DP_AXES) // microbatches),
        every=int(str(values["checkpoint_every"])) if wraps else 1,
    )
    small, arithmetic = made_smaller(sizes)
    for axis in [name for name in arithmetic if name in AXES]:
        draft.full_size[axis] = getattr(sizes, axis)
        draft.put(axis, getattr(small, axis), draft.derived, arithmetic[axis])
    for name in lost(sizes, small):
        axis = _AXIS_OF.get(name, name)
        words = "; ".join(draft.derived[given] for given in (axis, name) if given in draft.derived) or "it is smaller"
        draft.missing.setdefault(axis, f"{words}: what must stay of it?")
    batch, before = small.local_batch * small.dp * microbatches, values["global_batch"]
    if batch != before:
        if "global_batch" in {**draft.stated, **draft.derived}:
            draft.full_size.setdefault("global_batch", before)
            times = f" x {microbatches} microbatches" if microbatches > 1 else ""
            words = f"{before} made smaller: {small.local_batch} sequences x {small.dp} data-parallel ranks{times}"
            draft.put("global_batch", batch, draft.derived, words)
        draft.axes["global_batch"] = batch


def _microbatches_of_compiled(draft: Draft) -> None:
    """Compiled blocks train whole batches here, so one of both is asked for."""
    count = draft.count("accumulation")
    if count == 1 or draft.axes.get("compile", "none") == "none" or draft.count("pp") > 1:
        return
    draft.axes["global_batch"] = draft.count("global_batch") // count
    del draft.axes["accumulation"]
    words = draft.derived.pop("accumulation", "") or draft.stated.pop("accumulation", "")
    question = "compiled blocks train whole batches here: accumulation 1, or compile none?"
    draft.missing["accumulation"] = f"{words}: {question}"


def _pipeline(draft: Draft) -> None:
    """A block for every stage at least, and as many microbatches as fill it."""
    ranks = draft.count("pp")
    if ranks == 1:
        return
    _without_compile(draft, "a pipeline trains microbatches, and compiled blocks whole batches: compile none, or pp 1?")
    schedule = {"schedule": draft.axes["schedule"]} if draft.take("schedule") else {}
    stages = stage_count(msgspec.convert({"pp": ranks, **schedule}, Layout))
    if int(str(draft.axes.get("layers") or MODEL_PRESETS["tiny"].layers)) < stages:
        draft.put("layers", stages, draft.derived, f"a block for each of {stages} stages")
    count, dp = draft.count("accumulation"), ranks_of(draft.axes, DP_AXES)
    if count % ranks:
        count = ranks * max(2, count // ranks)
        draft.put("accumulation", count, draft.derived, f"{count} microbatches fill the pipeline")
    if draft.count("global_batch") % (dp * count):
        draft.put("global_batch", dp * count, draft.derived, f"a sequence for each of {count} microbatches")


def _context(draft: Draft) -> None:
    """The ranks that share sequences are counted as ranks of FSDP2, as other tools do not count them."""
    if "cp" not in draft.axes:
        draft.take("cp")
    if draft.count("cp") == 1:
        return
    draft.take("sequence_order")
    _without_compile(draft, "one rank stands for all pieces of a sequence, in eager mode: compile none, or cp 1?")
    stated, shards = draft.count("cp"), draft.count(REST)
    room = max(2, MAX_RANKS // (ranks_of(draft.axes) // shards))
    ranks = min(stated, _FEW_RANKS, room)
    if ranks < stated:
        draft.full_size["cp"] = stated
        draft.put("cp", ranks, draft.derived, f"{stated} made smaller: {ranks}")
    fewer = max(1, min(shards, room // ranks))
    if fewer < shards:
        draft.full_size.setdefault(REST, shards)
        draft.axes["global_batch"] = max(1, draft.count("global_batch") * fewer // shards)
    draft.put(REST, fewer * ranks, draft.derived, f"{fewer} x {ranks} ranks that share sequences")
    if draft.count("seq_len") < _PIECE * ranks:
        draft.put("seq_len", _PIECE * ranks, draft.derived, f"{_PIECE} positions for each of {ranks} ranks")


def _without_compile(draft: Draft, question: str) -> None:
    if draft.axes.get("compile", "none") != "none":
        words = draft.stated.pop("compile", "") or draft.assumed.pop("compile", "")
        draft.assumed.pop("wait_for_embedding", None)
        del draft.axes["compile"]
        draft.axes.pop("wait_for_embedding", None)
        draft.missing["compile"] = f"{words}: {question}"


def _experts(draft: Draft, *, full_size: bool) -> None:
    """As many experts, and ranks that share them, as the smaller run has room for."""
    taken = [axis for axis in ("experts", "top_k", "router", "balance", "ep") if draft.take(axis)]
    unnamed = draft.axes.get("experts", 0) == 0
    if unnamed and draft.count("ep") == 1 and not draft.says("experts_used"):
        for axis in taken:
            draft.drop(axis, "means nothing without experts")
        return
    if unnamed:
        draft.ask("experts", max(_FEW_EXPERTS, draft.count("ep")), "how many experts?")
    if "grouped_mm" in str(draft.value_of("converters")):
        draft.put("grouped_mm", True, draft.stated, draft.words_of("converters"))
    if not full_size:
        _fewer_experts(draft)


def _fewer_experts(draft: Draft) -> None:
    """More experts than a token meets, and one or several of them on a rank, as in the job."""
    ranks, tp = draft.count(REST) * draft.count("tp"), draft.count("tp")
    experts, ep, top_k = draft.count("experts"), draft.count("ep"), int(str(draft.axes.get("top_k", 2)))
    least = top_k + (experts > top_k)
    few_ep = max((degree for degree in range(tp, min(ranks, ep) + 1, tp) if ranks % degree == 0), default=1)
    few = few_ep if experts == ep else -(-min(experts, max(_FEW_EXPERTS, least)) // few_ep) * few_ep
    if few < least:
        words = f"{experts} experts on {ep} ranks become {few} on {few_ep}, and a token meets {top_k}"
        draft.missing.setdefault("experts", f"{words}: how many experts, on how many ranks?")
        few = -(-least // few_ep) * few_ep
    for axis, size, before in (("ep", few_ep, ep), ("experts", few, experts)):
        if size < before:
            draft.full_size[axis] = before
            draft.put(axis, size, draft.derived, f"{before} made smaller: {size}, of {few} experts on {few_ep} ranks")
        elif axis in draft.axes:
            draft.axes[axis] = size
