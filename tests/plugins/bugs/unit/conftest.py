"""What every test of `tests/unit` has."""

from tests.unit.conftest import _no_waiting_for_a_disk, project, pytest_collection_modifyitems

__all__ = ["_no_waiting_for_a_disk", "project", "pytest_collection_modifyitems"]
