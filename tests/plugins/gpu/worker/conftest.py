"""What every test of `tests/worker` has."""

from tests.worker.conftest import engine, plant, submit, train, trained

__all__ = ["engine", "plant", "submit", "train", "trained"]
