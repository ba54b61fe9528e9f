"""Pipeline parallelism: ranks hold the blocks of stages, and send microbatches from one stage to the next.

Stages are cut as torchtitan cuts a model: blocks in order, as evenly as they divide, the embedding in the first stage,
the last norm and the output layer in the last. Stages go round over the ranks: with two a rank, rank 0 of two has the
first and the third.

One rank computes all stages at once. But tied ends are two copies, and each has its own gradient.
"""

import functools
from collections.abc import Iterable, Iterator

from harness.matrix.case import Case
from harness.matrix.dims.dimension import MODEL_AXES, Dimension, Sender, Transfer
from harness.matrix.layout import Layout, coordinates
from harness.matrix.linears import EMBEDDING, OUTPUT_FQN, shard_size
from harness.matrix.upstream import STAGES_VOTE_TOGETHER

_PER_RANK = {"interleaved": 2}
_LAST = ("norm", OUTPUT_FQN)


def ends_are_one(case: Case) -> bool:
    """True if embedding and output layer have one parameter: tied ends of a pipeline are copies of one another."""
    return case.model.tied and case.layout.pp == 1


def stage_count(layout: Layout) -> int:
    return layout.pp * _PER_RANK.get(layout.schedule, 1)


def stages_of(case: Case, rank: int) -> tuple[int, ...]:
    """Return the stages that a rank computes, in order."""
    return _stages(case.layout, _coordinate(case, rank))


def _stages(layout: Layout, coordinate: int) -> tuple[int, ...]:
    return tuple(range(coordinate, stage_count(layout), layout.pp))


def _coordinate(case: Case, rank: int) -> int:
    return coordinates(case.layout, rank)["pp"]


def blocks_of_stage(case: Case, stage: int) -> range:
    """Return the numbers of the blocks that a stage holds."""
    per_stage, more = divmod(case.model.shape.layers, stage_count(case.layout))
    first = stage * per_stage + min(stage, more)
    return range(first, first + per_stage + (stage < more))


@functools.lru_cache(maxsize=1024)
def modules_of_stage(case: Case, stage: int) -> tuple[str, ...]:
    """Return the FQNs of the modules directly in the model that a stage holds, in order of execution."""
    blocks = (f"layers.{layer}" for layer in blocks_of_stage(case, stage))
    is_last = stage == stage_count(case.layout) - 1
    return (*((EMBEDDING,) if stage == 0 else ()), *blocks, *(_LAST if is_last else ()))


def stage_of(case: Case, fqn: str) -> int:
    """Return the stage that holds a module; the first for one that is in none of the Llama's."""
    stages = range(stage_count(case.layout))
    return next((stage for stage in stages if _module_of(fqn) in modules_of_stage(case, stage)), 0)


@functools.lru_cache(maxsize=1024)
def _modules(case: Case, coordinate: int) -> frozenset[str]:
    return frozenset(name for stage in _stages(case.layout, coordinate) for name in modules_of_stage(case, stage))


def holds(case: Case, rank: int, fqn: str) -> bool:
    """Return True if a module, or a parameter of one, is in a stage of this rank."""
    return case.layout.pp == 1 or _module_of(fqn) in _modules(case, _coordinate(case, rank))


def _module_of(fqn: str) -> str:
    parts = fqn.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def held(case: Case, rank: int, fqns: Iterable[str]) -> tuple[str, ...]:
    return tuple(fqn for fqn in fqns if holds(case, rank, fqn))


def neighbors(case: Case, rank: int) -> tuple[int, int]:
    """Return how many stages of a rank have one behind them, and how many one before them."""
    stages = stages_of(case, rank)
    return sum(stage < stage_count(case.layout) - 1 for stage in stages), sum(stage > 0 for stage in stages)


def connections(case: Case, rank: int) -> tuple[int, int]:
    """To how many ranks behind it a rank is next, and in how many rounds of disjoint pairs such ranks connect."""
    pp, mine = case.layout.pp, _coordinate(case, rank)
    pairs = {tuple(sorted((stage % pp, (stage + 1) % pp))) for stage in range(stage_count(case.layout) - 1)}
    odd_ring = pp % 2 == 1 and len(pairs) == pp
    return sum(lower == mine for lower, _ in pairs), min(len(pairs), 2) + odd_ring


def forwards_in_flight(case: Case, rank: int) -> dict[int, int]:
    """By stage of a rank, how many microbatches are computed forward when its first backward begins.

    GPipe computes all of them. The others begin to go back when the first microbatch has come back to the rank, or has
    gone through its last stage; interleaved stages take turns of as many microbatches as the pipeline has ranks.
    """
    layout, stages = case.layout, stages_of(case, rank)
    if layout.schedule == "gpipe" or layout.pp == 1:
        return dict.fromkeys(stages, case.train.accumulation if layout.pp > 1 else 1)
    behind = layout.pp - 1 - _coordinate(case, rank)
    forwards = (len(stages) - 1) * layout.pp + behind * len(stages) + 1
    steps = range(min(forwards, len(stages) * case.train.accumulation))
    turns = [stages[step // layout.pp % len(stages)] for step in steps]
    return {stage: turns.count(stage) for stage in stages}


def expert_layers_of(case: Case, rank: int) -> tuple[int, ...]:
    """Return the numbers of the blocks with experts that a rank holds."""
    return tuple(layer for layer in blocks_of(case, rank) if case.model.has_experts(layer))


def blocks_of(case: Case, rank: int) -> tuple[int, ...]:
    """Return the numbers of the blocks that a rank holds."""
    return tuple(sorted(layer for stage in stages_of(case, rank) for layer in blocks_of_stage(case, stage)))


def _between_stages(case: Case, rank: int) -> Iterator[Transfer]:
    """Yield every microbatch is sent from stage to stage, and its gradient back: this rank's part of the sequence."""
    elements, (behind, before) = case.residual_tokens * case.model.shape.dim, neighbors(case, rank)
    times = behind * case.forward_passes
    yield Transfer("pp", "send", case.train.dtype, elements, "outputs of stages", times=times)
    yield Transfer("pp", "send", case.train.dtype, elements, "input gradients of stages", times=before)


def _gradients_of_ends(case: Case, rank: int) -> Iterator[Transfer]:
    """Yield the first and the last stage send one another the gradient of their copy of tied weights."""
    if not case.model.tied or not (holds(case, rank, EMBEDDING) or holds(case, rank, OUTPUT_FQN)):
        return
    at = coordinates(case.layout, rank)
    rows = shard_size(case.model.padded_vocab_size, case.layout.tp, at["tp"])
    elements = shard_size(rows, case.layout.dp_shard, at["dp_shard"]) * case.model.shape.dim
    yield Transfer("pp", "send", case.parameter_dtype, elements, "gradients of tied ends")


def votes(of: Sender) -> Iterator[Transfer]:
    """Stages that are new ask one another whether all know the shapes that are sent; again behind an evaluation."""
    case, rank = of.case, of.rank
    is_new = case.train.age(of.step) == 1
    if case.layout.pp == 1 or not (is_new or case.train.evaluate):
        return
    if STAGES_VOTE_TOGETHER in of.changes:
        yield Transfer("pp", "all_reduce", "int32", 1, "votes of stages", op="min", times=case.forward_passes)
        sends, rounds = connections(case, rank)
        if is_new:
            yield Transfer("pp", "all_reduce", "int32", 1, "neighbors that connect", op="sum", times=rounds)
        if is_new and sends:
            yield Transfer("pp", "send", "int32", 1, "neighbors that connect", times=sends)
    else:
        times = sum(neighbors(case, rank)) * case.forward_passes
        yield Transfer("pp", "send", "int32", 1, "votes of stages", times=times)


PP = Dimension(
    name="pp",
    of_microbatch=lambda of: _between_stages(of.case, of.rank),
    of_step=lambda of: _gradients_of_ends(of.case, of.rank),
    of_age=votes,
    excluded={
        "microbatches_fill_pipeline": (("pp", "accumulation"), lambda case: case.train.accumulation % case.layout.pp),
        "stages_have_blocks": (
            ("pp", "schedule", *MODEL_AXES),
            lambda case: stage_count(case.layout) > case.model.shape.layers,
        ),
    },
    alone=lambda case: {"pp": 2} if case.model.tied and not ends_are_one(case) else {},
    played=lambda case: {"copied_ends": case.model.tied and not ends_are_one(case)},
)
