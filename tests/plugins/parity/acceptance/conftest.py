"""What every test of `tests/acceptance` has."""

from tests.acceptance.conftest import project, shared, template, warm

__all__ = ["project", "shared", "template", "warm"]
