"""The rank program of the relations. Nothing that uses private parts of torch is imported before they are checked."""

from collections.abc import Mapping

from harness.engine.program import RankContext
from harness.worker import main
from harness.worker.process import internals


def preload(options: Mapping[str, str]) -> None:
    """Do once what every rank needs, as for training."""
    main.preload(options)


def notes() -> tuple[str, ...]:
    return main.notes()


def rank_main(context: RankContext) -> bytes:
    """Return what this rank found of every relation, encoded."""
    internals.require(internals.RUN)
    from harness.plugins.independence.worker import forwards

    return forwards.rank_main(context)
