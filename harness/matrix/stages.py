"""The stages of a pipeline: which blocks a rank holds.

As torchtitan cuts a model: blocks in order, as evenly as they divide, the embedding in the first stage, the last norm
and the output layer in the last. Stages go round over the ranks: with two a rank, rank 0 of two has the first and the
third.
"""

import functools
from collections import Counter
from collections.abc import Iterable

from harness.matrix.case import Case
from harness.matrix.layout import Layout, coordinates

_PER_RANK = {"interleaved": 2}
EMBEDDING = "tok_embeddings"
OUTPUT = "output"
_LAST = ("norm", OUTPUT)


def ends_are_one(case: Case) -> bool:
    """True where embedding and output layer have one parameter: tied ends of a pipeline are copies of one another."""
    return case.model.tied and case.layout.pp == 1


def copies_of_weights(case: Case) -> frozenset[str]:
    """The parameters that a pipeline has besides those of the embedding, though they are the same weights."""
    return frozenset({f"{OUTPUT}.weight"} if case.model.tied else ())


def stage_count(layout: Layout) -> int:
    return layout.pp * _PER_RANK.get(layout.schedule, 1)


def stages_of(case: Case, rank: int) -> tuple[int, ...]:
    """The stages that a rank computes, in order."""
    return _stages(case.layout, _coordinate(case, rank))


def _stages(layout: Layout, coordinate: int) -> tuple[int, ...]:
    return tuple(range(coordinate, stage_count(layout), layout.pp))


def _coordinate(case: Case, rank: int) -> int:
    return coordinates(case.layout, rank)["pp"]


def blocks_of_stage(case: Case, stage: int) -> range:
    """The numbers of the blocks that a stage holds."""
    per_stage, more = divmod(case.model.shape.layers, stage_count(case.layout))
    first = stage * per_stage + min(stage, more)
    return range(first, first + per_stage + (stage < more))


@functools.lru_cache(maxsize=1024)
def modules_of_stage(case: Case, stage: int) -> tuple[str, ...]:
    """The FQNs of the modules directly in the model that a stage holds, in order of execution."""
    blocks = (f"layers.{layer}" for layer in blocks_of_stage(case, stage))
    is_last = stage == stage_count(case.layout) - 1
    return (*((EMBEDDING,) if stage == 0 else ()), *blocks, *(_LAST if is_last else ()))


@functools.lru_cache(maxsize=1024)
def _modules(case: Case, coordinate: int) -> frozenset[str]:
    return frozenset(name for stage in _stages(case.layout, coordinate) for name in modules_of_stage(case, stage))


def holds(case: Case, rank: int, fqn: str) -> bool:
    """True where a module, or a parameter of one, is in a stage of this rank."""
    return case.layout.pp == 1 or _module_of(fqn) in _modules(case, _coordinate(case, rank))


def _module_of(fqn: str) -> str:
    parts = fqn.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def held(case: Case, rank: int, fqns: Iterable[str]) -> tuple[str, ...]:
    return tuple(fqn for fqn in fqns if holds(case, rank, fqn))


def neighbours(case: Case, rank: int) -> tuple[int, int]:
    """How many stages of a rank have one behind them, and how many one before them."""
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
    turns = Counter(
        stages[step // layout.pp % len(stages)] for step in range(min(forwards, len(stages) * case.train.accumulation))
    )
    return {stage: turns[stage] for stage in stages}


def expert_layers_of(case: Case, rank: int) -> tuple[int, ...]:
    """The numbers of the blocks with experts that a rank holds."""
    return tuple(layer for layer in blocks_of(case, rank) if case.model.has_experts(layer))


def blocks_of(case: Case, rank: int) -> tuple[int, ...]:
    """The numbers of the blocks that a rank holds."""
    return tuple(sorted(layer for stage in stages_of(case, rank) for layer in blocks_of_stage(case, stage)))
