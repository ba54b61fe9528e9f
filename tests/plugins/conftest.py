"""What tests of plug-ins have: the fixtures of the folders of `tests` whose names their own folders have."""

import pytest

from harness.project import Project
from tests.acceptance.conftest import Command, shared, template, warm
from tests.acceptance.conftest import project as project_of_commands
from tests.power.conftest import executor
from tests.unit.conftest import _no_waiting_for_a_disk, pytest_collection_modifyitems
from tests.unit.conftest import project as empty_project
from tests.worker.conftest import engine, plant, submit, train, trained

__all__ = ["_no_waiting_for_a_disk", "empty_project", "engine", "executor", "plant", "project_of_commands"]
__all__ += ["pytest_collection_modifyitems", "shared", "submit", "template", "train", "trained", "warm"]


@pytest.fixture
def project(request: pytest.FixtureRequest) -> Project | Command:
    """That of `tests/acceptance` or of `tests/unit`."""
    name = "project_of_commands" if request.path.parent.name == "acceptance" else "empty_project"
    found: Project | Command = request.getfixturevalue(name)
    return found
