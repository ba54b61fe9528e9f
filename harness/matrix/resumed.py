"""Resumed runs: in which cases the state of a run is loaded, one after another, before training goes on.

With `resume = "same"` that is the case itself. With `resharded` it is another layout of the same ranks first, which
loads the state and saves it again: two reshardings, there and back. Every step is trained in the layout of the case.
"""

import msgspec

from harness.matrix.axes import without
from harness.matrix.axis import Changes
from harness.matrix.case import Case, Layout


def resumed_in(case: Case) -> tuple[Case, ...]:
    """The cases that load the state, in order; the last one goes on with it. Empty for a run that is not resumed."""
    other = other_layout(case.layout)
    if case.train.resume == "none":
        return ()
    return (case,) if case.train.resume == "same" or other is None else (_only_built(case, other), case)


def other_layout(layout: Layout) -> Layout | None:
    """FSDP2 over all ranks; where that is the layout itself, HSDP with two replicas. None where there is neither."""
    ranks = layout.world_size
    if layout.dp_shard != ranks:
        return Layout(dp_shard=ranks)
    return Layout(dp_replicate=2, dp_shard=ranks // 2) if ranks >= 4 and ranks % 2 == 0 else None


def _only_built(case: Case, layout: Layout) -> Case:
    """The case in another layout, without the options of training: it loads and saves."""
    moved = msgspec.structs.replace(case, layout=layout, float8=msgspec.structs.replace(case.float8, tp_styles="plain"))
    train = without(moved, Changes.SUMS).train  # a pipeline sets how gradients are summed
    train = msgspec.structs.replace(train, global_batch=layout.world_size, evaluate=False, resume="none")
    return msgspec.structs.replace(moved, train=train)
