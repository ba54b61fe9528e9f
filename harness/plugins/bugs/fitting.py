"""The batch of a drafted case, and its smaller run: what made the case is kept, or asked where it cannot be kept."""

import msgspec

from harness.errors import HarnessError
from harness.matrix.axes import AXES, axis_values, case_from_axes
from harness.matrix.case import MODEL_PRESETS
from harness.matrix.layout import DP_AXES, MESH_AXES, REST, Layout, ranks_of
from harness.matrix.linears import stage_count
from harness.plugins.bugs.draft import SIZES, Draft
from harness.plugins.bugs.scaling import MAX_RANKS, Sizes, lost, made_smaller

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
        draft.put(
            "global_batch", sequences * dp * count, where, f"{text}: {sequences} x {dp} data-parallel ranks{times}"
        )
    if count > _MOST_MICROBATCHES and not full_size:
        _fewer_microbatches(draft, count)


def _local_batch(draft: Draft) -> tuple[int | None, str]:
    """(sequences of a microbatch of a data-parallel rank, words), by their number or by their tokens."""
    local, tokens, length = _number(draft, "local_batch"), _number(draft, "local_tokens"), draft.count("seq_len")
    if draft.says("local_batch") or tokens is None:
        return local, draft.words_of("local_batch") or draft.of_file
    return max(1, tokens // length), f"{draft.words_of('local_tokens')} / sequences of {length}"


def _counted(draft: Draft, whole: int, local: int, dp: int) -> int:
    """The microbatches of a global batch."""
    words = f"{draft.words_of('global_batch')}: {whole} / ({local} sequences x {dp} data-parallel ranks)"
    if REST in draft.missing or "ranks" in draft.missing:
        question = f"{words} is how many microbatches? It follows from {REST}"
        draft.missing.setdefault("accumulation", question)
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
    draft.missing["accumulation"] = (
        f"{words}: compiled blocks train whole batches here: accumulation 1, or compile none?"
    )


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
