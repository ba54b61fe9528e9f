"""What every test of `tests/power` has."""

from tests.power.conftest import executor

__all__ = ["executor"]
